"""What is written loads again, bit-equal."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import torch

from lora_weights import RawAdapter, inspect_adapter, load_adapter, save_adapter
from lora_weights.tensors import read_safetensors
from lora_weights.testing import build_raw_adapter, llama_modules, pair_of, write_adapter

if TYPE_CHECKING:
    from pathlib import Path

MODULES = llama_modules()
EMBEDDINGS = {"model.embed_tokens": (128, 64)}


def stored(folder: Path) -> dict[str, torch.Tensor]:
    file, _ = read_safetensors(folder / "adapter_model.safetensors")
    assert file is not None
    return {entry.key: file.tensor(entry) for entry in file.entries}


def test_raw_tensors_and_configuration_are_written_as_they_are(tmp_path: Path) -> None:
    raw = build_raw_adapter(MODULES, embeddings=EMBEDDINGS, dtype=torch.bfloat16)

    folder = save_adapter(raw, tmp_path / "deep" / "folder")

    found = stored(folder)
    assert found.keys() == raw.tensors.keys()
    assert all(torch.equal(found[key], raw.tensors[key]) for key in found)
    assert json.loads((folder / "adapter_config.json").read_text()) == raw.config


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_loaded_adapter_saves_to_the_same_parts(tmp_path: Path, dtype: torch.dtype) -> None:
    folder = write_adapter(
        tmp_path / "a",
        MODULES,
        r=3,
        alpha=5,
        dtype=dtype,
        embeddings=EMBEDDINGS,
        use_rslora=True,
        rank_pattern={"model.layers.0.self_attn.q_proj": 7, "down_proj": 2},
        alpha_pattern={"layers.1.self_attn.[qk]_proj": 9},
    )
    first = load_adapter(folder)

    second = load_adapter(save_adapter(first, tmp_path / "b"))

    assert second.parts.keys() == first.parts.keys()
    for path in first.parts:
        again, pair = pair_of(second.parts, path), pair_of(first.parts, path)
        assert torch.equal(again.lora_a, pair.lora_a)
        assert torch.equal(again.lora_b, pair.lora_b)


def test_every_scaling_of_a_saved_adapter_is_exactly_one(tmp_path: Path) -> None:
    # "b.q" is a tail of "a.b.q": an unanchored pattern of one would match the other.
    modules = {"a.b.q": (8, 8), "b.q": (8, 8), "c.q": (8, 8)}
    folder = write_adapter(
        tmp_path / "a", modules, r=6, alpha=7, rank_pattern={"^a.b.q": 2, "c.q": 5}
    )

    saved = save_adapter(load_adapter(folder), tmp_path / "b")

    report = inspect_adapter(saved)
    assert {m.module: (m.rank, m.scaling) for m in report.modules} == {
        "a.b.q": (2, 1.0),
        "b.q": (6, 1.0),
        "c.q": (5, 1.0),
    }


def test_saving_again_gives_the_same_digest(tmp_path: Path) -> None:
    first = load_adapter(write_adapter(tmp_path / "a", MODULES, alpha=3))

    second = load_adapter(save_adapter(first, tmp_path / "b"))
    third = load_adapter(save_adapter(second, tmp_path / "c"))

    assert second.digest == third.digest
    assert second.digest != first.digest


def test_fields_that_are_not_about_scaling_survive(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a", MODULES, revision="main", fan_in_fan_out=True)

    saved = save_adapter(load_adapter(folder), tmp_path / "b")

    config = json.loads((saved / "adapter_config.json").read_text())
    assert (config["revision"], config["fan_in_fan_out"]) == ("main", True)


def test_the_modules_in_the_file_are_the_targets_of_the_saved_configuration(tmp_path: Path) -> None:
    folder = write_adapter(
        tmp_path / "a",
        {"layers.1.q_proj": (8, 8)},
        target_modules=".*",
        exclude_modules="q_proj",
        layers_to_transform=[1],
        init_lora_weights="eva",
    )

    saved = save_adapter(load_adapter(folder), tmp_path / "b")

    config = json.loads((saved / "adapter_config.json").read_text())
    assert config["target_modules"] == ["layers.1.q_proj"]
    assert config["exclude_modules"] is None
    assert config["layers_to_transform"] is None
    assert config["init_lora_weights"] is True


def test_copies_of_base_weights_are_written_too(tmp_path: Path) -> None:
    raw = build_raw_adapter({"lm_head": (8, 16)})
    key = "base_model.model.lm_head.base_layer.weight"
    raw = RawAdapter(config=raw.config, tensors={**raw.tensors, key: torch.ones(16, 8)})
    adapter = load_adapter(save_adapter(raw, tmp_path / "a"))

    assert torch.equal(stored(save_adapter(adapter, tmp_path / "b"))[key], torch.ones(16, 8))


def test_no_other_file_is_left_behind(tmp_path: Path) -> None:
    folder = save_adapter(build_raw_adapter(MODULES), tmp_path)

    names = sorted(path.name for path in folder.iterdir())
    assert names == ["adapter_config.json", "adapter_model.safetensors"]
