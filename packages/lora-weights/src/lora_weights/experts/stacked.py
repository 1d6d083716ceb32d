"""Stacked pairs of a file -> the canonical form, once the base's sizes are known.

Shapes: `X` experts, `r` rank, `I` in, `O` out.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from lora_weights.errors import Problem, ProblemCode
from lora_weights.experts.convert import reverse_pair, split_w13, unflatten_a, unflatten_b
from lora_weights.experts.names import PROJECTIONS, Projection, projection_sizes, projections_of
from lora_weights.experts.parallel import slice_pair
from lora_weights.experts.parameters import (
    Placing,
    find_placings,
    parameter_name,
    parameter_sizes,
)
from lora_weights.experts.parts import ExpertPair, ExpertPart

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lora_weights.experts.parts import ExpertShape
    from lora_weights.experts.stored import StoredExperts, StoredPair
    from lora_weights.scaling import ModuleScaling


def build_stacked(
    path: str,
    stored: StoredExperts,
    shape: ExpertShape,
    *,
    max_rank: int,
    local: range | None = None,
) -> tuple[ExpertPart | None, list[Problem]]:
    """Return the canonical form of stacked pairs, and everything that does not fit.

    Args:
        path: of the experts module, for the problems.
        stored: the pairs as read.
        shape: the base's experts, of all ranks together.
        max_rank: largest rank accepted.
        local: the experts wanted; None is all.
    """
    builder = _Builder(path=path, stored=stored, shape=shape, max_rank=max_rank, local=local)
    parameters = {name: pair for name, pair in stored.pairs.items() if name not in PROJECTIONS}
    if len(parameters) not in (0, len(stored.pairs)):
        found = f"pairs of parameters beside those of {', '.join(stored.pairs.keys() - parameters)}"
        builder.note("", "lora_A", found, "one of the two")
    elif parameters:
        builder.add_parameters(parameters)
    else:
        builder.add_projections()
    part = ExpertPart(**builder.pairs) if builder.pairs and not builder.problems else None
    return part, builder.problems


@dataclass(slots=True, kw_only=True)
class _Builder:
    """Collects the pairs of one experts module."""

    path: str
    stored: StoredExperts
    shape: ExpertShape
    max_rank: int
    local: range | None
    pairs: dict[str, ExpertPair] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def note(
        self, name: str, tensor: str, found: str, expected: str, code: str = "SHAPE_MISMATCH"
    ) -> None:
        """Add a problem with one of the stored pairs."""
        module = f"{self.path}.{name}" if name else self.path
        problem = Problem(
            code=ProblemCode[code], module=module, tensor=tensor, found=found, expected=expected
        )
        self.problems.append(problem)

    def add_parameters(self, parameters: Mapping[str, StoredPair]) -> None:
        """Add pairs that only their nesting names: shapes say what they are."""
        if len(parameters) > len(parameter_sizes(self.shape)):
            wanted = len(parameter_sizes(self.shape))
            found = f"wrapped {len(parameters)} times"
            self.note("", "lora_A", found, f"at most {wanted} pairs, on its {wanted} parameters")
            return
        for name, pair in parameters.items():
            shapes = [list(factor.shape) for factor in (pair.lora_a, pair.lora_b)]
            if [len(shape) for shape in shapes] != [2, 2] or shapes[0][0] != shapes[1][1]:
                found, expected = f"{shapes[0]}, with lora_B {shapes[1]}", "[X*r, I] and [O, r*X]"
                self.note(name, "lora_A", found, expected)
                continue
            rows = shapes[0][0]
            if rows % self.shape.num_experts:
                expected = f"a multiple of {self.shape.num_experts}, the base's experts"
                self.note(name, "lora_A", f"{rows} rows high", expected)
        placing = None if self.problems else self._place(parameters)
        if placing is None:
            return
        for projection, (name, pair) in zip(placing.projections, parameters.items(), strict=True):
            self._add_parameter(name, pair, projection, is_reversed=placing.is_reversed)

    def _place(self, parameters: Mapping[str, StoredPair]) -> Placing | None:
        """Return the one way to explain the pairs, or note why there is none."""
        sizes = [(pair.lora_a.shape[1], pair.lora_b.shape[0]) for pair in parameters.values()]
        version = self.stored.peft_version
        placings = find_placings(
            sizes, self.shape, parameters=self.stored.parameters, version=version
        )
        if len(placings) == 1:
            return placings[0]
        wanted = ", ".join(
            f"{wide} and {high} ({parameter_name(key, is_gated=self.shape.is_gated)})"
            for key, (wide, high) in parameter_sizes(self.shape).items()
        )
        for name, (wide, high) in zip(parameters, sizes, strict=True):
            found = f"of width {wide}, with lora_B of {high} rows"
            if not placings:
                expected = f"{wanted}, in either order, one parameter a pair"
                self.note(name, "lora_A", found, expected)
                continue
            found += f", which fits in {len(placings)} ways (peft_version {version or 'missing'})"
            expected = "sizes that differ, or the release that wrote it (peft_version)"
            self.note(name, "lora_A", found, expected, "AMBIGUOUS_MODULE")
        return None

    def _add_parameter(
        self, name: str, stored: StoredPair, projection: Projection, *, is_reversed: bool
    ) -> None:
        num_experts = self.shape.num_experts
        parameter = parameter_name(projection, is_gated=self.shape.is_gated)
        scaling = stored.scalings[parameter]
        rows = stored.lora_a.shape[0]
        if rows != num_experts * scaling.rank:
            expected = f"{num_experts * scaling.rank} ({num_experts} experts of rank {scaling.rank}"
            self.note(name, "lora_A", f"{rows} rows high", f"{expected} for {parameter})")
            return
        pair = ExpertPair(
            lora_a=unflatten_a(stored.lora_a, num_experts),
            lora_b=unflatten_b(stored.lora_b, num_experts),
        )
        pair = reverse_pair(pair) if is_reversed else pair
        self._add(name, projection, self._slice(pair), scaling)

    def add_projections(self) -> None:
        """Add pairs that their own names explain."""
        known, sizes = projections_of(self.shape), projection_sizes(self.shape)
        for name, stored in self.stored.pairs.items():
            projection = known.get(name)
            if projection is None:
                self.note(name, "lora_A", "for experts with a gate", "a base that has one")
                continue
            (scaling,) = stored.scalings.values()
            wide, high = sizes[projection]
            for tensor, factor, wanted in (
                ("lora_A", stored.lora_a, (scaling.rank, wide)),
                ("lora_B", stored.lora_b, (high, scaling.rank)),
            ):
                self._check_factor(name, tensor, factor, wanted)
            pair = ExpertPair(lora_a=stored.lora_a, lora_b=stored.lora_b)
            if not self.problems:
                whole = self.stored.local is None
                self._add(name, projection, self._slice(pair) if whole else pair, scaling)

    def _slice(self, pair: ExpertPair) -> ExpertPair:
        """Return the experts wanted of a pair over all of them."""
        return pair if self.local is None else slice_pair(pair, self.local)

    def _check_factor(
        self, name: str, tensor: str, factor: torch.Tensor, wanted: tuple[int, int]
    ) -> None:
        read = self.stored.local
        experts = self.shape.num_experts if read is None else len(read)
        if factor.shape[0] not in (1, experts) or tuple(factor.shape[1:]) != wanted:
            expected = f"[{experts} or 1, {wanted[0]}, {wanted[1]}]"
            self.note(name, tensor, str(list(factor.shape)), expected)

    def _add(
        self, name: str, projection: Projection, pair: ExpertPair, scaling: ModuleScaling
    ) -> None:
        """Split, fold and cast one pair, and put it under its projections."""
        if scaling.rank > self.max_rank:
            found, expected = f"rank {scaling.rank}", f"at most {self.max_rank}"
            self.note(name, "lora_A", found, expected, "RANK_TOO_LARGE")
            return
        lora_a = pair.lora_a.to(self._held(pair.lora_a)).contiguous()
        pair = ExpertPair(lora_a=lora_a, lora_b=pair.lora_b)
        pieces = {projection.value: pair}
        if projection is Projection.W13:
            w1, w3 = split_w13(pair, is_interleaved=self.shape.is_interleaved)
            pieces = {"w1": w1, "w3": w3}
        for key, piece in pieces.items():
            if key in self.pairs:
                self.note(name, "lora_A", f"a second pair for {key}", "one", "DUPLICATE_MODULE")
            self.pairs[key] = self._fold(name, piece, scaling.scaling)

    def _fold(self, name: str, pair: ExpertPair, scaling: float) -> ExpertPair:
        """Fold the scaling into B: float32 product first, then the one cast."""
        dtype = self._held(pair.lora_b)
        lora_b = pair.lora_b.to(torch.float32).mul(scaling).to(dtype).contiguous()
        for tensor, factor in (("lora_A", pair.lora_a), ("lora_B", lora_b)):
            if not torch.isfinite(factor).all():
                found = f"outside the range of {factor.dtype} once it is scaled"
                limit = f"values up to {torch.finfo(factor.dtype).max:g}"
                self.note(name, tensor, found, limit, "NOT_FINITE")
        return ExpertPair(lora_a=pair.lora_a, lora_b=lora_b)

    def _held(self, tensor: torch.Tensor) -> torch.dtype:
        """Return the type to hold a factor in: the one asked for, and float32 for float64."""
        if self.stored.dtype is not None:
            return self.stored.dtype
        return torch.float32 if tensor.dtype == torch.float64 else tensor.dtype
