"""Writes `docs/reference/cli.md` from the options themselves.

Run it as `python -m lora_server.cli.reference > docs/reference/cli.md`; a test compares the two.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys

from lora_server.cli.arguments import default_text
from lora_server.cli.main import build_parser
from lora_server.config import ServerConfig
from lora_server.option_fields import OptionKind, flag_of, option_of
from lora_server.options import CACHE_VARIABLE, CONFIG_VARIABLE, ENV_PREFIX
from lora_server.refused import REFUSED_FLAGS

_INTRODUCTION = f"""\
# Command line

This page is made from the options themselves by `python -m lora_server.cli.reference`.

## lora-server serve

`lora-server serve MODEL [--lora-modules NAME=PATH ...] [options]`

Every option can be given in three ways, and the first that is there decides:

1. the flag, such as `--max-loras 16`;
2. the variable, such as `{ENV_PREFIX}MAX_LORAS=16`; a list is written as words, quoted as in a
   shell, or as JSON;
3. the key in a YAML file, such as `max_loras: 16`, named by `--config FILE` or
   `{CONFIG_VARIABLE}`.

Unknown flags, variables and keys are refused, and all problems are reported together. A switch is
turned off by `--no-...`, or by `false` in a variable or the file.
"""
_AFTER_SERVE = f"""\
`{CACHE_VARIABLE}` is the folder for converted models (default: `~/.cache/lora-server`).

SIGTERM lets running requests finish for `--drain-timeout`, refuses new ones, and then exits with
status 0. SIGINT, or a second signal, ends all running requests within a few seconds, with status 0
too; a further SIGINT does not wait. Problems at start: all of them on stderr, status 1.

### Flags of vLLM that do not exist here

| flag | what to do |
|---|---|
"""


def render_reference() -> str:
    """Return the page as Markdown."""
    parts = [_INTRODUCTION]
    groups = dict.fromkeys(option_of(f).group for f in dataclasses.fields(ServerConfig))
    parts += [_group_section(group) for group in groups]
    refused = "".join(f"| `--{flag}` | {text} |\n" for flag, text in sorted(REFUSED_FLAGS.items()))
    parts.append(_AFTER_SERVE + refused)
    commands = ("demo", "bench", "bench compare", "smoke record", "smoke check")
    parts += [_command_section(name) for name in commands]
    parts.append(_command_section("plan", without=_serve_names()))
    return "\n".join(parts)


def _group_section(group: str) -> str:
    lines = [f"### {group}", "", "| option | variable | default | |", "|---|---|---|---|"]
    for config_field in dataclasses.fields(ServerConfig):
        option = option_of(config_field)
        if option.group != group:
            continue
        default = config_field.default
        if option.is_later:
            shown = "not available in this version"
        elif option.is_positional:
            shown = ""
        else:
            shown = f"`{default_text(default)}`" if default not in (None, ()) else str(option.unset)
        flag = flag_of(config_field.name)
        choices = f" One of {', '.join(option.choices)}." if option.choices else ""
        unit = f" In {option.unit}." if option.unit else ""
        negative = f", `--no-{flag[2:]}`" if option.kind is OptionKind.SWITCH else ""
        variable = ENV_PREFIX + config_field.name.upper()
        lines.append(
            f"| `{flag}`{negative} | `{variable}` | {shown} | {option.help}{choices}{unit} |"
        )
    return "\n".join([*lines, ""])


def _serve_names() -> frozenset[str]:
    """Return what `argparse` calls the options that `serve` has."""
    return frozenset({"config", *(f.name for f in dataclasses.fields(ServerConfig))})


def _command_section(name: str, *, without: frozenset[str] = frozenset()) -> str:
    """Describe a command, or what it has beside the options that another section describes."""
    parser = _subparser(name)
    lines = [f"## lora-server {name}", "", parser.description or "", ""]
    lines += ["| option | default | |", "|---|---|---|"]
    for action in _actions(parser):
        if isinstance(action, argparse._HelpAction) or action.dest in without:  # noqa: SLF001
            continue
        names = action.option_strings or [str(action.metavar)]
        flags = ", ".join(f"`{name}`" for name in names)
        is_set = action.default not in (None, False, [])
        shown = f"`{default_text(action.default)}`" if is_set else ""
        lines.append(f"| {flags} | {shown} | {action.help} |")
    return "\n".join([*lines, "", *([parser.epilog, ""] if parser.epilog else [])])


def _actions(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """Return what a command takes, without the commands below it."""
    actions = parser._actions  # noqa: SLF001 - argparse has no public list of them
    return [a for a in actions if not isinstance(a, argparse._SubParsersAction)]  # noqa: SLF001


def _subparser(path: str) -> argparse.ArgumentParser:
    """Find the parser of a command such as `bench`, or of one below it, such as `bench compare`."""
    parser = build_parser()
    for name in path.split():
        below = {
            key: found
            for action in parser._actions  # noqa: SLF001 - as above
            if isinstance(action, argparse._SubParsersAction)  # noqa: SLF001
            for key, found in action.choices.items()
        }
        parser = below[name]
    return parser


if __name__ == "__main__":
    sys.stdout.write(render_reference())
