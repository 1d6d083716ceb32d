"""The files of an adapter folder -> configuration and tensors. Knows files, not what they mean."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lora_weights.config import AdapterConfig, parse_config, parse_json
from lora_weights.errors import Problem, ProblemCode, UnsafeFormatError
from lora_weights.fields import CONFIG_FILE
from lora_weights.json_object import MAX_JSON_BYTES
from lora_weights.shards import check_index, missing_shards, parse_index
from lora_weights.sources.folder import (
    INDEX_FILE,
    PICKLE_SUFFIXES,
    WEIGHT_FILES,
    full_model_files,
)
from lora_weights.tensors import (
    CHANGED,
    FileHeader,
    TensorFile,
    file_stamp,
    names_only,
    read_data,
    read_header,
    read_pickle,
    unreadable,
)

if TYPE_CHECKING:
    from pathlib import Path

    from lora_weights.selection import Selector
    from lora_weights.sources.folder import AdapterFiles


def read_checkpoint(
    files: AdapterFiles,
    *,
    allow_pickle: bool,
    read_tensors: bool,
    max_bytes: int,
    select: Selector | None = None,
) -> tuple[AdapterConfig | None, TensorFile | None, list[Problem]]:
    """Read configuration and weights as one state of the folder.

    Args:
        files: the adapter's files.
        allow_pickle: read ``.bin`` and ``.pt`` files.
        read_tensors: read the numbers too, and not only names and shapes.
        max_bytes: most bytes of weights to read.
        select: what is wanted of each tensor; None is everything.

    Returns:
        The configuration, or None when rank and alpha cannot be told; the tensors, or None when
        they cannot be read whole; and everything wrong with both.

    Raises:
        UnsafeFormatError: the only weights are a pickle file and `allow_pickle` is false.
        OSError: a file cannot be read.
    """
    stamp = file_stamp(files.config)
    config, problems = read_config(files)
    tensors, more = read_weights(
        files,
        allow_pickle=allow_pickle,
        read_tensors=read_tensors,
        max_bytes=max_bytes,
        select=select,
    )
    problems += more
    if file_stamp(files.config) != stamp:
        # A trainer is at work: this configuration may not belong to these weights.
        found, expected = CHANGED
        problems.append(_config_problem(found, expected))
    return config, tensors, problems


def read_config(files: AdapterFiles) -> tuple[AdapterConfig | None, list[Problem]]:
    """Read the configuration.

    Returns:
        The configuration, or None when rank and alpha cannot be told; and everything wrong with it.

    Raises:
        OSError: the file cannot be read.
    """
    size = files.config.stat().st_size
    if size > MAX_JSON_BYTES:
        return None, [_config_problem(f"{size} bytes long", f"at most {MAX_JSON_BYTES}")]
    data, problems = parse_json(files.config.read_bytes())
    if data is None:
        return None, problems
    config, more = parse_config(data)
    return config, problems + more


def read_weights(
    files: AdapterFiles,
    *,
    allow_pickle: bool,
    read_tensors: bool,
    max_bytes: int,
    select: Selector | None = None,
) -> tuple[TensorFile | None, list[Problem]]:
    """Read the weights: one safetensors file, several with an index, or a pickle.

    Arguments, results and errors as for `read_checkpoint`.
    """
    path = files.weights
    if path is None:
        return None, [_no_weights(files)]
    if path.suffix in PICKLE_SUFFIXES:
        if not allow_pickle:
            raise UnsafeFormatError(source=files.source, file_name=path.name)
        if not read_tensors:
            found = "a pickle, which has no header"
            return None, [unreadable(path.name, found, "safetensors, or to read it whole")]
        problem = _too_large(path.stat().st_size, max_bytes)
        return (None, [problem]) if problem else read_pickle(path, select=select)
    is_index = path.name == INDEX_FILE
    headers, problems = _shard_headers(files, path) if is_index else _single_header(path)
    size = sum(header.data_bytes for header in headers)
    problem = _too_large(size, max_bytes) if read_tensors else None
    if problem is None and not problems and not any(header.entries for header in headers):
        problem = _no_tensors(path, size)
    if problem:
        problems.append(problem)
    if problems:
        return None, problems
    return read_data(headers, select=select) if read_tensors else (names_only(headers), [])


def _single_header(path: Path) -> tuple[list[FileHeader], list[Problem]]:
    header, problems = read_header(path)
    return [header] if header else [], problems


def _shard_headers(files: AdapterFiles, index: Path) -> tuple[list[FileHeader], list[Problem]]:
    """Read the headers of all files an index names, and compare it with them."""
    size = index.stat().st_size
    if size > MAX_JSON_BYTES:
        return [], [unreadable(index.name, f"{size} bytes long", f"at most {MAX_JSON_BYTES}")]
    table, problems = parse_index(index.read_bytes())
    names = sorted(set(table.values()))
    problems += missing_shards(names, files.paths)
    headers: dict[str, FileHeader] = {}
    for name in names:
        if name in files.paths:
            header, more = read_header(files.paths[name])
            problems += more
            if header is not None:
                headers[name] = header
    if not problems:
        problems += check_index(table, {name: h.entries for name, h in headers.items()})
    return list(headers.values()), problems


def _too_large(size: int, max_bytes: int) -> Problem | None:
    if size <= max_bytes:
        return None
    return unreadable("the weights", f"{size} bytes", f"at most {max_bytes} (max_bytes)")


def _no_tensors(path: Path, size: int) -> Problem:
    """Return the problem of a checkpoint without a single tensor.

    Sharded training leaves such files, of 40 bytes, when one process saves parameters that are
    still spread over all of them (DeepSpeed ZeRO-3).
    """
    return Problem(
        code=ProblemCode.NO_EFFECT,
        tensor=path.name,
        found=f"without a single tensor ({size} bytes of data)",
        expected="the LoRA tensors; gather sharded (ZeRO-3) parameters before saving",
    )


def _no_weights(files: AdapterFiles) -> Problem:
    if files.shards:
        return Problem(
            code=ProblemCode.SHARDED,
            tensor=WEIGHT_FILES[0],
            found=f"in several files ({', '.join(files.shards)}) without {INDEX_FILE}",
            expected="safetensors files with their index, or one file",
        )
    model = full_model_files(files.names)
    found = f"missing (the folder holds {model[0]}, a full model's)" if model else "missing"
    return Problem(
        code=ProblemCode.MISSING_WEIGHTS,
        tensor="the weight file",
        found=found,
        expected=f"one of {', '.join(WEIGHT_FILES)} beside {CONFIG_FILE}",
    )


def _config_problem(found: str, expected: str) -> Problem:
    return Problem(
        code=ProblemCode.CONFIG_UNREADABLE, tensor=CONFIG_FILE, found=found, expected=expected
    )
