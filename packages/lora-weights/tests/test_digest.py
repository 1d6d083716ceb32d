"""The digest is the same for the same content and differs for any other."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch

from lora_weights import RawAdapter, load_adapter, save_adapter
from lora_weights.testing import build_raw_adapter
from lora_weights.testing_formats import FORMATS, build_format

if TYPE_CHECKING:
    from pathlib import Path

MODULES = {"layers.0.q_proj": (8, 8), "layers.1.q_proj": (8, 8)}
B = "base_model.model.layers.1.q_proj.lora_B.weight"


def digest(
    folder: Path,
    *,
    tensors: dict[str, torch.Tensor] | None = None,
    raw: RawAdapter | None = None,
    **config: object,
) -> str:
    raw = raw or build_raw_adapter(MODULES, r=4, alpha=8)
    saved = RawAdapter(config={**raw.config, **config}, tensors={**raw.tensors, **(tensors or {})})
    return load_adapter(save_adapter(saved, folder)).digest


@pytest.fixture
def plain(tmp_path: Path) -> str:
    return digest(tmp_path / "plain")


def test_it_is_sha256_in_hex(plain: str) -> None:
    assert len(plain) == 64
    assert int(plain, 16) > 0


@pytest.mark.parametrize(
    "config",
    [
        {"lora_dropout": 0.3},
        {"task_type": None},
        {"base_model_name_or_path": "/elsewhere"},
        {"target_modules": ["q_proj", "absent"]},
        {"peft_version": "0.4.0"},
        {"inference_mode": False},
        {"init_lora_weights": "gaussian"},
        {"lora_alpha": 8.0},
        {"rank_pattern": None},
        {"unknown_field": None},
        {"fan_in_fan_out": True},
    ],
)
def test_fields_that_change_nothing_do_not_enter(
    tmp_path: Path, plain: str, config: dict[str, Any]
) -> None:
    assert digest(tmp_path / "other", **config) == plain


@pytest.mark.parametrize(
    "config",
    [
        {"lora_alpha": 9},
        {"use_rslora": True},
        {"alpha_pattern": {"layers.1.q_proj": 16}},
        {"alpha_pattern": {"nothing_of_this_name": 16}},
    ],
)
def test_scalings_and_patterns_enter(tmp_path: Path, plain: str, config: dict[str, Any]) -> None:
    assert digest(tmp_path / "other", **config) != plain


def test_the_order_of_patterns_enters_only_where_it_matters(tmp_path: Path) -> None:
    disjoint = {"layers.0.q_proj": 2.0, "layers.1.q_proj": 3.0}
    overlapping = {"q_proj": 2.0, "layers.1.q_proj": 3.0}

    def both_orders(patterns: dict[str, float], name: str) -> tuple[str, str]:
        turned = dict(reversed(patterns.items()))
        first = digest(tmp_path / f"{name}1", alpha_pattern=patterns)
        return first, digest(tmp_path / f"{name}2", alpha_pattern=turned)

    same, turned_same = both_orders(disjoint, "a")
    one, other = both_orders(overlapping, "b")

    assert same == turned_same
    assert one != other


def test_key_order_of_both_files_does_not_enter(tmp_path: Path, plain: str) -> None:
    raw = build_raw_adapter(MODULES, r=4, alpha=8)
    turned = RawAdapter(
        config=dict(reversed(list(raw.config.items()))),
        tensors=dict(reversed(list(raw.tensors.items()))),
    )

    assert digest(tmp_path / "turned", raw=turned) == plain


def test_data_order_inside_the_file_does_not_enter(tmp_path: Path, plain: str) -> None:
    folder = save_adapter(build_raw_adapter(MODULES, r=4, alpha=8), tmp_path / "moved")
    path = folder / "adapter_model.safetensors"
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    keys = sorted((key for key in header if key != "__metadata__"), reverse=True)
    moved, position, pieces = {}, 0, []
    for key in keys:
        start, end = header[key]["data_offsets"]
        moved[key] = {**header[key], "data_offsets": [position, position + end - start]}
        position += end - start
        pieces.append(data[start:end])
    text = json.dumps(moved).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(pieces))

    assert load_adapter(folder).digest == plain


def test_every_single_tensor_value_enters(tmp_path: Path, plain: str) -> None:
    raw = build_raw_adapter(MODULES, r=4, alpha=8)

    for number, (key, tensor) in enumerate(raw.tensors.items()):
        other = tensor.clone()
        other.view(-1)[-1] = torch.nextafter(other.view(-1)[-1], torch.tensor(9.0))
        assert digest(tmp_path / str(number), tensors={key: other}) != plain


def test_the_sign_of_zero_and_the_type_enter(tmp_path: Path) -> None:
    raw = build_raw_adapter(MODULES, r=4, alpha=8)
    zero = {B: raw.tensors[B] * 0}
    negative = {B: raw.tensors[B] * -0.0}
    half = {B: raw.tensors[B].half()}

    found = {
        digest(tmp_path / name, tensors=tensors)
        for name, tensors in (("zero", zero), ("negative", negative), ("half", half))
    }

    assert len(found) == 3


def test_swapping_two_modules_enters(tmp_path: Path, plain: str) -> None:
    raw = build_raw_adapter(MODULES, r=4, alpha=8)
    first = B.replace("layers.1", "layers.0")

    swapped = digest(tmp_path / "x", tensors={first: raw.tensors[B], B: raw.tensors[first]})

    assert swapped != plain


def test_the_type_asked_for_does_not_enter(tmp_path: Path, plain: str) -> None:
    folder = save_adapter(build_raw_adapter(MODULES, r=4, alpha=8), tmp_path)

    assert load_adapter(folder, dtype=torch.bfloat16).digest == plain


@pytest.mark.parametrize("name", FORMATS)
def test_every_tensor_of_every_format_enters(name: str, tmp_path: Path) -> None:
    raw = build_format(name)
    digests = {digest(tmp_path / "plain", raw=raw)}

    for index, key in enumerate(sorted(raw.tensors)):
        changed = {key: raw.tensors[key] + 1}
        digests.add(digest(tmp_path / str(index), raw=raw, tensors=changed))

    assert len(digests) == 1 + len(raw.tensors)


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("tokens", {"trainable_token_indices": [0, 7, 4]}),
        ("tokens", {"trainable_token_indices": [7, 0, 5]}),
        ("tokens", {"ensure_weight_tying": True}),
        ("loha", {"alpha": 4}),
        ("lokr", {"alpha_pattern": {"q_proj": 4}}),
    ],
)
def test_fields_of_other_formats_that_change_the_result_enter(
    name: str, config: dict[str, Any], tmp_path: Path
) -> None:
    raw = build_format(name)

    assert digest(tmp_path / "a", raw=raw) != digest(tmp_path / "b", raw=raw, **config)


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("tokens", {"trainable_token_indices": {"embed_tokens": [7, 0, 4]}}),
        ("whole", {"modules_to_save": ["lm_head", "score"]}),
        ("loha", {"rank_dropout": 0.5, "module_dropout": 0.1, "init_weights": False}),
        ("lokr", {"rank_dropout_scale": True, "decompose_factor": 4}),
        ("vera", {"projection_prng_key": 7, "d_initial": 0.5}),
    ],
)
def test_fields_of_other_formats_that_change_nothing_do_not_enter(
    name: str, config: dict[str, Any], tmp_path: Path
) -> None:
    raw = build_format(name)

    assert digest(tmp_path / "a", raw=raw) == digest(tmp_path / "b", raw=raw, **config)
