"""Asks every name for every prompt and makes a baseline of the answers."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from lora_server.cli.smoke.client import AnswerFailedError, ServedModel, SmokeClientError
from lora_server.smoke.baseline import MAX_PROMPTS, Baseline, BaselineError, BaselineModel
from lora_server.smoke.compare import shown_prompt

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lora_server.cli.smoke.client import SmokeClient
    from lora_server.smoke.baseline import BaselinePrompt


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordOutcome:
    """A baseline, or why there is none."""

    baseline: Baseline | None
    problems: tuple[str, ...] = ()


def record(
    client: SmokeClient,
    prompts: Sequence[BaselinePrompt],
    *,
    names: Sequence[str] | None,
    max_tokens: int,
) -> RecordOutcome:
    """Ask everything; what could not be answered is told together.

    Args:
        client: connected to the server.
        prompts: what to ask.
        names: only these; None is the base and every adapter.
        max_tokens: longest answer.

    Raises:
        BaselineError: there are too many prompts.
        SmokeClientError: the server cannot be used, or does not have one of the names.
    """
    if len(prompts) > MAX_PROMPTS:
        raise BaselineError([f"there are {len(prompts)} prompts, expected at most {MAX_PROMPTS}"])
    problems: list[str] = []
    models: dict[str, BaselineModel] = {}
    for served in _chosen(client, names):
        try:
            models[served.name] = _record_model(client, served, prompts, max_tokens)
        except BaselineError as error:
            problems += [f"{served.name!r}: {problem}" for problem in error.problems]
    if problems:
        return RecordOutcome(baseline=None, problems=tuple(problems))
    return RecordOutcome(
        baseline=Baseline(
            created_utc=datetime.now(UTC).isoformat(timespec="seconds"),
            server=client.base_url,
            max_tokens=max_tokens,
            models=models,
        )
    )


def _chosen(client: SmokeClient, names: Sequence[str] | None) -> list[ServedModel]:
    served = client.models()
    if names is None:
        return list(served)
    by_name = {model.name: model for model in served}
    missing = [name for name in names if name not in by_name and not client.knows(name)]
    if missing:
        raise SmokeClientError(
            f"--adapter: not served: {', '.join(map(repr, missing))}; "
            f"served are: {', '.join(by_name)}"
        )
    return [
        by_name.get(name, ServedModel(name=name, is_base=False)) for name in dict.fromkeys(names)
    ]


def _record_model(
    client: SmokeClient, served: ServedModel, prompts: Sequence[BaselinePrompt], max_tokens: int
) -> BaselineModel:
    recorded: list[BaselinePrompt] = []
    labels: set[str | None] = set()
    problems: list[str] = []
    for number, prompt in enumerate(prompts, start=1):
        try:
            found = client.ask(served.name, prompt, max_tokens=max_tokens)
        except AnswerFailedError as error:
            problems.append(f"prompt {number} {shown_prompt(prompt)}: {error}")
            continue
        labels.add(found.answered_by)
        update = {"text": found.answer.text, "tokens": found.answer.tokens}
        recorded.append(prompt.model_copy(update=update))
    if len(labels) > 1:
        shown = ", ".join(sorted(map(str, labels)))
        problems.append(f"the version changed while it was recorded: {shown}")
    if problems:
        raise BaselineError(problems)
    return BaselineModel(is_base=served.is_base, answered_by=labels.pop(), prompts=tuple(recorded))
