"""One small adapter of every format, and the base it belongs to, for tests.

The base has two attention projections with biases, an embedding, a head and a classifier:

    layers.0.q_proj  8 -> 8      layers.0.v_proj  8 -> 4
    embed_tokens  10 x 8         lm_head  8 -> 10         score  8 -> 3
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from lora_weights.bound import BaseTensors
from lora_weights.modules import ModuleKind, ModuleShape
from lora_weights.names import PEFT_PREFIX
from lora_weights.save import RawAdapter

if TYPE_CHECKING:
    from collections.abc import Mapping

Q, V = "layers.0.q_proj", "layers.0.v_proj"

SHAPES: dict[str, ModuleShape] = {
    Q: ModuleShape(in_features=8, out_features=8),
    V: ModuleShape(in_features=8, out_features=4),
    "embed_tokens": ModuleShape(in_features=10, out_features=8, kind=ModuleKind.EMBEDDING),
    "lm_head": ModuleShape(in_features=8, out_features=10),
    "score": ModuleShape(in_features=8, out_features=3, max_out_features=5),
}

_PAIRS = {
    f"{path}.lora_{ab}.weight": shape
    for path, size in ((Q, (8, 8)), (V, (8, 4)))
    for ab, shape in (("A", (2, size[0])), ("B", (size[1], 2)))
}
_EMBEDDING = {"embed_tokens.lora_embedding_A": (2, 10), "embed_tokens.lora_embedding_B": (8, 2)}
_HEAD = {"lm_head.lora_A.weight": (2, 8), "lm_head.lora_B.weight": (10, 2)}

_LORA: dict[str, object] = {
    "peft_type": "LORA",
    "r": 2,
    "lora_alpha": 3,
    "target_modules": ["q_proj", "v_proj"],
}
_LYCORIS: dict[str, object] = {"r": 2, "alpha": 3, "target_modules": ["q_proj", "v_proj"]}

_FORMATS: dict[str, tuple[Mapping[str, tuple[int, ...]], dict[str, object]]] = {
    "lora": (_PAIRS, _LORA),
    "embedding": ({**_PAIRS, **_EMBEDDING, **_HEAD}, _LORA),
    "dora": (
        {
            **_PAIRS,
            **_EMBEDDING,
            f"{Q}.lora_magnitude_vector": (8,),
            f"{V}.lora_magnitude_vector": (4,),
            "embed_tokens.lora_magnitude_vector": (8,),
        },
        {**_LORA, "use_dora": True},
    ),
    "lora_bias": (
        {**_PAIRS, f"{Q}.lora_B.bias": (8,), f"{V}.lora_B.bias": (4,)},
        {**_LORA, "lora_bias": True},
    ),
    "bias": (
        {**_PAIRS, f"{Q}.base_layer.bias": (8,), f"{V}.base_layer.bias": (4,)},
        {**_LORA, "bias": "lora_only"},
    ),
    "whole": (
        {**_PAIRS, "score.weight": (5, 8), "score.bias": (5,), "lm_head.weight": (10, 8)},
        {**_LORA, "modules_to_save": ["score", "classifier", "lm_head"]},
    ),
    "tokens": (
        {**_PAIRS, "embed_tokens.token_adapter.trainable_tokens_delta": (3, 8)},
        {**_LORA, "trainable_token_indices": [7, 0, 4]},
    ),
    "ia3": (
        {f"{Q}.ia3_l": (8, 1), f"{V}.ia3_l": (4, 1)},
        {"peft_type": "IA3", "target_modules": ["q_proj"], "feedforward_modules": []},
    ),
    "vera": (
        {
            f"{Q}.vera_lambda_b": (8,),
            f"{Q}.vera_lambda_d": (2,),
            f"{V}.vera_lambda_b": (4,),
            f"{V}.vera_lambda_d": (2,),
            "vera_A": (2, 8),
            "vera_B": (8, 2),
        },
        {"peft_type": "VERA", "r": 2, "target_modules": ["q_proj"], "save_projection": True},
    ),
    "loha": (
        {
            f"{path}.hada_w{index}_{ab}": (rows, 2) if ab == "a" else (2, 8)
            for path, rows in ((Q, 8), (V, 4))
            for index in (1, 2)
            for ab in "ab"
        },
        {**_LYCORIS, "peft_type": "LOHA"},
    ),
    "lokr": (
        {
            f"{Q}.lokr_w1": (2, 2),
            f"{Q}.lokr_w2_a": (4, 2),
            f"{Q}.lokr_w2_b": (2, 4),
            f"{V}.lokr_w1_a": (2, 2),
            f"{V}.lokr_w1_b": (2, 2),
            f"{V}.lokr_w2": (2, 4),
        },
        {**_LYCORIS, "peft_type": "LOKR"},
    ),
}

FORMATS = tuple(_FORMATS)
"""Names of all formats."""


def build_format(name: str, *, seed: int = 0, **config: object) -> RawAdapter:
    """Return a random adapter of one format, as PEFT would save it.

    Args:
        name: one of `FORMATS`.
        seed: of the generator.
        **config: further fields of ``adapter_config.json``, or other values for its own.
    """
    shapes, fields = _FORMATS[name]
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for key, shape in shapes.items():
        prefix = "base_model." if key.startswith("vera_") else PEFT_PREFIX
        tensors[prefix + key] = torch.randn(shape, generator=generator)
    return RawAdapter(config={**fields, **config}, tensors=tensors)


def base_tensors(path: str) -> BaseTensors:
    """Return the base's tensors of one module; the projections and the classifier have biases."""
    shape = SHAPES[path]
    generator = torch.Generator().manual_seed(sorted(SHAPES).index(path))
    size = (shape.out_features, shape.in_features)
    if shape.kind is ModuleKind.EMBEDDING:
        return BaseTensors(weight=torch.randn(size[::-1], generator=generator))
    has_bias = path != "lm_head"
    return BaseTensors(
        weight=torch.randn(size, generator=generator),
        bias=torch.randn(size[0], generator=generator) if has_bias else None,
    )
