"""An adapter in memory -> what PEFT's files hold: nothing folded, every part under its key.

A LoRA is written with a configuration whose scaling is exactly 1 for every module, since its
scaling is in B already. The factors of other methods are held as they were stored.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

from lora_weights.methods.vera import VeraFactors
from lora_weights.names import Part, build_key
from lora_weights.placement import is_saved_as

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from lora_weights.adapter import Adapter
    from lora_weights.modules import LoraPair, ModulePart


def unfold_config(adapter: Adapter) -> dict[str, object]:
    """Return the configuration under which PEFT reads the tensors of `unfold_tensors`."""
    raw = dict(adapter.config.raw)
    whole = [path for path, part in adapter.parts.items() if part.full is not None]
    # PEFT wants the weight of every listed module that the base has.
    listed = [
        name for name in adapter.config.modules_to_save if any(is_saved_as(p, name) for p in whole)
    ]
    config = {**raw, "peft_type": adapter.config.peft_type, "modules_to_save": listed or None}
    match adapter.config.peft_type:
        case "LORA":
            return config | _lora_config(adapter)
        case "LOHA" | "LOKR":
            return config | _patterns(adapter)
        case _:
            return config


def _lora_config(adapter: Adapter) -> dict[str, object]:
    """Return rank and alpha under which every folded pair has scaling 1.

    Pairs on expert parameters are held as they were stored, so beside them the numbers of the
    file stay, and come after the exact paths of the other pairs: PEFT takes the first that fits.
    """
    config, pairs = adapter.config, _pairs(adapter)
    ranks = {f"^{re.escape(path)}": pair.rank for path, pair in pairs.items()}
    result: dict[str, object] = {"init_lora_weights": True, "velora_config": None}
    if any(part.experts is not None for part in adapter.parts.values()):
        alphas = {
            pattern: math.sqrt(rank) if config.use_rslora else rank
            for pattern, rank in ranks.items()
        }
        result["rank_pattern"] = {**ranks, **config.rank_pattern}
        result["alpha_pattern"] = {**alphas, **config.alpha_pattern}
    else:
        default = max(ranks.values(), default=config.r)
        patterns = {pattern: rank for pattern, rank in ranks.items() if rank != default}
        result |= {"r": default, "lora_alpha": default, "use_rslora": False}
        result |= {"rank_pattern": patterns, "alpha_pattern": dict(patterns)}
    if pairs:
        # Exactly the modules in the file; nothing that would narrow or widen them on loading.
        result |= {
            "target_modules": sorted(pairs),
            "exclude_modules": None,
            "layers_to_transform": None,
            "layers_pattern": None,
        }
    return result


def _pairs(adapter: Adapter) -> dict[str, LoraPair]:
    return {path: part.pair for path, part in adapter.parts.items() if part.pair is not None}


def _patterns(adapter: Adapter) -> dict[str, object]:
    """Return rank and alpha of each module by its own path, whatever it was called before."""
    factors = {path: part.factors for path, part in adapter.parts.items() if part.factors}
    return {
        "rank_pattern": {f"^{re.escape(path)}": f.stored_rank for path, f in factors.items()},
        "alpha_pattern": {f"^{re.escape(path)}": f.alpha for path, f in factors.items()},
    }


def unfold_tensors(adapter: Adapter) -> dict[str, torch.Tensor]:
    """Return tensor key -> tensor, as PEFT names them."""
    tensors = {}
    for path, part in adapter.parts.items():
        for piece, tensor in _pieces(part):
            tensors[build_key(path, piece)] = tensor
        for name, stored in part.experts.pairs.items() if part.experts else ():
            module = f"{path}.{name}" if name else path
            tensors[build_key(module, Part.LORA_A)] = stored.lora_a
            tensors[build_key(module, Part.LORA_B)] = stored.lora_b
        if isinstance(part.factors, VeraFactors):
            tensors[build_key("", Part.VERA_SHARED_A)] = part.factors.shared_a
            tensors[build_key("", Part.VERA_SHARED_B)] = part.factors.shared_b
    for copies in adapter.base_copies.values():
        tensors |= {**copies.weights, **copies.biases}
    return tensors


def _pieces(part: ModulePart) -> Iterator[tuple[Part, torch.Tensor]]:
    """Yield what one part stores."""
    pair, full = part.pair, part.full
    if pair is not None:
        names = (Part.LORA_A, Part.LORA_B)
        if pair.is_embedding:
            names = (Part.EMBEDDING_A, Part.EMBEDDING_B)
        yield from zip(names, (pair.lora_a, pair.lora_b), strict=True)
    if part.factors is not None:
        yield from part.factors.tensors().items()
    if part.gain is not None:
        yield Part.IA3_GAIN, part.gain[:, None]
    if full is not None:
        yield Part.FULL_WEIGHT, full.weight
        if full.bias is not None:
            yield Part.FULL_BIAS, full.bias
    if part.token_rows is not None:
        yield Part.TOKEN_ROWS, part.token_rows.rows
    is_adapted = pair is not None or part.factors is not None
    for piece, vector in (
        (Part.LORA_BIAS, part.lora_bias),
        (Part.MAGNITUDE, part.magnitude),
        # PEFT moves the base layer, bias and all, below a module that it adapts.
        (Part.BASE_BIAS if is_adapted else Part.FULL_BIAS, part.bias),
    ):
        if vector is not None:
            yield piece, vector
