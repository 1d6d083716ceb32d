"""Trained rows of embeddings: which tokens they are, and the pairs they become."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from lora_weights import (
    AdapterConfig,
    BaseTensors,
    InvalidAdapterError,
    ProblemCode,
    RawAdapter,
    bind_adapter,
    load_adapter,
    save_adapter,
)
from lora_weights.testing_formats import SHAPES, base_tensors, build_format
from lora_weights.token_rows import assign_tokens

if TYPE_CHECKING:
    from pathlib import Path

    from lora_weights import Problem

KEY = "base_model.model.embed_tokens.token_adapter.trainable_tokens_delta"
HEAD_KEY = KEY.replace("embed_tokens", "lm_head")
TABLE = base_tensors("embed_tokens").weight


def tied(path: str) -> BaseTensors:
    """Return a base whose head is the embedding's own tensor."""
    return BaseTensors(weight=TABLE) if path in ("embed_tokens", "lm_head") else base_tensors(path)


def config(indices: object) -> AdapterConfig:
    fields = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": None}
    return AdapterConfig.from_dict({**fields, "trainable_token_indices": indices})


def refused(raw: RawAdapter, folder: Path) -> tuple[Problem, ...]:
    with pytest.raises(InvalidAdapterError) as caught:
        load_adapter(save_adapter(raw, folder))
    return caught.value.problems


def test_a_list_means_the_one_module_that_has_rows() -> None:
    assert assign_tokens(["model.embed_tokens"], config([3, 1])) == (
        {"model.embed_tokens": (3, 1)},
        [],
    )


def test_names_are_compared_by_the_plain_end_of_a_path() -> None:
    found, problems = assign_tokens(
        ["model.embed_tokens", "lm_head"], config({"embed_tokens": [1], "head": [2, 3]})
    )

    assert found == {"model.embed_tokens": (1,), "lm_head": (2, 3)}
    assert problems == []


@pytest.mark.parametrize(
    ("indices", "modules", "code"),
    [
        (None, ["embed_tokens"], ProblemCode.UNSUPPORTED_TENSOR),
        ([1], [], ProblemCode.INCOMPLETE_PAIR),
        ([1], ["a", "b"], ProblemCode.INCOMPLETE_PAIR),
        ({"embed_tokens": [1]}, ["embed_tokens", "b"], ProblemCode.AMBIGUOUS_MODULE),
        ({"tokens": [1], "embed_tokens": [2]}, ["embed_tokens"], ProblemCode.AMBIGUOUS_MODULE),
        ({"embed_tokens": [1], "b": [2]}, ["embed_tokens"], ProblemCode.MISSING_WEIGHTS),
    ],
)
def test_rows_and_tokens_that_do_not_belong_together_are_named(
    indices: object, modules: list[str], code: ProblemCode
) -> None:
    _, problems = assign_tokens(modules, config(indices))

    assert [problem.code for problem in problems] == [code]


@pytest.mark.parametrize(
    "indices", ["3", [1.0], [True], {"embed_tokens": 3}, {"embed_tokens": ["3"]}]
)
def test_tokens_that_are_no_numbers_are_named(indices: object) -> None:
    with pytest.raises(InvalidAdapterError, match="trainable_token_indices"):
        config(indices)


@pytest.mark.parametrize("indices", [[7, 0], [7, 0, 4, 5], [7, 7, 4], [-1, 0, 4]])
def test_each_row_has_one_token(indices: list[int], tmp_path: Path) -> None:
    problems = refused(build_format("tokens", trainable_token_indices=indices), tmp_path)

    assert {problem.module for problem in problems} == {"embed_tokens"}


def test_a_token_beyond_the_vocabulary_is_named_with_both_numbers(tmp_path: Path) -> None:
    adapter = load_adapter(
        save_adapter(build_format("tokens", trainable_token_indices=[7, 0, 10]), tmp_path)
    )

    with pytest.raises(InvalidAdapterError, match="for token 10, expected tokens below 10"):
        bind_adapter(adapter, SHAPES, max_rank=8, base=base_tensors)


def test_rows_become_one_rank_a_token(tmp_path: Path) -> None:
    raw = build_format("tokens")

    parts = bind_adapter(
        load_adapter(save_adapter(raw, tmp_path)), SHAPES, max_rank=8, base=base_tensors
    )

    pair = parts["embed_tokens"].pair
    assert pair is not None
    expected = TABLE.clone()
    expected[[7, 0, 4]] = raw.tensors[KEY]
    torch.testing.assert_close(TABLE + pair.lora_a.T @ pair.lora_b.T, expected)
    assert pair.rank == 3
    assert "lm_head" not in parts


def test_a_tied_head_uses_the_new_rows_too(tmp_path: Path) -> None:
    raw = build_format("tokens")

    parts = bind_adapter(load_adapter(save_adapter(raw, tmp_path)), SHAPES, max_rank=8, base=tied)

    pair = parts["lm_head"].pair
    assert pair is not None
    expected = TABLE.clone()
    expected[[7, 0, 4]] = raw.tensors[KEY]
    torch.testing.assert_close(TABLE + pair.lora_b @ pair.lora_a, expected)


def test_a_tied_head_with_rows_of_its_own_keeps_them(tmp_path: Path) -> None:
    raw = build_format(
        "tokens", trainable_token_indices={"embed_tokens": [7, 0, 4], "lm_head": [2]}
    )
    raw = RawAdapter(config=raw.config, tensors={**raw.tensors, HEAD_KEY: torch.ones(1, 8)})

    parts = bind_adapter(load_adapter(save_adapter(raw, tmp_path)), SHAPES, max_rank=8, base=tied)

    assert parts["lm_head"].rank == 1


def test_a_named_head_without_rows_must_be_tied(tmp_path: Path) -> None:
    both = {"embed_tokens": [7, 0, 4], "lm_head": [7, 0, 4]}
    adapter = load_adapter(
        save_adapter(build_format("tokens", trainable_token_indices=both), tmp_path)
    )

    with pytest.raises(InvalidAdapterError) as caught:
        bind_adapter(adapter, SHAPES, max_rank=8, base=base_tensors)

    assert [(p.code, p.module) for p in caught.value.problems] == [
        (ProblemCode.MISSING_WEIGHTS, "lm_head")
    ]
    assert bind_adapter(adapter, SHAPES, max_rank=8, base=tied)["lm_head"].rank == 3


def test_rows_and_a_pair_on_one_module_are_joined(tmp_path: Path) -> None:
    raw = build_format("tokens")
    pairs = {k: t for k, t in build_format("embedding").tensors.items() if "embedding_" in k}
    raw = RawAdapter(config=raw.config, tensors={**raw.tensors, **pairs})
    lora_a, lora_b = (pairs[f"base_model.model.embed_tokens.lora_embedding_{ab}"] for ab in "AB")

    parts = bind_adapter(
        load_adapter(save_adapter(raw, tmp_path)), SHAPES, max_rank=8, base=base_tensors
    )

    pair = parts["embed_tokens"].pair
    assert pair is not None
    expected = TABLE.clone()
    expected[[7, 0, 4]] = raw.tensors[KEY]
    torch.testing.assert_close(
        TABLE + pair.lora_a.T @ pair.lora_b.T, expected + 1.5 * (lora_b @ lora_a).T
    )
