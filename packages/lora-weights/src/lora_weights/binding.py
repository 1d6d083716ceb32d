"""One part of an adapter and one module of the base -> what the module gets.

    y' = gain * (y + B A x) + bias

Checks kinds, sizes and ranks. Shapes: `r` rank, `I` in, `O` out, `V` vocabulary, `D` embedding
width.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from lora_weights.bound import BoundPart
from lora_weights.dora import compute_gain
from lora_weights.errors import Problem, ProblemCode
from lora_weights.modules import ModuleKind
from lora_weights.token_pair import join_pairs, token_pair

if TYPE_CHECKING:
    from collections.abc import Callable

    from lora_weights.bound import BaseTensors
    from lora_weights.modules import FullModule, LoraPair, ModulePart, ModuleShape


def bind_part(
    path: str,
    part: ModulePart,
    shape: ModuleShape,
    base: Callable[[], BaseTensors | None],
    *,
    max_rank: int,
) -> tuple[BoundPart | None, list[Problem]]:
    """Bind one part.

    Args:
        path: module path as the adapter has it, for the problems.
        part: what the adapter has for the module.
        shape: the module's size.
        base: returns the module's own tensors; asked only where they are needed.
        max_rank: largest rank accepted.

    Returns:
        What the module gets, or None; and everything that does not fit.
    """
    binder = _Binder(path=path, part=part, shape=shape, base=base, max_rank=max_rank)
    bound = binder.bind()
    return (None if binder.problems else bound), binder.problems


@dataclass(slots=True, kw_only=True)
class _Binder:
    """Binds one part and collects what does not fit."""

    path: str
    part: ModulePart
    shape: ModuleShape
    base: Callable[[], BaseTensors | None]
    max_rank: int
    problems: list[Problem] = field(default_factory=list)

    def bind(self) -> BoundPart | None:
        """Return what the module gets; valid when there is no problem."""
        part = self.part
        if part.experts is not None:
            found = "a stacked pair of experts"
            self._note(ProblemCode.KIND_MISMATCH, "", found, "one for a module")
            return None
        if part.full is not None:
            return self._bind_full(part.full)
        own = self._own_pair()
        self._check_vectors()
        pair = own if part.token_rows is None else self._add_rows(own)
        self._check_rank(pair)
        if self.problems:
            return None
        if part.magnitude is None and part.bias is None:
            # Nothing of the base is replaced; nearly every part ends here.
            return BoundPart(pair=pair, gain=part.gain, bias=part.lora_bias)
        return self._bind_replaced(pair, own)

    def _own_pair(self) -> LoraPair | None:
        """Return the module's own pair, made of factors where the method has them."""
        part, shape = self.part, self.shape
        if part.factors is None:
            if part.pair is not None:
                self._check_pair(part.pair)
            return part.pair
        factors, sizes = part.factors, (shape.in_features, shape.out_features)
        if shape.kind is not ModuleKind.LINEAR:
            found = "the update of a linear module"
            self._note(ProblemCode.KIND_MISMATCH, "", found, "one for an embedding")
        elif not factors.fits(sizes[0]) or factors.out_features != sizes[1]:
            expected = f"[{sizes[1]}, {sizes[0]}]"
            found = f"an update with {factors.out_features} rows and other columns"
            if factors.out_features != sizes[1]:
                found = f"an update with {factors.out_features} rows"
            self._note(ProblemCode.SHAPE_MISMATCH, "", found, expected)
        elif factors.rank(sizes[0]) > self.max_rank:
            found = f"of rank {factors.rank(sizes[0])} as an exact pair (r {factors.stored_rank})"
            self._note(ProblemCode.RANK_TOO_LARGE, "", found, f"at most {self.max_rank}")
        else:
            pair = factors.to_pair(sizes[0])
            self._check_finite("the update", pair.lora_a, pair.lora_b)
            return pair
        return None

    def _check_pair(self, pair: LoraPair) -> None:
        is_embedding = self.shape.kind is ModuleKind.EMBEDDING
        if pair.is_embedding != is_embedding:
            kinds = ("a linear module", "an embedding")
            found = f"the pair of {kinds[pair.is_embedding]}"
            self._note(ProblemCode.KIND_MISMATCH, "", found, f"one for {kinds[is_embedding]}")
            return
        names = ("lora_embedding_A", "lora_embedding_B") if is_embedding else ("lora_A", "lora_B")
        for name, tensor, size in (
            (names[0], pair.lora_a, [pair.rank, self.shape.in_features]),
            (names[1], pair.lora_b, [self.shape.out_features, pair.rank]),
        ):
            if list(tensor.shape) != size:
                found = str(list(tensor.shape))
                self._note(ProblemCode.SHAPE_MISMATCH, name, found, str(size))

    def _check_vectors(self) -> None:
        part, size = self.part, [self.shape.out_features]
        for name, vector in (
            ("lora_B.bias", part.lora_bias),
            ("bias", part.bias),
            ("lora_magnitude_vector", part.magnitude),
            ("ia3_l", part.gain),
        ):
            if vector is not None and list(vector.shape) != size:
                found = str(list(vector.shape))
                self._note(ProblemCode.SHAPE_MISMATCH, name, found, str(size))

    def _check_rank(self, pair: LoraPair | None) -> None:
        if pair is None or pair.rank <= self.max_rank:
            return
        found, rows = f"rank {pair.rank}", self.part.token_rows
        if rows is not None:
            found += f" ({len(rows.token_ids)} of it for trained tokens)"
        name = "lora_embedding_A" if pair.is_embedding else "lora_A"
        self._note(ProblemCode.RANK_TOO_LARGE, name, found, f"at most {self.max_rank}")

    def _add_rows(self, pair: LoraPair | None) -> LoraPair | None:
        """Return the pair with a rank more for each trained token."""
        rows, tensors = self.part.token_rows, self._base("trained token rows")
        if rows is None or tensors is None:
            return pair
        table = tensors.weight
        if rows.rows.shape[1] != table.shape[1]:
            found = str(list(rows.rows.shape))
            expected = f"[{len(rows.token_ids)}, {table.shape[1]}]"
            self._note(ProblemCode.SHAPE_MISMATCH, _ROWS, found, expected)
        elif int(rows.token_ids.max()) >= table.shape[0]:
            found = f"for token {int(rows.token_ids.max())}"
            self._note(ProblemCode.SHAPE_MISMATCH, _ROWS, found, f"tokens below {table.shape[0]}")
        elif not self.problems:
            is_embedding = self.shape.kind is ModuleKind.EMBEDDING
            return join_pairs(pair, token_pair(rows, table, is_embedding=is_embedding))
        return pair

    def _bind_full(self, full: FullModule) -> BoundPart | None:
        """Return a whole replacement, checked against the module."""
        part, shape = self.part, self.shape
        if part.nbytes != full.nbytes:
            self._note(ProblemCode.DUPLICATE_MODULE, "weight", "there beside other parts", "alone")
        size = [shape.out_features, shape.in_features]
        if shape.kind is ModuleKind.EMBEDDING or shape.is_transposed:
            size.reverse()
        found, limit = list(full.weight.shape), shape.max_out_features
        if limit is None and found != size:
            self._note(ProblemCode.SHAPE_MISMATCH, "weight", str(found), str(size))
        elif limit is not None and (found[1:] != size[1:] or found[0] > limit):
            expected = f"[at most {limit}, {size[1]}]"
            self._note(ProblemCode.SHAPE_MISMATCH, "weight", str(found), expected)
        rows = found[1] if shape.is_transposed and len(found) > 1 else found[0]
        if full.bias is not None and list(full.bias.shape) != [rows]:
            self._note(ProblemCode.SHAPE_MISMATCH, "bias", str(list(full.bias.shape)), str([rows]))
        tensors = self.base()
        if tensors is not None and (tensors.bias is None) is not (full.bias is None):
            code = ProblemCode.MISSING_WEIGHTS if full.bias is None else ProblemCode.SHAPE_MISMATCH
            found_bias = "not in the file" if full.bias is None else "in the file"
            expected = "a trained one, as the base has one" if full.bias is None else "none"
            self._note(code, "bias", found_bias, expected)
        if shape.is_transposed:
            full = replace(full, weight=full.weight.T)
        return None if self.problems else BoundPart(full=full)

    def _bind_replaced(self, pair: LoraPair | None, own: LoraPair | None) -> BoundPart | None:
        """Return a part that replaces the base's bias or the norm of its rows.

        The wrapper adds the bias after the gain, and y holds the base's bias b already:
        ``gain * (W x + b + B A x) + bias = gain * (W x + B A x) + b'``.
        """
        part, tensors = self.part, self._base("magnitudes and trained biases")
        if tensors is None:
            return None
        old = None if tensors.bias is None else tensors.bias.detach().float().cpu()
        if part.bias is not None and old is None:
            self._note(ProblemCode.SHAPE_MISMATCH, "bias", "in the file", "none, as in the base")
            return None
        gain = None
        if part.magnitude is not None and own is not None:
            gain = compute_gain(tensors.weight.detach(), own, part.magnitude)
            self._check_finite("lora_magnitude_vector", gain)
        bias = None
        if old is not None:
            new = old if part.bias is None else part.bias
            bias = new - (old if gain is None else gain * old)
        if part.lora_bias is not None:
            added = part.lora_bias if gain is None else gain * part.lora_bias
            bias = added if bias is None else bias + added
        return BoundPart(pair=pair, gain=gain, bias=bias)

    def _base(self, what: str) -> BaseTensors | None:
        """Return the module's own tensors, or note that they are needed."""
        tensors = self.base()
        if tensors is None:
            self._note(
                ProblemCode.NEEDS_BASE, "", f"with {what}", "the base's own tensors to be at hand"
            )
        return tensors

    def _check_finite(self, tensor: str, *values: torch.Tensor) -> None:
        if not all(bool(torch.isfinite(value).all()) for value in values):
            found = "not finite once it is joined with the base"
            self._note(ProblemCode.NOT_FINITE, tensor, found, "finite values")

    def _note(self, code: ProblemCode, tensor: str, found: str, expected: str) -> None:
        self.problems.append(
            Problem(code=code, module=self.path, tensor=tensor, found=found, expected=expected)
        )


_ROWS = "trainable_tokens_delta"
