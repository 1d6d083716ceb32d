"""Puts wrappers into a model in place, one a module identity, and takes them out again.

Knows modules, paths and slots; nothing of adapters or keys.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from torch import Tensor

from lora_kernels import Backend, StackedWeights
from lora_layers.heads import find_heads
from lora_layers.targets import (
    Site,
    TargetFilter,
    check_targets,
    has_parameters,
    holds_matrix,
    read_shape,
    walk_sites,
    weight_of,
    why_not_wrappable,
)
from lora_layers.wrappers import (
    ClassificationHeadWithLora,
    ExpertStack,
    LoraEmbedding,
    LoraExperts,
    LoraLinear,
    LoraMerged,
    LoraModule,
    PackedGroup,
    PackedMember,
    SlotStack,
)
from lora_layers.wrappers.base_linear import (
    can_prepack,
    is_plain_linear,
    prepack_product,
    read_linear_shape,
)
from lora_layers.wrappers.embedding import find_embed_scale
from lora_layers.wrappers.packed import why_not_packable
from lora_weights import BaseTensors, ExpertShape, ModuleKind, ModuleShape

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    import torch
    from torch import nn

    from lora_layers.config import LoraModelConfig
    from lora_layers.heads import Head
    from lora_layers.step import StepState

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class WrapReport:
    """What became of the modules of a model."""

    wrapped: tuple[str, ...]
    """Paths of the modules that carry LoRA, members of packed groups included."""
    packed: Mapping[str, tuple[str, ...]]
    """`<parent>.<packed name>` -> paths of the members that run as one product."""
    unpacked: Mapping[str, str]
    """`<parent>.<packed name>` -> why its members stay separate."""
    left_out: frozenset[str]
    """Paths that could carry LoRA and are not in `target_modules`."""
    unsupported: Mapping[str, str]
    """Path of each other module with parameters of its own -> why it cannot carry LoRA."""
    aliases: Mapping[str, str]
    """Further path of a wrapped module -> the path it is registered under."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Injection:
    """The wrappers in a model, and how to take them out."""

    shapes: dict[str, ModuleShape | ExpertShape] = field(default_factory=dict)
    """Path -> widths of each module that carries LoRA."""
    left_out: dict[str, ModuleShape | ExpertShape] = field(default_factory=dict)
    """Path -> widths of each module that could carry LoRA and is not in `target_modules`."""
    virtual_shapes: dict[str, ModuleShape] = field(default_factory=dict)
    """The same for names adapters may use beside the model's own: a packed group as a whole, the
    parts of a module the model stores as one."""
    bases: dict[str, BaseTensors] = field(default_factory=dict)
    """Path, virtual ones too -> base weight and bias, views of the model's."""
    embed_scales: dict[str, float] = field(default_factory=dict)
    """Path -> factor of each embedding that scales its output."""
    stacks: dict[str, SlotStack | ExpertStack] = field(default_factory=dict)
    """Path of each module or packed group -> its slots."""
    prepacked: dict[str, int] = field(default_factory=dict)
    """Path of each module or packed group with a second copy of its weight -> bytes of that."""
    merged: set[str] = field(default_factory=set)
    """Paths of modules whose weight is merged with a pair for the rows of an adapter."""
    heads: tuple[Head, ...] = ()
    """The classification heads; adapters can bring their own where there is exactly one."""
    groups: list[PackedGroup] = field(default_factory=list)
    """The packed groups."""
    replaced: list[Site] = field(default_factory=list)
    """Every place where a wrapper hangs now, with the original module."""
    packed: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """As in `WrapReport`."""
    unpacked: dict[str, str] = field(default_factory=dict)
    """As in `WrapReport`."""

    def undo(self) -> None:
        """Hang every original module where it was, its parameters in storages of their own."""
        for site in self.replaced:
            setattr(site.parent, site.name, site.module)
        for group in self.groups:
            group.unfuse()
        self.replaced.clear()
        self.groups.clear()


