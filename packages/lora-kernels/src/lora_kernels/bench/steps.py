"""Steps to be timed: slots in several copies, activations, routing, and the calls over them.

The copies take turns, so that weights come from where they lie in a real step; activations are
shared, since a real step has just written them.

Letters: `T` tokens, `E` entries, `N` slots, `K` experts per token, `X` experts, `M` pairs
(entry, chosen expert), `P` slices, `I` in, `O` out, `r` rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from lora_kernels.bench.traffic import Load
from lora_kernels.build import build_routing
from lora_kernels.embedding import embedding_lora_
from lora_kernels.expert_weights import ExpertWeights
from lora_kernels.moe import align_experts, moe_lora_
from lora_kernels.ops import apply_lora_, expand_, shrink
from lora_kernels.testing import random_pair, random_weights, slots_by_popularity
from lora_kernels.weights import StackedWeights

if TYPE_CHECKING:
    from torch import Tensor

    from lora_kernels.backend import Backend
    from lora_kernels.bench.cases import Case, Module
    from lora_kernels.expert_routing import ExpertRouting
    from lora_kernels.routing import Routing

_SEED = 0
_COPIED_BYTES = 64 << 20
_MIN_COPIES, _MAX_COPIES = 2, 30


class Step(Protocol):
    """One module in one step."""

    @property
    def op(self) -> str:
        """Name of the operator."""

    @property
    def module(self) -> Module:
        """The module's sizes."""

    @property
    def load(self) -> Load:
        """How much of it the step uses."""

    @property
    def num_slots_in_use(self) -> int:
        """Slots that a token names."""

    def run(self, number: int, backend: Backend) -> object:
        """Call the operator on a copy of the slots."""

    def read(self, number: int) -> None:
        """Read the true ranks of the slots in use, of the factors the operator needs, once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearStep:
    """A linear module, or an embedding."""

    op: str
    module: Module
    load: Load

    weights: tuple[StackedWeights, ...]
    """Copies of the slots."""

    routing: Routing

    x: Tensor
    """`[T, I]`; token ids, `[T]`, for an embedding."""

    y: Tensor
    """`[T, sum O_p]`."""

    v: Tensor
    """What `shrink` gives, `[P, E, r]` float32; read by `expand_`."""

    @property
    def num_slots_in_use(self) -> int:
        """See `Step`."""
        return len(self.routing.segments)

    def run(self, number: int, backend: Backend) -> object:
        """See `Step`."""
        weights = self.weights[number % len(self.weights)]
        if self.op == "shrink":
            return shrink(self.x, weights, self.routing, backend=backend)
        if self.op == "expand_":
            return expand_(self.y, self.v, weights, self.routing, backend=backend)
        if self.op == "embedding_lora_":
            return embedding_lora_(self.y, self.x, weights, self.routing, backend=backend)
        return self.add(self.y, number, backend)

    def add(self, y: Tensor, number: int, backend: Backend) -> Tensor:
        """Run `apply_lora_` on another output than the step's own."""
        weights = self.weights[number % len(self.weights)]
        return apply_lora_(y, self.x, weights, self.routing, backend=backend)

    def read(self, number: int) -> None:
        """See `Step`; slots between the first and the last in use are read as well."""
        weights = self.weights[number % len(self.weights)]
        first, last = self.routing.segments[0].slot, self.routing.segments[-1].slot + 1
        if self.op not in ("expand_", "embedding_lora_"):
            weights.a_storage[: self.load.rank, :, first:last].view(torch.float32).sum()
        if self.op != "shrink":
            weights.b_storage[first:last, : self.load.rank].view(torch.float32).sum()


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertStep:
    """An expert stage; the router's choice is sorted once, as both stages share it."""

    op: str
    module: Module
    load: Load

    weights: tuple[ExpertWeights, ...]
    """Copies of the slots."""

    expert_routing: ExpertRouting

    keys_in_use: Tensor
    """Pairs (slot, expert) in use, `slot * X + expert`, growing."""

    x: Tensor
    """`[T, I]`."""

    y: Tensor
    """`[T * K, sum O_p]`."""

    @property
    def num_slots_in_use(self) -> int:
        """See `Step`."""
        return len(self.expert_routing.routing.segments)

    def run(self, number: int, backend: Backend) -> object:
        """See `Step`."""
        weights = self.weights[number % len(self.weights)]
        return moe_lora_(self.y, self.x, weights, self.expert_routing, backend=backend)

    def read(self, number: int) -> None:
        """See `Step`; one call for each pair (slot, expert), whose factors are one run."""
        weights = self.weights[number % len(self.weights)]
        for key in self.keys_in_use.tolist():
            slot, expert = divmod(key, self.module.num_experts)
            weights.a_storage[slot, expert, : self.load.rank].view(torch.float32).sum()
            weights.b_storage[slot, expert, : self.load.rank].view(torch.float32).sum()


