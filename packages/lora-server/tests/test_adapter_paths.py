"""Where adapters may be loaded from over HTTP."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from lora_server.adapters.paths import AdapterRoots
from lora_server.errors import PathNotAllowedError, RuntimeLoadingDisabledError

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "root"
    (root / "law v1").mkdir(parents=True)
    (tmp_path / "outside").mkdir()
    return root


def test_a_folder_below_a_root_is_found_however_it_is_written(root: Path) -> None:
    roots = AdapterRoots([str(root)])
    (root / "link").symlink_to(root / "law v1")

    written = [
        "law v1",
        "law v1/",
        f"{root}/law v1",
        f"file://{root}/law v1",
        "x/../law v1",
        "link",
    ]

    assert {roots.resolve(path) for path in written} == {root / "law v1"}


def test_a_missing_folder_below_a_root_is_allowed_so_that_it_can_be_reported(root: Path) -> None:
    assert AdapterRoots([str(root)]).resolve("absent") == root / "absent"


@pytest.mark.parametrize(
    "path", ["../outside", "/etc", "law v1/../../outside", "escape", "~", "a\0b", "file:///etc"]
)
def test_what_leads_out_of_every_root_is_refused(root: Path, path: str) -> None:
    (root / "escape").symlink_to(root.parent / "outside")

    with pytest.raises(PathNotAllowedError):
        AdapterRoots([str(root)]).resolve(path)


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_config.json", "shards"])
@pytest.mark.parametrize("target", ["outside/secret", "outside", "nowhere"])
def test_a_file_that_is_linked_from_outside_is_refused(root: Path, name: str, target: str) -> None:
    (root.parent / "outside" / "secret").write_text("secret")
    (root / "law v1" / name).symlink_to(root.parent / target)

    with pytest.raises(PathNotAllowedError, match=f"links that lead out.*'{name}'") as caught:
        AdapterRoots([str(root)]).resolve("law v1")

    assert "outside/secret" not in str(caught.value)


def test_a_link_that_leads_out_by_way_of_another_is_refused(root: Path) -> None:
    (root / "step").symlink_to(root.parent / "outside")
    (root / "law v1" / "adapter_config.json").symlink_to(root / "step" / "config")

    with pytest.raises(PathNotAllowedError):
        AdapterRoots([str(root)]).resolve("law v1")


def test_links_between_folders_below_the_roots_are_followed(root: Path, tmp_path: Path) -> None:
    other = tmp_path / "blobs"
    other.mkdir()
    (other / "abc").write_text("{}")
    (root / "law v1" / "adapter_config.json").symlink_to(other / "abc")
    (root / "law v1" / "again.json").symlink_to("adapter_config.json")

    assert AdapterRoots([str(root), str(other)]).resolve("law v1") == root / "law v1"
    with pytest.raises(PathNotAllowedError, match=r"'adapter_config.json', 'again.json'"):
        AdapterRoots([str(root)]).resolve("law v1")


def test_a_loop_of_links_is_refused(root: Path) -> None:
    (root / "law v1" / "one").symlink_to("two")
    (root / "law v1" / "two").symlink_to("one")
    (root / "loop").symlink_to("loop")

    for path in ("law v1", "loop"):
        with pytest.raises(PathNotAllowedError):
            AdapterRoots([str(root)]).resolve(path)


def test_a_sibling_whose_name_begins_like_a_root_is_outside(root: Path) -> None:
    twin = root.with_name("root-private")
    twin.mkdir()

    with pytest.raises(PathNotAllowedError):
        AdapterRoots([str(root)]).resolve(str(twin))


def test_without_a_root_nothing_is_loaded() -> None:
    with pytest.raises(RuntimeLoadingDisabledError, match="--adapter-root"):
        AdapterRoots([]).resolve("anything")
