"""Time the LoRA part of one transformer layer: its packed linear modules, one after the other.

The layers of a model take turns, so that weights come from where they lie in a real step, not
from the cache that the round before has filled; activations are shared, since a real step has
just written them. Baselines: reading the bytes of the slots in use
once, the layer's own linear products, and the usual gather of each token's A and B with a batched
product.

Letters: `T` tokens, `E` entries, `N` slots, `R` max rank, `I` in, `O` out, `P` slices.
"""

from __future__ import annotations

import argparse
import platform
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from lora_kernels.backend import Backend
from lora_kernels.bench.harness import Row, header, time_in_turn
from lora_kernels.build import build_routing
from lora_kernels.ops import apply_lora_
from lora_kernels.testing import Popularity, random_weights, slots_by_popularity

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from lora_kernels.routing import Routing
    from lora_kernels.weights import StackedWeights

SMOLLM2_135M = ((576, (576, 192, 192)), (576, (576,)), (576, (1536, 1536)), (1536, (576,)))
"""Packed linear modules of a layer: (in, out of each slice) of qkv, o, gate_up, down."""

MAX_RANK = 64
_SEED = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One kind of step."""

    mode: str
    tokens: int
    slots: int
    rank: int
    popularity: Popularity


DECODE = [
    Case(mode="decode", tokens=16, slots=8, rank=16, popularity=popularity)
    for popularity in Popularity
]
PREFILL = [
    Case(mode="prefill", tokens=512, slots=8, rank=16, popularity=popularity)
    for popularity in (Popularity.DISTINCT, Popularity.IDENTICAL)
]
MORE = [
    Case(mode="decode", tokens=tokens, slots=slots, rank=rank, popularity=Popularity.DISTINCT)
    for tokens in (1, 16, 64)
    for slots in (8, 32)
    for rank in (8, 64)
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One layer's modules with their inputs and outputs."""

    weights: tuple[StackedWeights, ...]
    base: tuple[Tensor, ...]
    x: tuple[Tensor, ...]
    y: tuple[Tensor, ...]


def build_layers(case: Case, num_layers: int, dtype: torch.dtype) -> list[Layer]:
    """Draw slots and base weights of some layers, and the activations they share."""
    generator = torch.Generator().manual_seed(_SEED)

    def draw(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=generator).to(dtype)

    x = tuple(draw(case.tokens, in_features) for in_features, _ in SMOLLM2_135M)
    y = tuple(draw(case.tokens, sum(outs)) for _, outs in SMOLLM2_135M)
    layers = []
    for _ in range(num_layers):
        stacks = [
            random_weights(
                [case.rank] * case.slots,
                max_rank=MAX_RANK,
                in_features=in_features,
                out_features=outs,
                dtype=dtype,
                generator=generator,
            )
            for in_features, outs in SMOLLM2_135M
        ]
        base = [draw(sum(outs), in_features) for in_features, outs in SMOLLM2_135M]
        layers.append(Layer(weights=tuple(stacks), base=tuple(base), x=x, y=y))
    return layers


def route(case: Case) -> Routing:
    """Route the tokens; those of a prefill lie together by slot, as requests do."""
    generator = torch.Generator().manual_seed(_SEED)
    slots = slots_by_popularity(
        case.popularity, num_tokens=case.tokens, num_slots=case.slots, generator=generator
    )
    if case.mode == "prefill":
        slots.sort()
    return build_routing(
        token_idx=range(case.tokens), slots=slots, num_tokens=case.tokens, num_slots=case.slots
    )


def read_slots(layer: Layer, routing: Routing) -> None:
    """Read the true ranks of the slots in use once."""
    present = [segment.slot for segment in routing.segments]
    first, last = present[0], present[-1] + 1
    for stack in layer.weights:
        rank = stack.slot_ranks[first][0]
        stack.a_storage[:rank, :, first:last].view(torch.int64).sum()
        stack.b_storage[first:last, :rank].view(torch.int64).sum()


def apply_base(layer: Layer) -> None:
    """Multiply with the layer's own weights."""
    for x, w in zip(layer.x, layer.base, strict=True):
        torch.nn.functional.linear(x, w)


def apply_gathered(layer: Layer, routing: Routing) -> None:
    """Copy each token's A and B, then multiply them as a batch."""
    tokens, slots = routing.token_idx, routing.entry_slots
    for stack, x, y in zip(layer.weights, layer.x, layer.y, strict=True):
        x_by_entry = x[tokens].unsqueeze(2)
        for p, (low, high) in enumerate(stack.out_ranges):
            rank = stack.slot_ranks[0][p]
            v = torch.bmm(stack.lora_a[p][:, :rank][slots], x_by_entry)
            delta = torch.bmm(stack.lora_b[p][:, :, :rank][slots], v)
            y[:, low:high].index_add_(0, tokens, delta.squeeze(2))


def apply_operator(layer: Layer, routing: Routing, backend: Backend) -> None:
    """Run `apply_lora_` for each module."""
    for stack, x, y in zip(layer.weights, layer.x, layer.y, strict=True):
        apply_lora_(y, x, stack, routing, backend=backend)


def time_case(case: Case, *, num_layers: int, rounds: int, dtype: torch.dtype) -> list[Row]:
    """Time the operator and its baselines for one kind of step."""
    layers = build_layers(case, num_layers, dtype)
    routing = route(case)
    candidates: dict[str, Callable[[int], object]] = {
        "apply_lora_ aten": lambda i: apply_operator(layers[i % num_layers], routing, Backend.ATEN),
        "read slots once": lambda i: read_slots(layers[i % num_layers], routing),
        "base linear": lambda i: apply_base(layers[i % num_layers]),
    }
    timed = time_in_turn(candidates, rounds=rounds, warm_up=3)
    if case.mode == "decode":
        gathered: dict[str, Callable[[int], object]] = {
            "gathered bmm": lambda i: apply_gathered(layers[i % num_layers], routing)
        }
        timed |= time_in_turn(gathered, rounds=max(2, rounds // 20), warm_up=1)
    return [
        Row(
            mode=case.mode,
            op=op,
            tokens=case.tokens,
            slots=case.slots,
            rank=case.rank,
            popularity=case.popularity.value,
            p20=p20,
            p50=p50,
            p80=p80,
        )
        for op, (p20, p50, p80) in timed.items()
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table, each row as soon as it is known."""
    parser = argparse.ArgumentParser(prog="python -m lora_kernels.bench", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the main cases, in under a minute")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--layers", type=int, default=30, help="layers that take turns")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    machine = f"{platform.processor() or platform.machine()}, {options.threads} threads"
    print(
        f"SmolLM2-135M layer, bfloat16, max rank {MAX_RANK}, torch {torch.__version__}, {machine}"
    )
    print(header())
    with torch.inference_mode():
        for case in DECODE + PREFILL + ([] if options.quick else MORE):
            rows = time_case(
                case, num_layers=options.layers, rounds=options.rounds, dtype=torch.bfloat16
            )
            for row in rows:
                print(row.line(), flush=True)


if __name__ == "__main__":
    main()
