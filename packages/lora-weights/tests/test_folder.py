"""Sources on this machine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lora_weights import AdapterNotFoundError, SourceError
from lora_weights.sources.folder import find_files, resolve_folder


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    folder = tmp_path / "my adapter"
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({}))
    (folder / "adapter_model.safetensors").write_bytes(b"")
    return folder


def test_every_spelling_of_a_folder_finds_it(
    adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = adapter.parent / "link"
    link.symlink_to(adapter)
    monkeypatch.chdir(adapter.parent)
    monkeypatch.setenv("HOME", str(adapter.parent))
    spellings: list[str | Path] = [
        adapter,
        str(adapter),
        f"{adapter}/",
        "my adapter",
        "./my adapter/",
        "~/my adapter",
        f"file://{adapter}",
        f"file://localhost{adapter}",
        f"file://{adapter}".replace(" ", "%20"),
        link,
    ]

    found = [find_files(source) for source in spellings]

    assert all(files.config.samefile(adapter / "adapter_config.json") for files in found)
    assert all(files.folder.is_absolute() for files in found)


@pytest.mark.parametrize("source", ["s3://bucket/a", "https://host/a", "file://host/a", "hf://o/n"])
def test_sources_elsewhere_are_refused(source: str) -> None:
    with pytest.raises(SourceError, match="only folders on this machine"):
        resolve_folder(source)


def test_a_missing_folder_is_named() -> None:
    with pytest.raises(AdapterNotFoundError, match="there is no folder /no/such/adapter"):
        find_files("/no/such/adapter")


@pytest.mark.parametrize("source", ["", "~nobody-of-this-name/adapter", "org/name"])
def test_what_names_no_folder_is_not_found(source: str) -> None:
    with pytest.raises(AdapterNotFoundError):
        find_files(source)


def test_a_file_in_place_of_a_folder_is_named(adapter: Path) -> None:
    with pytest.raises(AdapterNotFoundError, match="is a file"):
        find_files(adapter / "adapter_model.safetensors")


def test_an_empty_folder_says_what_was_expected(tmp_path: Path) -> None:
    with pytest.raises(AdapterNotFoundError, match=r"is empty, expected adapter_config\.json"):
        find_files(tmp_path)


def test_a_folder_without_configuration_lists_what_it_holds(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")

    with pytest.raises(AdapterNotFoundError, match=r"it holds model\.safetensors"):
        find_files(tmp_path)


def test_an_adapter_one_folder_deeper_is_hinted_at(adapter: Path) -> None:
    with pytest.raises(AdapterNotFoundError, match="in the sub-folder my adapter"):
        find_files(adapter.parent)


def test_weight_files_are_searched_in_order(adapter: Path) -> None:
    (adapter / "adapter_model.bin").write_bytes(b"")
    (adapter / "adapter_model.pt").write_bytes(b"")

    order = []
    while (weights := find_files(adapter).weights) is not None:
        order.append(weights.name)
        weights.unlink()

    assert order == ["adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt"]


def test_parts_of_a_sharded_checkpoint_are_listed(tmp_path: Path) -> None:
    names = [
        "adapter_config.json",
        "adapter_model-00001-of-00002.safetensors",
        "adapter_model.safetensors.index.json",
    ]
    for name in names:
        Path(tmp_path / name).write_bytes(b"")

    files = find_files(tmp_path)

    assert files.weights is None
    assert list(files.shards) == names[1:]
