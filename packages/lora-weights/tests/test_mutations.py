"""Random damage to a valid adapter is harmless, or an error that names what is wrong."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lora_weights import (
    InvalidAdapterError,
    bind_adapter,
    inspect_adapter,
    load_adapter,
    save_adapter,
)
from lora_weights.names import Part, parse_key
from lora_weights.save import RawAdapter
from lora_weights.testing import build_raw_adapter, write_adapter
from lora_weights.testing_formats import FORMATS, SHAPES, base_tensors, build_format

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from lora_weights import BoundPart

Q = "model.layers.0.self_attn.q_proj"
V = "model.layers.0.self_attn.v_proj"


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    modules = {Q: (8, 8), V: (8, 4)}
    return write_adapter(tmp_path_factory.mktemp("sound"), modules, r=2)


def loads_and_binds(folder: Path) -> tuple[dict[str, BoundPart], str]:
    """Return what an adapter does to the base of the formats, or what is wrong with it."""
    try:
        adapter = load_adapter(folder)
        return bind_adapter(adapter, SHAPES, max_rank=16, base=base_tensors), ""
    except InvalidAdapterError as error:
        return {}, str(error)


def equal(first: dict[str, BoundPart], second: dict[str, BoundPart]) -> bool:
    """Return whether two adapters do the same."""
    if first.keys() != second.keys():
        return False
    pairs = [(dict(_tensors(first[path])), dict(_tensors(second[path]))) for path in first]
    return all(
        ours.keys() == theirs.keys() and all(torch.equal(t, theirs[k]) for k, t in ours.items())
        for ours, theirs in pairs
    )


def _tensors(part: BoundPart) -> Iterator[tuple[str, torch.Tensor]]:
    if part.pair is not None:
        yield from (("a", part.pair.lora_a), ("b", part.pair.lora_b))
    if part.full is not None:
        yield "weight", part.full.weight
        if part.full.bias is not None:
            yield "full bias", part.full.bias
    yield from ((k, t) for k, t in (("gain", part.gain), ("bias", part.bias)) if t is not None)


# Segments that mean something in keys, so that a changed key is often another valid one.
WORDS = st.sampled_from(
    [
        *("base_model", "model", "module", "layers", "0", "1", "q_proj", "v_proj", "score"),
        *("lora_A", "lora_B", "weight", "bias", "base_layer", "lora_embedding_A", "default"),
        *("lora_magnitude_vector", "ia3_l", "vera_A", "vera_lambda_b", "hada_w1_a", "lokr_w1"),
        *("modules_to_save", "original_module", "lm_head", "embed_tokens", "token_adapter"),
        "trainable_tokens_delta",
    ]
)


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=25
)
@given(data=st.data())
@pytest.mark.parametrize("name", FORMATS)
def test_a_mutation_of_any_format_is_harmless_or_an_error_that_names_it(
    name: str, tmp_path: Path, data: st.DataObject
) -> None:
    raw = build_format(name)
    before, _ = loads_and_binds(save_adapter(raw, tmp_path / "before"))
    tensors = dict(raw.tensors)
    key = data.draw(st.sampled_from(sorted(tensors)))
    kind = data.draw(st.sampled_from(["renamed", "dropped", "transposed", "cut"]))
    tensor = tensors.pop(key)
    segments = key.split(".")
    if kind == "renamed":
        segments[data.draw(st.integers(0, len(segments) - 1))] = data.draw(WORDS)
        tensors.setdefault(".".join(segments), tensor)
    elif kind == "transposed":
        tensors[key] = tensor.T.contiguous() if tensor.ndim > 1 else tensor[:, None]
    elif kind == "cut":
        tensors[key] = tensor[:-1]

    after, problems = loads_and_binds(
        save_adapter(RawAdapter(config=raw.config, tensors=tensors), tmp_path / "after")
    )

    new = parse_key(".".join(segments))
    names = (key, parse_key(key).module, parse_key(key).part, ".".join(segments), new.module)
    if problems:
        assert any(word and word in problems for word in names)
        return
    # What is left has lost a module, or is spelled another way; or the shape fits as well.
    lost = before.keys() - after.keys()
    may_lose = kind in ("dropped", "renamed") and parse_key(key).part in _ALONE
    may_move = kind == "renamed" and new.module != parse_key(key).module
    is_square = kind == "transposed" and tensor.ndim > 1 and tensor.shape == tensor.T.shape
    assert equal(before, after) or (lost and may_lose) or may_move or is_square


_ALONE = {Part.IA3_GAIN, Part.FULL_WEIGHT}
"""Parts of which a module has one only."""


ANY_NAME = st.from_regex(r"[a-zA-Z_.0-9]{1,30}", fullmatch=True)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_a_renamed_key_is_placed_or_named(sound: Path, tmp_path: Path, data: st.DataObject) -> None:
    raw = build_raw_adapter({Q: (8, 8), V: (8, 4)}, r=2)
    key = data.draw(st.sampled_from(sorted(raw.tensors)))
    start = data.draw(st.integers(0, len(key)))
    stop = data.draw(st.integers(start, len(key)))
    new = key[:start] + data.draw(ANY_NAME) + key[stop:]
    tensors = {new if name == key else name: t for name, t in raw.tensors.items()}
    folder = save_adapter(RawAdapter(config=raw.config, tensors=tensors), tmp_path)

    report = inspect_adapter(folder)

    if report.is_loadable:
        assert len(report.modules) == 2
    else:
        text = "\n".join(map(str, report.problems))
        assert new in text or new.split(".lora_")[0].removeprefix("base_model.model.") in text


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    position=st.floats(0, 1, exclude_max=True),
    content=st.binary(min_size=1, max_size=8),
    cut=st.booleans(),
)
def test_damaged_bytes_are_an_error_or_another_digest(
    sound: Path, tmp_path: Path, position: float, content: bytes, cut: bool
) -> None:
    shutil.copy(sound / "adapter_config.json", tmp_path)
    data = bytearray((sound / "adapter_model.safetensors").read_bytes())
    start = int(position * len(data))
    data[start : start + len(content)] = b"" if cut else content
    (tmp_path / "adapter_model.safetensors").write_bytes(data)
    unchanged = data == (sound / "adapter_model.safetensors").read_bytes()
    in_metadata = b"__metadata__" in data and start < data.index(b"}")

    report = inspect_adapter(tmp_path)

    if report.is_loadable and not unchanged and not in_metadata:
        assert report.digest != load_adapter(sound).digest
    else:
        assert report.is_loadable or report.problems


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 300) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=6,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data(), value=JSON)
def test_any_value_in_any_field_loads_or_is_a_problem(
    sound: Path, tmp_path: Path, data: st.DataObject, value: object
) -> None:
    config = json.loads((sound / "adapter_config.json").read_text())
    field = data.draw(st.sampled_from([*sorted(config), "rank_pattern", "alpha_pattern", "other"]))
    shutil.copy(sound / "adapter_model.safetensors", tmp_path)
    (tmp_path / "adapter_config.json").write_text(json.dumps({**config, field: value}))

    report = inspect_adapter(tmp_path)

    if report.is_loadable:
        assert [summary.module for summary in report.modules] == [Q, V]
    else:
        text = "\n".join(map(str, report.problems))
        consequences = ("rank", "zero in", "once it is scaled")
        assert any(word in text for word in (field, *consequences))
