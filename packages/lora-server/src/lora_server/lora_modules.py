"""The adapters that are loaded at start: what names them, and every way to write them down.

Reads the names in `--lora-dir`, never an adapter's content.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lora_server.errors import StartupError

if TYPE_CHECKING:
    from collections.abc import Sequence

BASE_CHOICE = "base"
"""Value of the header `X-Use-LoRA` that means "no adapter", so no adapter can be called that."""

_CONFIG_FILE = "adapter_config.json"
_JSON_FIELDS = {"name", "path", "base_model_name"}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraModule:
    """One adapter that is loaded at start."""

    name: str
    """What clients write in `model`; exact and case-sensitive."""
    path: str
    """Folder that holds `adapter_config.json`."""
    base_model_name: str | None = None
    """Reported as the adapter's parent; None is the first served name of the base."""


def adapter_name_problem(name: str, base_names: tuple[str, ...]) -> str | None:
    """Say why no adapter can have this name, or None when it can."""
    if not name or name != name.strip() or not name.isprintable():
        return f"adapter name {name!r} is empty, not printable, or begins or ends with a space"
    if name in base_names:
        return f"adapter name {name!r} is a name of the base model"
    if name == BASE_CHOICE:
        return f"adapter name {name!r} means the base model in the header X-Use-LoRA"
    return None


def module_problems(modules: tuple[LoraModule, ...], base_names: tuple[str, ...]) -> list[str]:
    """Check the names of the adapters that are loaded at start, from all sources together."""
    problems = []
    seen: dict[str, LoraModule] = {}
    for module in modules:
        problem = adapter_name_problem(module.name, base_names)
        if problem is not None:
            problems.append(problem)
        elif module.name in seen:
            first = seen[module.name].path
            problems.append(
                f"adapter name {module.name!r} is given twice: {first!r} and {module.path!r}"
            )
        if not module.path:
            problems.append(f"adapter {module.name!r} has an empty path")
        seen.setdefault(module.name, module)
    return problems


def parse_modules(items: Sequence[object]) -> tuple[LoraModule, ...]:
    """Read the items of `--lora-modules`: `a=p`, `a=p,b=q`, JSON objects, or mappings.

    Raises:
        StartupError: with every item that cannot be read.
    """
    modules: list[LoraModule] = []
    problems: list[str] = []
    for item in items:
        try:
            modules += _parse_item(item)
        except StartupError as error:
            problems += error.problems
    if problems:
        raise StartupError(problems)
    return tuple(modules)


def _parse_item(item: object) -> list[LoraModule]:
    if isinstance(item, dict):
        return [_from_mapping(item)]
    if not isinstance(item, str):
        raise StartupError([f"{item!r} is neither NAME=PATH nor an object"])
    if item.lstrip().startswith("{"):
        return [_from_json(item)]
    modules: list[LoraModule] = []
    problems: list[str] = []
    for piece in item.split(","):
        name, equals, path = (part.strip() for part in piece.partition("="))
        if equals and name and path:
            modules.append(LoraModule(name=name, path=path))
        else:
            problems.append(_piece_problem(piece, item))
    if problems:
        raise StartupError(problems)
    return modules


def _piece_problem(piece: str, item: str) -> str:
    """Say what is wrong with one `name=path`."""
    if not piece.strip():
        return f"{item!r} has an empty item, expected NAME=PATH"
    if "=" in piece:
        return f"{piece.strip()!r} lacks a name or a path, expected NAME=PATH"
    if "," in item:
        return (
            f"{piece.strip()!r} in {item!r} is not NAME=PATH; a path with a comma needs the form "
            '{"name": ..., "path": ...}'
        )
    if Path(piece).is_dir():
        return f"{piece!r} is a folder without a name: write NAME={piece}, or --lora-dir {piece}"
    return f"{piece!r} is not NAME=PATH (the model comes before the flags; see also --lora-dir)"


def _from_json(text: str) -> LoraModule:
    try:
        fields = json.loads(text, object_pairs_hook=_unique_keys)
    except (json.JSONDecodeError, RecursionError) as error:
        raise StartupError([f"{text!r} is not JSON: {error}"]) from error
    return _from_mapping(fields)


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    doubled = sorted({key for key in keys if keys.count(key) > 1})
    if doubled:
        raise StartupError([f"object has a field twice: {', '.join(doubled)}"])
    return dict(pairs)


def _from_mapping(fields: dict[Any, Any]) -> LoraModule:
    problems = [
        f"{fields!r} has an unknown field {key!r}, known are {', '.join(sorted(_JSON_FIELDS))}"
        for key in fields
        if key not in _JSON_FIELDS
    ]
    problems += [
        f"{fields!r} lacks the text {key!r}"
        for key in ("name", "path")
        if not isinstance(fields.get(key), str) or not fields[key]
    ]
    base = fields.get("base_model_name")
    if base is not None and (not isinstance(base, str) or not base):
        problems.append(f"{fields!r}: 'base_model_name' is not a text")
    if problems:
        raise StartupError(problems)
    return LoraModule(name=fields["name"], path=fields["path"], base_model_name=base)


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderScan:
    """What `--lora-dir` holds."""

    modules: tuple[LoraModule, ...]
    """One for each sub-folder with an `adapter_config.json`, by name."""
    skipped: tuple[str, ...]
    """Names of the other sub-folders, to be said in the log."""


def scan_folder(folder: str) -> FolderScan:
    """List the adapters in the sub-folders of `folder`; hidden ones are left out.

    Raises:
        StartupError: when the folder is missing, cannot be read, or holds no adapter.
    """
    root = Path(folder)
    try:
        children = sorted(child for child in root.iterdir() if child.is_dir())
    except OSError as error:
        raise StartupError(
            [f"--lora-dir {folder!r} is no folder that can be read: {error.strerror}"]
        ) from error
    visible = [child for child in children if not child.name.startswith(".")]
    found = [child for child in visible if (child / _CONFIG_FILE).is_file()]
    if not found:
        is_adapter = (root / _CONFIG_FILE).is_file()
        what = "is itself an adapter: name its parent" if is_adapter else "holds no adapter"
        seen = f"{len(visible)} sub-folders, none with an {_CONFIG_FILE}"
        raise StartupError([f"--lora-dir {folder!r} {what} ({seen})"])
    return FolderScan(
        modules=tuple(LoraModule(name=child.name, path=str(child)) for child in found),
        skipped=tuple(child.name for child in visible if child not in found),
    )
