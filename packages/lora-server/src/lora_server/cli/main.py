"""The command `lora-server`: finds the sub-command and runs it.

Help and mistakes are answered without loading torch or transformers: each command imports what it
needs when it runs.
"""

from __future__ import annotations

import argparse
import sys
from importlib.metadata import version
from typing import TYPE_CHECKING

from lora_server.cli import bench, demo, doctor, plan, serve, smoke
from lora_server.errors import StartupError

if TYPE_CHECKING:
    from collections.abc import Sequence

_COMMANDS = (serve, demo, bench, doctor, plan, smoke)
_PROGRAM = "lora-server"


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line."""
    parser = argparse.ArgumentParser(
        prog=_PROGRAM,
        description="One base model, many LoRA adapters, one OpenAI-compatible API.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=version(_PROGRAM))
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command in _COMMANDS:
        command.add_parser(commands)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status: 0 done, 1 failed, 2 not understood."""
    parser = build_parser()
    parsed, extras = parser.parse_known_args(arguments)
    if extras and not parsed.takes_extras:
        parser.error(f"{parsed.command}: unexpected {' '.join(extras)}")
    try:
        return int(parsed.run(parsed, extras))
    except StartupError as error:
        print(f"{_PROGRAM} {parsed.command}: cannot start:", file=sys.stderr)
        for problem in error.problems:
            print(f"  - {problem}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{_PROGRAM} {parsed.command}: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
