"""Renaming rules and skipped prefixes of the caller."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from lora_weights import InvalidAdapterError, ProblemCode, load_adapter
from lora_weights.renaming import Renaming
from lora_weights.testing import pair_of, write_adapter

if TYPE_CHECKING:
    from pathlib import Path

MODULES = {"old.layers.0.q_proj": (8, 8), "old.layers.1.q_proj": (8, 8), "mtp.0.q_proj": (8, 8)}


@pytest.mark.parametrize(
    ("rename", "path", "new"),
    [
        ({"old": "new"}, "old.a", ["new.a"]),
        ({"old.": "new."}, "old.a", ["new.a"]),
        ({"old": ""}, "old.a", ["a"]),
        ({"": "model"}, "old.a", ["model.old.a"]),
        ({"old.a": "b"}, "old.a", ["b"]),
        ({"ol": "new"}, "old.a", ["old.a"]),
        ({"old": "x", "old.a": "y"}, "old.a.b", ["x.a.b", "y.b"]),
        ({"old": "x", "old.a": "x.a"}, "old.a.b", ["x.a.b"]),
    ],
)
def test_prefixes_are_whole_components(rename: dict[str, str], path: str, new: list[str]) -> None:
    assert Renaming(rename=rename).new_names(path) == new


def test_modules_are_renamed_and_patterns_match_the_names_of_the_file(tmp_path: Path) -> None:
    folder = write_adapter(
        tmp_path, MODULES, r=4, rank_pattern={"old.layers.1.q_proj": 2}, alpha_pattern={"^mtp": 1}
    )

    adapter = load_adapter(folder, rename={"old": "model"})

    assert sorted(adapter.parts) == [
        "model.layers.0.q_proj",
        "model.layers.1.q_proj",
        "mtp.0.q_proj",
    ]
    assert pair_of(adapter.parts, "model.layers.1.q_proj").rank == 2


def test_skipped_tensors_are_listed_and_do_not_enter_the_digest(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "all", MODULES)
    rest = {path: size for path, size in MODULES.items() if not path.startswith("mtp")}

    adapter = load_adapter(folder, skip_prefixes=["mtp."])

    assert adapter.skipped == (
        "base_model.model.mtp.0.q_proj.lora_A.weight",
        "base_model.model.mtp.0.q_proj.lora_B.weight",
    )
    assert adapter.parts.keys() == rest.keys()
    assert adapter.digest != load_adapter(folder).digest
    assert adapter.digest == load_adapter(write_adapter(tmp_path / "rest", rest)).digest


def test_another_name_is_another_digest(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path, MODULES)

    assert load_adapter(folder, rename={"old": "x"}).digest != load_adapter(folder).digest


def test_skipping_everything_leaves_no_adapter(tmp_path: Path) -> None:
    with pytest.raises(InvalidAdapterError) as caught:
        load_adapter(write_adapter(tmp_path, MODULES), skip_prefixes=["old", "mtp"])

    assert [problem.code for problem in caught.value.problems] == [ProblemCode.NO_EFFECT]


def test_rules_that_disagree_name_both_modules(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path, MODULES)

    with pytest.raises(InvalidAdapterError) as caught:
        load_adapter(folder, rename={"old": "a", "old.layers": "b"})

    problems = caught.value.problems
    assert {problem.code for problem in problems} == {ProblemCode.AMBIGUOUS_MODULE}
    assert "a.layers.0.q_proj and to b.0.q_proj" in problems[0].found


def test_two_modules_renamed_to_one_are_named(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path, MODULES)

    with pytest.raises(InvalidAdapterError) as caught:
        load_adapter(folder, rename={"old.layers.0": "x", "mtp.0": "x"})

    assert {p.code for p in caught.value.problems} == {ProblemCode.DUPLICATE_MODULE}
