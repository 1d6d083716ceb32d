"""``bind_adapter``: an adapter's modules -> a base model's modules, everything checked.

Knows a base model only as a table of module paths and shapes, and its tensors where they matter.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from lora_weights.binding import bind_part
from lora_weights.bound import BoundPart
from lora_weights.checks import no_effect
from lora_weights.errors import InvalidAdapterError, Problem, ProblemCode
from lora_weights.experts import ExpertShape
from lora_weights.experts.bind import bind_experts, group_experts
from lora_weights.paths import ModulePaths, check_dropped_prefixes, resolve_paths
from lora_weights.placement import is_saved_as
from lora_weights.tied import add_tied_parts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from lora_weights.adapter import Adapter
    from lora_weights.bound import BaseTensors
    from lora_weights.config import AdapterConfig
    from lora_weights.modules import ModulePart, ModuleShape

_GAIN_ROUNDING = 1e-6
"""How far a DoRA gain may be from 1 by rounding alone."""


def bind_adapter(
    adapter: Adapter,
    shapes: Mapping[str, ModuleShape | ExpertShape],
    *,
    max_rank: int,
    base: Callable[[str], BaseTensors | None] | None = None,
) -> dict[str, BoundPart]:
    """Match an adapter with a base model.

    Args:
        adapter: a checked adapter.
        shapes: module path in the base model -> size, for every module that can take a part. A
            head that is tied to the embedding is one of them.
        max_rank: largest rank accepted, of pairs and of the exact pairs that factors make.
        base: returns the base's tensors of a module path in `shapes`, or None where it cannot.
            What depends on them (DoRA, replaced biases, token rows, copies of base tensors) is
            refused by name without.

    Returns:
        Module path in the base model -> what the module gets. Every part of the adapter is in it.

    Raises:
        InvalidAdapterError: a module is unknown, ambiguous, of another kind or size, named twice,
            above `max_rank`, its stored base tensors differ, the layout of expert tensors cannot
            be told, or the adapter would change nothing; names all of them.
    """
    tensors = base or _no_tensors
    paths = ModulePaths(shapes)
    groups, others = group_experts(adapter.parts, shapes, paths.find)
    targets, problems = resolve_paths(others, paths)
    experts_paths = {group.experts: target for target, group in groups.items()}
    problems += check_dropped_prefixes(targets | experts_paths)
    names = {target: path for path, target in targets.items()}
    parts = {target: adapter.parts[path] for target, path in names.items()}
    problems += _check_tying(adapter.config, parts, base)
    parts = add_tied_parts(parts, shapes, adapter.config, tensors)
    bound: dict[str, BoundPart] = {}
    for target, part in parts.items():
        path, shape = names.get(target, target), shapes[target]
        if isinstance(shape, ExpertShape):
            problems.append(_problem(ProblemCode.KIND_MISMATCH, path, "", "a module", "experts"))
            continue
        own = partial(tensors, target)
        piece, more = bind_part(path, part, shape, own, max_rank=max_rank)
        problems += more
        if piece is not None:
            bound[target] = piece
    for target, group in groups.items():
        experts, more = bind_experts(group, max_rank=max_rank, local=adapter.experts)
        problems += more
        if experts is not None:
            bound[target] = BoundPart(experts=experts)
    problems += _check_saved_modules(adapter.config, parts, shapes)
    problems += _check_token_names(adapter.config, parts, shapes)
    problems += _check_biases(adapter.config, parts, tensors)
    problems += _check_base_copies(adapter, paths, shapes, tensors)
    has_effect = any(_has_effect(path, part, tensors) for path, part in bound.items())
    # One rank may have nothing of an adapter that changes other experts.
    if not problems and not has_effect and adapter.experts is None:
        problems.append(no_effect("without effect on this base"))
    if problems:
        raise InvalidAdapterError(problems, source=adapter.source)
    return bound


def _no_tensors(path: str) -> None:
    """Stand in for a base whose tensors are not at hand."""
    del path


def _problem(code: ProblemCode, module: str, tensor: str, found: str, expected: str) -> Problem:
    return Problem(code=code, module=module, tensor=tensor, found=found, expected=expected)


def _check_tying(
    config: AdapterConfig,
    parts: Mapping[str, ModulePart],
    base: Callable[[str], BaseTensors | None] | None,
) -> list[Problem]:
    """Return a problem when nobody can say whether a head follows an embedding's part."""
    if base is not None or not config.ensure_weight_tying:
        return []
    embeddings = [path for path, part in parts.items() if part.pair and part.pair.is_embedding]
    heads = [path for path, part in parts.items() if path not in embeddings and part.pair]
    if not embeddings or any(_are_transposed(parts, embeddings, head) for head in heads):
        return []
    return [
        _problem(
            ProblemCode.NEEDS_BASE,
            path,
            "lora_embedding_A",
            "tied to a head (ensure_weight_tying) whose pair is not in the file",
            "the base's own tensors to be at hand, which tell whether it has such a head",
        )
        for path in embeddings
    ]


def _are_transposed(parts: Mapping[str, ModulePart], embeddings: Iterable[str], head: str) -> bool:
    pairs = [pair for path in embeddings if (pair := parts[path].pair) is not None]
    own = parts[head].pair
    return own is not None and any(
        own.lora_a.shape == pair.lora_b.T.shape and own.lora_b.shape == pair.lora_a.T.shape
        for pair in pairs
    )


