"""`lora-server doctor`: what an adapter is, what it changes, what stands in its way here.

Reads with the reader that serving uses; with `--model` it goes through the same preparation, so
that both give one verdict.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from lora_server.config import ServerConfig
    from lora_weights import Adapter, AdapterReport, Problem


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command and its flags."""
    parser = commands.add_parser(
        "doctor",
        help="say whether an adapter loads and what to change",
        description="Examine an adapter: what it is, what it changes, and what would keep it from "
        "being served. Exits with 0 if it loads, otherwise with 1.",
        allow_abbrev=False,
    )
    parser.add_argument("path", metavar="PATH", help="the adapter: a folder or an address")
    parser.add_argument(
        "--model",
        metavar="MODEL",
        help="base model to examine it for; its weights are loaded (default: the adapter alone)",
    )
    parser.add_argument(
        "--max-lora-rank",
        type=int,
        metavar="N",
        help="largest rank that will be served (default: as serve)",
    )
    parser.add_argument(
        "--lora-target-modules",
        nargs="+",
        metavar="MODULE",
        help="modules that will carry adapters (default: all)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON only")
    parser.set_defaults(run=run, takes_extras=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Examination:
    """What the doctor found."""

    report: AdapterReport
    """On the adapter alone."""
    model: str | None
    """The base it was examined for."""
    fit_problems: tuple[Problem, ...]
    """Why the base cannot take it; empty without a base too."""

    @property
    def problems(self) -> tuple[Problem, ...]:
        """Everything that keeps it from being served."""
        return (*self.report.problems, *self.fit_problems)

    @property
    def loads(self) -> bool:
        """Whether it can be served."""
        return self.report.is_loadable and not self.fit_problems


def run(parsed: argparse.Namespace, extras: Sequence[str]) -> int:
    """Examine an adapter and print what was found; 0 if it loads, otherwise 1.

    Raises:
        StartupError: the base model cannot be loaded, or a flag is out of range.
    """
    del extras
    found = _examine(parsed)
    if parsed.json:
        json.dump(_as_json(found), sys.stdout, indent=2)
        print()
    else:
        from lora_server.cli.doctor_text import print_examination

        print_examination(found)
    return 0 if found.loads else 1


def _examine(parsed: argparse.Namespace) -> Examination:
    from lora_weights import inspect_adapter

    config = _config(parsed)
    report = inspect_adapter(parsed.path, max_rank=config.max_lora_rank)
    problems: tuple[Problem, ...] = ()
    if parsed.model is not None and report.adapter is not None:
        problems = _fit(report.adapter, config)
    return Examination(report=report, model=parsed.model, fit_problems=problems)


def _config(parsed: argparse.Namespace) -> ServerConfig:
    """Return the options of a server that would serve the adapter."""
    from lora_server.config import ServerConfig

    given: dict[str, Any] = {"model": parsed.model or "any", "max_loras": 1}
    if parsed.max_lora_rank is not None:
        given["max_lora_rank"] = parsed.max_lora_rank
    if parsed.lora_target_modules is not None:
        given["lora_target_modules"] = tuple(parsed.lora_target_modules)
    return ServerConfig(**given)


def _fit(adapter: Adapter, config: ServerConfig) -> tuple[Problem, ...]:
    """Prepare the adapter for the base as serving does; return what stands in the way."""
    from lora_layers import AdapterMismatchError
    from lora_server.cli.wrap import wrap_model
    from lora_server.model.load import load_model

    manager = wrap_model(load_model(config.model, device="cpu"), config)
    try:
        manager.prepare(adapter)
    except AdapterMismatchError as error:
        return error.problems
    return ()


def _as_json(found: Examination) -> dict[str, Any]:
    from lora_server.cli.advice import ADVICE

    report = found.report
    return {
        "source": report.source,
        "model": found.model,
        "loads": found.loads,
        "digest": report.digest,
        "base_model": report.base_model,
        "peft_type": None if report.config is None else report.config.peft_type,
        "rank": report.rank,
        "num_tensors": report.num_tensors,
        "weights_bytes": report.weights_bytes,
        "modules": [
            {
                "module": summary.module,
                "kinds": [str(kind) for kind in summary.kinds],
                "rank": summary.rank,
                "scaling": summary.scaling,
                "bytes": summary.nbytes,
                "dtype": summary.dtype,
                "norms": {str(kind): norm for kind, norm in summary.norms.items()},
            }
            for summary in report.modules
        ],
        "warnings": list(report.warnings),
        "problems": [
            {
                "code": str(problem.code),
                "module": problem.module,
                "tensor": problem.tensor,
                "found": problem.found,
                "expected": problem.expected,
                "message": str(problem),
                "advice": ADVICE[problem.code],
            }
            for problem in found.problems
        ],
    }
