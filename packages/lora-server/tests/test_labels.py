"""What files say of labels, and which of them counts."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from lora_server.errors import StartupError
from lora_server.model.labels import ProblemType, adapter_notes, build_labels, read_notes

if TYPE_CHECKING:
    from pathlib import Path

BASE = read_notes({"id2label": {0: "bad", 1: "good"}, "problem_type": "regression"})


def test_the_first_notes_with_a_name_for_every_column_decide() -> None:
    own = read_notes({"id2label": {"0": "no", "1": "yes"}})

    assert build_labels(2, own, BASE).names == ("no", "yes")
    assert build_labels(2, None, BASE).names == ("bad", "good")


@pytest.mark.parametrize(
    "names", [{"0": "a"}, {"0": "a", "1": "b", "2": "c"}, {"1": "a", "2": "b"}]
)
def test_names_for_other_columns_than_there_are_do_not_count(names: dict[str, str]) -> None:
    labels = build_labels(2, read_notes({"id2label": names}))

    assert labels.names == ("LABEL_0", "LABEL_1")


def test_problem_type_and_thresholds_come_from_the_first_that_says_so() -> None:
    own = read_notes({"id2label": {"0": "a", "1": "b"}, "threshold": 0.3, "thresholds": {"b": 0.9}})

    labels = build_labels(2, own, BASE)

    assert labels.problem_type is ProblemType.REGRESSION
    assert labels.thresholds == (0.3, 0.9)
    assert build_labels(2, None).problem_type is ProblemType.SINGLE_LABEL
    assert build_labels(2, None).thresholds == (0.5, 0.5)


def test_adapter_config_is_asked_before_the_file_beside_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"id2label": {"0": "beside"}}))

    own = adapter_notes({"id2label": {"0": "own"}}, tmp_path)
    beside = adapter_notes({"r": 8}, tmp_path)

    assert own is not None
    assert beside is not None
    assert (dict(own.names), dict(beside.names)) == ({0: "own"}, {0: "beside"})


def test_an_adapter_that_says_nothing_has_no_notes(tmp_path: Path) -> None:
    assert adapter_notes({"r": 8}, tmp_path) is None
    assert adapter_notes({}, "s3://bucket/adapter") is None
    (tmp_path / "config.json").write_text("[1]")
    assert adapter_notes({}, tmp_path) is None


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ({"id2label": ["a"]}, "id2label is a list"),
        ({"id2label": {"x": "a"}}, "id2label has 'x'"),
        ({"problem_type": "guess"}, "problem_type is 'guess', expected one of single_label"),
        ({"threshold": 2}, "threshold is 2"),
        ({"threshold": True}, "threshold is True"),
        ({"thresholds": {"nobody": 0.5}}, "thresholds has 'nobody'"),
        ({"thresholds": 0.5}, "thresholds is a float"),
    ],
)
def test_a_field_that_is_not_what_it_should_be_is_refused(
    content: dict[str, Any], text: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(content))

    with pytest.raises(StartupError, match=text):
        read_notes(content)
    with pytest.raises(StartupError, match=rf"config\.json: {text}"):
        adapter_notes({}, tmp_path)


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")

    with pytest.raises(StartupError, match=r"config\.json cannot be read"):
        adapter_notes({}, tmp_path)
