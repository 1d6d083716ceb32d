"""Formats with something missing, too much or too wide: refused by name, with the numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from lora_weights import (
    InvalidAdapterError,
    ModuleShape,
    ProblemCode,
    RawAdapter,
    bind_adapter,
    load_adapter,
    save_adapter,
)
from lora_weights.names import parse_key
from lora_weights.testing_formats import FORMATS, SHAPES, Q, V, base_tensors, build_format

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

    from lora_weights import BaseTensors, Problem

PREFIX = "base_model.model."


def changed(
    raw: RawAdapter, *, drop: Collection[str] = (), add: dict[str, torch.Tensor] | None = None
) -> RawAdapter:
    dropped = {PREFIX + key for key in drop} | set(drop)
    tensors = {key: tensor for key, tensor in raw.tensors.items() if key not in dropped}
    more = {PREFIX + key: tensor for key, tensor in (add or {}).items()}
    return RawAdapter(config=raw.config, tensors={**tensors, **more})


def refused(raw: RawAdapter, folder: Path, **arguments: Any) -> tuple[Problem, ...]:
    with pytest.raises(InvalidAdapterError) as caught:
        load_adapter(save_adapter(raw, folder), **arguments)
    return caught.value.problems


def unbound(
    raw: RawAdapter,
    folder: Path,
    *,
    max_rank: int = 16,
    has_base: bool = True,
    shapes: dict[str, ModuleShape] | None = None,
) -> tuple[Problem, ...]:
    adapter = load_adapter(save_adapter(raw, folder))
    with pytest.raises(InvalidAdapterError) as caught:
        bind_adapter(
            adapter,
            shapes or SHAPES,
            max_rank=max_rank,
            base=base_tensors if has_base else None,
        )
    return caught.value.problems


DROPPABLE = [
    (name, key)
    for name in FORMATS
    for key in sorted(build_format(name).tensors)
    # One module less is another adapter of the same format, and as good as this one.
    if name != "ia3" and not key.endswith("lm_head.weight")
]


@pytest.mark.parametrize(("name", "key"), DROPPABLE)
def test_a_dropped_tensor_is_named(name: str, key: str, tmp_path: Path) -> None:
    folder = save_adapter(changed(build_format(name), drop=[key]), tmp_path)
    parsed = parse_key(key)

    with pytest.raises(InvalidAdapterError) as caught:
        bind_adapter(load_adapter(folder), SHAPES, max_rank=16, base=base_tensors)

    text = str(caught.value)
    assert (parsed.module and parsed.module in text) or parsed.part in text


@pytest.mark.parametrize("name", FORMATS)
def test_a_swapped_shape_is_named(name: str, tmp_path: Path) -> None:
    raw = build_format(name)

    for index, (key, tensor) in enumerate(sorted(raw.tensors.items())):
        other = torch.randn(*tensor.shape, 2)
        folder = save_adapter(
            RawAdapter(config=raw.config, tensors={**raw.tensors, key: other}),
            tmp_path / str(index),
        )
        with pytest.raises(InvalidAdapterError) as caught:
            bind_adapter(load_adapter(folder), SHAPES, max_rank=16, base=base_tensors)
        assert ProblemCode.SHAPE_MISMATCH in {problem.code for problem in caught.value.problems}


def test_c13_a_missing_magnitude_is_named_for_each_module(tmp_path: Path) -> None:
    raw = build_format("dora")

    problems = refused(changed(raw, drop=[f"{Q}.lora_magnitude_vector"]), tmp_path)

    assert [(p.code, p.module, p.tensor) for p in problems] == [
        (ProblemCode.INCOMPLETE_PAIR, Q, "lora_magnitude_vector")
    ]
    assert "use_dora is true" in problems[0].expected


def test_c13_magnitudes_without_the_flag_are_named(tmp_path: Path) -> None:
    problems = refused(build_format("dora", use_dora=False), tmp_path)

    assert [p.code for p in problems] == [ProblemCode.UNSUPPORTED_TENSOR] * 3
    assert all("use_dora false" in p.found for p in problems)


def test_c13_a_flag_without_a_single_magnitude_is_refused(tmp_path: Path) -> None:
    problems = refused(build_format("lora", use_dora=True), tmp_path)

    assert [p.module for p in problems] == [Q, V]


def test_dora_with_a_bias_of_lora_b_is_refused_as_peft_does(tmp_path: Path) -> None:
    problems = refused(build_format("lora_bias", use_dora=True), tmp_path)

    assert problems[0].code is ProblemCode.INVALID_FIELD
    assert "lora_bias" in problems[0].tensor


def test_c14_bias_keys_without_the_field_are_named(tmp_path: Path) -> None:
    problems = refused(build_format("lora_bias", lora_bias=False), tmp_path)

    assert [p.tensor for p in problems] == [f"{PREFIX}{Q}.lora_B.bias", f"{PREFIX}{V}.lora_B.bias"]


def test_c14_a_trained_bias_that_is_missing_is_named(tmp_path: Path) -> None:
    raw = changed(build_format("bias"), drop=[f"{V}.base_layer.bias"])

    problems = unbound(raw, tmp_path)

    assert [(p.code, p.module) for p in problems] == [(ProblemCode.MISSING_WEIGHTS, V)]


def test_c14_a_copy_of_an_untrained_bias_must_equal_the_bases(tmp_path: Path) -> None:
    key = f"{Q}.base_layer.bias"
    own = base_tensors(Q).bias
    assert own is not None

    problems = unbound(changed(build_format("lora"), add={key: own + 1}), tmp_path / "other")
    adapter = load_adapter(
        save_adapter(changed(build_format("lora"), add={key: own}), tmp_path / "same")
    )

    assert [p.code for p in problems] == [ProblemCode.BASE_COPY_DIFFERS]
    assert key in problems[0].tensor
    assert Q in bind_adapter(adapter, SHAPES, max_rank=2, base=base_tensors)


@pytest.mark.parametrize("name", ["dora", "bias", "tokens"])
def test_what_depends_on_the_base_needs_its_tensors(name: str, tmp_path: Path) -> None:
    problems = unbound(build_format(name), tmp_path, has_base=False)

    assert {p.code for p in problems} == {ProblemCode.NEEDS_BASE}
    assert all(p.module for p in problems)


def test_a_trained_bias_for_a_module_without_one_is_named(tmp_path: Path) -> None:
    raw = changed(build_format("bias"), add={"lm_head.bias": torch.ones(10)})

    problems = unbound(raw, tmp_path)

    assert [(p.module, p.tensor) for p in problems] == [("lm_head", "bias")]


def test_c17_untrained_copies_count_as_applied_when_they_equal_the_base(tmp_path: Path) -> None:
    base = base_tensors("score")
    assert base.bias is not None
    copies = {"score.original_module.weight": base.weight, "score.original_module.bias": base.bias}
    raw = build_format("whole")

    adapter = load_adapter(save_adapter(changed(raw, add=copies), tmp_path / "same"))
    other = {**copies, "score.original_module.weight": base.weight + 1}
    problems = unbound(changed(raw, add=other), tmp_path / "other")

    assert adapter.digest == load_adapter(save_adapter(raw, tmp_path / "plain")).digest
    assert "score" in bind_adapter(adapter, SHAPES, max_rank=2, base=base_tensors)
    assert [(p.code, p.tensor) for p in problems] == [
        (ProblemCode.BASE_COPY_DIFFERS, f"{PREFIX}score.original_module.weight")
    ]


def test_c18_copies_of_embeddings_beside_their_pairs_must_equal_the_bases(tmp_path: Path) -> None:
    raw = build_format("embedding")
    same = {
        f"{path}.base_layer.weight": base_tensors(path).weight
        for path in ("embed_tokens", "lm_head")
    }
    taller = {"embed_tokens.base_layer.weight": torch.ones(11, 8)}

    adapter = load_adapter(save_adapter(changed(raw, add=same), tmp_path / "same"))
    problems = unbound(changed(raw, add=taller), tmp_path / "taller")

    assert set(bind_adapter(adapter, SHAPES, max_rank=2, base=base_tensors)) == {
        Q,
        V,
        "embed_tokens",
        "lm_head",
    }
    assert [p.code for p in problems] == [ProblemCode.BASE_COPY_DIFFERS]
    assert "[11, 8], not the base's [10, 8]" in problems[0].found


def test_c23_a_head_may_have_as_many_labels_as_the_base_says(tmp_path: Path) -> None:
    raw = build_format("whole")
    shapes = {**SHAPES, "score": ModuleShape(in_features=8, out_features=3, max_out_features=4)}
    fixed = {**SHAPES, "score": ModuleShape(in_features=8, out_features=3)}

    limited = unbound(raw, tmp_path / "a", shapes=shapes)
    exact = unbound(raw, tmp_path / "b", shapes=fixed)

    assert [(p.found, p.expected) for p in limited] == [("[5, 8]", "[at most 4, 8]")]
    assert [(p.found, p.expected) for p in exact] == [("[5, 8]", "[3, 8]")]


def test_c23_a_whole_tensor_of_an_unknown_name_is_named(tmp_path: Path) -> None:
    raw = changed(build_format("whole"), add={"odd_head.weight": torch.ones(3, 8)})

    problems = refused(raw, tmp_path)

    assert [p.tensor for p in problems] == [f"{PREFIX}odd_head.weight"]


@pytest.mark.parametrize("shape", [(8,), (3, 7), (3, 8, 1)])
def test_a_whole_module_of_another_size_is_named(shape: tuple[int, ...], tmp_path: Path) -> None:
    raw = changed(
        build_format("whole"), drop=["score.bias"], add={"score.weight": torch.ones(shape)}
    )

    codes = {p.code for p in unbound(raw, tmp_path)}

    assert codes == {ProblemCode.SHAPE_MISMATCH, ProblemCode.MISSING_WEIGHTS}


def test_a_saved_norm_is_kept_and_refused_where_the_base_gives_no_place_for_it(
    tmp_path: Path,
) -> None:
    raw = build_format("lora", modules_to_save=["norm"])
    raw = changed(raw, add={"norm.weight": torch.ones(8), "norm.bias": torch.ones(8)})

    problems = unbound(raw, tmp_path)

    assert [(p.code, p.module) for p in problems] == [(ProblemCode.UNKNOWN_MODULE, "norm")]


def test_a_whole_weight_beside_a_pair_is_named(tmp_path: Path) -> None:
    raw = build_format("lora", modules_to_save=["q_proj"])

    problems = refused(changed(raw, add={f"{Q}.weight": torch.ones(8, 8)}), tmp_path)

    assert [p.tensor for p in problems] == [f"{PREFIX}{Q}.weight"]


def test_an_input_gain_is_refused_with_the_reason(tmp_path: Path) -> None:
    raw = build_format("ia3", feedforward_modules=["v_proj"])
    raw = changed(raw, add={f"{V}.ia3_l": torch.ones(1, 8) * 2})

    problems = refused(raw, tmp_path)

    assert [(p.code, p.module) for p in problems] == [(ProblemCode.UNSUPPORTED_TENSOR, V)]
    assert "a gain of the module's input" in problems[0].found
    assert "full rank" in problems[0].expected


@pytest.mark.parametrize(
    ("shape", "listed", "expected"),
    [
        ((1, 8), [], "as feedforward_modules does not name the module"),
        ((4, 1), ["v_proj"], "as feedforward_modules names the module"),
        ((4, 1), ".*v_proj", "as feedforward_modules names the module"),
        ((4,), [], "a gain of the module's output"),
        ((4, 2), None, "a gain of the module's output"),
    ],
)
def test_a_gain_of_another_form_than_declared_is_named(
    shape: tuple[int, ...], listed: object, expected: str, tmp_path: Path
) -> None:
    raw = build_format("ia3", feedforward_modules=listed)

    problems = refused(changed(raw, add={f"{V}.ia3_l": torch.ones(shape) * 2}), tmp_path)

    assert [p.code for p in problems] == [ProblemCode.SHAPE_MISMATCH]
    assert expected in problems[0].expected


def test_vera_without_its_projections_says_how_to_save_them(tmp_path: Path) -> None:
    raw = build_format("vera", save_projection=False)

    missing = refused(changed(raw, drop=["base_model.vera_A", "base_model.vera_B"]), tmp_path / "a")
    contrary = refused(raw, tmp_path / "b")

    assert [p.code for p in missing] == [ProblemCode.MISSING_WEIGHTS]
    assert "save_projection=True" in missing[0].expected
    assert [p.code for p in contrary] == [ProblemCode.INVALID_FIELD]


def test_vera_projections_too_small_for_a_module_are_named(tmp_path: Path) -> None:
    raw = build_format("vera")
    short = RawAdapter(
        config=raw.config, tensors={**raw.tensors, "base_model.vera_B": torch.ones(6, 2)}
    )
    narrow = RawAdapter(
        config=raw.config, tensors={**raw.tensors, "base_model.vera_A": torch.ones(2, 7)}
    )

    rows = refused(short, tmp_path / "short")
    columns = unbound(narrow, tmp_path / "narrow")

    assert [(p.module, p.tensor) for p in rows] == [(Q, "vera_lambda_b")]
    assert [(p.module, p.code) for p in columns] == [
        (Q, ProblemCode.SHAPE_MISMATCH),
        (V, ProblemCode.SHAPE_MISMATCH),
    ]


@pytest.mark.parametrize(("name", "exact"), [("loha", 4), ("lokr", 4)])
def test_an_exact_rank_above_the_limit_is_named_with_both_numbers(
    name: str, exact: int, tmp_path: Path
) -> None:
    raw = build_format(name)

    at_load = refused(raw, tmp_path / "a", max_rank=3)
    at_bind = unbound(raw, tmp_path / "b", max_rank=3)

    for problems in (at_load, at_bind):
        assert {p.code for p in problems} == {ProblemCode.RANK_TOO_LARGE}
        assert f"of rank {exact} as an exact pair (r 2)" in str(problems[0])
        assert "at most 3" in str(problems[0])


def test_a_rank_beside_trained_tokens_counts_both(tmp_path: Path) -> None:
    raw = build_format("tokens", trainable_token_indices=list(range(3)))
    embedding = {
        key: tensor
        for key, tensor in build_format("embedding").tensors.items()
        if "lora_embedding" in key
    }
    raw = RawAdapter(config=raw.config, tensors={**raw.tensors, **embedding})

    problems = unbound(raw, tmp_path, max_rank=4)

    assert [p.found for p in problems] == ["rank 5 (3 of it for trained tokens)"]


@pytest.mark.parametrize("part", ["hada_t1", "hada_t2"])
def test_factors_of_convolutions_are_named(part: str, tmp_path: Path) -> None:
    raw = changed(build_format("loha"), add={f"{Q}.{part}": torch.ones(2, 2, 3, 3)})

    problems = refused(raw, tmp_path)

    assert f"{Q}.{part}" in problems[0].tensor


@pytest.mark.parametrize("drop", ["lokr_w1", "lokr_w2_a", "lokr_w2_b"])
def test_half_a_kronecker_product_is_named(drop: str, tmp_path: Path) -> None:
    problems = refused(changed(build_format("lokr"), drop=[f"{Q}.{drop}"]), tmp_path)

    assert [(p.code, p.module) for p in problems] == [(ProblemCode.INCOMPLETE_PAIR, Q)]


@pytest.mark.parametrize("name", FORMATS)
def test_numbers_that_are_none_are_named_in_every_format(name: str, tmp_path: Path) -> None:
    raw = build_format(name)
    key = max(raw.tensors)
    tensor = raw.tensors[key].clone()
    tensor.view(-1)[0] = torch.nan

    problems = refused(
        RawAdapter(config=raw.config, tensors={**raw.tensors, key: tensor}), tmp_path
    )

    assert [(p.code, p.tensor) for p in problems] == [(ProblemCode.NOT_FINITE, key)]


def test_a_gain_over_a_norm_of_zero_is_refused(tmp_path: Path) -> None:
    raw = build_format("dora", lora_alpha=0)
    adapter = load_adapter(save_adapter(raw, tmp_path))

    def dead(path: str) -> BaseTensors:
        tensors = base_tensors(path)
        tensors.weight[0] = 0.0
        return tensors

    with pytest.raises(InvalidAdapterError) as caught:
        bind_adapter(adapter, SHAPES, max_rank=2, base=dead)

    found = [(p.code, p.module) for p in caught.value.problems]
    assert (ProblemCode.NOT_FINITE, Q) in found


@pytest.mark.parametrize(
    ("name", "value", "keys"),
    [
        ("ia3", 1.0, ("ia3_l",)),
        ("vera", 0.0, ("vera_lambda_b",)),
        ("vera", 0.0, ("vera_A",)),
        ("loha", 0.0, ("hada_w2_b",)),
        ("lokr", 0.0, ("lokr_w1", "lokr_w1_a")),
        ("lora_bias", 0.0, ("lora_B.weight", "lora_B.bias")),
    ],
)
def test_c48_every_format_without_effect_is_refused(
    name: str, value: float, keys: tuple[str, ...], tmp_path: Path
) -> None:
    raw = build_format(name)
    tensors = {
        key: torch.full_like(tensor, value) if key.endswith(keys) else tensor
        for key, tensor in raw.tensors.items()
    }

    problems = refused(RawAdapter(config=raw.config, tensors=tensors), tmp_path)

    assert [p.code for p in problems] == [ProblemCode.NO_EFFECT]


def test_c48_what_equals_the_base_is_without_effect_on_it(tmp_path: Path) -> None:
    bias_q, bias_v = base_tensors(Q).bias, base_tensors(V).bias
    assert bias_q is not None
    assert bias_v is not None
    same: dict[str, dict[str, torch.Tensor]] = {
        "bias": {f"{Q}.base_layer.bias": bias_q, f"{V}.base_layer.bias": bias_v},
        "tokens": {
            "embed_tokens.token_adapter.trainable_tokens_delta": base_tensors(
                "embed_tokens"
            ).weight[[7, 0, 4]]
        },
        "dora": {
            f"{Q}.lora_magnitude_vector": base_tensors(Q).weight.norm(dim=1),
            f"{V}.lora_magnitude_vector": base_tensors(V).weight.norm(dim=1),
            "embed_tokens.lora_magnitude_vector": base_tensors("embed_tokens").weight.norm(dim=0),
        },
    }

    for name, tensors in same.items():
        raw = build_format(name)
        zeros = {
            key: tensor * 0
            for key, tensor in raw.tensors.items()
            if "lora_B" in key or "embedding_B" in key
        }
        raw = RawAdapter(config=raw.config, tensors={**raw.tensors, **zeros})
        problems = unbound(changed(raw, add=tensors), tmp_path / name)
        assert [p.code for p in problems] == [ProblemCode.NO_EFFECT], name


def test_a_tensor_stored_under_two_keys_must_be_one_and_the_same(tmp_path: Path) -> None:
    raw = build_format("dora")
    key = "embed_tokens.lora_magnitude_vector"
    own = raw.tensors[PREFIX + key]

    # PEFT writes both keys when it saves the embedding's own weight beside the pair.
    load_adapter(save_adapter(changed(raw, add={f"{key}.weight": own}), tmp_path / "same"))
    problems = refused(changed(raw, add={f"{key}.weight": own + 1}), tmp_path / "other")

    assert [p.code for p in problems] == [ProblemCode.DUPLICATE_TENSOR]
    assert f"{key}.weight" in problems[0].tensor


def test_velora_buffers_are_of_no_use_after_training_and_listed(tmp_path: Path) -> None:
    raw = build_format("lora", velora_config={"num_groups": 2})
    key = f"{Q}.lora_velora_embed"

    adapter = load_adapter(save_adapter(changed(raw, add={key: torch.ones(4)}), tmp_path / "a"))

    assert adapter.skipped == (PREFIX + key,)
    assert adapter.digest == load_adapter(save_adapter(raw, tmp_path / "b")).digest


def test_a_file_of_embeddings_alone_is_no_adapter(tmp_path: Path) -> None:
    raw = RawAdapter(
        config=build_format("lora").config,
        tensors={f"{PREFIX}lm_head.weight": torch.ones(10, 8)},
    )

    problems = refused(raw, tmp_path)

    assert [p.tensor for p in problems] == [f"{PREFIX}lm_head.weight"]
