"""StackedWeights: the A and B factors, gains and biases of one (packed) module for all slots.

Knows slots by number only: which adapter sits in which slot is the caller's business.

Letters: `N` slots, `R` max rank, `I` in, `O` out, `P` slices.
"""

from __future__ import annotations

import ctypes
import math
import struct
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Self

import torch

from lora_kernels.bounds import SlotBounds, WrittenRanks
from lora_kernels.errors import KernelArgumentError, UnsupportedShapeError
from lora_kernels.slot_memory import slot_memory

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from torch import Tensor

    Pair = tuple[Tensor, Tensor]


HAS_BIAS = 1
HAS_GAIN = 2


class StackedWeights:
    """The slots of one module.

    `lora_a` and `lora_b` are views, in the usual order, of a storage that suits CPUs:

    - A is `[R, P, N, I]`. The first `r` ranks of all slices and slots are one contiguous matrix,
      so that one product shrinks a whole step, and a padded max rank costs nothing.
    - B is a view `[N, R, sum O_p]` of `[R, N, sum O_p]`, the slices side by side as in the output.
      The first `r` ranks of all slots are one contiguous matrix here too. Rows can be cut into
      pieces of one width, `chunk`, so that expanding a token is a weighted sum of pieces.

    `affine`, `[2, N, sum O_p]` float32, holds an output gain and a bias for each slot. Most
    adapters have neither, so it is allocated when the first one comes, or by `allocate_affine`,
    which who captures CUDA graphs calls before. `slot_table`, `[N, P + 1]` int32, tells kernels a
    slot's true ranks and, last, `HAS_BIAS` and `HAS_GAIN` bits. Every address is fixed from its
    allocation on.
    """

    def __init__(self, a_storage: Tensor, b_storage: Tensor, out_features: Sequence[int]) -> None:
        """Wrap a storage; callers use `allocate`.

        Args:
            a_storage: `[R, P, N, I]`, contiguous.
            b_storage: `[N, R, sum O_p]`, a view of a contiguous `[R, N, sum O_p]`, of the dtype
                and device of A.
            out_features: `O_p` of each slice.
        """
        self.a_storage = a_storage
        self.b_storage = b_storage
        self.max_rank, self.num_slices, self.num_slots, self.in_features = a_storage.shape
        self.out_features = tuple(out_features)
        ends = accumulate(self.out_features)
        self.out_ranges = tuple((e - o, e) for e, o in zip(ends, self.out_features, strict=True))
        self.lora_a = tuple(a_storage[:, p].transpose(0, 1) for p in range(self.num_slices))
        self.lora_b = tuple(b_storage[:, :, i:j].transpose(1, 2) for i, j in self.out_ranges)
        self._kind: str | None = None
        self.slot_ranks = [(0,) * self.num_slices] * self.num_slots
        table_shape = (self.num_slots, self.num_slices + 1)
        self.slot_table = torch.zeros(table_shape, dtype=torch.int32, device=a_storage.device)
        self.affine: Tensor | None = None
        self.gain_slots: frozenset[int] = frozenset()
        self.bias_slots: frozenset[int] = frozenset()
        self.chunk = math.gcd(*self.out_features)
        chunk_counts = torch.tensor([out // self.chunk for out in self.out_features])
        self.slice_of_chunk = torch.repeat_interleave(chunk_counts).to(b_storage.device)
        self.derived: dict[Hashable, Any] = {}
        """What a backend has worked out for this storage and keeps for the next calls."""
        self._out_blocks: dict[int, Tensor] = {}
        self._first_ranks: dict[int, Pair] = {}
        self._slot_factors: dict[tuple[int, int], Pair] = {}
        self._pairs: dict[tuple[int, int, int], Pair] = {}
        self.bounds = SlotBounds(a_storage, b_storage)
        self._written = WrittenRanks(a_storage, b_storage)

    @classmethod
    def allocate(
        cls,
        *,
        num_slots: int,
        max_rank: int,
        in_features: int,
        out_features: Sequence[int],
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> Self:
        """Allocate zeros: `num_slots` empty slots.

        Args:
            num_slots: `N`.
            max_rank: `R`, the largest rank `write_slot` takes.
            in_features: `I`; the vocabulary size for an embedding.
            out_features: `O_p` of each slice of the packed module; one for a plain one.
            dtype: float32, float16 or bfloat16.
            device: where the slots live.

        Raises:
            KernelArgumentError: a size is not positive, or the dtype is none of the three.
        """
        sizes = (num_slots, max_rank, in_features, *out_features)
        if not out_features or min(sizes) < 1:
            raise KernelArgumentError(
                f"stacked weights: num_slots={num_slots}, max_rank={max_rank}, "
                f"in_features={in_features}, out_features={list(out_features)}, "
                "expected positive sizes and at least one slice"
            )
        if dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise KernelArgumentError(
                f"stacked weights: dtype is {dtype}, expected float32, float16 or bfloat16"
            )
        a_shape = (max_rank, len(out_features), num_slots, in_features)
        b_shape = (max_rank, num_slots, sum(out_features))
        with torch.inference_mode(mode=False):  # torch counts no writes of inference tensors
            a_storage = _zeros(a_shape, dtype, device)
            b_storage = _zeros(b_shape, dtype, device).transpose(0, 1)
        weights = cls(a_storage, b_storage, out_features)
        for slot in range(num_slots):
            weights._written.note(slot, 0)
        return weights

    @property
    def dtype(self) -> torch.dtype:
        """Of all factors."""
        return self.a_storage.dtype

    @property
    def device(self) -> torch.device:
        """Of all factors."""
        return self.a_storage.device

    @property
    def slot_ranks(self) -> list[tuple[int, ...]]:
        """True rank of each slice, 0 if absent, for each slot: `N` tuples of `P`."""
        return self._slot_ranks

    @slot_ranks.setter
    def slot_ranks(self, ranks: list[tuple[int, ...]]) -> None:
        self._slot_ranks = ranks
        self._kind = None

    @property
    def kind(self) -> str:
        """All that a plan for these slots depends on: sizes, dtype, device and true ranks.

        A text, since texts keep their hash.
        """
        if self._kind is None:
            sizes = (*self.a_storage.shape, *self.out_features)
            self._kind = f"{sizes} {self.dtype} {self.device} {self.slot_ranks}"
        return self._kind

    @property
    def total_out_features(self) -> int:
        """Width of the packed output, `sum O_p`."""
        return self.out_ranges[-1][1]

    @property
    def nbytes(self) -> int:
        """Bytes of the storage of all slots, gains and biases included once they are allocated."""
        affine = 0 if self.affine is None else self.affine.nbytes
        return self.a_storage.nbytes + self.b_storage.nbytes + affine

    def allocate_affine(self) -> Tensor:
        """Allocate the gains and biases of all slots, unless that was done before.

        Returns:
            `[2, N, sum O_p]` float32: gains, 1 where a slot has none, and biases, 0 likewise.
        """
        if self.affine is None:
            shape = (2, self.num_slots, self.total_out_features)
            affine = torch.zeros(shape, dtype=torch.float32, device=self.device)
            affine[0] = 1
            self.affine = affine
        return self.affine

    @cached_property
    def b_pieces(self) -> Tensor:
        """All rows of B, cut into pieces of `chunk`: `[R * N * C, chunk]`, a view."""
        return self.b_storage.transpose(0, 1).view(-1, self.chunk)

    def slot_factors(self, slot: int, rank: int) -> Pair:
        """Return the first ranks of all slices of a slot as two matrices, views of the storage.

        Returns:
            `[rank * P, I]`, slices innermost, and `[rank, sum O_p]`.
        """
        factors = self._slot_factors.get((slot, rank))
        if factors is None:
            lora_a = self.a_storage[:rank, :, slot].flatten(0, 1)  # [r, P, I] -> [r * P, I]
            factors = self._slot_factors[slot, rank] = lora_a, self.b_storage[slot, :rank]
        return factors

    def first_ranks(self, rank: int) -> Pair:
        """Return the first ranks of all slots as two matrices, views of the storage.

        Returns:
            `[rank * P * N, I]` and `[rank * N, sum O_p]`.
        """
        if rank not in self._first_ranks:
            self._first_ranks[rank] = (
                self.a_storage[:rank].flatten(0, 2),
                self.b_storage.transpose(0, 1)[:rank].flatten(0, 1),
            )
        return self._first_ranks[rank]

    def out_blocks(self, width: int) -> Tensor:
        """Cut the packed output into blocks of at most `width` columns of one slice.

        Returns:
            `[blocks, 3]` int32: slice, first column, one past the last; made at the first call.
        """
        if width not in self._out_blocks:
            blocks = [
                (p, first, min(first + width, high))
                for p, (low, high) in enumerate(self.out_ranges)
                for first in range(low, high, width)
            ]
            table = torch.tensor(blocks, dtype=torch.int32)
            self._out_blocks[width] = table.to(self.device)
        return self._out_blocks[width]

    def write_slot(
        self,
        slot: int,
        slices: Sequence[Pair | None],
        *,
        gain: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> None:
        """Replace what a slot holds; nothing of its previous content remains.

        Args:
            slot: `0..N-1`.
            slices: for each of the `P` slices `(lora_a [r, I], lora_b [O_p, r])` with
                `1 <= r <= R`, cast to the dtype of the storage, or `None` for a slice that the
                adapter does not touch. Ranks may differ between slices.
            gain: `[sum O_p]`, what base output and delta are multiplied with; kept as float32.
                `None` is 1.
            bias: `[sum O_p]`, what is added after that; kept as float32. `None` is 0.

        Raises:
            KernelArgumentError: the slot is out of range or the number of slices is wrong.
            UnsupportedShapeError: a pair, the gain or the bias has another shape; all of them
                are named. The slot is unchanged then.
        """
        self._check_slot(slot)
        if len(slices) != self.num_slices:
            raise KernelArgumentError(
                f"write_slot: {len(slices)} slices given, expected {self.num_slices}"
            )
        problems = [self._pair_problem(i, pair) for i, pair in enumerate(slices) if pair]
        problems += [self._affine_problem("gain", gain), self._affine_problem("bias", bias)]
        found = [problem for problem in problems if problem]
        if found:
            raise UnsupportedShapeError(f"write_slot: {'; '.join(found)}")
        ranks = tuple(0 if pair is None else pair[0].shape[0] for pair in slices)
        # What every slice writes over need not be emptied before.
        self._empty(slot, min(ranks))
        with self.bounds.rewriting(slot, max(ranks)):
            for i, pair in enumerate(slices):
                if pair is not None:
                    lora_a, lora_b = self._targets(slot, i, ranks[i])
                    lora_a.copy_(pair[0])
                    lora_b.copy_(pair[1])
        self._written.note(slot, max(ranks))
        self.slot_ranks[slot] = ranks
        self._kind = None
        has_affine = HAS_BIAS * (bias is not None) + HAS_GAIN * (gain is not None)
        self._write_row(slot, [*ranks, has_affine])
        if gain is not None:
            self.allocate_affine()[0, slot].copy_(gain)
            self.gain_slots |= {slot}
        if bias is not None:
            self.allocate_affine()[1, slot].copy_(bias)
            self.bias_slots |= {slot}

    def reset_slot(self, slot: int) -> None:
        """Empty a slot: zeros everywhere, every slice absent, no gain and no bias.

        Raises:
            KernelArgumentError: the slot is out of range.
        """
        self._check_slot(slot)
        self._empty(slot, 0)
        self._written.note(slot, 0)

    def _empty(self, slot: int, first: int) -> None:
        """Make every slice absent, with zeros from rank `first` on; no gain and no bias."""
        self.slot_ranks[slot] = (0,) * self.num_slices
        self._write_row(slot, [0] * (self.num_slices + 1))
        self._kind = None
        written = self._written.of(slot)
        if first < written:
            with self.bounds.rewriting(slot, first):
                self.a_storage[first:written, :, slot].zero_()
                self.b_storage[slot, first:written].zero_()
            self._written.note(slot, first)
        if self.affine is not None:
            self.affine[0, slot] = 1
            self.affine[1, slot] = 0
        self.gain_slots -= {slot}
        self.bias_slots -= {slot}

    def _write_row(self, slot: int, values: list[int]) -> None:
        """Write a row of the slot table."""
        row = self.slot_table[slot]
        if row.device.type == "cpu":  # in a tenth of the time that torch takes
            packed = struct.pack(f"{len(values)}i", *values)
            ctypes.memmove(row.data_ptr(), packed, len(packed))
            return
        for i, value in enumerate(values):
            row[i] = value  # passed by value: no copy that the host waits for

    def _targets(self, slot: int, index: int, rank: int) -> Pair:
        """Return where a pair goes: views, kept since making them takes as long as a copy."""
        found = self._pairs.get((slot, index, rank))
        if found is None:
            with torch.inference_mode(mode=False):  # usable in either mode
                found = self.lora_a[index][slot, :rank], self.lora_b[index][slot, :, :rank]
            self._pairs[slot, index, rank] = found
        return found

    def _check_slot(self, slot: int) -> None:
        if not 0 <= slot < self.num_slots:
            raise KernelArgumentError(f"slot is {slot}, expected 0..{self.num_slots - 1}")

    def _pair_problem(self, index: int, pair: Pair) -> str | None:
        lora_a, lora_b = pair
        out = self.out_features[index]
        rank = lora_a.shape[0] if lora_a.ndim else 0
        if lora_a.shape != (rank, self.in_features) or lora_b.shape != (out, rank):
            return (
                f"slice {index} is lora_a {[*lora_a.shape]} and lora_b {[*lora_b.shape]}, "
                f"expected [r, {self.in_features}] and [{out}, r]"
            )
        if not 1 <= rank <= self.max_rank:
            return f"slice {index} has rank {rank}, expected 1..{self.max_rank}"
        return None

    def _affine_problem(self, name: str, values: Tensor | None) -> str | None:
        if values is None or list(values.shape) == [self.total_out_features]:
            return None
        return f"{name} is {[*values.shape]}, expected [{self.total_out_features}]"

    def __repr__(self) -> str:
        return (
            f"StackedWeights(num_slots={self.num_slots}, max_rank={self.max_rank}, "
            f"in_features={self.in_features}, out_features={list(self.out_features)}, "
            f"dtype={self.dtype}, device='{self.device}')"
        )


def _zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    if torch.device(device).type == "cpu":
        return slot_memory().zeros(shape, dtype)
    return torch.zeros(tuple(shape), dtype=dtype, device=device)
