"""Where the options come from: command line, `LORA_SERVER_*` variables, a YAML file, defaults.

The first of these that names an option decides. Unknown names are refused, all problems are
reported together, and each value is remembered with who set it. The only module that reads the
environment.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from lora_server.config import ServerConfig
from lora_server.errors import StartupError
from lora_server.lora_modules import module_problems, scan_folder
from lora_server.option_fields import Option, flag_of, option_of
from lora_server.option_values import is_list, parse_value, split_list

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from lora_server.config import LoraModule

ENV_PREFIX = "LORA_SERVER_"
CACHE_VARIABLE = ENV_PREFIX + "CACHE_DIR"
"""Where the demo's converted base model is kept."""
CONFIG_VARIABLE = ENV_PREFIX + "CONFIG"
"""The YAML file, when `--config` is not given."""

# Kubernetes sets these in every pod of a namespace that has a Service named lora-server.
_SERVICE_LINK = re.compile(ENV_PREFIX + r"(SERVICE_HOST|SERVICE_PORT\w*|PORT_\d+_\w+)")


class Origin(StrEnum):
    """Who set an option, strongest first."""

    COMMAND_LINE = "command line"
    ENVIRONMENT = "environment"
    FILE = "file"
    DEFAULT = "default"


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedConfig:
    """The options in force, and where they come from."""

    config: ServerConfig
    origins: Mapping[str, Origin]
    """Field name -> who set it; every field of `ServerConfig` is there."""
    modules: tuple[LoraModule, ...]
    """All adapters to load at start: `--lora-modules`, then `--lora-dir` by name."""
    skipped_folders: tuple[str, ...]
    """Sub-folders of `--lora-dir` that hold no adapter."""


def resolve(
    arguments: Mapping[str, object],
    *,
    config_file: str | None = None,
    environ: Mapping[str, str] | None = None,
) -> ResolvedConfig:
    """Combine all sources of options.

    Args:
        arguments: field name -> what the command line says; a list of texts for list options.
        config_file: the YAML file; None is the one `LORA_SERVER_CONFIG` names, if any.
        environ: variables; None is those of the process.

    Raises:
        StartupError: with every problem of every source.
    """
    variables = _variables(environ)
    path = config_file if config_file is not None else variables.get(CONFIG_VARIABLE)
    problems: list[str] = []
    file_values = _read_file(path, problems) if path is not None else {}
    sources = (
        (Origin.COMMAND_LINE, dict(arguments)),
        (Origin.ENVIRONMENT, _read_variables(variables, problems)),
        (Origin.FILE, file_values),
    )
    values: dict[str, Any] = {}
    origins: dict[str, Origin] = {}
    for config_field in dataclasses.fields(ServerConfig):
        name = config_field.name
        origins[name] = Origin.DEFAULT
        for origin, given in sources:
            if name in given:
                origins[name] = origin
                _take(values, config_field, given[name], _spelling(name, origin, path), problems)
                break
    config = _build(values, problems)
    modules, skipped = _find_modules(values, problems)
    if problems or config is None:
        raise StartupError(tuple(dict.fromkeys(problems)))
    return ResolvedConfig(config=config, origins=origins, modules=modules, skipped_folders=skipped)


def static_modules(config: ServerConfig) -> tuple[LoraModule, ...]:
    """Return all adapters to load at start: `--lora-modules`, then `--lora-dir` by name.

    Raises:
        StartupError: when the folder is missing or holds no adapter, or a name occurs twice.
    """
    problems: list[str] = []
    values = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    modules, _ = _find_modules(values, problems)
    if problems:
        raise StartupError(problems)
    return modules


def cache_folder(environ: Mapping[str, str] | None = None) -> Path:
    """Return the folder for converted models; it may not exist yet."""
    variables = _variables(environ)
    chosen = variables.get(CACHE_VARIABLE)
    if chosen:
        return Path(chosen).expanduser()
    base = variables.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "lora-server"


