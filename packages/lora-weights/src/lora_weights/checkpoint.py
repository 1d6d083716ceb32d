"""The files of an adapter folder -> configuration and tensors. Knows files, not what they mean."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lora_weights.config import AdapterConfig, parse_config, parse_json
from lora_weights.errors import Problem, ProblemCode, UnsafeFormatError
from lora_weights.sources.folder import WEIGHT_FILES
from lora_weights.tensors import TensorFile, names_only, read_data, read_header, read_pickle

if TYPE_CHECKING:
    from lora_weights.sources.folder import AdapterFiles


def read_config(files: AdapterFiles) -> tuple[AdapterConfig | None, list[Problem]]:
    """Read the configuration.

    Returns:
        The configuration, or None when rank and alpha cannot be told; and everything wrong with it.

    Raises:
        OSError: the file cannot be read.
    """
    data, problems = parse_json(files.config.read_bytes())
    if data is None:
        return None, problems
    config, more = parse_config(data)
    return config, problems + more


def read_weights(
    files: AdapterFiles, *, allow_pickle: bool, read_tensors: bool, max_bytes: int
) -> tuple[TensorFile | None, list[Problem]]:
    """Read the weights.

    Args:
        files: the adapter's files.
        allow_pickle: read ``.bin`` and ``.pt`` files.
        read_tensors: read the numbers too, and not only names and shapes.
        max_bytes: most bytes of tensors to read.

    Returns:
        The tensors, or None with the reasons why they cannot be read whole.

    Raises:
        UnsafeFormatError: the only weights are a pickle file and `allow_pickle` is false.
        OSError: a file cannot be read.
    """
    path = files.weights
    if path is None:
        return None, [_no_weights(files)]
    if path.suffix == ".safetensors":
        header, problems = read_header(path)
        if header is None:
            return None, problems
        return read_data([header]) if read_tensors else (names_only([header]), [])
    if allow_pickle:
        return read_pickle(path)
    raise UnsafeFormatError(source=files.source, file_name=path.name)


def _no_weights(files: AdapterFiles) -> Problem:
    if files.shards:
        return Problem(
            code=ProblemCode.SHARDED,
            tensor=WEIGHT_FILES[0],
            found=f"in several files ({', '.join(files.shards)})",
            expected="one file; save the adapter unsharded",
        )
    return Problem(
        code=ProblemCode.MISSING_WEIGHTS,
        tensor="the weight file",
        found="missing",
        expected=f"one of {', '.join(WEIGHT_FILES)} beside adapter_config.json",
    )
