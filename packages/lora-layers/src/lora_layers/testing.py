"""A small decoder, adapters for it, and dense float64 arithmetic to compare with.

The decoder treats every token by itself, so one row of a batch can be compared with the same row
alone. `dense_logits` knows nothing of wrappers, slots or kernels: it adds `scaling * B @ A` to the
weights and multiplies.

Letters: `T` rows, `I` in, `O` out, `H` hidden, `V` vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

from lora_layers.content import SlotContent
from lora_layers.step import RowRun
from lora_layers.wrappers import SlotStack
from lora_weights import Adapter, load_adapter, save_adapter
from lora_weights.testing import build_raw_adapter

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from lora_layers.content import PreparedAdapter
    from lora_layers.manager import LoraModelManager

HIDDEN, INTER, VOCAB, LAYERS = 16, 24, 32, 2

PACKED_MODULES = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""What `TinyDecoder` packs."""

LINEARS: dict[str, tuple[int, int]] = {
    f"layers.{layer}.{name}": sizes
    for layer in range(LAYERS)
    for name, sizes in {
        "attn.q_proj": (HIDDEN, HIDDEN),
        "attn.k_proj": (HIDDEN, HIDDEN // 2),
        "attn.v_proj": (HIDDEN, HIDDEN // 2),
        "attn.o_proj": (HIDDEN, HIDDEN),
        "mlp.gate_proj": (HIDDEN, INTER),
        "mlp.up_proj": (HIDDEN, INTER),
        "mlp.down_proj": (INTER, HIDDEN),
    }.items()
} | {"lm_head": (HIDDEN, VOCAB)}
"""Path -> (I, O) of every linear module of `TinyDecoder`."""

EMBEDDINGS = {"embed_tokens": (VOCAB, HIDDEN)}
"""Path -> (V, D) of its embedding."""


class TinyAttention(nn.Module):
    """Projections named as in a decoder; tokens do not see each other."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.k_proj = nn.Linear(HIDDEN, HIDDEN // 2)
        self.v_proj = nn.Linear(HIDDEN, HIDDEN // 2, bias=False)
        self.o_proj = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        """Map `[..., H]` to `[..., H]`."""
        query = self.q_proj(x)
        query = query.view(*query.shape[:-1], 2, HIDDEN // 2).flatten(-2)  # as heads are split
        rest = torch.cat([self.k_proj(x), self.v_proj(x)], dim=-1)
        return self.o_proj(torch.tanh(query) * rest)  # type: ignore[no-any-return]


class TinyMlp(nn.Module):
    """A gated MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(HIDDEN, INTER, bias=False)
        self.up_proj = nn.Linear(HIDDEN, INTER, bias=False)
        self.down_proj = nn.Linear(INTER, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map `[..., H]` to `[..., H]`."""
        gated = torch.tanh(self.gate_proj(x)) * self.up_proj(x)
        return self.down_proj(gated)  # type: ignore[no-any-return]


class TinyBlock(nn.Module):
    """Attention and MLP, each added to the stream."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = TinyAttention()
        self.mlp = TinyMlp()

    def forward(self, x: Tensor) -> Tensor:
        """Map `[..., H]` to `[..., H]`."""
        x = x + self.attn(x)
        return x + self.mlp(x)  # type: ignore[no-any-return]


class TinyDecoder(nn.Module):
    """Embedding, two blocks and a head; every row by itself."""

    def __init__(self, *, tied: bool = False, seed: int = 0) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList([TinyBlock() for _ in range(LAYERS)])
        self.lm_head = nn.Linear(HIDDEN, VOCAB, bias=False)
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.parameters():
            parameter.requires_grad_(False)
            parameter.normal_(std=0.3, generator=generator)
        if tied:
            self.lm_head.weight = self.embed_tokens.weight

    def hidden(self, token_ids: Tensor) -> Tensor:
        """Map ids `[...]` to the last hidden state `[..., H]`."""
        x: Tensor = self.embed_tokens(token_ids)
        for layer in self.layers:
            x = layer(x)
        return x

    def forward(self, token_ids: Tensor, keep: Tensor | None = None) -> Tensor:
        """Map ids `[T]` or `[B, S]` to logits; `keep` picks the rows of `[T]` that get them."""
        x = self.hidden(token_ids)
        return self.lm_head(x if keep is None else x[keep])  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BuiltAdapter:
    """An adapter, and what it adds to each weight."""

    adapter: Adapter
    """As `load_adapter` read it."""
    deltas: Mapping[str, Tensor]
    """Path -> `scaling * B @ A`, float64: `[O, I]`, or `[V, D]` for an embedding."""


def build_adapter(
    folder: Path,
    paths: Iterable[str] = (*LINEARS, *EMBEDDINGS),
    *,
    r: int = 4,
    seed: int = 0,
    std: float = 0.3,
    dtype: torch.dtype = torch.float32,
) -> BuiltAdapter:
    """Write a random adapter for modules of `TinyDecoder` in PEFT's layout and read it.

    Args:
        folder: where to write; one folder an adapter.
        paths: modules it touches.
        r: rank.
        seed: one seed gives one adapter.
        std: standard deviation of A and B.
        dtype: dtype of the stored tensors.
    """
    wanted = list(paths)
    raw = build_raw_adapter(
        {path: LINEARS[path] for path in wanted if path in LINEARS},
        embeddings={path: EMBEDDINGS[path] for path in wanted if path in EMBEDDINGS},
        r=r,
        seed=seed,
        std=std,
        dtype=dtype,
    )
    scaling = 2.0  # build_raw_adapter's alpha is twice the rank
    prefix = "base_model.model."
    deltas = {}
    for path in wanted:
        names = (
            ("lora_embedding_A", "lora_embedding_B")
            if path in EMBEDDINGS
            else ("lora_A.weight", "lora_B.weight")
        )
        a_RI, b_OR = (raw.tensors[f"{prefix}{path}.{name}"].double() for name in names)  # noqa: N806
        delta = scaling * (b_OR @ a_RI)
        deltas[path] = delta.t() if path in EMBEDDINGS else delta
    return BuiltAdapter(adapter=load_adapter(save_adapter(raw, folder)), deltas=deltas)


def dense_logits(
    state: Mapping[str, Tensor],
    token_ids: Tensor,
    *weighted: tuple[BuiltAdapter, float],
) -> Tensor:
    """Compute the logits of `TinyDecoder` in float64 with the deltas merged into the weights.

    Args:
        state: the base model's `state_dict`.
        token_ids: `[T]`.
        *weighted: adapters and their scales.

    Returns:
        `[T, V]` float64.
    """

    def weight(path: str) -> Tensor:
        total = state[f"{path}.weight"].double()
        for built, scale in weighted:
            if path in built.deltas:
                total = total + scale * built.deltas[path]
        return total

    def linear(path: str, x: Tensor) -> Tensor:
        bias = state.get(f"{path}.bias")
        return functional.linear(x, weight(path), None if bias is None else bias.double())

    x = weight("embed_tokens")[token_ids]
    for layer in range(LAYERS):
        attn, mlp = f"layers.{layer}.attn", f"layers.{layer}.mlp"
        rest = torch.cat([linear(f"{attn}.k_proj", x), linear(f"{attn}.v_proj", x)], dim=-1)
        x = x + linear(f"{attn}.o_proj", torch.tanh(linear(f"{attn}.q_proj", x)) * rest)
        gated = torch.tanh(linear(f"{mlp}.gate_proj", x)) * linear(f"{mlp}.up_proj", x)
        x = x + linear(f"{mlp}.down_proj", gated)
    return linear("lm_head", x)


def runs(*parts: tuple[int, Sequence[tuple[str, float]] | str | None]) -> tuple[RowRun, ...]:
    """Return runs from (rows, adapters): a key, a weighted set, or None for the base."""
    made = []
    for num_rows, adapters in parts:
        if isinstance(adapters, str):
            adapters = ((adapters, 1.0),)  # noqa: PLW2901
        made.append(RowRun(num_rows=num_rows, adapters=tuple(adapters or ())))
    return tuple(made)


def content_of(prepared: PreparedAdapter, path: str) -> SlotContent:
    """Return what a prepared adapter puts into a slot of a linear or embedding module."""
    content = prepared.contents[path]
    assert isinstance(content, SlotContent), f"{path} is an experts module"
    return content


def stack_of(manager: LoraModelManager, path: str) -> SlotStack:
    """Return the slots of a linear or embedding module, or packed group."""
    stack = manager._injection.stacks[path]  # noqa: SLF001 - of this package
    assert isinstance(stack, SlotStack), f"{path} is an experts module"
    return stack
