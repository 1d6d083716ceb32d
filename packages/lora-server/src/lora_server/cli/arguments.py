"""The flags of `serve`, made from the fields of `ServerConfig`.

Values stay as they were typed: `lora_server.options` reads them together with the other sources,
so that all problems are told at once. Knows no option by name but the model and `--config`.
"""

from __future__ import annotations

import argparse
import dataclasses
from typing import TYPE_CHECKING, Any

from lora_server.config import ServerConfig
from lora_server.errors import StartupError
from lora_server.option_fields import OptionKind, flag_of, option_of
from lora_server.options import resolve, suggest
from lora_server.refused import REFUSED_FLAGS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from lora_server.option_fields import Option
    from lora_server.options import ResolvedConfig

_CONFIG_FLAG = "--config"
_ACTIONS: dict[OptionKind, dict[str, Any]] = {
    OptionKind.SWITCH: {"action": argparse.BooleanOptionalAction},
    OptionKind.TEXTS: {"action": "append"},
    OptionKind.NAMES: {"action": "extend", "nargs": "*"},
    OptionKind.MODULES: {"action": "extend", "nargs": "*"},
}
_METAVARS = {
    OptionKind.INTEGER: "N",
    OptionKind.NUMBER: "X",
    OptionKind.BYTES: "SIZE",
    OptionKind.TEXT: "TEXT",
}


def add_config_flags(parser: argparse.ArgumentParser) -> None:
    """Add a flag for every field of `ServerConfig` but the model, which `read_config` finds.

    argparse gives up an optional positional argument as soon as a flag comes before it.
    """
    parser.add_argument(
        _CONFIG_FLAG, metavar="FILE", help="YAML file with options; flags and variables go first."
    )
    groups: dict[str, argparse._ArgumentGroup] = {}
    for config_field in dataclasses.fields(ServerConfig):
        option = option_of(config_field)
        if option.group not in groups:
            groups[option.group] = parser.add_argument_group(option.group)
        if option.is_positional:
            continue
        details: dict[str, Any] = dict(_ACTIONS.get(option.kind, {}))
        if option.kind is not OptionKind.SWITCH:
            choices = "{" + ",".join(option.choices) + "}"
            named = option.metavar or _METAVARS.get(option.kind, "VALUE")
            details["metavar"] = choices if option.choices else named
        groups[option.group].add_argument(
            flag_of(config_field.name),
            default=argparse.SUPPRESS,
            help=help_text(option, config_field.default).replace("%", "%%"),
            **details,
        )


def help_text(option: Option, default: object) -> str:
    """Return the option's sentence with its unit and its default."""
    if option.is_later:
        return f"{option.help} Not available in this version."
    shown = option.unset if default in (None, ()) else default_text(default)
    unit = f"in {option.unit}, " if option.unit else ""
    return f"{option.help} ({unit}default: {shown})"


def default_text(default: object) -> str:
    """Return a default the way it is written on a command line."""
    if isinstance(default, bool):
        return "on" if default else "off"
    return str(default)


def read_config(
    parsed: argparse.Namespace,
    extras: Sequence[str],
    *,
    environ: Mapping[str, str] | None = None,
) -> ResolvedConfig:
    """Make the configuration from parsed flags and from what the parser left over.

    Args:
        parsed: flags as `add_config_flags` declares them.
        extras: arguments the parser did not know: the model, and mistakes.
        environ: variables; None is those of the process.

    Raises:
        StartupError: with every problem of every source.
    """
    names = {f.name for f in dataclasses.fields(ServerConfig)}
    arguments: dict[str, object] = {k: v for k, v in vars(parsed).items() if k in names}
    problems = [_unknown_problem(extra) for extra in extras if extra.startswith("-")]
    words = [extra for extra in extras if not extra.startswith("-")]
    if words:
        arguments["model"] = words[0]
    # the word after an unknown flag may have been meant as its value
    if len(words) > 1 and not problems:
        problems.append(f"unexpected arguments after MODEL: {', '.join(words[1:])}")
    if not arguments.get("lora_modules", True):
        problems.append("--lora-modules names no adapter, expected NAME=PATH")
    try:
        resolved = resolve(arguments, config_file=parsed.config, environ=environ)
    except StartupError as error:
        raise StartupError([*problems, *error.problems]) from error
    if problems:
        raise StartupError(problems)
    return resolved


def _unknown_problem(argument: str) -> str:
    flag = argument.partition("=")[0]
    name = flag.removeprefix("--no-").removeprefix("--")
    if name in REFUSED_FLAGS:
        return f"{flag} is not an option here: {REFUSED_FLAGS[name]}"
    known = [flag_of(f.name) for f in dataclasses.fields(ServerConfig)]
    return f"unknown option {flag}{suggest(flag, [*known, _CONFIG_FLAG])}"
