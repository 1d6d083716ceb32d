"""JSON files that come from strangers: one object, no key twice, bounded. Knows no field."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_JSON_BYTES = 16 * 2**20
"""Largest configuration or index read; real ones have a few kilobytes, indexes up to a megabyte."""

LFS_MARK = b"version https://git-lfs"
"""What a file starts with when git-lfs left its pointer in place of it."""


def parse_object(content: bytes) -> tuple[dict[str, object], tuple[str, str] | None]:
    """Parse a JSON object.

    A key that comes twice is refused: readers disagree on which of the two counts.

    Args:
        content: the file.

    Returns:
        The object, empty when there is none; and (found, expected) when the content is no object.
    """
    expected = "a JSON object"
    if content.startswith(LFS_MARK):
        return {}, ("a git-lfs pointer", "the file itself (run `git lfs pull`)")
    if not content.strip():
        return {}, ("empty", expected)
    try:
        data = json.loads(content.decode("utf-8-sig"), object_pairs_hook=unique_keys)
        # Half a surrogate pair is valid JSON, and no text that could be printed or stored.
        json.dumps(data, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        return {}, (f"not JSON ({error})", expected)
    if not isinstance(data, dict):
        return {}, (f"a JSON {type(data).__name__}", expected)
    return data, None


def unique_keys(pairs: Sequence[tuple[str, object]]) -> dict[str, object]:
    """Build an object from its pairs; for `json.loads`.

    Raises:
        ValueError: a key comes twice.
    """
    items = dict(pairs)
    if len(items) < len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"it names {key[:100]!r} twice")
            seen.add(key)
    return items
