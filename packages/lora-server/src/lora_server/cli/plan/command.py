"""The command itself: its flags, what it reads, and what it prints.

Takes every flag of `serve`, so that the plan is one of the very command line that will be run.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from typing import TYPE_CHECKING

from lora_server.cli.arguments import add_config_flags, read_config
from lora_server.errors import StartupError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from lora_server.cli.ledger.planned import Plan
    from lora_server.cli.plan.advice import Traffic, TrafficAdvice
    from lora_server.config import ServerConfig
    from lora_server.options import ResolvedConfig

DEFAULT_TARGET = 0.95
_USAGE = "lora-server plan MODEL [options of serve] [--trace FILE | --zipf S] [--json]"
_EPILOG = (
    "Besides these, every option of serve is taken, from the command line, variables and --config "
    "alike. The status is 0 when everything fits, else 1."
)


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command and its flags."""
    parser = commands.add_parser(
        "plan",
        help="tell what a service would take of the memory",
        usage=_USAGE,
        description="Tell what serving MODEL with these options would take of the memory, before "
        "it is started: no weights are read.",
        epilog=_EPILOG,
        allow_abbrev=False,
    )
    add_plan_flags(parser)
    add_config_flags(parser)
    parser.set_defaults(run=run, takes_extras=True)


def add_plan_flags(parser: argparse.ArgumentParser) -> None:
    """Declare the flags that `serve` does not have."""
    traffic = parser.add_mutually_exclusive_group()
    traffic.add_argument(
        "--trace",
        metavar="FILE",
        help='requests of the past: JSON lines such as {"adapter": "a", "at": 0.25}, at in seconds '
        "and optional; gives the hit rate for each number of slots",
    )
    traffic.add_argument(
        "--zipf",
        type=float,
        metavar="S",
        help="instead of a trace: the k-th adapter gets a share of the requests as 1/k^S",
    )
    parser.add_argument(
        "--num-adapters",
        type=int,
        metavar="N",
        help="adapters of --zipf (default: those named)",
    )
    parser.add_argument(
        "--target-hit-rate",
        type=float,
        default=DEFAULT_TARGET,
        metavar="R",
        help="share of the requests that should find their adapter in a slot",
    )
    parser.add_argument("--json", action="store_true", help="print JSON only")


def run(parsed: argparse.Namespace, extras: Sequence[str]) -> int:
    """Print the plan; 0 if everything fits, otherwise 1.

    Raises:
        StartupError: an option is wrong, the model cannot be served, or the trace cannot be read.
    """
    resolved = read_config(parsed, extras)
    traffic = _traffic(parsed, resolved)

    from lora_server.cli.ledger.planned import plan_service
    from lora_server.ledger import Verdict

    plan = plan_service(resolved.config, resolved.modules)
    advice = None if traffic is None else _advice(traffic, plan, parsed, resolved.config)
    if parsed.json:
        content = {
            **plan.ledger.as_json(),
            "problems": list(plan.problems),
            "traffic": None if advice is None else dataclasses.asdict(advice),
        }
        json.dump(content, sys.stdout, indent=2)
        print()
    else:
        from lora_server.cli.plan.text import print_plan

        print_plan(plan.ledger, advice, plan.problems)
    is_fine = plan.ledger.verdict is not Verdict.DOES_NOT_FIT and not plan.problems
    return 0 if is_fine else 1


def _traffic(parsed: argparse.Namespace, resolved: ResolvedConfig) -> Traffic | None:
    """Return the requests to simulate, or None.

    Raises:
        StartupError: with everything that is wrong with the flags, or with the trace.
    """
    from lora_server.cli.plan.advice import Traffic
    from lora_server.cli.plan.traffic import NUM_DRAWN, draw_zipf, read_trace

    problems = _flag_problems(parsed, resolved)
    if problems:
        raise StartupError(problems)
    known = [module.name for module in resolved.modules]
    if parsed.trace is not None:
        uses = read_trace(parsed.trace, base_names=resolved.config.base_names)
        return Traffic(uses=uses, known=known)
    if parsed.zipf is None:
        return None
    count = parsed.num_adapters or len(known)
    names = [*known, *(f"adapter {k}" for k in range(len(known) + 1, count + 1))][:count]
    uses = draw_zipf(names, parsed.zipf)
    return Traffic(uses=uses, known=names, num_warm_up=NUM_DRAWN // 2)


def _flag_problems(parsed: argparse.Namespace, resolved: ResolvedConfig) -> list[str]:
    problems = []
    if not 0 < parsed.target_hit_rate <= 1:
        problems.append(
            f"--target-hit-rate is {parsed.target_hit_rate}, expected above 0 and at most 1"
        )
    if parsed.zipf is not None and not (math.isfinite(parsed.zipf) and parsed.zipf >= 0):
        problems.append(f"--zipf is {parsed.zipf}, expected 0 or more")
    if parsed.num_adapters is not None and parsed.num_adapters < 1:
        problems.append(f"--num-adapters is {parsed.num_adapters}, expected at least 1")
    if parsed.num_adapters is not None and parsed.zipf is None:
        problems.append("--num-adapters says how many --zipf spreads over; give --zipf too")
    if parsed.zipf is not None and parsed.num_adapters is None and not resolved.modules:
        problems.append("--zipf needs adapters: name them, or give --num-adapters")
    has_traffic = parsed.trace is not None or parsed.zipf is not None
    if has_traffic and not resolved.config.enable_lora:
        problems.append("--trace and --zipf are about adapters, which --no-enable-lora turns off")
    return problems


def _advice(
    traffic: Traffic, plan: Plan, parsed: argparse.Namespace, config: ServerConfig
) -> TrafficAdvice:
    from lora_server.cli.plan.advice import advise

    host = plan.ledger.host_tier
    assert host is not None, "traffic is asked about with adapters only"
    return advise(
        traffic,
        target=parsed.target_hit_rate,
        num_slots=config.max_loras,
        max_host=config.host_capacity,
        slot_bytes=plan.slot_bytes,
        adapter_bytes=host.adapter_bytes,
    )
