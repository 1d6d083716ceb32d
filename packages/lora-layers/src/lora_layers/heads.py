"""Where a model's classification head is: the modules whose rows are one a label, or lead to them.

Knows names and places; nothing of adapters. A head is a module that a caller's list names
(`score`, `classifier`). It is one linear module, or holds several, of which the last gives the
labels (RoBERTa's `dense` and `out_proj`). A linear neighbour whose name ends with the head's
(DistilBERT's `pre_classifier`) belongs to it, as PEFT saves the two together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from lora_layers.wrappers.base_linear import read_linear_shape

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from lora_layers.targets import Site


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """The classification head of a model."""

    path: str
    """Path of the module that the caller's list names."""
    label_path: str
    """Path of the linear module with one row a label."""
    member_paths: frozenset[str]
    """Paths of all its linear modules."""


def find_heads(sites: Sequence[Site], names: Collection[str]) -> tuple[Head, ...]:
    """Return the heads of a model, one a module; there should be one at most.

    Args:
        sites: every module of the model, parents first.
        names: last name parts that make a module a head.
    """
    found: dict[int, Head] = {}
    for site in sites:
        is_inside = any(site.path.startswith(f"{head.path}.") for head in found.values())
        if site.name not in names or is_inside or id(site.module) in found:
            continue
        own = [s.path for s in sites if _is_below(s, site) and _is_linear(s)]
        if own:
            beside = [s.path for s in sites if _is_companion(s, site) and _is_linear(s)]
            found[id(site.module)] = Head(
                path=site.path, label_path=own[-1], member_paths=frozenset((*beside, *own))
            )
    return tuple(found.values())


def _is_linear(site: Site) -> bool:
    return read_linear_shape(site.module) is not None


def _is_below(site: Site, head: Site) -> bool:
    return site.path == head.path or site.path.startswith(f"{head.path}.")


def _is_companion(site: Site, head: Site) -> bool:
    return site.parent is head.parent and site.name != head.name and site.name.endswith(head.name)
