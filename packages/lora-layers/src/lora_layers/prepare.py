"""AdapterPreparer: matches an adapter with this model, packs it and casts it.

Reads descriptions that never change, so several threads may prepare at once. Knows nothing of
slots, residency or requests.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from lora_layers.content import Content, PreparedAdapter, SlotContent, make_prepared
from lora_layers.errors import AdapterMismatchError
from lora_layers.prepare_experts import ExpertLayout
from lora_layers.prepare_heads import HeadRules
from lora_layers.wrappers import ExpertStack, SlotStack
from lora_weights import (
    FullModule,
    InvalidAdapterError,
    Problem,
    ProblemCode,
    bind_adapter,
    pack_parts,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from torch import Tensor

    from lora_layers.content import Pair
    from lora_layers.inject import Injection, WrapReport
    from lora_weights import Adapter, BoundPart, ExpertShape, ModuleShape


@dataclass(frozen=True, slots=True, kw_only=True)
class StackLayout:
    """What preparation needs to know of one stack of slots."""

    path: str
    """Path of the module or packed group."""
    member_paths: tuple[str, ...]
    """Path of the module behind each slice."""
    sizes: tuple[int, ...]
    """Rows `O_p` of each slice."""
    dtype: torch.dtype
    """dtype of the slots."""
    base_dtype: torch.dtype
    """dtype of the base's weight, in which whole replacements are kept."""

    @property
    def packed_modules(self) -> dict[str, tuple[str, ...]]:
        """The stack's own packing: name -> member names; empty for a stack of one slice."""
        if len(self.member_paths) == 1:
            return {}
        name = self.path.rpartition(".")[2]
        return {name: tuple(path.rpartition(".")[2] for path in self.member_paths)}


class AdapterPreparer:
    """Matches adapters with one model. Holds descriptions only; thread-safe."""

    def __init__(
        self,
        injection: Injection,
        report: WrapReport,
        *,
        max_rank: int,
        target_modules: frozenset[str] | None,
        head_task_type: str | None = None,
    ) -> None:
        self._shapes: dict[str, ModuleShape | ExpertShape] = {
            **injection.shapes,
            **injection.virtual_shapes,
        }
        self._left_out = dict(injection.left_out)
        self._bases = dict(injection.bases)
        self._layouts = tuple(
            StackLayout(
                path=stack.path,
                member_paths=stack.member_paths,
                sizes=stack.weights.out_features,
                dtype=stack.weights.dtype,
                base_dtype=injection.bases[stack.path].weight.dtype,
            )
            for stack in injection.stacks.values()
            if isinstance(stack, SlotStack)
        )
        self._experts = {
            path: ExpertLayout(
                shape=stack.shape, dtype=stack.dtype, shares_outer=stack.w13.a_experts == 1
            )
            for path, stack in injection.stacks.items()
            if isinstance(stack, ExpertStack)
        }
        self._embed_scales = dict(injection.embed_scales)
        self._merged = frozenset(injection.merged)
        self._heads = HeadRules(injection.heads, task_type=head_task_type)
        self._report = report
        self._max_rank = max_rank
        self._target_modules = target_modules

    def prepare(self, adapter: Adapter) -> PreparedAdapter:
        """Bind an adapter to the model's modules, check it, pack it and cast it.

        Raises:
            AdapterMismatchError: modules the model does not have or that carry no LoRA here, shapes
                or ranks that do not fit, parts that cannot be applied, no effect; all at once.
        """
        problems = list(self._left_out_problems(adapter.parts))
        parts: Mapping[str, BoundPart] = {}
        try:
            # Against all modules: a name must not become clear only because some are left out.
            parts = bind_adapter(
                adapter,
                self._shapes | self._left_out,
                max_rank=self._max_rank,
                base=self._bases.get,
            )
        except InvalidAdapterError as error:
            problems += [self._explain(problem) for problem in error.problems]
        problems += self._heads.problems(parts, adapter.config)
        contents: dict[str, Content] = {}
        if not problems:
            contents, problems = self._pack(parts)
        problems += _numeric_problems(contents) if not problems else []
        if problems:
            raise AdapterMismatchError(problems, source=adapter.source)
        return make_prepared(
            contents,
            num_labels=self._heads.num_labels(parts),
            digest=adapter.digest,
            source=adapter.source,
        )

    def _pack(self, parts: Mapping[str, BoundPart]) -> tuple[dict[str, Content], list[Problem]]:
        """Sort the parts into the slices of the stacks; a stack without any is left out."""
        contents: dict[str, Content] = {}
        problems: list[Problem] = []
        for layout in self._layouts:
            own = {p: parts[p] for p in (layout.path, *layout.member_paths) if p in parts}
            if not own:
                continue
            try:
                packed = pack_parts(
                    own, layout.packed_modules, slice_sizes={layout.path: layout.sizes}
                )
            except InvalidAdapterError as error:
                problems += error.problems
            else:
                content = self._content(layout, packed[layout.path].parts)
                contents[layout.path] = content
                if layout.path in self._merged:
                    problems += _merged_problems(layout.path, content)
        for path, experts in self._experts.items():
            part = parts.get(path)
            if part is not None and part.experts is not None:
                problems += experts.problems(path, part.experts)
                contents[path] = experts.content(part.experts)
        return contents, problems

    def _content(self, layout: StackLayout, parts: Sequence[BoundPart | None]) -> SlotContent:
        """Cast the parts of a stack's slices and join what is one vector over all of them."""
        scale = self._embed_scales.get(layout.path, 1.0)
        fulls = tuple(
            None if part is None or part.full is None else _cast_full(part.full, layout, scale)
            for part in parts
        )
        return SlotContent(
            slices=tuple(_cast_pair(part, layout.dtype, scale) for part in parts),
            gain=_join([None if p is None else p.gain for p in parts], layout.sizes, fill=1.0),
            bias=_join([None if p is None else p.bias for p in parts], layout.sizes, fill=0.0),
            fulls=fulls if any(fulls) else (),
        )

    def _left_out_problems(self, modules: Iterable[str]) -> Iterable[Problem]:
        """Yield a problem for each part whose module the caller chose to leave out."""
        for module in modules:
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


