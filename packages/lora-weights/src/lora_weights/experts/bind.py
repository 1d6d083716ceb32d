"""What an adapter has for fused experts modules, found among its parts and brought in one form.

Knows a base model only as a table of module paths and shapes.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from lora_weights.errors import Problem, ProblemCode
from lora_weights.experts.names import parse_expert
from lora_weights.experts.parts import ExpertShape
from lora_weights.experts.per_expert import build_per_expert
from lora_weights.experts.stacked import build_stacked

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from lora_weights.experts.names import ExpertName
    from lora_weights.experts.parts import ExpertPart
    from lora_weights.experts.stored import StoredExperts
    from lora_weights.modules import ModulePart, ModuleShape


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertGroup:
    """Everything an adapter has for one fused experts module of the base."""

    experts: str
    """Path of the experts module as the checkpoint spells it."""
    shape: ExpertShape
    """The base's experts, of all ranks together."""
    stored: StoredExperts | None = None
    """Stacked pairs."""
    members: dict[ExpertName, ModulePart] = field(default_factory=dict)
    """What single experts have."""


def group_experts(
    parts: Mapping[str, ModulePart],
    shapes: Mapping[str, ModuleShape | ExpertShape],
    find: Callable[[str], Sequence[str]],
) -> tuple[dict[str, ExpertGroup], dict[str, ModulePart]]:
    """Return what belongs to fused experts of the base, by base path, and all other parts.

    A single expert's module that the base has as a module of its own is one of the others.

    Args:
        parts: checkpoint path -> part.
        shapes: base path -> size.
        find: returns the base paths that fit a checkpoint path.
    """
    groups: dict[str, ExpertGroup] = {}
    others: dict[str, ModulePart] = {}
    for path, part in parts.items():
        name = parse_expert(path)
        single = name is not None and name.expert is not None
        if name is None or not (single or part.experts is not None) or (single and find(path)):
            others[path] = part
            continue
        found = find(name.experts)
        shape = shapes[found[0]] if len(found) == 1 else None
        if not isinstance(shape, ExpertShape):
            others[path] = part
            continue
        group = groups.setdefault(found[0], ExpertGroup(experts=name.experts, shape=shape))
        if group.experts != name.experts:
            others[path] = part
        elif single:
            group.members[name] = part
        else:
            groups[found[0]] = replace(group, stored=part.experts)
    return groups, others


def bind_experts(
    group: ExpertGroup, *, max_rank: int, local: range | None = None
) -> tuple[ExpertPart | None, list[Problem]]:
    """Return what one fused experts module gets, and everything that does not fit.

    Args:
        group: what the adapter has for it.
        max_rank: largest rank accepted.
        local: the experts wanted, by index in the whole model; None is all.

    Returns:
        The part, with a leading dimension of the wanted experts, or of 1 for a factor that all
        share; None when it has problems, or nothing for any of the wanted experts.
    """
    shape = group.shape
    if local is not None and local.stop > shape.num_experts:
        found = f"asked for experts {local.start} to {local.stop - 1}"
        expected = f"experts 0 to {shape.num_experts - 1}"
        return None, [_problem(ProblemCode.UNKNOWN_MODULE, group.experts, found, expected)]
    if group.stored is None:
        return build_per_expert(group.members, shape, max_rank=max_rank, local=local)
    if group.members:
        found, expected = "stored for single experts and for all of them", "one of the two"
        return None, [_problem(ProblemCode.DUPLICATE_MODULE, group.experts, found, expected)]
    return build_stacked(group.experts, group.stored, shape, max_rank=max_rank, local=local)


def _problem(code: ProblemCode, module: str, found: str, expected: str) -> Problem:
    return Problem(code=code, module=module, found=found, expected=expected)
