"""`lora-server demo`: a real small model and three adapters, answering one mixed batch.

The service runs as a child process, as a user would start it, and is asked over HTTP.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from typing import TYPE_CHECKING

from lora_server.errors import StartupError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command and its flags."""
    parser = commands.add_parser(
        "demo",
        help="serve the embedded model and ask it one mixed batch",
        description="Prepare the embedded base model, serve it with the bundled adapters, ask the "
        "same questions of the base and of every adapter in one batch, then keep serving.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--once",
        action="store_true",
        help="exit after the batch: 0 when every adapter answers differently, otherwise 1",
    )
    parser.add_argument(
        "--prepare",
        action="store_true",
        help='only prepare the model; print {"model": PATH, "adapters": {NAME: PATH}}',
    )
    parser.add_argument(
        "--port",
        type=_port,
        default=0,
        metavar="N",
        help="port of the service (default: a free one)",
    )
    parser.set_defaults(run=run, takes_extras=False)


def run(parsed: argparse.Namespace, extras: Sequence[str]) -> int:
    """Run the demo; 0 after Ctrl-C, and as `--once` says.

    Raises:
        StartupError: when the model or the adapters are missing, or the service does not start.
    """
    from lora_server.model.demo import bundled_adapters

    del extras
    model = _prepare()
    adapters = bundled_adapters()
    if parsed.prepare:
        paths = {name: str(path) for name, path in adapters.items()}
        print(json.dumps({"model": str(model), "adapters": paths}))
        return 0
    if not adapters:
        raise StartupError(["this installation of lora-server has no bundled adapters"])
    return _serve_and_ask(model, adapters, port=parsed.port, once=parsed.once)


def _prepare() -> Path:
    """Convert the embedded model unless that was done before, with a progress bar on stderr."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from lora_server.model.demo import BASE_NAME, prepare_base
    from lora_server.options import cache_folder

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(BASE_NAME, total=1.0)

        def tell(stage: str, fraction: float) -> None:
            bar.update(task, description=f"{BASE_NAME}: {stage}", completed=fraction)

        return prepare_base(cache_dir=cache_folder(), progress=tell)


def _serve_and_ask(model: Path, adapters: Mapping[str, Path], *, port: int, once: bool) -> int:
    from lora_server.cli.demo_batch import ask_all, curl_lines, print_answers, same_answers
    from lora_server.cli.demo_child import free_port, serve_child

    chosen = port or free_port()
    base_url = f"http://127.0.0.1:{chosen}"
    names = (model.name, *adapters)
    with serve_child(model, adapters, port=chosen) as child:
        child.wait_until_ready(base_url)
        answers = asyncio.run(ask_all(base_url, names))
        print_answers(answers, names)
        problems = same_answers(answers, names)
        for problem in problems:
            print(problem, file=sys.stderr)
        if once:
            return 1 if problems else 0
        print("\n".join(curl_lines(base_url, names)), flush=True)
        try:
            return child.wait()
        except KeyboardInterrupt:
            return 0


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:  # noqa: PLR2004 - what TCP has
        raise argparse.ArgumentTypeError(f"{text!r} is not a port")
    return int(text)
