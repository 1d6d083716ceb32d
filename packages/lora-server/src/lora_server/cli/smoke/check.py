"""Asks a server again what a baseline holds, and says what became of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lora_server.cli.smoke.client import AnswerFailedError
from lora_server.smoke.baseline import BaselineError, digest_of
from lora_server.smoke.compare import compare_prompt, failed_prompt
from lora_server.smoke.report import CheckResult, ModelResult

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from lora_server.cli.smoke.client import SmokeClient
    from lora_server.smoke.baseline import Baseline, Rules
    from lora_server.smoke.compare import PromptResult


def check(
    client: SmokeClient,
    baseline: Baseline,
    *,
    names: Sequence[str] | None,
    tolerance: float | None,
) -> CheckResult:
    """Compare a server with a baseline.

    The base may have another name than when it was recorded.

    Args:
        client: connected to the server.
        baseline: what was recorded.
        names: only these; None is everything recorded.
        tolerance: in log-probability; None is what the baseline says.

    Raises:
        BaselineError: a name of `names` was not recorded.
        SmokeClientError: the server cannot be used.
    """
    wanted = list(dict.fromkeys(names)) if names is not None else list(baseline.models)
    unknown = [name for name in wanted if name not in baseline.models]
    if unknown:
        shown, recorded = ", ".join(map(repr, unknown)), ", ".join(baseline.models)
        raise BaselineError([f"--adapter: not recorded: {shown}; recorded are: {recorded}"])
    rules = baseline.rules
    if tolerance is not None:
        rules = rules.model_copy(update={"tolerance": tolerance})
    served = client.models()
    base = served[0].name
    listed = {model.name for model in served}
    asked = {name: base if baseline.models[name].is_base else name for name in wanted}
    missing = [name for name, now in asked.items() if now not in listed and not client.knows(now)]
    results = [
        _check_model(client, baseline, name, now, rules)
        for name, now in asked.items()
        if name not in missing
    ]
    known = {*baseline.models, *asked.values(), base}
    return CheckResult(
        models=tuple(results),
        not_served=tuple(missing),
        not_recorded=tuple(m.name for m in served if m.name not in known) if names is None else (),
    )


def _check_model(
    client: SmokeClient, baseline: Baseline, name: str, asked: str, rules: Rules
) -> ModelResult:
    recorded = baseline.models[name]
    results: list[PromptResult] = []
    labels: list[str | None] = []
    for index, prompt in enumerate(recorded.prompts):
        try:
            found = client.ask(asked, prompt, max_tokens=baseline.max_tokens)
        except AnswerFailedError as error:
            results.append(failed_prompt(index, prompt, str(error)))
            continue
        labels.append(found.answered_by)
        if labels[-1] != labels[0]:
            change = f"the version changed meanwhile, from {labels[0]} to {labels[-1]}"
            results.append(failed_prompt(index, prompt, change))
        else:
            results.append(compare_prompt(index, prompt, found.answer, tolerance=rules.tolerance))
    return ModelResult(
        name=name,
        rules=rules,
        digest_recorded=recorded.digest,
        digest_found=digest_of(labels[-1] if labels else None),
        prompts=tuple(results),
    )


def check_lines(result: CheckResult) -> Iterator[str]:
    """Describe a check for people: a line a name, and below it what is not the same."""
    for model in result.models:
        yield f"{'ok' if model.has_passed else 'FAILED':7}{model.name}: {model.summary}"
        for sentence in model.sentences():
            yield f"         {sentence}"
    for name in result.not_served:
        yield f"FAILED {name}: recorded, but not served"
    for name in result.not_recorded:
        yield f"note   {name}: served, but not recorded"
