"""ExpertWeights: the A and B factors of one stage of an expert layer, for all slots and experts.

A stage is w13 (gate and up; two slices, or one of twice the width, or up alone) or w2 (down).
Knows slots and experts by number only: which adapter sits in which slot is the caller's business.

Letters: `N` slots, `X` experts, `R` max rank, `I` in, `O` out, `P` slices.
"""

from __future__ import annotations

import math
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Self

import torch

from lora_kernels.errors import KernelArgumentError, UnsupportedShapeError

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from torch import Tensor

    ExpertSlice = tuple[Tensor, Tensor]


class ExpertWeights:
    """The slots of one expert stage.

    `lora_a`, `[N, X, R, I]` for each slice, and `lora_b`, `[N, X, O_p, R]`, are views of a
    storage made so that what one (slot, expert) needs is a single run of memory:

    - A is `[N, X, R, P, I]`: the first `r` ranks of all slices are `r * P` contiguous rows.
    - B is `[N, X, R, sum O_p]`: the first `r` ranks are `r` contiguous rows, the slices side by
      side as in the output, cut into pieces of one width, `chunk`, without a remainder.

    `rank_table`, `[N, P]` int32, tells kernels a slot's true ranks.

    A factor that all experts of an adapter share has an expert dimension of 1, in the storage as
    in the views, and costs that much.
    """

    def __init__(
        self, a_storage: Tensor, b_storage: Tensor, out_features: Sequence[int], num_experts: int
    ) -> None:
        """Wrap a storage; callers use `allocate`.

        Args:
            a_storage: `[N, X or 1, R, P, I]`, contiguous.
            b_storage: `[N, X or 1, R, sum O_p]`, contiguous, of the dtype and device of A.
            out_features: `O_p` of each slice.
            num_experts: `X`.
        """
        self.a_storage = a_storage
        self.b_storage = b_storage
        self.num_experts = num_experts
        self.num_slots, self.a_experts, self.max_rank, _, self.in_features = a_storage.shape
        self.b_experts = b_storage.shape[1]
        self.out_features = tuple(out_features)
        self.num_slices = len(self.out_features)
        ends = accumulate(self.out_features)
        self.out_ranges = tuple((e - o, e) for e, o in zip(ends, self.out_features, strict=True))
        self.lora_a = tuple(a_storage[:, :, :, p] for p in range(self.num_slices))
        self.lora_b = tuple(b_storage[..., i:j].transpose(2, 3) for i, j in self.out_ranges)
        self.slot_ranks: list[tuple[int, ...]] = [(0,) * self.num_slices] * self.num_slots
        self.rank_table = torch.zeros(
            (self.num_slots, self.num_slices), dtype=torch.int32, device=a_storage.device
        )
        self.chunk = math.gcd(*self.out_features)
        self.derived: dict[Hashable, Any] = {}

    @classmethod
    def allocate(
        cls,
        *,
        num_slots: int,
        num_experts: int,
        max_rank: int,
        in_features: int,
        out_features: Sequence[int],
        dtype: torch.dtype,
        device: torch.device | str,
        is_a_shared: bool = False,
        is_b_shared: bool = False,
    ) -> Self:
        """Allocate zeros: `num_slots` empty slots.

        Args:
            num_slots: `N`.
            num_experts: `X`, the experts this process holds.
            max_rank: `R`, the largest rank `write_slot` takes.
            in_features: `I`.
            out_features: `O_p` of each slice; one for w2 and for experts without gate.
            dtype: float32, float16 or bfloat16.
            device: where the slots live.
            is_a_shared: all experts of an adapter share A; its expert dimension is 1.
            is_b_shared: all experts of an adapter share B; its expert dimension is 1.

        Raises:
            KernelArgumentError: a size is not positive, or the dtype is none of the three.
        """
        sizes = (num_slots, num_experts, max_rank, in_features, *out_features)
        if not out_features or min(sizes) < 1:
            raise KernelArgumentError(
                f"expert weights: num_slots={num_slots}, num_experts={num_experts}, "
                f"max_rank={max_rank}, in_features={in_features}, "
                f"out_features={list(out_features)}, expected positive sizes and at least one slice"
            )
        if dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise KernelArgumentError(
                f"expert weights: dtype is {dtype}, expected float32, float16 or bfloat16"
            )
        a_experts = 1 if is_a_shared else num_experts
        b_experts = 1 if is_b_shared else num_experts
        a_shape = (num_slots, a_experts, max_rank, len(out_features), in_features)
        b_shape = (num_slots, b_experts, max_rank, sum(out_features))
        return cls(
            torch.zeros(a_shape, dtype=dtype, device=device),
            torch.zeros(b_shape, dtype=dtype, device=device),
            out_features,
            num_experts,
        )

    @property
    def dtype(self) -> torch.dtype:
        """Of all factors."""
        return self.a_storage.dtype

    @property
    def device(self) -> torch.device:
        """Of all factors."""
        return self.a_storage.device

    @property
    def total_out_features(self) -> int:
        """Width of the packed output, `sum O_p`."""
        return self.out_ranges[-1][1]

    @property
    def nbytes(self) -> int:
        """Bytes of everything allocated for all slots: factors and ranks."""
        return self.a_storage.nbytes + self.b_storage.nbytes + self.rank_table.nbytes

    def out_blocks(self, width: int) -> Tensor:
        """Cut the packed output into blocks of at most `width` columns of one slice.

        Returns:
            `[blocks, 3]` int32: slice, first column, one past the last; made at the first call.
        """
        key = ("out_blocks", width)
        found: Tensor | None = self.derived.get(key)
        if found is None:
            blocks = [
                (p, first, min(first + width, high))
                for p, (low, high) in enumerate(self.out_ranges)
                for first in range(low, high, width)
            ]
            found = torch.tensor(blocks, dtype=torch.int32).to(self.device)
            self.derived[key] = found
        return found

    def write_slot(self, slot: int, slices: Sequence[ExpertSlice | None]) -> None:
        """Replace what a slot holds; nothing of its previous content remains.

        Args:
            slot: `0..N-1`.
            slices: for each of the `P` slices `(lora_a [X, r, I], lora_b [X, O_p, r])` with
                `1 <= r <= R`, cast to the dtype of the storage, or `None` for a slice that the
                adapter does not touch. Ranks may differ between slices. A factor with a leading
                1 is the same for all experts; where the storage is shared it must be one.

        Raises:
            KernelArgumentError: the slot is out of range or the number of slices is wrong.
            UnsupportedShapeError: a factor has another shape; all such slices are named. The slot
                is unchanged then.
        """
        self._check_slot(slot)
        if len(slices) != self.num_slices:
            raise KernelArgumentError(
                f"write_slot: {len(slices)} slices given, expected {self.num_slices}"
            )
        problems = [self._slice_problem(i, pair) for i, pair in enumerate(slices) if pair]
        found = [problem for problem in problems if problem]
        if found:
            raise UnsupportedShapeError(f"write_slot: {'; '.join(found)}")
        self.reset_slot(slot)
        for i, pair in enumerate(slices):
            if pair is not None:
                rank = pair[0].shape[1]
                self.lora_a[i][slot, :, :rank].copy_(pair[0])
                self.lora_b[i][slot, :, :, :rank].copy_(pair[1])
        self._set_ranks(slot, [0 if pair is None else pair[0].shape[1] for pair in slices])

    def reset_slot(self, slot: int) -> None:
        """Empty a slot: zeros everywhere, every slice absent.

        Raises:
            KernelArgumentError: the slot is out of range.
        """
        self._check_slot(slot)
        self._set_ranks(slot, [0] * self.num_slices)
        self.a_storage[slot].zero_()
        self.b_storage[slot].zero_()

    def _set_ranks(self, slot: int, ranks: Sequence[int]) -> None:
        self.slot_ranks[slot] = tuple(ranks)
        for i, rank in enumerate(ranks):
            self.rank_table[slot, i] = rank  # passed by value: no copy that the host waits for

    def _check_slot(self, slot: int) -> None:
        if not 0 <= slot < self.num_slots:
            raise KernelArgumentError(f"slot is {slot}, expected 0..{self.num_slots - 1}")

    def _slice_problem(self, index: int, pair: ExpertSlice) -> str | None:
        lora_a, lora_b = pair
        rank = lora_a.shape[1] if lora_a.ndim == 3 else 0  # noqa: PLR2004 - [X, r, I]
        found = [*lora_a.shape], [*lora_b.shape]
        allowed = (
            [[x, rank, self.in_features] for x in {1, self.a_experts}],
            [[x, self.out_features[index], rank] for x in {1, self.b_experts}],
        )
        if found[0] not in allowed[0] or found[1] not in allowed[1]:
            return (
                f"slice {index} is lora_a {found[0]} and lora_b {found[1]}, expected "
                f"[{self._experts(self.a_experts)}, r, {self.in_features}] and "
                f"[{self._experts(self.b_experts)}, {self.out_features[index]}, r]"
            )
        if not 1 <= rank <= self.max_rank:
            return f"slice {index} has rank {rank}, expected 1..{self.max_rank}"
        return None

    @staticmethod
    def _experts(count: int) -> str:
        return "1" if count == 1 else f"{count} or 1"

    def __repr__(self) -> str:
        return (
            f"ExpertWeights(num_slots={self.num_slots}, num_experts={self.num_experts}, "
            f"max_rank={self.max_rank}, in_features={self.in_features}, "
            f"out_features={list(self.out_features)}, is_a_shared={self.is_a_shared}, "
            f"is_b_shared={self.is_b_shared}, dtype={self.dtype}, device='{self.device}')"
        )

    @property
    def is_a_shared(self) -> bool:
        """A has an expert dimension of 1."""
        return self.a_experts == 1

    @property
    def is_b_shared(self) -> bool:
        """B has an expert dimension of 1."""
        return self.b_experts == 1
