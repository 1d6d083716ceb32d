"""The flags of `lora-server smoke record` and `check`, and their exit statuses.

0: recorded, or every recorded name passed. 1: something moved, is missing or was not answered.
2: the command cannot do its work: a flag, a file, an address, a server without log-probabilities.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from lora_server.cli.smoke.client import SmokeClient

_USAGE_STATUS = 2
_MAX_TOKENS = 32


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command, its two actions and their flags."""
    parser = commands.add_parser(
        "smoke",
        help="keep every adapter's answers as a baseline, and compare after an update",
        description="Keep every adapter's answers as a baseline, and compare after an update.",
        allow_abbrev=False,
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    record = _add_action(
        actions,
        "record",
        "ask the base and every adapter of the server, and keep the answers in a file",
        "Exit status: 0 when the file was written, 1 when an adapter did not answer, otherwise 2.",
    )
    record.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help="one prompt a line; .jsonl: an object a line, with prompt, must_contain, "
        "must_not_contain (default: eight short ones)",
    )
    record.add_argument(
        "--max-tokens",
        type=_tokens,
        default=_MAX_TOKENS,
        metavar="N",
        help=f"longest answer (default: {_MAX_TOKENS})",
    )
    record.set_defaults(run=run_record, takes_extras=False)
    check = _add_action(
        actions,
        "check",
        "ask again what was recorded, and compare",
        "Exit status: 0 when every recorded name passed, 1 when one moved, is not served or did "
        "not answer, 2 when nothing could be compared.",
    )
    check.add_argument(
        "--tolerance",
        type=_tolerance,
        metavar="X",
        help="largest difference in log-probability (default: what the file says, else 0.05)",
    )
    check.add_argument("--json", action="store_true", help="print the result as JSON")
    check.set_defaults(run=run_check, takes_extras=False)


def _add_action(
    actions: argparse._SubParsersAction[argparse.ArgumentParser], name: str, text: str, epilog: str
) -> argparse.ArgumentParser:
    parser = actions.add_parser(
        name,
        help=text,
        description=f"{text[0].upper()}{text[1:]}.",
        epilog=epilog,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--base-url", required=True, metavar="URL", help="the server")
    add("--file", required=True, type=Path, metavar="FILE", help="the baseline")
    add(
        "--adapter",
        nargs="+",
        action="extend",
        metavar="NAME",
        help="only these names; the base by its own name",
    )
    add("--api-key", metavar="KEY", help="sent as a bearer token")
    add(
        "--timeout",
        type=_seconds,
        default=120.0,
        metavar="SECONDS",
        help="for one answer (default: 120)",
    )
    return parser


def run_record(parsed: argparse.Namespace, extras: Sequence[str]) -> int:
    """Record a baseline and return the exit status."""
    from lora_server.cli.smoke.record import record
    from lora_server.smoke.baseline import BaselineError, write_baseline
    from lora_server.smoke.prompts import DEFAULT_PROMPTS, read_prompts, unanswered

    del extras

    def act(client: SmokeClient) -> int:
        if not parsed.file.parent.is_dir():
            raise BaselineError([f"--file {str(parsed.file)!r}: the folder does not exist"])
        prompts = (
            tuple(map(unanswered, DEFAULT_PROMPTS))
            if parsed.prompts is None
            else read_prompts(parsed.prompts)
        )
        outcome = record(client, prompts, names=parsed.adapter, max_tokens=parsed.max_tokens)
        if outcome.baseline is None:
            _print_problems("nothing was written", outcome.problems)
            return 1
        write_baseline(outcome.baseline, parsed.file)
        count = len(outcome.baseline.models)
        print(f"{count} names x {len(prompts)} prompts written to {parsed.file}", file=sys.stderr)
        return 0

    return _run(parsed, act)


def run_check(parsed: argparse.Namespace, extras: Sequence[str]) -> int:
    """Compare a server with a baseline and return the exit status."""
    from lora_server.cli.smoke.check import check, check_lines
    from lora_server.smoke.baseline import read_baseline

    del extras

    def act(client: SmokeClient) -> int:
        baseline = read_baseline(parsed.file)
        result = check(client, baseline, names=parsed.adapter, tolerance=parsed.tolerance)
        if parsed.json:
            print(json.dumps(result.as_dict(), indent=2))
        else:
            for line in check_lines(result):
                print(line)
        return 0 if result.has_passed else 1

    return _run(parsed, act)


def _run(parsed: argparse.Namespace, act: Callable[[SmokeClient], int]) -> int:
    """Connect, act, and tell everything that keeps the command from its work."""
    from lora_server.cli.smoke.client import SmokeClient, SmokeClientError
    from lora_server.smoke.baseline import BaselineError

    try:
        with SmokeClient(parsed.base_url, api_key=parsed.api_key, timeout_s=parsed.timeout) as it:
            return act(it)
    except (BaselineError, SmokeClientError) as error:
        _print_problems("cannot go on", error.problems)
        return _USAGE_STATUS


def _print_problems(what: str, problems: Sequence[str]) -> None:
    print(f"lora-server smoke: {what}:", file=sys.stderr)
    for problem in problems:
        print(f"  - {problem}", file=sys.stderr)


def _tokens(text: str) -> int:
    from lora_server.smoke.baseline import MAX_TOKENS

    if not text.isdecimal() or not 1 <= int(text) <= MAX_TOKENS:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 to {MAX_TOKENS}")
    return int(text)


def _tolerance(text: str) -> float:
    return _number(text, is_zero_allowed=True)


def _seconds(text: str) -> float:
    return _number(text, is_zero_allowed=False)


def _number(text: str, *, is_zero_allowed: bool) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not (0 <= value < float("inf")) or (value == 0 and not is_zero_allowed):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return value
