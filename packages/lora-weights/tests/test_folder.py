"""Folders on this machine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lora_weights import AdapterNotFoundError, SourceError, load_adapter
from lora_weights.sources.folder import INDEX_FILE, find_files
from lora_weights.testing import write_adapter


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    folder = tmp_path / "my adapter"
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({}))
    (folder / "adapter_model.safetensors").write_bytes(b"")
    return folder


def test_c05_every_spelling_of_a_folder_finds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_adapter(tmp_path / "my adapter", {"q_proj": (8, 8)})
    link = tmp_path / "link"
    link.symlink_to(folder)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    spellings: list[str | Path] = [
        folder,
        Path("my adapter"),
        str(folder),
        f"{folder}/",
        "my adapter",
        "./my adapter/",
        "~/my adapter",
        f"file://{folder}",
        f"FILE://localhost{folder}",
        f"file://{folder}".replace(" ", "%20"),
        link,
    ]

    found = [load_adapter(source) for source in spellings]

    assert len({adapter.digest for adapter in found}) == 1
    assert all(Path(adapter.source).is_absolute() for adapter in found)


def test_files_that_are_links_are_read(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "blobs", {"q_proj": (8, 8)})
    linked = tmp_path / "linked"
    linked.mkdir()
    for path in folder.iterdir():
        (linked / path.name).symlink_to(path)

    assert load_adapter(linked).digest == load_adapter(folder).digest


@pytest.mark.parametrize("is_folder", [True, False])
def test_a_link_that_leads_nowhere_is_named(tmp_path: Path, is_folder: bool) -> None:
    name = "adapter" if is_folder else "adapter_config.json"
    (tmp_path / name).symlink_to(tmp_path / "gone")

    with pytest.raises(AdapterNotFoundError, match=r"link to .*not there"):
        find_files(tmp_path / name if is_folder else tmp_path)


def test_a_missing_folder_is_named() -> None:
    with pytest.raises(AdapterNotFoundError, match="there is no folder /no/such/adapter"):
        find_files("/no/such/adapter")


@pytest.mark.parametrize("source", ["", "~nobody-of-this-name/adapter", "a\0b", "./org/name"])
def test_c05_what_names_no_folder_is_not_found(source: str) -> None:
    with pytest.raises(AdapterNotFoundError):
        load_adapter(source)


def test_a_file_address_with_another_host_is_refused() -> None:
    with pytest.raises(SourceError, match="names the host 'other'"):
        load_adapter("file://other/adapter")


def test_a_file_in_place_of_a_folder_is_named(adapter: Path) -> None:
    with pytest.raises(AdapterNotFoundError, match="is a file"):
        find_files(adapter / "adapter_model.safetensors")


def test_c05_an_empty_folder_says_what_was_expected(tmp_path: Path) -> None:
    with pytest.raises(AdapterNotFoundError, match=r"is empty, expected adapter_config\.json"):
        find_files(tmp_path)


def test_c05_weights_alone_are_no_adapter(tmp_path: Path) -> None:
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")

    with pytest.raises(AdapterNotFoundError, match=r"holds no adapter_config\.json.*weights alone"):
        find_files(tmp_path)


def test_a_configuration_that_is_a_folder_is_none(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").mkdir()

    with pytest.raises(AdapterNotFoundError, match=r"holds no adapter_config\.json"):
        find_files(tmp_path)


@pytest.mark.parametrize("name", ["model.safetensors", "model-00001-of-00002.safetensors"])
def test_c05_a_full_model_is_told_from_an_adapter(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / name).write_bytes(b"")

    with pytest.raises(AdapterNotFoundError, match=f"{name} belongs to a full model"):
        find_files(tmp_path)


def test_c05_an_adapter_one_folder_deeper_is_hinted_at(adapter: Path) -> None:
    with pytest.raises(AdapterNotFoundError, match="is one in the sub-folder my adapter"):
        find_files(adapter.parent)


def test_c05_all_adapters_below_a_folder_are_listed(tmp_path: Path) -> None:
    for name in ("checkpoint-100", "checkpoint-200", "checkpoint-200/other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_config.json").write_text("{}")
    (tmp_path / "runs").mkdir()

    with pytest.raises(AdapterNotFoundError) as caught:
        find_files(tmp_path)

    hint = "are some in the sub-folders checkpoint-100, checkpoint-200, checkpoint-200/other"
    assert caught.value.reason.endswith(hint)


def test_odd_names_are_listed_as_text_that_can_be_printed(tmp_path: Path) -> None:
    (tmp_path / "evil\x1b[2J").write_bytes(b"")
    Path(f"{tmp_path}/\udcff").write_bytes(b"")

    with pytest.raises(AdapterNotFoundError) as caught:
        find_files(tmp_path)

    assert caught.value.reason.isprintable()
    caught.value.reason.encode()


def test_weight_files_are_searched_in_order(adapter: Path) -> None:
    for name in ("adapter_model.bin", "adapter_model.pt", INDEX_FILE):
        (adapter / name).write_bytes(b"")

    order = []
    while (weights := find_files(adapter).weights) is not None:
        order.append(weights.name)
        weights.unlink()

    assert order == [
        "adapter_model.safetensors",
        INDEX_FILE,
        "adapter_model.bin",
        "adapter_model.pt",
    ]


def test_parts_of_a_sharded_checkpoint_are_listed(tmp_path: Path) -> None:
    names = [
        "adapter_config.json",
        "adapter_model-00001-of-00002.safetensors",
        "adapter_model.bin.index.json",
    ]
    for name in names:
        Path(tmp_path / name).write_bytes(b"")

    files = find_files(tmp_path)

    assert files.weights is None
    assert list(files.shards) == names[1:]
