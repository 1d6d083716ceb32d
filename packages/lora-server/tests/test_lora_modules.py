"""Every way to write adapters down, every mistake in it, and the scan of a folder."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_server.errors import StartupError
from lora_server.lora_modules import LoraModule, parse_modules, scan_folder

if TYPE_CHECKING:
    from pathlib import Path

A = LoraModule(name="a", path="/p")
B = LoraModule(name="b", path="/q")


def problems_of(*items: object) -> tuple[str, ...]:
    with pytest.raises(StartupError) as caught:
        parse_modules(items)
    return caught.value.problems


@pytest.mark.parametrize(
    "items",
    [
        ["a=/p", "b=/q"],
        ["a=/p,b=/q"],
        ["a = /p , b = /q"],
        ['{"name": "a", "path": "/p"}', "b=/q"],
        [{"name": "a", "path": "/p"}, {"name": "b", "path": "/q", "base_model_name": None}],
    ],
)
def test_all_forms_mean_the_same(items: list[object]) -> None:
    assert parse_modules(items) == (A, B)


def test_an_item_is_split_at_its_first_equals_sign() -> None:
    assert parse_modules(["a=/p=1"]) == (LoraModule(name="a", path="/p=1"),)


def test_an_object_can_name_the_parent_and_a_path_with_a_comma() -> None:
    text = '{"name": "a", "path": "/p,q", "base_model_name": "org/base"}'

    assert parse_modules([text]) == (LoraModule(name="a", path="/p,q", base_model_name="org/base"),)


@given(
    st.text(st.characters(exclude_characters="=,", exclude_categories=("C", "Z")), min_size=1),
    st.text(st.characters(exclude_characters=",", exclude_categories=("C", "Z")), min_size=1),
)
def test_name_and_path_survive_both_forms(name: str, path: str) -> None:
    text = json.dumps({"name": name, "path": path})

    assert parse_modules([text]) == (LoraModule(name=name, path=path),)
    if not name.startswith("{"):
        assert parse_modules([f"{name}={path}"]) == (LoraModule(name=name, path=path),)


@pytest.mark.parametrize(
    ("item", "text"),
    [
        ("", "empty item"),
        ("a=/p,", "empty item"),
        (",a=/p", "empty item"),
        ("a=", "lacks a name or a path"),
        ("=/p", "lacks a name or a path"),
        ("a=/p,q", "a path with a comma needs the form"),
        ("a", "not NAME=PATH"),
        (5, "neither NAME=PATH nor an object"),
        ('{"name": "a"', "not JSON"),
        ('{"name": "a", "path": "/p", "path": "/q"}', "twice"),
        ('{"name": "a"}', "lacks the text 'path'"),
        ('{"name": 1, "path": "/p"}', "lacks the text 'name'"),
        ('{"name": "a", "path": ""}', "lacks the text 'path'"),
        ('{"name": "a", "path": "/p", "rank": 8}', "unknown field 'rank'"),
        ('{"name": "a", "path": "/p", "base_model_name": 7}', "'base_model_name'"),
    ],
)
def test_an_item_that_cannot_be_read_is_refused_with_the_reason(item: object, text: str) -> None:
    (problem,) = problems_of(item)

    assert text in problem


def test_all_bad_items_are_told_at_once() -> None:
    assert len(problems_of("a=/p", "b", "c=", "{", "d=/q,e")) == 4


def test_a_folder_without_a_name_leads_to_the_flag_for_folders(tmp_path: Path) -> None:
    (problem,) = problems_of(str(tmp_path))

    assert f"--lora-dir {tmp_path}" in problem


def make_adapter(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text("{}")


def test_a_scan_finds_every_folder_with_a_config_by_name_and_says_what_it_skips(
    tmp_path: Path,
) -> None:
    make_adapter(tmp_path / "zebra")
    make_adapter(tmp_path / "ant")
    (tmp_path / "notes").mkdir()
    (tmp_path / ".cache").mkdir()
    (tmp_path / "file.txt").write_text("x")

    scan = scan_folder(str(tmp_path))

    assert [module.name for module in scan.modules] == ["ant", "zebra"]
    assert scan.modules[0].path == str(tmp_path / "ant")
    assert scan.skipped == ("notes",)


def test_a_link_to_an_adapter_is_found(tmp_path: Path) -> None:
    make_adapter(tmp_path / "elsewhere" / "a")
    root = tmp_path / "root"
    root.mkdir()
    (root / "linked").symlink_to(tmp_path / "elsewhere" / "a")

    assert [module.name for module in scan_folder(str(root)).modules] == ["linked"]


def test_a_missing_folder_is_a_problem(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="No such file"):
        scan_folder(str(tmp_path / "absent"))


def test_a_folder_without_adapters_is_a_problem_that_says_what_was_seen(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()

    with pytest.raises(StartupError, match=r"holds no adapter \(1 sub-folders"):
        scan_folder(str(tmp_path))


def test_an_adapter_given_as_the_folder_is_recognised(tmp_path: Path) -> None:
    make_adapter(tmp_path / "a")

    with pytest.raises(StartupError, match="is itself an adapter"):
        scan_folder(str(tmp_path / "a"))
