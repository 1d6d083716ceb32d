"""Random damage to a valid adapter is harmless, or an error that names what is wrong."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lora_weights import inspect_adapter, load_adapter, save_adapter
from lora_weights.save import RawAdapter
from lora_weights.testing import build_raw_adapter, write_adapter

if TYPE_CHECKING:
    from pathlib import Path

Q = "model.layers.0.self_attn.q_proj"
V = "model.layers.0.self_attn.v_proj"


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    modules = {Q: (8, 8), V: (8, 4)}
    return write_adapter(tmp_path_factory.mktemp("sound"), modules, r=2)


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
