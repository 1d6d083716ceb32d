"""HeadRules: what an adapter with a classification head of its own must fulfil.

Sizes are checked where every module's are, when the adapter is bound.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lora_weights import Problem, ProblemCode

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from lora_layers.heads import Head
    from lora_weights import AdapterConfig, BoundPart


class HeadRules:
    """Where the heads of a model are, and what may take their place. Thread-safe."""

    def __init__(self, heads: Sequence[Head], *, task_type: str | None) -> None:
        """Know the heads of a model.

        Args:
            heads: every head.
            task_type: PEFT's `task_type` that an adapter with a head must have where it names one.
        """
        self._heads = tuple(heads)
        self._task_type = task_type

    def num_labels(self, parts: Mapping[str, BoundPart]) -> int | None:
        """Return the labels of an adapter's own head; None without one."""
        if len(self._heads) != 1:
            return None
        part = parts.get(self._heads[0].label_path)
        return None if part is None or part.full is None else part.full.weight.shape[0]

    def problems(self, parts: Mapping[str, BoundPart], config: AdapterConfig) -> Iterator[Problem]:
        """Yield a problem for each head of an adapter that cannot have a place here."""
        for head in self._heads:
            own = [path for path in head.member_paths if path in parts and parts[path].full]
            if not own:
                continue
            if len(self._heads) > 1:
                found = f"one of {len(self._heads)} heads ({', '.join(self._paths())})"
                expected = "the only head of the model, where adapters bring their own"
                yield _problem(ProblemCode.AMBIGUOUS_MODULE, head, found, expected)
            elif self._task_type not in {None, config.task_type or self._task_type}:
                found = f"the head of an adapter for task_type {config.task_type}"
                yield _problem(ProblemCode.KIND_MISMATCH, head, found, self._task_type or "")

    def _paths(self) -> list[str]:
        return [head.path for head in self._heads]


def _problem(code: ProblemCode, head: Head, found: str, expected: str) -> Problem:
    return Problem(code=code, module=head.path, found=found, expected=expected)
