"""Which modules carry LoRA: where they hang, what they are, which the caller's filter lets pass.

Knows names, paths and module classes; changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor, nn

from lora_layers.errors import TargetNotFoundError, UnsupportedModuleError
from lora_layers.wrappers.base_experts import holds_experts, read_expert_shape
from lora_layers.wrappers.base_linear import read_linear_shape, takes_one_input
from lora_layers.wrappers.merged import holds_one_matrix
from lora_weights import ExpertShape, ModuleKind, ModuleShape

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

READS_WEIGHTS_OF_CHILDREN = (nn.MultiheadAttention, nn.TransformerEncoderLayer)
"""Classes that may use a child's weight without calling the child: a wrapper would be passed by."""

MATRIX_DIMS = 2
"""Parameters with at least so many dimensions could have low-rank deltas."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Site:
    """One place where a module hangs; a module reachable by two paths has two."""

    path: str
    """Full dotted path in the model."""
    name: str
    """Attribute of the parent, the last part of the path."""
    parent: nn.Module
    """What it hangs on."""
    module: nn.Module
    """The module itself."""

    @property
    def parent_path(self) -> str:
        """Path of the parent, empty for the model itself."""
        return self.path.rpartition(".")[0]


def walk_sites(model: nn.Module) -> list[Site]:
    """List every module below `model` by every path that leads to it, parents first."""
    modules = dict(model.named_modules(remove_duplicate=False))
    sites = []
    for path, module in modules.items():
        if path:
            parent_path, _, name = path.rpartition(".")
            sites.append(Site(path=path, name=name, parent=modules[parent_path], module=module))
    return sites


def read_shape(module: nn.Module) -> ModuleShape | ExpertShape | None:
    """Return the widths of a module LoRA knows a form for; None for any other class."""
    if holds_experts(module):
        return read_expert_shape(module)
    if isinstance(module, nn.Embedding):
        return ModuleShape(
            in_features=module.num_embeddings,
            out_features=module.embedding_dim,
            kind=ModuleKind.EMBEDDING,
        )
    linear = read_linear_shape(module)
    if linear is not None:
        return ModuleShape(
            in_features=linear.in_features,
            out_features=linear.out_features,
            is_transposed=linear.is_transposed,
        )
    if holds_one_matrix(module):
        out_features, in_features = weight_of(module).shape
        return ModuleShape(in_features=in_features, out_features=out_features)
    return None


def why_not_wrappable(site: Site) -> str | None:
    """Return why the module at a site cannot carry LoRA; None if it can."""
    module, parent = site.module, site.parent
    shape = read_shape(module)
    if shape is None and holds_experts(module):
        return (
            f"is a {type(module).__name__}, which gives deltas of experts no place, expected a "
            "fused experts module that describes itself as those of transformers 5"
        )
    if shape is None:
        return f"is a {type(module).__name__}, expected a linear or embedding module"
    if isinstance(parent, READS_WEIGHTS_OF_CHILDREN):
        return f"is used by weight, not by call, in a {type(parent).__name__}"
    if isinstance(shape, ModuleShape) and not takes_one_input(module):
        return f"is a {type(module).__name__} whose forward takes several inputs, expected one"
    dtype = weight_of(module).dtype
    if not dtype.is_floating_point:
        return f"has a weight of dtype {dtype}, expected a floating one"
    return None


def weight_of(module: nn.Module) -> Tensor:
    """Return the weight of a linear or embedding module; of experts that of the down product."""
    weight = module.down_proj if holds_experts(module) else module.weight
    assert isinstance(weight, Tensor)
    return weight


def has_parameters(module: nn.Module) -> bool:
    """Whether the module owns a parameter itself, not only through its children."""
    return next(module.parameters(recurse=False), None) is not None


def holds_matrix(module: nn.Module) -> bool:
    """Whether the module itself owns a parameter that a low-rank delta could be added to."""
    own = module.parameters(recurse=False)
    return any(p.ndim >= MATRIX_DIMS and p.is_floating_point() for p in own)


class TargetFilter:
    """The caller's choice of modules.

    A module passes if its last name part or its full path is listed, or the packed name it belongs
    to is. A packed group passes if any of its members does. None passes everything.
    """

    def __init__(
        self,
        target_modules: frozenset[str] | None,
        packed_modules: Mapping[str, tuple[str, ...]],
    ) -> None:
        self.target_modules = target_modules
        self._packed_name = {m: name for name, members in packed_modules.items() for m in members}

    def passes(self, path: str) -> bool:
        """Whether the module at `path` may carry LoRA."""
        if self.target_modules is None:
            return True
        return not self.target_modules.isdisjoint(self._names(path))

    def unmatched(self, paths: Iterable[str]) -> list[str]:
        """Return the listed names that no path answers to."""
        found = {name for path in paths for name in self._names(path)}
        return sorted((self.target_modules or frozenset()) - found)

    def _names(self, path: str) -> Iterator[str]:
        """Yield every name under which the filter may list a path."""
        parent, _, last = path.rpartition(".")
        yield path
        yield last
        packed = self._packed_name.get(last)
        if packed is not None:
            yield packed
            yield f"{parent}.{packed}" if parent else packed


def check_targets(
    target_filter: TargetFilter, sites: Collection[Site], unsupported: Mapping[str, str]
) -> None:
    """Refuse a model without anything to wrap, and filter entries that cannot be honoured.

    Args:
        target_filter: the caller's choice.
        sites: every module of the model.
        unsupported: path -> reason, for every module that cannot carry LoRA.

    Raises:
        TargetNotFoundError: nothing in the model can carry LoRA, or an entry names no module.
        UnsupportedModuleError: an entry names modules that cannot carry LoRA.
    """
    if all(site.path in unsupported for site in sites):
        classes = sorted({type(site.module).__name__ for site in sites})
        raise TargetNotFoundError(
            "the model has no module that can carry LoRA, expected linear or embedding modules "
            f"below it; classes seen: {', '.join(classes) or 'none'}"
        )
    if target_filter.target_modules is None:
        return
    refused = {path: why for path, why in unsupported.items() if target_filter.passes(path)}
    if refused:
        raise UnsupportedModuleError(refused)
    unmatched = target_filter.unmatched(site.path for site in sites)
    if unmatched:
        names = sorted({s.name for s in sites if s.path not in unsupported})
        raise TargetNotFoundError(
            f"target_modules names {unmatched}, which the model does not have; it has {names}"
        )
