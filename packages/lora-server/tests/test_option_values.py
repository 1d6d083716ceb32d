"""From text to value: sizes, switches, numbers and lists."""

from __future__ import annotations

import pytest

from lora_server.errors import StartupError
from lora_server.option_fields import Option, OptionKind
from lora_server.option_values import parse_size, parse_value, split_list


def option(kind: OptionKind) -> Option:
    return Option(help="It.", group="g", kind=kind)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4096", 4096),
        ("4096B", 4096),
        ("1k", 1024),
        ("512M", 512 * 2**20),
        ("512MiB", 512 * 2**20),
        ("512mb", 512 * 10**6),
        ("2GiB", 2 * 2**30),
        ("1.5 GB", 1_500_000_000),
        ("1T", 2**40),
    ],
)
def test_a_size_is_read_with_its_suffix(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "M", "-1", "1Q", "1iB", "1.M", "1 2", "0x10"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        parse_size(text)


@pytest.mark.parametrize(
    ("kind", "raw", "value"),
    [
        (OptionKind.INTEGER, "12", 12),
        (OptionKind.INTEGER, 12, 12),
        (OptionKind.NUMBER, "0.5", 0.5),
        (OptionKind.NUMBER, 1, 1.0),
        (OptionKind.BYTES, 4096, 4096),
        (OptionKind.SWITCH, "Yes", True),
        (OptionKind.SWITCH, False, False),
        (OptionKind.SWITCH, "0", False),
        (OptionKind.TEXT, 12, "12"),
        (OptionKind.TEXTS, ["a,b", "c"], ("a,b", "c")),
        (OptionKind.TEXTS, "a", ("a",)),
        (OptionKind.NAMES, ["a,b", "c"], ("a", "b", "c")),
        (OptionKind.NAMES, [], ()),
    ],
)
def test_a_value_is_read_by_its_kind(kind: OptionKind, raw: object, value: object) -> None:
    assert parse_value(option(kind), raw) == value


@pytest.mark.parametrize(
    ("kind", "raw", "text"),
    [
        (OptionKind.INTEGER, "1.5", "not a whole number"),
        (OptionKind.INTEGER, True, "not a whole number"),
        (OptionKind.INTEGER, [1], "not one value"),
        (OptionKind.NUMBER, "fast", "not a number"),
        (OptionKind.SWITCH, "perhaps", "neither true nor false"),
        (OptionKind.TEXT, None, "not one value"),
        (OptionKind.TEXTS, [1], "not a text"),
        (OptionKind.MODULES, ["a"], "not NAME=PATH"),
    ],
)
def test_what_does_not_fit_its_kind_is_refused(kind: OptionKind, raw: object, text: str) -> None:
    with pytest.raises(StartupError, match=text):
        parse_value(option(kind), raw)


@pytest.mark.parametrize(
    ("text", "items"),
    [
        ("a b", ["a", "b"]),
        ("'a b' c", ["a b", "c"]),
        ('["a", {"b": 1}]', ["a", {"b": 1}]),
        ('{"name": "a"}', ['{"name": "a"}']),
    ],
)
def test_a_variable_holds_a_list_as_words_or_as_json(text: str, items: list[object]) -> None:
    assert split_list(text) == items


@pytest.mark.parametrize("text", ["'a", "[1,"])
def test_a_list_that_does_not_end_is_refused(text: str) -> None:
    with pytest.raises(StartupError, match="no list"):
        split_list(text)
