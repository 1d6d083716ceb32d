"""What an option of the service is: its kind, its limits, and the text that explains it.

`Option` is carried in the metadata of `ServerConfig`'s fields; flags, variables, YAML keys and the
reference page are made from it. Knows no option by name.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

_KEY = "option"


class OptionKind(StrEnum):
    """How the text of an option becomes its value."""

    TEXT = "text"
    INTEGER = "integer"
    NUMBER = "number"
    BYTES = "bytes"
    SWITCH = "switch"
    CHOICE = "choice"
    TEXTS = "texts"
    """The flag takes one value and may be repeated."""
    NAMES = "names"
    """The flag takes several values, also separated by commas, and may be repeated."""
    MODULES = "modules"
    """The forms of `--lora-modules`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """What a field's metadata says about its option."""

    help: str
    """One sentence, without the default."""
    group: str
    """Heading in `--help` and in the reference."""
    kind: OptionKind
    metavar: str | None = None
    unit: str | None = None
    choices: tuple[str, ...] = ()
    minimum: float | None = None
    maximum: float | None = None
    unset: str | None = None
    """What happens when the value is None or empty; shown as the default."""
    is_positional: bool = False
    is_secret: bool = False
    """The value is not printed."""
    is_later: bool = False
    """Only the default is accepted by this version."""


def about(
    text: str,
    group: str,
    kind: OptionKind = OptionKind.TEXT,
    **details: Any,
) -> Mapping[str, Any]:
    """Make the metadata of a field; `details` are further fields of `Option`."""
    return {_KEY: Option(help=text, group=group, kind=kind, **details)}


def option_of(config_field: dataclasses.Field[Any]) -> Option:
    """Return the `Option` that a field of `ServerConfig` carries."""
    option = config_field.metadata[_KEY]
    assert isinstance(option, Option)
    return option


def flag_of(name: str) -> str:
    """Return the flag of a field, such as `--max-loras` for `max_loras`."""
    return "MODEL" if name == "model" else "--" + name.replace("_", "-")


def value_problems(config_field: dataclasses.Field[Any], value: object) -> list[str]:
    """Check the value of one field by what its `Option` says."""
    option = option_of(config_field)
    flag = flag_of(config_field.name)
    if option.is_later and value != config_field.default:
        return [
            f"{flag} is not available in this version; leave it out ({option.help.rstrip('.')})"
        ]
    if option.choices and value not in option.choices:
        return [f"{flag} is {value!r}, expected one of {', '.join(option.choices)}"]
    if isinstance(value, int | float) and not _is_within(value, option):
        return [f"{flag} is {value}, expected {_range_text(option)}"]
    if isinstance(value, tuple) and any(item in ("", None) for item in value):
        return [f"{flag} has an empty item"]
    return [f"{flag} is empty"] if value == "" and config_field.name != "model" else []


def _is_within(value: float, option: Option) -> bool:
    low = -math.inf if option.minimum is None else option.minimum
    high = math.inf if option.maximum is None else option.maximum
    return math.isfinite(value) and low <= value <= high


def _range_text(option: Option) -> str:
    unit = f" {option.unit}" if option.unit else ""
    if option.maximum is None:
        return f"at least {option.minimum}{unit}"
    return f"{option.minimum} to {option.maximum}{unit}"
