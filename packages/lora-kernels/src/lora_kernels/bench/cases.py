"""What is measured: module shapes of real models, and the steps that run over them.

Letters: `I` in, `O` out of each slice, `X` experts, `K` experts per token, `V` vocabulary.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

from lora_kernels.testing import Popularity


@dataclass(frozen=True, slots=True, kw_only=True)
class Module:
    """One (packed) module of a model."""

    name: str

    in_features: int
    """`I`; the vocabulary size for an embedding."""

    out_features: tuple[int, ...]
    """`O` of each slice."""

    num_experts: int = 0
    """`X`; 0 for a module that is no expert stage."""

    num_choices: int = 0
    """`K`."""


def _layer(hidden: int, q: int, kv: int, inner: int) -> tuple[Module, ...]:
    return (
        Module(name="qkv", in_features=hidden, out_features=(q, kv, kv)),
        Module(name="o", in_features=q, out_features=(hidden,)),
        Module(name="gate_up", in_features=hidden, out_features=(inner, inner)),
        Module(name="down", in_features=inner, out_features=(hidden,)),
    )


LAYERS = {
    "smollm2-135m": _layer(hidden=576, q=576, kv=192, inner=1536),
    "qwen3-0.6b": _layer(hidden=1024, q=2048, kv=1024, inner=3072),
    "llama-7b": _layer(hidden=4096, q=4096, kv=4096, inner=11008),
    "llama-70b": _layer(hidden=8192, q=8192, kv=1024, inner=28672),
}
"""The four packed modules of a transformer layer, from the models' configurations."""

EMBEDDINGS = {
    "smollm2-135m": Module(name="embedding", in_features=49152, out_features=(576,)),
    "qwen3-0.6b": Module(name="embedding", in_features=151936, out_features=(1024,)),
}

EXPERTS = {
    "mixtral-8x7b": Module(
        name="w13", in_features=4096, out_features=(14336, 14336), num_experts=8, num_choices=2
    )
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One operator, or a whole layer, in one kind of step."""

    op: str
    """`shrink`, `expand_`, `apply_lora_`, `embedding_lora_`, `moe_lora_`; or `layer`, which is
    `apply_lora_` over the four modules of a layer."""

    model: str
    popularity: Popularity

    tokens: int = 16
    slots: int = 8
    rank: int = 16

    is_prefill: bool = False
    """Tokens lie together by slot, as prompts do; else they take turns, as sequences do."""

    @property
    def modules(self) -> tuple[Module, ...]:
        """What the step runs through; an operator of a linear module is measured on qkv."""
        if self.op == "layer":
            return LAYERS[self.model]
        if self.op == "embedding_lora_":
            return (EMBEDDINGS[self.model],)
        if self.op == "moe_lora_":
            return (EXPERTS[self.model],)
        return LAYERS[self.model][:1]


def quick_cases(device_type: str) -> list[Case]:
    """Return the cases of `--quick`: each model, popularity and operator at least once."""
    distinct, identical = Popularity.DISTINCT, Popularity.IDENTICAL
    cases = [
        Case(op="layer", model=model, popularity=popularity, tokens=tokens, is_prefill=is_prefill)
        for model in ("smollm2-135m", "qwen3-0.6b")
        for tokens, is_prefill, popularities in (
            (16, False, tuple(Popularity)),
            (512, True, (distinct, identical)),
        )
        for popularity in popularities
    ]
    cases += [
        Case(op="apply_lora_", model=model, popularity=popularity)
        for model in LAYERS
        for popularity in Popularity
    ]
    cases += [
        Case(op=op, model=model, popularity=distinct)
        for model in LAYERS
        for op in ("shrink", "expand_")
    ]
    small = Case(op="apply_lora_", model="smollm2-135m", popularity=distinct)
    cases += [replace(small, tokens=tokens) for tokens in (1, 64)]
    cases += [replace(small, rank=rank) for rank in (8, 64)]
    cases.append(replace(small, op="embedding_lora_"))
    cases += [
        Case(op="moe_lora_", model="mixtral-8x7b", popularity=popularity)
        for popularity in (distinct, identical)
    ]
    if device_type == "cuda":
        cases += _large_cases()
    return cases


def _large_cases() -> list[Case]:
    """64 distinct adapters at hidden 4096: the size at which GPUs are compared."""
    large = Case(
        op="layer", model="llama-7b", popularity=Popularity.DISTINCT, tokens=64, slots=64, rank=16
    )
    return [replace(large, op=op) for op in ("layer", "shrink", "expand_", "apply_lora_")]


def all_cases(device_type: str) -> list[Case]:
    """Return the cases of `--quick`, then every combination of sizes; takes hours on a CPU."""
    steps = ((1, False), (16, False), (64, False), (512, True))
    linears = itertools.product(
        LAYERS, ("layer", "shrink", "expand_", "apply_lora_"), Popularity, steps, (8, 16, 64)
    )
    cases = quick_cases(device_type)
    cases += [
        Case(
            op=op,
            model=model,
            popularity=popularity,
            tokens=tokens,
            rank=rank,
            is_prefill=is_prefill,
        )
        for model, op, popularity, (tokens, is_prefill), rank in linears
    ]
    others = [("embedding_lora_", model) for model in EMBEDDINGS]
    others += [("moe_lora_", model) for model in EXPERTS]
    cases += [
        Case(op=op, model=model, popularity=popularity, tokens=tokens, is_prefill=is_prefill)
        for (op, model), popularity, (tokens, is_prefill) in itertools.product(
            others, Popularity, steps
        )
    ]
    return list(dict.fromkeys(cases))
