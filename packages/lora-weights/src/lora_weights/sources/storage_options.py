"""What callers pass to a storage: read by name, and never shown."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

_MIN_SECRET = 4


def check_options(options: Mapping[str, object], known: Iterable[str]) -> None:
    """Refuse options that a storage does not have.

    Raises:
        ValueError: names them, and those there are.
    """
    known = tuple(known)
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise ValueError(
            f"storage_options has {', '.join(unknown)}, expected only {', '.join(known)}"
        )


def text_option(options: Mapping[str, object], name: str) -> str | None:
    """Return an option that is a text.

    Raises:
        ValueError: it is something else.
    """
    value = options.get(name)
    if value is None or isinstance(value, str):
        return value
    raise ValueError(f"storage_options {name} is a {type(value).__name__}, expected a text")


def number_option(options: Mapping[str, object], name: str, default: float) -> float:
    """Return an option that is a positive number.

    Raises:
        ValueError: it is something else.
    """
    value = options.get(name, default)
    if isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0:
        return float(value)
    raise ValueError(f"storage_options {name} is not a positive number")


def header_option(options: Mapping[str, object], name: str) -> dict[str, str]:
    """Return an option that maps texts to texts.

    Raises:
        ValueError: it is something else.
    """
    value = options.get(name) or {}
    if isinstance(value, dict) and all(
        isinstance(text, str) for item in value.items() for text in item
    ):
        return dict(value)
    raise ValueError(f"storage_options {name} is not a mapping of texts")


def secrets_of(value: object) -> Iterator[str]:
    """Yield every text in a value, however deep, that may be a secret."""
    if isinstance(value, str):
        if len(value) >= _MIN_SECRET:
            yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from secrets_of(item)
    elif isinstance(value, (list, tuple, set)):
        for item in value:
            yield from secrets_of(item)
