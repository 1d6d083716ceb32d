"""What works and may surprise: the warnings of a report, one sentence each."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from lora_weights.fields import CONFIG_FILE
from lora_weights.scaling import pattern_fault
from lora_weights.sources.folder import PICKLE_SUFFIXES, WEIGHT_FILES, listed

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from lora_weights.config import AdapterConfig
    from lora_weights.inventory import Inventory
    from lora_weights.load import Reading
    from lora_weights.sources.folder import AdapterFiles
    from lora_weights.tensors import TensorFile

_TOKENIZER_FILES = (
    "tokenizer_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
)

_FURTHER_WEIGHTS = "non_lora_trainables.bin"
_MAX_NAMES = 6


def warnings_of(reading: Reading) -> Iterator[str]:
    """Yield the warnings on what was read.

    Args:
        reading: as far as the adapter could be read.
    """
    yield from _file_warnings(reading.files)
    if reading.tensors is not None:
        yield from _tensor_warnings(reading.tensors)
    if reading.config is not None:
        yield from _config_warnings(reading.config)
    if reading.config is not None and reading.inventory is not None:
        yield from _target_warnings(reading.config, reading.inventory)
        yield from _inventory_warnings(reading.inventory)


def _file_warnings(files: AdapterFiles) -> Iterator[str]:
    tokenizer = [name for name in _TOKENIZER_FILES if name in files.names]
    if tokenizer:
        yield (
            "the adapter's own tokenizer and chat template are not used, the base's are"
            f" ({listed(tokenizer)})"
        )
    code = [name for name in files.names if name.endswith(".py")]
    if code:
        yield f"code in the folder is never run ({listed(code, _MAX_NAMES)})"
    if _FURTHER_WEIGHTS in files.names:
        yield f"{_FURTHER_WEIGHTS} holds further trained weights, which are not read"
    weights = files.weights
    if weights is None:
        return
    if weights.suffix in PICKLE_SUFFIXES:
        yield f"{weights.name} is a pickle; save it as {WEIGHT_FILES[0]}"
    if weights.name == WEIGHT_FILES[0] and files.shards:
        yield f"{weights.name} is read, and the files beside it are not ({listed(files.shards)})"


def _tensor_warnings(tensors: TensorFile) -> Iterator[str]:
    empty = [entry.key for entry in tensors.entries if entry.start == entry.end]
    if empty:
        yield (
            f"tensors without elements ({listed(empty, _MAX_NAMES)}) are what sharded training"
            " (ZeRO-3, FSDP) leaves when parameters are not gathered before saving"
        )
    if not tensors.has_numbers:
        yield "only headers were read: whether the numbers are finite, and not all zero, is open"


def _config_warnings(config: AdapterConfig) -> Iterator[str]:
    if config.init_lora_weights == "lora_ga":
        yield (
            "LoRA-GA changes the base weight when training starts; unless the adapter was "
            "converted when it was saved, it belongs to that changed base"
        )


def _inventory_warnings(inventory: Inventory) -> Iterator[str]:
    if inventory.base_copies:
        names = listed(list(inventory.base_copies), _MAX_NAMES)
        yield f"the file holds copies of base weights ({names}), which must equal the base's"
    if inventory.skipped:
        names = listed(inventory.skipped, _MAX_NAMES)
        yield f"tensors that are left out, on request or as they only serve training: {names}"


def _target_warnings(config: AdapterConfig, inventory: Inventory) -> Iterator[str]:
    """Say where the configuration's target_modules and the tensors disagree."""
    targets = config.target_modules
    if targets is None or targets == "all-linear":
        return
    modules = [pair.stored_as for pair in inventory.pairs]
    if isinstance(targets, str):
        outside = _outside_pattern(targets, modules)
    else:
        endings = tuple(f".{name}" for name in targets)
        outside = [m for m in modules if m not in targets and not m.endswith(endings)]
        stored = [entries.stored_as for entries in inventory.modules]
        unused = [name for name in targets if not any(_is_target(m, name) for m in stored)]
        if unused:
            names = listed(unused, _MAX_NAMES)
            yield f"{CONFIG_FILE} target_modules names modules without tensors: {names}"
    if outside:
        names = listed(outside, _MAX_NAMES)
        yield f"the file adapts modules outside {CONFIG_FILE} target_modules: {names}"


def _is_target(module: str, name: str) -> bool:
    return module == name or module.endswith(f".{name}")


def _outside_pattern(pattern: str, modules: Sequence[str]) -> list[str]:
    """Return the modules a target pattern does not match; none when it is no safe pattern."""
    if pattern_fault(pattern) is not None:
        return []
    expression = re.compile(pattern)
    return [module for module in modules if not expression.fullmatch(module)]