def build_step(case: Case, module: Module, *, dtype: torch.dtype, device: torch.device) -> Step:
    """Draw slots, activations and the routing of a case for one module."""
    generator = torch.Generator().manual_seed(_SEED)
    slots = slots_by_popularity(
        case.popularity, num_tokens=case.tokens, num_slots=case.slots, generator=generator
    )
    routing = build_routing(
        token_idx=range(case.tokens),
        slots=sorted(slots) if case.is_prefill else slots,
        num_tokens=case.tokens,
        num_slots=case.slots,
        device=device,
    )
    if module.num_experts:
        return _build_expert_step(case, module, routing, generator, dtype)
    return _build_linear_step(case, module, routing, generator, dtype)


def _build_linear_step(
    case: Case, module: Module, routing: Routing, generator: torch.Generator, dtype: torch.dtype
) -> LinearStep:
    device, num_slices = routing.device, len(module.out_features)

    def allocate() -> StackedWeights:
        return StackedWeights.allocate(
            num_slots=case.slots,
            max_rank=case.rank,
            in_features=module.in_features,
            out_features=module.out_features,
            dtype=dtype,
            device=device,
        )

    first = random_weights(
        [case.rank] * case.slots,
        max_rank=case.rank,
        in_features=module.in_features,
        out_features=module.out_features,
        dtype=dtype,
        generator=generator,
        device=device,
    )
    weights = [first]
    for _ in range(1, _num_copies(first.nbytes)):
        copy = allocate()
        for slot in range(case.slots):
            pairs = zip(first.lora_a, first.lora_b, strict=True)
            copy.write_slot(slot, [(lora_a[slot], lora_b[slot]) for lora_a, lora_b in pairs])
        weights.append(copy)
    if case.op == "embedding_lora_":
        x = torch.randint(module.in_features, (case.tokens,), generator=generator).to(device)
    else:
        x = torch.randn(case.tokens, module.in_features, generator=generator).to(device, dtype)
    y = torch.randn(case.tokens, sum(module.out_features), generator=generator).to(device, dtype)
    v = torch.randn(num_slices, routing.num_entries, case.rank, generator=generator).to(device)
    return LinearStep(
        op="apply_lora_" if case.op == "layer" else case.op,
        module=module,
        load=Load(
            entries=routing.num_entries,
            rows=routing.num_entries,
            groups=len(routing.segments),
            rank=case.rank,
            element_size=first.dtype.itemsize,
        ),
        weights=tuple(weights),
        routing=routing,
        x=x,
        y=y,
        v=v,
    )


def _build_expert_step(
    case: Case, module: Module, routing: Routing, generator: torch.Generator, dtype: torch.dtype
) -> ExpertStep:
    device, num_experts = routing.device, module.num_experts
    weights: list[ExpertWeights] = []
    while not weights or len(weights) < _num_copies(weights[0].nbytes):
        stage = ExpertWeights.allocate(
            num_slots=case.slots,
            num_experts=num_experts,
            max_rank=case.rank,
            in_features=module.in_features,
            out_features=module.out_features,
            dtype=dtype,
            device=device,
        )
        for slot in range(case.slots):
            pairs = [
                random_pair(case.rank, module.in_features, out, generator=generator)
                for out in module.out_features
            ]
            stage.write_slot(
                slot,
                [(a.expand(num_experts, -1, -1), b.expand(num_experts, -1, -1)) for a, b in pairs],
            )
        weights.append(stage)
    chances = torch.rand(case.tokens, num_experts, generator=generator)
    expert_ids = chances.argsort(1)[:, : module.num_choices].to(device)
    expert_routing = align_experts(routing, expert_ids, num_experts=num_experts)
    keys = torch.unique(expert_routing.pair_keys)
    x = torch.randn(case.tokens, module.in_features, generator=generator).to(device, dtype)
    rows = case.tokens * module.num_choices
    y = torch.randn(rows, sum(module.out_features), generator=generator).to(device, dtype)
    return ExpertStep(
        op=case.op,
        module=module,
        load=Load(
            entries=routing.num_entries * module.num_choices,
            rows=routing.num_entries,
            groups=keys.shape[0],
            rank=case.rank,
            element_size=weights[0].dtype.itemsize,
        ),
        weights=tuple(weights),
        expert_routing=expert_routing,
        keys_in_use=keys,
        x=x,
        y=y,
    )


def _num_copies(num_bytes: int) -> int:
    return max(_MIN_COPIES, min(_MAX_COPIES, -(-_COPIED_BYTES // num_bytes)))
