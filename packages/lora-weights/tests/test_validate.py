"""bind_adapter: names, shapes, kinds, ranks against a base model; everything at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lora_weights import (
    Adapter,
    AdapterConfig,
    BaseTensors,
    BoundPart,
    FullModule,
    InvalidAdapterError,
    LoraPair,
    ModuleKind,
    ModulePart,
    ModuleShape,
    ProblemCode,
    bind_adapter,
)
from lora_weights.adapter import BaseCopy
from lora_weights.paths import ModulePaths
from lora_weights.testing import llama_modules

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from lora_weights import Problem

MODULES = llama_modules()
Q = "model.layers.0.self_attn.q_proj"


def shape(in_features: int, out_features: int, kind: ModuleKind = ModuleKind.LINEAR) -> ModuleShape:
    return ModuleShape(in_features=in_features, out_features=out_features, kind=kind)


SHAPES = {path: shape(*size) for path, size in MODULES.items()}


def part(
    in_features: int, out_features: int, *, rank: int = 4, is_embedding: bool = False
) -> ModulePart:
    pair = LoraPair(
        lora_a=torch.ones(rank, in_features),
        lora_b=torch.ones(out_features, rank),
        is_embedding=is_embedding,
    )
    return ModulePart(pair=pair)


def adapter(
    parts: dict[str, ModulePart],
    *,
    modules_to_save: tuple[str, ...] = (),
    base_copies: dict[str, BaseCopy] | None = None,
) -> Adapter:
    config = AdapterConfig(r=4, lora_alpha=4.0, modules_to_save=modules_to_save)
    return Adapter(
        config=config, parts=parts, digest="0" * 64, source="here", base_copies=base_copies or {}
    )


def problems_of(
    parts: dict[str, ModulePart],
    shapes: dict[str, ModuleShape] | None = None,
    *,
    max_rank: int = 64,
    modules_to_save: tuple[str, ...] = (),
) -> tuple[Problem, ...]:
    with pytest.raises(InvalidAdapterError) as caught:
        bind_adapter(
            adapter(parts, modules_to_save=modules_to_save), shapes or SHAPES, max_rank=max_rank
        )
    assert caught.value.source == "here"
    return caught.value.problems


def pairs_of(parts: Mapping[str, ModulePart | BoundPart]) -> dict[str, LoraPair | None]:
    return {path: found.pair for path, found in parts.items()}


def full_size(rename: Callable[[str], str] = lambda path: path) -> dict[str, ModulePart]:
    return {rename(path): part(*size) for path, size in MODULES.items()}


def test_exact_names_bind_to_themselves() -> None:
    parts = full_size()

    assert pairs_of(bind_adapter(adapter(parts), SHAPES, max_rank=4)) == pairs_of(parts)


@pytest.mark.parametrize(
    "rename",
    [
        lambda path: path.removeprefix("model."),
        lambda path: f"model.{path}",
        lambda path: f"base.wrapped.{path}",
    ],
    ids=["one model. too few", "one too many", "another wrapper"],
)
def test_a_unique_tail_binds_every_module_to_the_same_place(rename: Callable[[str], str]) -> None:
    parts = full_size(rename)

    bound = bind_adapter(adapter(parts), SHAPES, max_rank=4)

    assert pairs_of(bound) == {path: parts[rename(path)].pair for path in MODULES}


def test_text_only_names_bind_inside_a_multimodal_wrapper() -> None:
    shapes = {p.replace("model.", "model.language_model.", 1): s for p, s in SHAPES.items()}

    bound = bind_adapter(adapter(full_size()), shapes, max_rank=4)

    assert set(bound) == set(shapes)


def test_names_that_fit_two_towers_are_ambiguous() -> None:
    shapes = {f"{tower}.{path}": s for tower in ("text", "vision") for path, s in SHAPES.items()}

    problems = problems_of({Q: part(64, 64)}, shapes)

    assert [problem.code for problem in problems] == [ProblemCode.AMBIGUOUS_MODULE]
    assert f"text.{Q}, vision.{Q}" in problems[0].found


def test_an_exact_name_wins_over_a_tail() -> None:
    shapes = {"lm_head": shape(8, 8), "draft.lm_head": shape(8, 8)}

    assert list(bind_adapter(adapter({"lm_head": part(8, 8)}), shapes, max_rank=4)) == ["lm_head"]


def test_unknown_modules_are_all_named() -> None:
    parts = {**full_size(), "model.layers.99.self_attn.q_proj": part(64, 64), "x": part(1, 1)}

    problems = problems_of(parts)

    assert {problem.code for problem in problems} == {ProblemCode.UNKNOWN_MODULE}
    assert [problem.module for problem in problems] == ["model.layers.99.self_attn.q_proj", "x"]


def test_a_tail_ends_at_a_dot() -> None:
    problems = problems_of({"model.layers.10.q_proj": part(8, 8)}, {"0.q_proj": shape(8, 8)})

    assert [problem.code for problem in problems] == [ProblemCode.UNKNOWN_MODULE]


def test_two_modules_for_one_place_name_each_other() -> None:
    problems = problems_of({Q: part(64, 64), f"model.{Q}": part(64, 64)})

    assert [problem.code for problem in problems] == [ProblemCode.DUPLICATE_MODULE]
    assert Q in problems[0].found


def test_two_models_in_one_file_do_not_share_a_base() -> None:
    shapes = {"layers.0.q_proj": shape(8, 8), "layers.1.q_proj": shape(8, 8)}
    parts = {"text.layers.0.q_proj": part(8, 8), "draught.layers.1.q_proj": part(8, 8)}

    problems = problems_of(parts, shapes)

    assert [problem.code for problem in problems] == [ProblemCode.AMBIGUOUS_MODULE] * 2
    assert "draught, text" in problems[0].found


def test_shapes_are_compared_with_the_base() -> None:
    problems = problems_of({Q: part(60, 70)})

    assert [str(problem) for problem in problems] == [
        f"{Q} lora_A is [4, 60], expected [4, 64]",
        f"{Q} lora_B is [70, 4], expected [64, 4]",
    ]


def test_the_rank_limit_is_named_with_both_numbers() -> None:
    problems = problems_of({Q: part(64, 64, rank=9)}, max_rank=8)

    assert [str(problem) for problem in problems] == [f"{Q} lora_A is rank 9, expected at most 8"]


def test_embedding_pairs_bind_to_embeddings_only() -> None:
    shapes = {"embed": shape(128, 64, ModuleKind.EMBEDDING), "lm_head": shape(64, 128)}
    good = {"embed": part(128, 64, is_embedding=True), "lm_head": part(64, 128)}
    bad = {"embed": part(128, 64), "lm_head": part(64, 128, is_embedding=True)}

    problems = problems_of(bad, shapes)

    assert pairs_of(bind_adapter(adapter(good), shapes, max_rank=4)) == pairs_of(good)
    assert [problem.code for problem in problems] == [ProblemCode.KIND_MISMATCH] * 2


def test_another_vocabulary_is_a_shape_problem() -> None:
    shapes = {"embed": shape(128, 64, ModuleKind.EMBEDDING)}

    problems = problems_of({"embed": part(130, 64, is_embedding=True)}, shapes)

    assert [str(problem) for problem in problems] == [
        "embed lora_embedding_A is [4, 130], expected [4, 128]"
    ]


def test_all_kinds_of_problems_come_in_one_error() -> None:
    parts = {Q: part(60, 64), "nowhere": part(1, 1), f"x.{Q}": part(64, 64)}

    codes = {problem.code for problem in problems_of(parts)}

    assert codes == {
        ProblemCode.SHAPE_MISMATCH,
        ProblemCode.UNKNOWN_MODULE,
        ProblemCode.DUPLICATE_MODULE,
    }


def test_a_listed_module_that_the_base_has_needs_its_weight() -> None:
    shapes = {**SHAPES, "score": shape(64, 2)}
    whole = ModulePart(full=FullModule(weight=torch.ones(2, 64)))
    listed = ("classifier", "score")

    problems = problems_of({Q: part(64, 64)}, shapes, modules_to_save=listed)
    bound = bind_adapter(adapter({"score": whole}, modules_to_save=listed), shapes, max_rank=4)

    assert [(p.code, p.module) for p in problems] == [(ProblemCode.MISSING_WEIGHTS, "score")]
    assert bound["score"].full is whole.full


def test_a_listed_module_that_the_base_lacks_is_normal() -> None:
    found = adapter({Q: part(64, 64)}, modules_to_save=("classifier", "score"))

    assert list(bind_adapter(found, SHAPES, max_rank=4)) == [Q]


def bind_with_copy(copy: torch.Tensor, base: torch.Tensor | None) -> dict[str, BoundPart]:
    shapes = {"lm_head": shape(8, 16)}
    copies = BaseCopy(weights={"lm_head.base_layer.weight": copy})
    found = adapter({"lm_head": part(8, 16)}, base_copies={"lm_head": copies})
    tensors = None if base is None else BaseTensors(weight=base)
    return bind_adapter(found, shapes, max_rank=4, base=lambda _: tensors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_copy_of_the_base_weight_passes_when_equal(dtype: torch.dtype) -> None:
    copy = torch.randn(16, 8)

    assert list(bind_with_copy(copy, copy.to(dtype))) == ["lm_head"]


@pytest.mark.parametrize(
    ("base", "found"),
    [
        (torch.zeros(16, 8), "another weight"),
        (torch.zeros(17, 8), "[16, 8], not the base's [17, 8]"),
        (None, "cannot be compared"),
    ],
)
def test_any_other_copy_is_refused_by_name(base: torch.Tensor | None, found: str) -> None:
    with pytest.raises(InvalidAdapterError) as caught:
        bind_with_copy(torch.ones(16, 8), base)

    assert [problem.code for problem in caught.value.problems] == [ProblemCode.BASE_COPY_DIFFERS]
    assert found in caught.value.problems[0].found


PATHS = st.lists(st.sampled_from(["model", "a", "b", "q"]), min_size=1, max_size=4).map(".".join)


@given(paths=st.sets(PATHS, max_size=8), path=PATHS)
def test_what_is_found_is_the_name_itself_or_differs_by_leading_parts_or_wrappers(
    paths: set[str], path: str
) -> None:
    found = ModulePaths(paths).find(path)

    if path in paths:
        assert found == [path]
    for base in found:
        assert base in paths
        one, other = path.split("."), base.split(".")
        shared = min(len(one), len(other))
        is_tail = one[-shared:] == other[-shared:]
        inner = [[part for part in parts if part != "model"] for parts in (one, other)]
        assert is_tail or inner[0] == inner[1]
