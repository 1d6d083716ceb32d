"""The demo's questions: asked of every model at the same time, shown side by side."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import httpx
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lora_server.errors import StartupError

if TYPE_CHECKING:
    from collections.abc import Sequence

PROMPTS = (
    "How do I reset my password?",
    "List all customers from Berlin.",
    "What happens if the delivery is late?",
)
"""Questions that are in no training text of the bundled adapters."""

_MAX_TOKENS = 48
_TIMEOUT_S = 300
_PLAIN_WIDTH = 120
"""Columns of the table where the output is not a terminal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """What all models said, and how long the batch took."""

    texts: dict[tuple[str, str], str]
    """(prompt, model) -> answer."""
    seconds: float


async def ask_all(
    base_url: str, models: Sequence[str], prompts: Sequence[str] = PROMPTS
) -> Answers:
    """Send every prompt to every model at the same time, greedily decoded.

    Raises:
        StartupError: naming every request that failed.
    """
    pairs = list(itertools.product(prompts, models))
    start = time.perf_counter()
    async with httpx.AsyncClient(base_url=base_url, timeout=_TIMEOUT_S, trust_env=False) as client:
        results = await asyncio.gather(
            *(_ask(client, prompt, model) for prompt, model in pairs), return_exceptions=True
        )
    problems = [
        f"{model!r}, {prompt!r}: {result}"
        for (prompt, model), result in zip(pairs, results, strict=True)
        if isinstance(result, BaseException)
    ]
    if problems:
        raise StartupError(problems)
    texts = {pair: str(text) for pair, text in zip(pairs, results, strict=True)}
    return Answers(texts=texts, seconds=time.perf_counter() - start)


async def _ask(client: httpx.AsyncClient, prompt: str, model: str) -> str:
    response = await client.post("/v1/chat/completions", json=_body(model, prompt))
    if response.status_code != httpx.codes.OK:
        raise StartupError([f"{response.status_code}: {response.text}"])
    return str(response.json()["choices"][0]["message"]["content"]).strip()


def _body(model: str, prompt: str) -> dict[str, object]:
    return {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": _MAX_TOKENS,
        "temperature": 0,
    }


def print_answers(
    answers: Answers,
    models: Sequence[str],
    prompts: Sequence[str] = PROMPTS,
    console: Console | None = None,
) -> None:
    """Print one column for each model and one row for each prompt."""
    target = console if console is not None else Console()
    if console is None and not target.is_terminal:
        target = Console(width=_PLAIN_WIDTH)
    for prompt in prompts:
        table = Table(title=Text(prompt), title_justify="left", expand=True, padding=(0, 1))
        for model in models:
            table.add_column(Text(model), ratio=1, overflow="fold")
        table.add_row(*(Text(answers.texts[prompt, model]) for model in models))
        target.print(table)
    target.print(
        f"{len(answers.texts)} answers in one mixed batch, {answers.seconds:.1f} s", highlight=False
    )


def same_answers(
    answers: Answers, models: Sequence[str], prompts: Sequence[str] = PROMPTS
) -> list[str]:
    """Name every pair of models that give the same answer; empty when all of them differ."""
    return [
        f"{second!r} answers like {first!r}: {prompt!r}"
        for prompt in prompts
        for first, second in itertools.combinations(models, 2)
        if answers.texts[prompt, first] == answers.texts[prompt, second]
    ]


def curl_lines(base_url: str, models: Sequence[str]) -> list[str]:
    """Return commands to go on with: the list, each model, a stream, the header."""
    base, *adapters = models
    prompt = PROMPTS[0]
    chat = f"{base_url}/v1/chat/completions"

    def post(body: dict[str, object], header: str = "") -> str:
        return f"curl -s {chat} -H 'Content-Type: application/json'{header} -d '{_shell(body)}'"

    return [
        "",
        f"Serving on {base_url} until Ctrl-C. Try:",
        "",
        f"curl -s {base_url}/v1/models",
        *(post(_body(model, prompt)) for model in models),
        post({**_body(adapters[0], prompt), "stream": True}).replace("curl -s", "curl -sN", 1),
        post(_body(base, prompt), f" -H 'X-Use-LoRA: {adapters[-1]}'").replace(
            f'"model": {json.dumps(base)}, ', "", 1
        ),
    ]


def _shell(body: dict[str, object]) -> str:
    """Return JSON for a shell's single quotes."""
    return json.dumps(body).replace("'", "'\\''")