def _check_saved_modules(
    config: AdapterConfig,
    parts: Mapping[str, ModulePart],
    shapes: Mapping[str, ModuleShape | ExpertShape],
) -> Iterator[Problem]:
    """Yield a problem for each listed module that the base has and the file has no weight for.

    PEFT lists heads that a model may not have, so a listed name without a module is normal.
    """
    whole = {path for path, part in parts.items() if part.full is not None}
    for base in shapes:
        name = next((name for name in config.modules_to_save if is_saved_as(base, name)), None)
        if name is not None and base not in whole:
            found = f"listed in modules_to_save ({name}) and not in the file"
            code = ProblemCode.MISSING_WEIGHTS
            yield _problem(code, base, "weight", found, "its trained weight")


def _check_token_names(
    config: AdapterConfig,
    parts: Mapping[str, ModulePart],
    shapes: Mapping[str, ModuleShape | ExpertShape],
) -> Iterator[Problem]:
    """Yield a problem for each module with trained tokens that has no rows of its own or tied."""
    indices = config.trainable_token_indices
    for name in indices if indices is not None and not isinstance(indices, tuple) else ():
        for base in shapes:
            if base.endswith(name) and (base not in parts or parts[base].token_rows is None):
                found = "named in trainable_token_indices, without rows and not tied to any"
                expected = "its trained rows"
                yield _problem(ProblemCode.MISSING_WEIGHTS, base, name, found, expected)


def _check_biases(
    config: AdapterConfig,
    parts: Mapping[str, ModulePart],
    base: Callable[[str], BaseTensors | None],
) -> Iterator[Problem]:
    """Yield a problem for each module whose bias was trained and is not in the file."""
    if config.bias == "none":
        return
    for path, part in parts.items():
        is_adapted = part.pair is not None or part.factors is not None
        if not is_adapted or part.bias is not None:
            continue
        tensors = base(path)
        if tensors is not None and tensors.bias is not None:
            found = f"trained (bias {config.bias}) and not in the file"
            code = ProblemCode.MISSING_WEIGHTS
            yield _problem(code, path, "bias", found, "the trained bias of every adapted module")


def _check_base_copies(
    adapter: Adapter,
    paths: ModulePaths,
    shapes: Mapping[str, ModuleShape | ExpertShape],
    base: Callable[[str], BaseTensors | None],
) -> Iterator[Problem]:
    """Yield a problem for each stored base tensor that is not known to equal the base's."""
    for path, copies in adapter.base_copies.items():
        found = paths.find(path)
        tensors = base(found[0]) if len(found) == 1 else None
        is_transposed = len(found) == 1 and _is_transposed(shapes[found[0]])
        for key, copy in copies.weights.items():
            own = None if tensors is None else tensors.weight
            own = own.T if own is not None and is_transposed else own
            yield from _compare_copy(path, key, copy, own)
        for key, copy in copies.biases.items():
            yield from _compare_copy(path, key, copy, None if tensors is None else tensors.bias)


def _is_transposed(shape: ModuleShape | ExpertShape) -> bool:
    return not isinstance(shape, ExpertShape) and shape.is_transposed


def _compare_copy(
    path: str, key: str, copy: torch.Tensor, own: torch.Tensor | None
) -> Iterator[Problem]:
    name = key.rpartition(".")[2]
    if own is None:
        found = f"a copy of the base's {name} that cannot be compared"
    elif copy.shape != own.shape:
        found = f"{list(copy.shape)}, not the base's {list(own.shape)}"
    # A base served in a narrower type is still the base the adapter was trained on.
    elif not torch.equal(copy.to(own.dtype), own.detach().cpu()):
        found = f"another {name} than the base's"
    else:
        return
    expected = (
        f"a {name} equal to the base's; save the adapter with save_embedding_layers=False, and "
        "without what was not trained"
    )
    yield _problem(ProblemCode.BASE_COPY_DIFFERS, path, key, found, expected)


def _has_effect(path: str, part: BoundPart, base: Callable[[str], BaseTensors | None]) -> bool:
    """Return whether a part changes what its module computes."""
    pair, full = part.pair, part.full
    if part.experts is not None or (
        pair is not None and bool(pair.lora_b.any()) and bool(pair.lora_a.any())
    ):
        return True
    if part.gain is not None and bool(((part.gain - 1).abs() > _GAIN_ROUNDING).any()):
        return True
    if part.bias is not None and bool(part.bias.any()):
        return part.gain is None or bool((part.bias.abs() > _GAIN_ROUNDING).any())
    return full is not None and not _is_base(full.weight, full.bias, base(path))


def _is_base(weight: torch.Tensor, bias: torch.Tensor | None, tensors: BaseTensors | None) -> bool:
    """Return whether a whole replacement is known to be what the base has already."""
    if tensors is None or weight.shape != tensors.weight.shape:
        return False
    own = tensors.weight.detach().cpu()
    if not torch.equal(weight.to(own.dtype), own):
        return False
    if bias is None or tensors.bias is None:
        return True
    return torch.equal(bias.to(tensors.bias.dtype), tensors.bias.detach().cpu())
