"""Checkpoints in several safetensors files: the index and what it promises. Opens no file.

The index is transformers' ``*.safetensors.index.json``, an object whose ``weight_map`` maps each
tensor key to a file name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lora_weights.errors import Problem, ProblemCode
from lora_weights.json_object import parse_object
from lora_weights.sources.folder import INDEX_FILE

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from lora_weights.tensor_format import TensorEntry

MAX_SHARDS = 1000
"""Most files of one checkpoint."""


def parse_index(content: bytes) -> tuple[dict[str, str], list[Problem]]:
    """Return tensor key -> file name, or what is wrong with the index.

    Args:
        content: the index file.
    """
    data, fault = parse_object(content)
    if fault is not None:
        return {}, [_index_problem(*fault)]
    table = data.get("weight_map")
    if not isinstance(table, dict) or not table:
        return {}, [_index_problem("without a weight_map", "tensor names mapped to file names")]
    bad = [key for key, name in table.items() if not is_plain_name(name)]
    if bad:
        found = f"mapping {bad[0][:100]!r} to {str(table[bad[0]])[:100]!r}"
        return {}, [_index_problem(found, "a .safetensors file beside it")]
    if len(set(table.values())) > MAX_SHARDS:
        found = f"naming {len(set(table.values()))} files"
        return {}, [_index_problem(found, f"at most {MAX_SHARDS}")]
    return {str(key): str(name) for key, name in table.items()}, []


def is_plain_name(name: object) -> bool:
    """Return whether a name from an index is a weight file beside it, and leads nowhere else."""
    return (
        isinstance(name, str)
        and name.endswith(".safetensors")
        and name.isprintable()
        and not name.startswith(".")
        and not any(mark in name for mark in "/\\:")
        and len(name) <= 255  # noqa: PLR2004 - what file systems allow
    )


def missing_shards(names: Iterable[str], present: Iterable[str]) -> list[Problem]:
    """Return a problem that names the files that are not there.

    Args:
        names: files the index names.
        present: files that are there.
    """
    names = sorted(set(names))
    missing = sorted(set(names) - set(present))
    if not missing:
        return []
    found = f"incomplete: {', '.join(missing)} missing"
    return [_index_problem(found, f"all of its {len(names)} files")]


def check_index(
    table: Mapping[str, str], shards: Mapping[str, Iterable[TensorEntry]]
) -> list[Problem]:
    """Return a problem for each tensor on which the index and the files disagree.

    Args:
        table: tensor key -> file name, from the index.
        shards: file name -> its tensors.
    """
    problems = []
    found: set[str] = set()
    for name, entries in shards.items():
        for entry in entries:
            expected = table.get(entry.key)
            if expected == name:
                found.add(entry.key)
                continue
            place = f"in {name}"
            promise = (
                f"{expected}, as {INDEX_FILE} says" if expected else f"an entry in {INDEX_FILE}"
            )
            problems.append(_tensor_problem(entry.key, place, promise))
    problems += [
        _tensor_problem(key, "missing", f"in {table[key]}, as {INDEX_FILE} says")
        for key in sorted(table.keys() - found)
    ]
    return problems


def _index_problem(found: str, expected: str) -> Problem:
    return Problem(code=ProblemCode.SHARDED, tensor=INDEX_FILE, found=found, expected=expected)


def _tensor_problem(key: str, found: str, expected: str) -> Problem:
    return Problem(code=ProblemCode.SHARDED, tensor=key, found=found, expected=expected)