class Injector:
    """Wraps the modules of one model. Use once: `inject` changes the model."""

    def __init__(self, model: nn.Module, config: LoraModelConfig) -> None:
        """Look at the model; nothing is changed yet.

        Raises:
            TargetNotFoundError, UnsupportedModuleError: see `check_targets`.
        """
        self._config = config
        self._sites = walk_sites(model)
        self._filter = TargetFilter(config.target_modules, config.packed_modules)
        reasons = {site.path: why_not_wrappable(site) for site in self._sites}
        self._unsupported = {path: why for path, why in reasons.items() if why is not None}
        check_targets(self._filter, self._sites, self._unsupported)
        self._aliases: dict[str, str] = {}
        self._heads = find_heads(self._sites, config.head_modules)
        self._head_paths = {path for head in self._heads for path in head.member_paths}
        self._places = self._find_places()
        self._passing = [places for places in self._places if self._passes(places)]
        first = [places[0] for places in self._places if not self._passes(places)]
        left_out = {site.path: shape_of(site.module) for site in first}
        self._injection = Injection(left_out=left_out, heads=self._heads)

    @property
    def device(self) -> torch.device | None:
        """Where the modules to be wrapped live; None when the filter lets nothing pass."""
        return weight_of(self._passing[0][0].module).device if self._passing else None

    def inject(self, step: StepState) -> tuple[Injection, WrapReport]:
        """Replace the chosen modules by wrappers that read their routing from `step`."""
        claimed = self._inject_groups(step)
        for places in self._passing:
            if places[0].path not in claimed:
                self._inject_single(places, step)
        if self._config.target_modules is None:
            self._warn_of_unwrapped()
        return self._injection, self._report()

    def _find_places(self) -> list[list[Site]]:
        """Group the wrappable sites by module identity; a logits module is one of its own."""
        found: dict[tuple[int, bool], list[Site]] = {}
        for site in self._sites:
            if site.path not in self._unsupported:
                found.setdefault((id(site.module), self._is_logits(site)), []).append(site)
        for first, *others in found.values():
            self._aliases |= {other.path: first.path for other in others}
        return list(found.values())

    def _is_logits(self, site: Site) -> bool:
        return not self._config.logits_modules.isdisjoint((site.name, site.path))

    def _is_label_layer(self, site: Site) -> bool:
        """Whether adapters may bring the module with rows of their own number."""
        return len(self._heads) == 1 and site.path == self._heads[0].label_path

    def _passes(self, places: Sequence[Site]) -> bool:
        return any(
            site.path in self._head_paths or self._filter.passes(site.path) for site in places
        )

    def _inject_groups(self, step: StepState) -> set[str]:
        """Wrap packed groups; return the paths of their members."""
        by_path = {site.path: places for places in self._places for site in places}
        claimed: set[str] = set()
        seen: set[tuple[int, str]] = set()
        for site in self._sites:
            for name, members in self._config.packed_modules.items():
                if site.name not in members or (id(site.parent), name) in seen:
                    continue
                seen.add((id(site.parent), name))
                prefix = f"{site.parent_path}." if site.parent_path else ""
                groups = [by_path.get(prefix + member) for member in members]
                present = [places for places in groups if places is not None]
                if not any(self._passes(places) for places in present):
                    continue
                reason = self._why_not_packed(members, groups, claimed)
                if reason is not None:
                    self._injection.unpacked[prefix + name] = reason
                    continue
                self._inject_group(prefix + name, present, step)
                claimed |= {places[0].path for places in present}
        return claimed

    def _why_not_packed(
        self, members: Sequence[str], groups: Sequence[list[Site] | None], claimed: Collection[str]
    ) -> str | None:
        """Return why a group's members stay separate; None if they can run as one."""
        absent = [m for m, places in zip(members, groups, strict=True) if places is None]
        if absent:
            return f"no linear module named {', '.join(absent)} beside the others"
        modules = []
        for places in groups:
            assert places is not None
            site = places[0]
            if not is_plain_linear(site.module):
                return f"{site.path} is a {type(site.module).__name__}, expected a plain nn.Linear"
            if self._is_logits(site) or site.path in claimed:
                return f"{site.path} belongs to another group or computes logits"
            modules.append(site.module)
        return why_not_packable(modules)

    def _inject_group(self, path: str, members: Sequence[list[Site]], step: StepState) -> None:
        modules = [places[0].module for places in members]
        linears = [module for module in modules if is_plain_linear(module)]
        paths = [places[0].path for places in members]
        stack = SlotStack(
            path=path,
            member_paths=paths,
            weights=self._allocate(
                linears[0].weight, linears[0].in_features, [m.out_features for m in linears]
            ),
            cell=step.tokens,
            backend=self._config.backend,
        )
        group = PackedGroup(
            linears, stack, prepack=self._config.prepack_linear, native=self._is_native
        )
        if self._config.prepack_linear and can_prepack(group.weight):
            self._injection.prepacked[path] = group.weight.nbytes
        self._injection.groups.append(group)
        self._injection.stacks[path] = stack
        self._injection.packed[path] = tuple(paths)
        for index, places in enumerate(members):
            self._replace(places, PackedMember(places[0].module, group, index))
            if self._passes(places):
                self._record_shape(places[0])
        whole = BaseTensors(weight=group.weight, bias=group.bias)
        self._injection.bases[path] = whole
        if all(self._passes(places) for places in members):
            self._injection.virtual_shapes[path] = linear_shape(whole.weight)

    def _inject_single(self, places: Sequence[Site], step: StepState) -> None:
        site = places[0]
        shape = self._record_shape(site)
        if isinstance(shape, ExpertShape):
            self._inject_experts(places, shape, step)
            return
        parts = self._record_parts(site, shape) or {site.path: shape.out_features}
        stack = SlotStack(
            path=site.path,
            member_paths=tuple(parts),
            weights=self._allocate(weight_of(site.module), shape.in_features, list(parts.values())),
            cell=step.logits if self._is_logits(site) else step.tokens,
            backend=self._config.backend,
        )
        self._injection.stacks[site.path] = stack
        wrapper: LoraModule
        if shape.kind is ModuleKind.EMBEDDING:
            wrapper = LoraEmbedding(site.module, stack)
            self._injection.embed_scales[site.path] = find_embed_scale(site.module)
        elif read_linear_shape(site.module) is None:
            wrapper = LoraMerged(site.module, stack)
            self._injection.merged.add(site.path)
        elif self._is_label_layer(site):
            wrapper = ClassificationHeadWithLora(site.module, stack, self._prepacked(site))
        else:
            wrapper = LoraLinear(site.module, stack, self._prepacked(site))
        self._replace(places, wrapper)

    def _inject_experts(self, places: Sequence[Site], shape: ExpertShape, step: StepState) -> None:
        site = places[0]
        weight = weight_of(site.module)
        stack = ExpertStack(
            path=site.path,
            shape=shape,
            num_slots=self._config.max_loras,
            max_rank=self._config.max_lora_rank,
            dtype=self._config.lora_dtype or weight.dtype,
            device=weight.device,
            shares_outer=self._config.moe_shared_loras,
            cell=step.tokens,
            backend=self._config.backend,
        )
        self._injection.stacks[site.path] = stack
        self._replace(places, LoraExperts(site.module, stack))

    @property
    def _is_native(self) -> bool:
        return self._config.backend is Backend.NATIVE

    def _prepacked(self, site: Site) -> Callable[[Tensor], Tensor] | None:
        """Return a prepacked product for a module that is nothing but a product."""
        module = site.module
        linear = read_linear_shape(module)
        if not self._config.prepack_linear or linear is None:
            return None
        if linear.is_transposed or not is_plain_linear(module):
            return None
        product = prepack_product(module.weight, module.bias, native=self._is_native)
        if product is not None:
            self._injection.prepacked[site.path] = module.weight.nbytes
        return product

    def _allocate(
        self, weight: Tensor, in_features: int, out_features: Sequence[int]
    ) -> StackedWeights:
        return StackedWeights.allocate(
            num_slots=self._config.max_loras,
            max_rank=self._config.max_lora_rank,
            in_features=in_features,
            out_features=out_features,
            dtype=self._config.lora_dtype or weight.dtype,
            device=weight.device,
        )

    def _record_shape(self, site: Site) -> ModuleShape | ExpertShape:
        shape = shape_of(site.module)
        if isinstance(shape, ModuleShape) and self._is_label_layer(site):
            shape = replace(shape, max_out_features=self._config.max_labels or shape.out_features)
        self._injection.shapes[site.path] = shape
        if isinstance(shape, ModuleShape):
            self._injection.bases[site.path] = base_tensors(site.module)
        return shape

    def _record_parts(self, site: Site, shape: ModuleShape) -> dict[str, int]:
        """Record the parts of a module the model stores as one; return path -> rows, or nothing."""
        rows = self._config.fused_modules.get(site.name, {})
        if sum(rows.values()) != shape.out_features or shape.kind is not ModuleKind.LINEAR:
            return {}
        prefix = f"{site.parent_path}." if site.parent_path else ""
        parts = {prefix + name: count for name, count in rows.items()}
        whole = self._injection.bases[site.path]
        start = 0
        for path, count in parts.items():
            part = slice(start, start := start + count)
            bias = None if whole.bias is None else whole.bias[part]
            base = BaseTensors(weight=whole.weight[part], bias=bias)
            self._injection.bases[path] = base
            self._injection.virtual_shapes[path] = linear_shape(base.weight)
        return parts

    def _replace(self, places: Sequence[Site], wrapper: LoraModule) -> None:
        for site in places:
            setattr(site.parent, site.name, wrapper)
            self._injection.replaced.append(site)

    def _warn_of_unwrapped(self) -> None:
        classes: dict[str, int] = {}
        for site in self._sites:
            if site.path in self._unsupported and holds_matrix(site.module):
                name = type(site.module).__name__
                classes[name] = classes.get(name, 0) + 1
        if classes:
            found = ", ".join(f"{count} {name}" for name, count in sorted(classes.items()))
            logger.warning("modules with weight matrices that cannot carry LoRA: %s", found)

    def _report(self) -> WrapReport:
        return WrapReport(
            wrapped=tuple(self._injection.shapes),
            packed=dict(self._injection.packed),
            unpacked=dict(self._injection.unpacked),
            left_out=frozenset(self._injection.left_out),
            unsupported={
                site.path: self._unsupported[site.path]
                for site in self._sites
                if site.path in self._unsupported and has_parameters(site.module)
            },
            aliases=self._aliases,
        )


def shape_of(module: nn.Module) -> ModuleShape | ExpertShape:
    """Return the widths of a linear, embedding or experts module."""
    shape = read_shape(module)
    assert shape is not None, "modules of other classes are sorted out before"
    return shape


def linear_shape(weight: Tensor) -> ModuleShape:
    """Return the widths of a linear module with weight `[O, I]`."""
    return ModuleShape(in_features=weight.shape[1], out_features=weight.shape[0])


def base_tensors(module: nn.Module) -> BaseTensors:
    """Return weight `[O, I]` (`[V, D]` of an embedding) and bias, views of the module's."""
    weight, bias = weight_of(module).detach(), getattr(module, "bias", None)
    linear = read_linear_shape(module)
    is_transposed = linear is not None and linear.is_transposed
    return BaseTensors(
        weight=weight.t() if is_transposed else weight,
        bias=bias.detach() if isinstance(bias, Tensor) else None,
    )
