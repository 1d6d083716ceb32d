"""VeRA: two random matrices that all modules share, scaled by a vector on either side.

    y' = W x + b + lambda_b * (B[:O] (lambda_d * (A[:, :I] x)))

(``peft/tuners/vera/layer.py``, ``Linear.forward``.) The shared A is as wide as the widest module,
the shared B as tall as the tallest; each module takes their first columns and rows. The pair is
``lora_a = A[:, :I]``, ``lora_b = diag(lambda_b) B[:O] diag(lambda_d)``.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from lora_weights.errors import Problem, ProblemCode
from lora_weights.fields import CONFIG_FILE
from lora_weights.methods.factors import product_pair
from lora_weights.modules import LoraPair
from lora_weights.names import Part

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import torch

    from lora_weights.config import AdapterConfig
    from lora_weights.tensor_format import TensorEntry


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class VeraFactors:
    """One module's vectors, and the matrices it shares with the others."""

    lambda_b: torch.Tensor
    """`[O]`."""
    lambda_d: torch.Tensor
    """`[r]`."""
    shared_a: torch.Tensor
    """`[r, >= I]`."""
    shared_b: torch.Tensor
    """`[>= O, r]`."""
    dtype: torch.dtype
    """Type of the pair."""

    @property
    def stored_rank(self) -> int:
        """`r`."""
        return self.lambda_d.shape[0]

    @property
    def alpha(self) -> float:
        """`r`, as VeRA has no scaling."""
        return float(self.stored_rank)

    @property
    def out_features(self) -> int:
        """`O`."""
        return self.lambda_b.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes of the vectors; the matrices belong to no module."""
        return self.lambda_b.nbytes + self.lambda_d.nbytes

    def tensors(self) -> Mapping[Part, torch.Tensor]:
        """Return the vectors, by part."""
        return MappingProxyType({Part.VERA_B: self.lambda_b, Part.VERA_D: self.lambda_d})

    def rank(self, in_features: int | None = None) -> int:
        """Return ``min(r, O, I)``."""
        width = self.shared_a.shape[1] if in_features is None else in_features
        return min(self.stored_rank, self.out_features, width)

    def fits(self, in_features: int) -> bool:
        """Return whether the shared A is wide enough."""
        return in_features <= self.shared_a.shape[1]

    def to_pair(self, in_features: int) -> LoraPair:
        """Return the exact pair."""
        lora_b = self.shared_b[: self.out_features].float() * self.lambda_b.float()[:, None]
        lora_b = lora_b * self.lambda_d.float()
        lora_a = self.shared_a[:, :in_features]
        if self.rank(in_features) < self.stored_rank:
            return product_pair(lora_b @ lora_a.float(), self.dtype)
        return LoraPair(lora_a=lora_a.to(self.dtype), lora_b=lora_b.to(self.dtype))


def check_shared(shared: Mapping[Part, TensorEntry], config: AdapterConfig) -> Iterator[Problem]:
    """Yield what is wrong with the shared matrices.

    PEFT can leave them out and draw them again from ``projection_prng_key``. That depends on
    torch's release and on the machine, so such an adapter is refused.
    """
    if len(shared) < 2:  # noqa: PLR2004
        named = " and ".join(sorted({Part.VERA_SHARED_A, Part.VERA_SHARED_B} - shared.keys()))
        yield Problem(
            code=ProblemCode.MISSING_WEIGHTS,
            tensor=named,
            found="not in the file",
            expected="the random matrices the adapter was trained with; save it again with "
            "VeraConfig(save_projection=True)",
        )
        return
    if not config.save_projection:
        yield Problem(
            code=ProblemCode.INVALID_FIELD,
            tensor=f"{CONFIG_FILE} save_projection",
            found="false, with the matrices in the file",
            expected="true; PEFT would draw others",
        )
    forms = {Part.VERA_SHARED_A: f"[{config.r}, I]", Part.VERA_SHARED_B: f"[O, {config.r}]"}
    for axis, (part, form) in enumerate(forms.items()):
        shape = shared[part].shape
        if len(shape) != 2 or shape[axis] != config.r or not shape[1 - axis]:  # noqa: PLR2004
            yield Problem(
                code=ProblemCode.SHAPE_MISMATCH,
                tensor=part,
                found=str(list(shape)),
                expected=f"{form} (r by {CONFIG_FILE})",
            )


def check_vectors(
    module: str, parts: Mapping[Part, TensorEntry], shared: Mapping[Part, TensorEntry], rank: int
) -> Iterator[Problem]:
    """Yield what is wrong with the shapes of one module's vectors."""
    tallest = shared.get(Part.VERA_SHARED_B)
    limit = tallest.shape[0] if tallest is not None and tallest.shape else 0
    shape_b, shape_d = parts[Part.VERA_B].shape, parts[Part.VERA_D].shape
    if len(shape_b) != 1 or not 0 < shape_b[0] <= (limit or shape_b[0]):
        yield _mismatch(module, Part.VERA_B, shape_b, f"[O], at most the {limit} rows of vera_B")
    if shape_d != (rank,):
        yield _mismatch(module, Part.VERA_D, shape_d, f"[{rank}] (r by {CONFIG_FILE})")


def _mismatch(module: str, part: Part, shape: tuple[int, ...], expected: str) -> Problem:
    return Problem(
        code=ProblemCode.SHAPE_MISMATCH,
        module=module,
        tensor=part,
        found=str(list(shape)),
        expected=expected,
    )
