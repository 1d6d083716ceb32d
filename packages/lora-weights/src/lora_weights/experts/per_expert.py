"""One pair an expert (2D) -> the canonical form.

Shapes: `X` experts, `r` rank, `I` in, `O` out.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lora_weights.errors import Problem, ProblemCode
from lora_weights.experts.convert import split_w13, stack_experts
from lora_weights.experts.names import Projection, projection_sizes, projections_of
from lora_weights.experts.parts import ExpertPair, ExpertPart
from lora_weights.modules import LoraPair

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lora_weights.experts.names import ExpertName
    from lora_weights.experts.parts import ExpertShape
    from lora_weights.modules import ModulePart


def build_per_expert(
    parts: Mapping[ExpertName, ModulePart],
    shape: ExpertShape,
    *,
    max_rank: int,
    local: range | None = None,
) -> tuple[ExpertPart | None, list[Problem]]:
    """Return the canonical form of single experts' pairs, and everything that does not fit.

    Args:
        parts: what the single experts get, scaling folded in; absent ones are zero.
        shape: the base's experts, of all ranks together.
        max_rank: largest rank accepted.
        local: the experts wanted; None is all.
    """
    builder = _Builder(shape=shape, max_rank=max_rank)
    for name, part in parts.items():
        builder.add(name, part)
    if builder.problems:
        return None, builder.problems
    experts = range(shape.num_experts) if local is None else local
    stacked = {
        projection.value: stack_experts([pairs.get(expert) for expert in experts])
        for projection, pairs in builder.pairs.items()
        if any(expert in pairs for expert in experts)
    }
    return (ExpertPart(**stacked) if stacked else None), []


@dataclass(slots=True, kw_only=True)
class _Builder:
    """Sorts single experts' pairs by projection."""

    shape: ExpertShape
    max_rank: int
    pairs: dict[Projection, dict[int, LoraPair]] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def add(self, name: ExpertName, part: ModulePart) -> None:
        """Place one expert's pair, or note what is wrong with it."""
        module = f"{name.experts}.{name.expert}.{name.name}"
        problems = [*self._check_place(module, name), *_check_parts(module, part)]
        pair, projection = part.pair, projections_of(self.shape).get(name.name)
        if pair is not None and projection is not None:
            problems += self._check_pair(module, pair, projection)
        self.problems += problems
        if problems or pair is None or projection is None or name.expert is None:
            return
        for key, piece in self._split(pair, projection).items():
            other = self.pairs.setdefault(key, {}).setdefault(name.expert, piece)
            if other is not piece:
                found = f"a second pair for {key.value} of expert {name.expert}"
                self.problems.append(_problem("DUPLICATE_MODULE", module, "lora_A", found, "one"))

    def _check_place(self, module: str, name: ExpertName) -> list[Problem]:
        """Return what is wrong with the expert's index and the projection's name."""
        problems = []
        if name.expert is None or name.expert >= self.shape.num_experts:
            expected = f"0 to {self.shape.num_experts - 1}, the base's experts"
            found = f"of expert {name.expert}"
            problems.append(_problem("UNKNOWN_MODULE", module, "", found, expected))
        if name.name not in projections_of(self.shape):
            found, expected = "for experts with a gate", "a base that has one"
            problems.append(_problem("UNKNOWN_MODULE", module, "", found, expected))
        return problems

    def _check_pair(self, module: str, pair: LoraPair, projection: Projection) -> list[Problem]:
        wide, high = projection_sizes(self.shape)[projection]
        problems = []
        for tensor, factor, wanted in (
            ("lora_A", pair.lora_a, [pair.rank, wide]),
            ("lora_B", pair.lora_b, [high, pair.rank]),
        ):
            if list(factor.shape) != wanted:
                found = str(list(factor.shape))
                problems.append(_problem("SHAPE_MISMATCH", module, tensor, found, str(wanted)))
        if pair.rank > self.max_rank:
            found, expected = f"rank {pair.rank}", f"at most {self.max_rank}"
            problems.append(_problem("RANK_TOO_LARGE", module, "lora_A", found, expected))
        return problems

    def _split(self, pair: LoraPair, projection: Projection) -> dict[Projection, LoraPair]:
        """Return a pair by projection, a fused one cut into gate and up."""
        if projection is not Projection.W13:
            return {projection: pair}
        fused = ExpertPair(lora_a=pair.lora_a[None], lora_b=pair.lora_b[None])
        w1, w3 = split_w13(fused, is_interleaved=self.shape.is_interleaved)
        return {
            Projection.W1: LoraPair(lora_a=pair.lora_a, lora_b=w1.lora_b[0]),
            Projection.W3: LoraPair(lora_a=pair.lora_a, lora_b=w3.lora_b[0]),
        }


def _check_parts(module: str, part: ModulePart) -> list[Problem]:
    """Refuse by name what a fused experts module has no place for."""
    problems = []
    for tensor, value in (
        ("lora_magnitude_vector", part.magnitude),
        ("lora_B.bias", part.lora_bias),
        ("bias", part.bias),
        ("gain", part.gain),
        ("weight", part.full),
        ("trainable tokens", part.token_rows),
    ):
        if value is not None:
            found, expected = "stored for one expert", "only a low-rank pair on fused experts"
            problems.append(_problem("UNSUPPORTED_TENSOR", module, tensor, found, expected))
    if part.pair is not None and part.pair.is_embedding:
        found, expected = "the pair of an embedding", "one for a linear module"
        problems.append(_problem("KIND_MISMATCH", module, "lora_embedding_A", found, expected))
    return problems


def _problem(code: str, module: str, tensor: str, found: str, expected: str) -> Problem:
    return Problem(
        code=ProblemCode[code], module=module, tensor=tensor, found=found, expected=expected
    )
