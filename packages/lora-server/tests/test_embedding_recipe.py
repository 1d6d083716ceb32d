"""How sentence-transformers' files become a recipe, and what each recipe computes."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch

from lora_server.errors import StartupError
from lora_server.model.embedding_recipe import (
    EmbeddingRecipe,
    PoolingMode,
    read_max_length,
    read_recipe,
)

if TYPE_CHECKING:
    from pathlib import Path

STEPS = ("Transformer", "Pooling", "Normalize")


def write(folder: Path, pooling: dict[str, Any], steps: tuple[str, ...] = STEPS) -> None:
    """Write a checkpoint's files, as sentence-transformers does."""
    modules = [
        {
            "idx": i,
            "path": f"{i}_{kind}" if i else "",
            "type": f"sentence_transformers.models.{kind}",
        }
        for i, kind in enumerate(steps)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))


@pytest.mark.parametrize(
    ("pooling", "mode"),
    [
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, PoolingMode.CLS),
        ({"pooling_mode_mean_tokens": True}, PoolingMode.MEAN),
        ({"pooling_mode_lasttoken": True}, PoolingMode.LAST),
        ({"pooling_mode": "max"}, PoolingMode.MAX),
    ],
)
def test_reads_both_forms_of_the_pooling_mode(
    pooling: dict[str, Any], mode: PoolingMode, tmp_path: Path
) -> None:
    write(tmp_path, pooling)

    assert read_recipe(tmp_path, is_causal=False) == EmbeddingRecipe(mode=mode)


def test_without_a_normalising_step_embeddings_keep_their_length(tmp_path: Path) -> None:
    write(tmp_path, {"pooling_mode": "cls"}, ("Transformer", "Pooling"))

    recipe = read_recipe(tmp_path, is_causal=False)

    hidden = torch.tensor([[3.0, 4.0], [1.0, 1.0]])
    assert recipe.apply(hidden).tolist() == [3.0, 4.0]


@pytest.mark.parametrize(
    ("is_causal", "mode"), [(True, PoolingMode.LAST), (False, PoolingMode.MEAN)]
)
def test_files_that_say_nothing_leave_the_choice_to_the_attention(
    is_causal: bool, mode: PoolingMode, tmp_path: Path
) -> None:
    assert read_recipe(tmp_path, is_causal=is_causal) == EmbeddingRecipe(mode=mode)


@pytest.mark.parametrize(
    ("pooling", "steps", "text"),
    [
        ({"pooling_mode": "mean"}, ("Transformer", "Pooling", "Dense"), "Pooling, Dense"),
        ({"pooling_mode": "mean"}, ("Transformer",), "steps are Transformer"),
        ({"pooling_mode": "weightedmean"}, STEPS, "weightedmean; expected one of"),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}, STEPS, "cls, mean"),
        ({}, STEPS, "none"),
    ],
)
def test_a_step_or_mode_that_is_not_known_is_refused(
    pooling: dict[str, Any], steps: tuple[str, ...], text: str, tmp_path: Path
) -> None:
    write(tmp_path, pooling, steps)

    with pytest.raises(StartupError, match=text):
        read_recipe(tmp_path, is_causal=False)


def test_each_mode_takes_its_rows() -> None:
    hidden = torch.tensor([[3.0, 0.0], [0.0, 4.0], [3.0, 8.0]])
    found = {
        mode: EmbeddingRecipe(mode=mode, is_normalised=False).apply(hidden).tolist()
        for mode in PoolingMode
    }

    assert found == {
        PoolingMode.CLS: [3.0, 0.0],
        PoolingMode.MEAN: [2.0, 4.0],
        PoolingMode.MAX: [3.0, 8.0],
        PoolingMode.LAST: [3.0, 8.0],
    }
    normalised = EmbeddingRecipe(mode=PoolingMode.MEAN).apply(hidden)
    assert float(normalised.norm()) == pytest.approx(1.0)


def test_the_longest_text_is_read_where_it_is_said(tmp_path: Path) -> None:
    assert read_max_length(tmp_path) is None
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 256}')
    assert read_max_length(tmp_path) == 256
    (tmp_path / "sentence_bert_config.json").write_text("{")
    with pytest.raises(StartupError, match="cannot be read"):
        read_max_length(tmp_path)
