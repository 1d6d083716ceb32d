"""From the text of an option to its value: numbers, sizes, switches, lists, adapters.

The same for a command line, an environment variable and a YAML file, which differ only in how they
write lists. Knows no option by name.
"""

from __future__ import annotations

import json
import re
import shlex
from typing import TYPE_CHECKING, Any

from lora_server.errors import StartupError
from lora_server.lora_modules import parse_modules
from lora_server.option_fields import OptionKind

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from lora_server.option_fields import Option

_LIST_KINDS = (OptionKind.TEXTS, OptionKind.NAMES, OptionKind.MODULES)
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?b?)", re.IGNORECASE)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_SWITCH_WORDS = {
    **dict.fromkeys(("1", "true", "yes", "on"), True),
    **dict.fromkeys(("0", "false", "no", "off"), False),
}


def is_list(option: Option) -> bool:
    """Whether the option's value is a tuple."""
    return option.kind in _LIST_KINDS


def parse_size(text: str) -> int:
    """Read a number of bytes, such as `4096`, `512M`, `2GiB` or `1.5GB`.

    `M` and `MiB` are powers of 1024, `MB` is a power of 1000.

    Raises:
        ValueError: when `text` is no size.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None or (match[3] and not match[2] and match[3].lower() != "b"):
        raise ValueError(f"{text!r} is not a size such as 512M or 2GiB")
    base = 1000 if match[2] and match[3].lower() == "b" else 1024
    return int(float(match[1]) * base ** _POWERS[match[2].lower()])


def parse_value(option: Option, raw: object) -> Any:
    """Turn what a source says into the value of the option.

    Args:
        option: says what kind of value it is.
        raw: a text, a YAML value, or a list of them where the option is a list.

    Raises:
        StartupError: with every problem of the value; they do not name the option.
    """
    if is_list(option):
        return _parse_list(option, raw)
    parsers: dict[OptionKind, Callable[[str], Any]] = {
        OptionKind.INTEGER: _parse_integer,
        OptionKind.NUMBER: _parse_number,
        OptionKind.BYTES: parse_size,
        OptionKind.SWITCH: _parse_switch,
    }
    if not isinstance(raw, str | int | float):
        raise StartupError([f"{raw!r} is not one value"])
    if isinstance(raw, bool) and {"on", "off"} <= set(option.choices):
        raw = "on" if raw else "off"  # YAML takes these words for truth values
    try:
        return parsers.get(option.kind, str)(str(raw))
    except ValueError as error:
        raise StartupError([str(error)]) from error


def split_list(text: str) -> list[object]:
    """Split a variable that holds a list: a JSON list or object, or words quoted as in a shell.

    Raises:
        StartupError: when it is neither.
    """
    try:
        if text.lstrip().startswith(("[", "{")):
            items = json.loads(text)
            return items if isinstance(items, list) else [text]
        return list(shlex.split(text))
    except ValueError as error:
        raise StartupError([f"{text!r} is no list: {error}"]) from error


def _parse_list(option: Option, raw: object) -> tuple[Any, ...]:
    items: Sequence[object] = raw if isinstance(raw, list | tuple) else [raw]
    if option.kind is OptionKind.MODULES:
        return parse_modules(items)
    problems = [f"{item!r} is not a text" for item in items if not isinstance(item, str)]
    if problems:
        raise StartupError(problems)
    texts = [str(item) for item in items]
    if option.kind is OptionKind.NAMES:
        texts = [piece.strip() for text in texts for piece in text.split(",")]
    return tuple(texts)


def _parse_integer(text: str) -> int:
    try:
        return int(text)
    except ValueError as error:
        raise ValueError(f"{text!r} is not a whole number") from error


def _parse_number(text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise ValueError(f"{text!r} is not a number") from error


def _parse_switch(text: str) -> bool:
    try:
        return _SWITCH_WORDS[text.strip().lower()]
    except KeyError:
        raise ValueError(f"{text!r} is neither true nor false") from None
