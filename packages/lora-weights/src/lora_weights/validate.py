"""``bind_adapter``: an adapter's modules -> a base model's modules, shapes and ranks checked.

Knows a base model only as a table of module paths and shapes.
Shapes: `r` rank, `I` in, `O` out, `V` vocabulary, `D` embedding width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from lora_weights.bound import BoundPart
from lora_weights.errors import InvalidAdapterError, Problem, ProblemCode
from lora_weights.experts import ExpertShape
from lora_weights.experts.bind import bind_experts, group_experts
from lora_weights.modules import ModuleKind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from lora_weights.adapter import Adapter
    from lora_weights.bound import BaseTensors
    from lora_weights.modules import LoraPair, ModuleShape

_MAX_LISTED = 4


class ModulePaths:
    """Finds the base model's module for a path that a checkpoint names.

    An exact name wins. Otherwise one path must be the tail of the other, or become it when a
    leading ``model.`` on both is left out (text-only names inside a multimodal wrapper); exactly
    one module of the base may fit.
    """

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
        found = [base for base in same_name if _is_tail(path, base) or _is_tail(base, path)]
        if not found and path.startswith("model."):
            inner = path.removeprefix("model.")
            found = [
                base for base in same_name if base.startswith("model.") and _is_tail(inner, base)
            ]
        return found


def _is_tail(tail: str, path: str) -> bool:
    return path.endswith(tail) and path[-len(tail) - 1 : -len(tail)] == "."


def bind_adapter(
    adapter: Adapter,
    shapes: Mapping[str, ModuleShape | ExpertShape],
    *,
    max_rank: int,
    base: Callable[[str], BaseTensors | None] | None = None,
) -> dict[str, BoundPart]:
    """Match an adapter with a base model.

    Args:
        adapter: a checked adapter.
        shapes: module path in the base model -> size, for every module that can take a pair.
        max_rank: largest rank accepted.
        base: returns the base's tensors of a module path in `shapes`, or None where it cannot.
            What depends on them (DoRA, replaced biases, token rows, copies of base weights) is
            refused by name without.

    Returns:
        Module path in the base model -> what the module gets. Every part of the adapter is in it.

    Raises:
        InvalidAdapterError: a module is unknown, ambiguous, of another kind or size, named twice,
            above `max_rank`, its stored base weight differs, or the layout of expert tensors
            cannot be told; names all of them.
    """
    paths = ModulePaths(shapes)
    groups, others = group_experts(adapter.parts, shapes, paths.find)
    targets, problems = _resolve(others, paths)
    experts_paths = {group.experts: target for target, group in groups.items()}
    problems += _check_dropped_prefixes(targets | experts_paths)
    bound = {}
    for path, target in targets.items():
        part, shape = adapter.parts[path], shapes[target]
        if isinstance(shape, ExpertShape):
            problems.append(_problem(ProblemCode.KIND_MISMATCH, path, "", "a module", "experts"))
            continue
        if part.experts is not None:
            found, expected = "a stacked pair of experts", "one for a module"
            problems.append(_problem(ProblemCode.KIND_MISMATCH, path, "", found, expected))
        if part.pair is not None:
            problems += _check_pair(path, part.pair, shape, max_rank)
        gain = None if part.gain is None else part.gain.float()
        bound[target] = BoundPart(pair=part.pair, full=part.full, gain=gain)
    for target, group in groups.items():
        experts, more = bind_experts(group, max_rank=max_rank)
        problems += more
        if experts is not None:
            bound[target] = BoundPart(experts=experts)
    problems += _check_saved_modules(adapter, shapes)
    problems += _check_base_copies(adapter, targets, base)
    if problems:
        raise InvalidAdapterError(problems, source=adapter.source)
    return bound


def _resolve(parts: Iterable[str], paths: ModulePaths) -> tuple[dict[str, str], list[Problem]]:
    """Return checkpoint path -> base path, and the modules without one clear place."""
    problems = []
    targets: dict[str, str] = {}
    owners: dict[str, str] = {}
    for path in parts:
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


def _check_dropped_prefixes(targets: Mapping[str, str]) -> list[Problem]:
    """Return problems when different leading parts were left out of the checkpoint's paths.

    One left-out prefix is a spelling of the whole model. Two are two models, of which the base
    has one at most.
    """
    dropped: dict[str, list[str]] = {}
    for path, base in targets.items():
        if _is_tail(base, path):
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


def _check_pair(path: str, pair: LoraPair, shape: ModuleShape, max_rank: int) -> list[Problem]:
    """Return what does not fit between a pair and its module."""
    if pair.is_embedding != (shape.kind is ModuleKind.EMBEDDING):
        found = "the pair of an embedding" if pair.is_embedding else "the pair of a linear module"
        expected = f"one for {'an embedding' if not pair.is_embedding else 'a linear module'}"
        return [_problem(ProblemCode.KIND_MISMATCH, path, "", found, expected)]
    names = ("lora_embedding_A", "lora_embedding_B") if pair.is_embedding else ("lora_A", "lora_B")
    rank, problems = pair.rank, []
    if rank > max_rank:
        expected = f"at most {max_rank}"
        problems.append(
            _problem(ProblemCode.RANK_TOO_LARGE, path, names[0], f"rank {rank}", expected)
        )
    for name, tensor, size in (
        (names[0], pair.lora_a, [rank, shape.in_features]),
        (names[1], pair.lora_b, [shape.out_features, rank]),
    ):
        if list(tensor.shape) != size:
            found = str(list(tensor.shape))
            problems.append(_problem(ProblemCode.SHAPE_MISMATCH, path, name, found, str(size)))
    return problems


def _problem(code: ProblemCode, module: str, tensor: str, found: str, expected: str) -> Problem:
    return Problem(code=code, module=module, tensor=tensor, found=found, expected=expected)


def _check_saved_modules(
    adapter: Adapter, shapes: Mapping[str, ModuleShape | ExpertShape]
) -> list[Problem]:
    """Return a problem for each listed module that the base has and the file has no weight for.

    PEFT lists heads that a model may not have, so a listed name without a module is normal.
    """
    whole = {path for path, part in adapter.parts.items() if part.full is not None}
    return [
        _problem(
            ProblemCode.MISSING_WEIGHTS,
            base,
            "weight",
            f"listed in modules_to_save ({name}) and not in the file",
            "its trained weight",
        )
        for name in adapter.config.modules_to_save
        for base in shapes
        if (base == name or _is_tail(name, base))
        and not any(path in (base, name) or _is_tail(name, path) for path in whole)
    ]


def _check_base_copies(
    adapter: Adapter,
    targets: Mapping[str, str],
    base: Callable[[str], BaseTensors | None] | None,
) -> list[Problem]:
    """Return a problem for each stored base weight that is not known to equal the base's."""
    problems = []
    for path, copy in adapter.base_copies.items():
        tensors = base(targets[path]) if base is not None and path in targets else None
        if tensors is None:
            found = "a copy of the base's weight that cannot be compared"
        elif copy.shape != tensors.weight.shape:
            found = f"{list(copy.shape)}, not the base's {list(tensors.weight.shape)}"
        # A base served in a narrower type is still the base the adapter was trained on.
        elif not torch.equal(copy.to(tensors.weight.dtype), tensors.weight.detach().cpu()):
            found = "another weight than the base's"
        else:
            continue
        problems.append(
            _problem(
                ProblemCode.BASE_COPY_DIFFERS,
                path,
                "base_layer.weight",
                found,
                "a weight equal to the base's; save the adapter with save_embedding_layers=False",
            )
        )
    return problems
