"""PreparedAdapter: an adapter matched with this model, packed and cast, ready for a slot.

Reads descriptions that never change, so several threads may prepare at once. Knows nothing of
slots, residency or requests.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from lora_layers.errors import AdapterMismatchError
from lora_weights import (
    InvalidAdapterError,
    LoraPair,
    ModulePart,
    Problem,
    ProblemCode,
    bind_adapter,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from torch import Tensor

    from lora_layers.inject import Injection, WrapReport
    from lora_weights import Adapter, ModuleShape

    Slices = tuple[tuple[Tensor, Tensor] | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PreparedAdapter:
    """What one adapter puts into the slots of each wrapped module."""

    slices: Mapping[str, Slices] = field(repr=False)
    """Path of a module or packed group -> `(lora_a [r, I], lora_b [O_p, r])` of each slice, in the
    slots' dtype; None for a slice the adapter leaves alone. Other modules are left alone whole."""
    rank: int
    """Largest rank of any pair."""
    nbytes: int
    """Bytes of all tensors, true ranks, nothing padded."""
    digest: str
    """The adapter's digest; empty for a dummy."""
    source: str
    """Where the adapter was read from; shown, never opened."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StackLayout:
    """What preparation needs to know of one stack of slots."""

    path: str
    """Path of the module or packed group."""
    member_paths: tuple[str, ...]
    """Path of the module behind each slice."""
    dtype: torch.dtype
    """dtype of the slots."""


class AdapterPreparer:
    """Matches adapters with one model. Holds descriptions only; thread-safe."""

    def __init__(
        self,
        injection: Injection,
        report: WrapReport,
        *,
        max_rank: int,
        target_modules: frozenset[str] | None,
    ) -> None:
        self._shapes: dict[str, ModuleShape] = dict(injection.shapes)
        self._left_out: dict[str, ModuleShape] = dict(injection.left_out)
        self._weights: dict[str, Tensor] = dict(injection.weights)
        self._layouts = tuple(
            StackLayout(path=stack.path, member_paths=stack.member_paths, dtype=stack.weights.dtype)
            for stack in injection.stacks.values()
        )
        self._embed_scales = dict(injection.embed_scales)
        self._report = report
        self._max_rank = max_rank
        self._target_modules = target_modules

    def prepare(self, adapter: Adapter) -> PreparedAdapter:
        """Bind an adapter to the model's modules, check it, pack it and cast it.

        Raises:
            AdapterMismatchError: modules the model does not have or that carry no LoRA here, shapes
                or ranks that do not fit, parts that cannot be applied, no effect; all at once.
        """
        problems = [*_unsupported_parts(adapter.parts), *self._left_out_problems(adapter.parts)]
        parts: Mapping[str, ModulePart] = {}
        try:
            # Against all modules: a name must not become clear only because some are left out.
            parts = bind_adapter(
                adapter,
                self._shapes | self._left_out,
                max_rank=self._max_rank,
                base_weight=self._weights.get,
            )
        except InvalidAdapterError as error:
            problems += [self._explain(problem) for problem in error.problems]
        if problems:
            raise AdapterMismatchError(problems, source=adapter.source)
        slices = self._pack(parts)
        problems = list(_numeric_problems(slices))
        if problems:
            raise AdapterMismatchError(problems, source=adapter.source)
        return make_prepared(slices, digest=adapter.digest, source=adapter.source)

    def _pack(self, parts: Mapping[str, ModulePart]) -> dict[str, Slices]:
        """Sort the pairs into the slices of the stacks; a stack without any is left out."""
        packed: dict[str, Slices] = {}
        for layout in self._layouts:
            pairs = [
                self._pair(path, parts.get(path), layout.dtype) for path in layout.member_paths
            ]
            if any(pair is not None for pair in pairs):
                packed[layout.path] = tuple(pairs)
        return packed

    def _pair(
        self, path: str, part: ModulePart | None, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor] | None:
        pair: LoraPair | None = part.pair if part is not None else None
        if pair is None:
            return None
        scale = self._embed_scales.get(path, 1.0)
        lora_b = pair.lora_b if scale == 1.0 else pair.lora_b.float() * scale
        return pair.lora_a.to(dtype), lora_b.to(dtype)

    def _left_out_problems(self, parts: Mapping[str, ModulePart]) -> Iterable[Problem]:
        """Yield a problem for each part whose module the caller chose to leave out."""
        for module in parts:
            path = _find(module, self._left_out)
            if path is not None and _find(module, self._shapes) is None:
                yield Problem(
                    code=ProblemCode.UNKNOWN_MODULE,
                    module=module,
                    found=f"left out: {path} carries no adapters here",
                    expected=f"a module in target_modules {sorted(self._target_modules or ())}",
                )

    def _explain(self, problem: Problem) -> Problem:
        """Say what an unknown module is, where the model has it and cannot adapt it."""
        if problem.code is not ProblemCode.UNKNOWN_MODULE:
            return problem
        path = _find(problem.module, self._report.unsupported)
        if path is not None:
            why = f"at {path}, which {self._report.unsupported[path].partition(', ')[0]}"
            return replace(problem, found=why, expected="a module that can carry LoRA")
        return problem


def make_prepared(slices: Mapping[str, Slices], *, digest: str, source: str) -> PreparedAdapter:
    """Wrap slices up with their rank and size."""
    pairs = [pair for stack in slices.values() for pair in stack if pair is not None]
    return PreparedAdapter(
        slices=slices,
        rank=max((lora_a.shape[0] for lora_a, _ in pairs), default=0),
        nbytes=sum(lora_a.nbytes + lora_b.nbytes for lora_a, lora_b in pairs),
        digest=digest,
        source=source,
    )


def _find(module: str, paths: Collection[str]) -> str | None:
    """Return the path that a checkpoint's module name means: equal, or one ends with the other."""
    if module in paths:
        return module
    for path in paths:
        if path.endswith(f".{module}") or module.endswith(f".{path}"):
            return path
    return None


def _unsupported_parts(parts: Mapping[str, ModulePart]) -> Iterable[Problem]:
    """Yield a problem for each part that is not a pair: nothing of an adapter may be dropped."""
    for module, part in parts.items():
        for name in ("bias", "magnitude", "full"):
            if getattr(part, name) is not None:
                yield Problem(
                    code=ProblemCode.UNSUPPORTED_TENSOR,
                    module=module,
                    tensor=name,
                    found="present",
                    expected="a lora_A and lora_B pair only",
                )


def _numeric_problems(slices: Mapping[str, Slices]) -> Iterable[Problem]:
    """Yield what is wrong with the numbers as the slots will hold them."""
    if not any(_has_effect(pair) for stack in slices.values() for pair in stack):
        found = "without effect: no pair, or every lora_A or lora_B zero in the slots' dtype"
        yield Problem(code=ProblemCode.NO_EFFECT, found=found, expected="at least one delta")
    for path, stack in slices.items():
        for index, pair in enumerate(stack):
            for name, tensor in zip(("lora_A", "lora_B"), pair or (), strict=False):
                if not torch.isfinite(tensor).all():
                    yield Problem(
                        code=ProblemCode.NOT_FINITE,
                        module=path,
                        tensor=f"{name} of slice {index}",
                        found=f"not finite as {tensor.dtype}",
                        expected="finite values",
                    )


def _has_effect(pair: tuple[Tensor, Tensor] | None) -> bool:
    return pair is not None and bool(pair[0].any()) and bool(pair[1].any())
