"""Module paths of a checkpoint -> module paths of a base model. Knows names only.

An exact name wins. Otherwise one path must be the tail of the other, or both must be the same once
the names of wrappers (``model``, ``language_model``) are left out; and exactly one module of the
base may fit. A path that names another tower of a model, such as a vision encoder, is never cut
down to the path of a text model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lora_weights.errors import Problem, ProblemCode

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

WRAPPERS = frozenset({"base_model", "language_model", "model", "module", "text_model"})
"""Segments that say where the text model lies, and nothing else."""

TOWERS = (
    "audio",
    "connector",
    "decoder",
    "draft",
    "encoder",
    "image",
    "mtp",
    "projector",
    "speech",
    "talker",
    "video",
    "vision",
    "visual",
)
"""Parts of names of modules beside a text model."""

_MAX_LISTED = 4


class ModulePaths:
    """Finds the base model's module for a path that a checkpoint names."""

    def __init__(self, paths: Iterable[str]) -> None:
        self._paths = frozenset(paths)
        self._by_name: dict[str, list[str]] = {}
        for path in sorted(self._paths):
            self._by_name.setdefault(path.rpartition(".")[2], []).append(path)

    def find(self, path: str) -> list[str]:
        """Return the modules that fit: one when it is clear, none, or several."""
        if path in self._paths:
            return [path]
        same_name = self._by_name.get(path.rpartition(".")[2], [])
        found = [base for base in same_name if is_tail(path, base) or _is_cut(path, base)]
        if found:
            return found
        core = _without_wrappers(path)
        return [base for base in same_name if _without_wrappers(base) == core]


def is_tail(tail: str, path: str) -> bool:
    """Return whether a path ends with another one, in whole components."""
    return path.endswith(tail) and path[-len(tail) - 1 : -len(tail)] == "."


def _is_cut(path: str, base: str) -> bool:
    """Return whether a checkpoint's path is a base's with something before it that may go."""
    if not is_tail(base, path):
        return False
    dropped = path[: -len(base) - 1]
    return not any(tower in dropped for tower in TOWERS)


def _without_wrappers(path: str) -> list[str]:
    return [segment for segment in path.split(".") if segment not in WRAPPERS]


def resolve_paths(
    modules: Iterable[str], paths: ModulePaths
) -> tuple[dict[str, str], list[Problem]]:
    """Match the modules of an adapter with those of a base.

    Args:
        modules: paths as the adapter has them.
        paths: those of the base model.

    Returns:
        Path of the adapter -> path of the base, and the modules without one clear place.
    """
    problems = []
    targets: dict[str, str] = {}
    owners: dict[str, str] = {}
    for path in modules:
        found = paths.find(path)
        if len(found) != 1:
            problems.append(_not_placed(path, found))
        elif found[0] in owners:
            problems.append(_placed_twice(path, found[0], owners[found[0]]))
        else:
            targets[path] = found[0]
            owners[found[0]] = path
    return targets, problems


def _not_placed(path: str, found: list[str]) -> Problem:
    if not found:
        return Problem(
            code=ProblemCode.UNKNOWN_MODULE,
            module=path,
            found="not a module of the base model that takes an adapter",
        )
    listed = ", ".join(found[:_MAX_LISTED]) + (", ..." if len(found) > _MAX_LISTED else "")
    return Problem(
        code=ProblemCode.AMBIGUOUS_MODULE,
        module=path,
        found=f"the tail of {len(found)} modules ({listed})",
        expected="of exactly one",
    )


def _placed_twice(path: str, base: str, other: str) -> Problem:
    return Problem(
        code=ProblemCode.DUPLICATE_MODULE,
        module=path,
        found=f"meant for {base}, and so is {other}",
        expected="one entry a module",
    )


def check_dropped_prefixes(targets: Mapping[str, str]) -> list[Problem]:
    """Return problems when different leading parts were left out of the checkpoint's paths.

    One left-out prefix is a spelling of the whole model. Two are two models, of which the base
    has one at most.

    Args:
        targets: path of the adapter -> path of the base.
    """
    dropped: dict[str, list[str]] = {}
    for path, base in targets.items():
        if is_tail(base, path):
            dropped.setdefault(path[: -len(base) - 1], []).append(path)
    if len(dropped) <= 1:
        return []
    prefixes = ", ".join(sorted(dropped))
    return [
        Problem(
            code=ProblemCode.AMBIGUOUS_MODULE,
            module=path,
            found=f"below one of several prefixes that the base lacks ({prefixes})",
            expected="one prefix for all modules",
        )
        for paths in dropped.values()
        for path in paths
    ]