def _cast_pair(part: BoundPart | None, dtype: torch.dtype, embed_scale: float) -> Pair | None:
    if part is None or part.pair is None:
        return None
    lora_b = part.pair.lora_b
    scaled = lora_b if embed_scale == 1.0 else lora_b.float() * embed_scale
    return part.pair.lora_a.to(dtype), scaled.to(dtype)


def _cast_full(full: FullModule, layout: StackLayout, embed_scale: float) -> FullModule:
    """Cast a whole replacement to the base's dtype; a scaled embedding scales it too."""
    weight = full.weight.to(layout.base_dtype)
    bias = None if full.bias is None else full.bias.to(layout.base_dtype)
    # The product is rounded as the embedding's own forward would round it.
    return FullModule(weight=weight if embed_scale == 1.0 else weight * embed_scale, bias=bias)


def _join(vectors: Sequence[Tensor | None], sizes: Sequence[int], *, fill: float) -> Tensor | None:
    """Return the slices' vectors as one `[sum O_p]` float32; None when no slice has any."""
    if all(vector is None for vector in vectors):
        return None
    return torch.cat(
        [
            torch.full((size,), fill) if vector is None else vector.float().cpu()
            for vector, size in zip(vectors, sizes, strict=True)
        ]
    )


def _merged_problems(path: str, content: SlotContent) -> Iterable[Problem]:
    """Yield what cannot be brought into a weight that is merged with a pair."""
    for name, present in (
        ("gain", content.gain is not None),
        ("bias", content.bias is not None),
        ("weight", any(content.fulls)),
    ):
        if present:
            yield Problem(
                code=ProblemCode.UNSUPPORTED_TENSOR,
                module=path,
                tensor=name,
                found="present",
                expected="a low-rank pair only, since the module does more than a product",
            )


def _find(module: str, paths: Collection[str]) -> str | None:
    """Return the path that a checkpoint's module name means: equal, or one ends with the other."""
    if module in paths:
        return module
    for path in paths:
        if path.endswith(f".{module}") or module.endswith(f".{path}"):
            return path
    return None


def _numeric_problems(contents: Mapping[str, Content]) -> Iterable[Problem]:
    """Yield what is wrong with the numbers as the slots will hold them."""
    if not any(content.has_effect() for content in contents.values()):
        found = (
            "without effect: no pair, or every lora_A or lora_B zero in the slots' dtype, or their"
            f" products zero; norm of the update: 0 over {len(contents)} modules"
        )
        yield Problem(code=ProblemCode.NO_EFFECT, found=found, expected="at least one delta")
    for path, content in contents.items():
        for name, tensor in content.tensors():
            if not torch.isfinite(tensor).all():
                yield Problem(
                    code=ProblemCode.NOT_FINITE,
                    module=path,
                    tensor=name,
                    found=f"not finite as {tensor.dtype}",
                    expected="finite values",
                )