def environment_without_options(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the variables for a child process that is to be told its options by flags only."""
    variables = _variables(environ)
    return {key: value for key, value in variables.items() if not key.startswith(ENV_PREFIX)}


def suggest(name: str, known: Iterable[str]) -> str:
    """Return ", did you mean X?" when a known name is close, else an empty text."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f", did you mean {close[0]}?" if close else ""


def _variables(environ: Mapping[str, str] | None) -> Mapping[str, str]:
    return os.environ if environ is None else environ  # noqa: TID251 - this is where it is read


def _fields() -> dict[str, Option]:
    return {f.name: option_of(f) for f in dataclasses.fields(ServerConfig)}


def _spelling(name: str, origin: Origin, path: str | None) -> str:
    """Name an option the way its source writes it."""
    if origin is Origin.ENVIRONMENT:
        return ENV_PREFIX + name.upper()
    return f"{path}: {name}" if origin is Origin.FILE else flag_of(name)


def _take(
    values: dict[str, Any],
    config_field: dataclasses.Field[Any],
    raw: object,
    where: str,
    problems: list[str],
) -> None:
    """Parse one option into `values`, or note why that fails."""
    option = option_of(config_field)
    if raw is None and config_field.default is None:
        values[config_field.name] = None
        return
    try:
        values[config_field.name] = parse_value(option, raw)
    except StartupError as error:
        problems += [f"{where}: {problem}" for problem in error.problems]


def _build(values: dict[str, Any], problems: list[str]) -> ServerConfig | None:
    """Make the config; what could not be parsed has its default, so that the rest is checked."""
    try:
        return ServerConfig(**{"model": "", **values})
    except StartupError as error:
        problems += error.problems
        return None


def _find_modules(
    values: Mapping[str, Any], problems: list[str]
) -> tuple[tuple[LoraModule, ...], tuple[str, ...]]:
    """Look for the folders that the options name, also when other options are wrong."""
    problems += [
        f"--adapter-root {root!r} is not a folder"
        for root in values.get("adapter_root", ())
        if "://" not in root and not Path(root).is_dir()
    ]
    modules = values.get("lora_modules", ())
    if values.get("lora_dir") is None:
        return modules, ()
    try:
        scan = scan_folder(values["lora_dir"])
    except StartupError as error:
        problems += error.problems
        return modules, ()
    base_names = values.get("served_model_name") or (values.get("model", ""),)
    modules += scan.modules
    problems += module_problems(modules, base_names)
    return modules, scan.skipped


def _read_variables(variables: Mapping[str, str], problems: list[str]) -> dict[str, object]:
    """Read `LORA_SERVER_*`; an empty variable counts as not set."""
    fields = _fields()
    found: dict[str, object] = {}
    for variable, text in sorted(variables.items()):
        known_elsewhere = variable in (CACHE_VARIABLE, CONFIG_VARIABLE)
        if not variable.startswith(ENV_PREFIX) or known_elsewhere or not text:
            continue
        name = variable.removeprefix(ENV_PREFIX).lower()
        if _SERVICE_LINK.fullmatch(variable):
            continue
        if name == "port" and "://" in text:
            problems.append(
                f"{variable}={text!r} is what Kubernetes sets for a Service named lora-server: "
                "rename the Service, or set enableServiceLinks: false"
            )
        elif name not in fields:
            close = suggest(variable, [ENV_PREFIX + known.upper() for known in fields])
            problems.append(f"unknown variable {variable}{close}")
        else:
            _read_variable(found, name, text, fields[name], problems)
    return found


def _read_variable(
    found: dict[str, object], name: str, text: str, option: Option, problems: list[str]
) -> None:
    try:
        found[name] = split_list(text) if is_list(option) else text
    except StartupError as error:
        problems += [f"{ENV_PREFIX}{name.upper()}: {problem}" for problem in error.problems]


def _read_file(path: str, problems: list[str]) -> dict[str, object]:
    """Read a YAML file of `option: value`; keys may be written with `-` or `_`."""
    try:
        text = Path(path).read_text(encoding="utf-8")
        content, root = yaml.safe_load(text), yaml.compose(text, Loader=yaml.SafeLoader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        problems.append(f"--config {path!r} cannot be read: {error}")
        return {}
    if content is None:
        return {}
    if not isinstance(content, dict) or not isinstance(root, yaml.MappingNode):
        problems.append(f"{path}: expected a mapping of options, found {type(content).__name__}")
        return {}
    fields = _fields()
    found: dict[str, object] = {}
    # the parsed mapping has forgotten keys that occur twice
    written = [str(key.value).replace("-", "_") for key, _ in root.value]
    problems += [
        f"{path}: {n} is set twice" for n in dict.fromkeys(written) if written.count(n) > 1
    ]
    for key, value in content.items():
        name = str(key).replace("-", "_")
        if name in fields:
            found[name] = value
        else:
            problems.append(f"{path}: unknown key {str(key)!r}{suggest(name, fields)}")
    return found
