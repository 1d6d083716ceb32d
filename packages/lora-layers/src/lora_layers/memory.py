"""What the slots of a wrapped model take, module by module; the same of a model on `meta`.

Descriptions and the tensors themselves; knows nothing of adapters by name, devices or budgets.

Letters: `N` slots, `I` in, `O_p` out of slice `p`, `P` slices, `X` experts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from lora_layers.wrappers import ExpertStack, SlotStack
from lora_weights import ModuleKind, ModuleShape

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor

    from lora_kernels import ExpertWeights, StackedWeights
    from lora_layers.inject import Injection
    from lora_layers.step import RoutingCell

_AFFINE_BYTES = 2 * 4
"""A gain and a bias, float32, for each slot and output."""


class StackForm(StrEnum):
    """What kind of module a stack of slots belongs to."""

    LINEAR = "linear"
    EMBEDDING = "embedding"
    LOGITS = "logits"
    """One of the caller's `logits_modules`."""
    EXPERTS = "experts"


@dataclass(frozen=True, slots=True, kw_only=True)
class StackMemory:
    """The slots of one module or packed group."""

    path: str
    """Where it is; for a packed group `<parent>.<packed name>`."""
    member_paths: tuple[str, ...]
    """Path of the module behind each slice, as adapters name it; of experts the path itself."""
    form: StackForm
    rank_bytes: tuple[int, ...]
    """What one rank of each slice takes in one slot; of experts w1, w3 if there is one, and w2."""
    slot_ranks: tuple[tuple[int, ...], ...]
    """True rank of each slice, 0 if absent, for each of the `N` slots."""
    affine_bytes: int
    """What gains and biases of all slots take once an adapter brings one."""
    tensors: tuple[Tensor, ...] = field(repr=False)
    """Everything allocated, views left out; gains and biases once they are."""

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def used_bytes(self, ranks: Sequence[int]) -> int:
        """Return what of a slot an adapter of these ranks, one a slice, fills."""
        return sum(rank * size for rank, size in zip(ranks, self.rank_bytes, strict=True))


def describe_stacks(injection: Injection, logits: RoutingCell) -> Iterator[StackMemory]:
    """Yield the slots of every module that carries LoRA.

    Args:
        injection: the wrappers in the model.
        logits: the cell from which modules read that see logits rows.
    """
    for path, stack in injection.stacks.items():
        if isinstance(stack, ExpertStack):
            yield _describe_experts(path, stack)
        else:
            yield _describe(path, stack, _form_of(path, stack, injection.shapes, logits))


def _form_of(
    path: str, stack: SlotStack, shapes: Mapping[str, object], logits: RoutingCell
) -> StackForm:
    if stack.cell is logits:
        return StackForm.LOGITS
    shape = shapes.get(path)
    is_embedding = isinstance(shape, ModuleShape) and shape.kind is ModuleKind.EMBEDDING
    return StackForm.EMBEDDING if is_embedding else StackForm.LINEAR


def _describe(path: str, stack: SlotStack, form: StackForm) -> StackMemory:
    weights = stack.weights
    itemsize = weights.dtype.itemsize
    return StackMemory(
        path=path,
        member_paths=stack.member_paths,
        form=form,
        rank_bytes=tuple((weights.in_features + o) * itemsize for o in weights.out_features),
        slot_ranks=tuple(weights.slot_ranks),
        affine_bytes=_AFFINE_BYTES * weights.num_slots * weights.total_out_features,
        tensors=_tensors(weights),
    )


def _tensors(weights: StackedWeights) -> tuple[Tensor, ...]:
    own = (weights.a_storage, weights.b_storage, weights.slot_table, weights.slice_of_chunk)
    return own if weights.affine is None else (*own, weights.affine)


def _describe_experts(path: str, stack: ExpertStack) -> StackMemory:
    ranks = zip(stack.w13.slot_ranks, stack.w2.slot_ranks, strict=True)
    return StackMemory(
        path=path,
        member_paths=(path,),
        form=StackForm.EXPERTS,
        rank_bytes=(*_expert_rank_bytes(stack.w13), *_expert_rank_bytes(stack.w2)),
        slot_ranks=tuple(w13 + w2 for w13, w2 in ranks),
        affine_bytes=0,
        tensors=tuple(
            tensor
            for weights in (stack.w13, stack.w2)
            for tensor in (weights.a_storage, weights.b_storage, weights.rank_table)
        ),
    )


def _expert_rank_bytes(weights: ExpertWeights) -> Iterator[int]:
    """Yield what one rank of each slice takes: A and B of all experts, shared ones once."""
    for out_features in weights.out_features:
        numbers = weights.a_experts * weights.in_features + weights.b_experts * out_features
        yield numbers * weights.dtype.itemsize
