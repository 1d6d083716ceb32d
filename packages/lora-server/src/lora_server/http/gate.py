"""The gate of an in-place update: the new version answers a baseline before it takes traffic.

Its prompts are ordinary requests to the engine, addressed by digest, while the name still stands
for the old version. Clients never name a file: the baseline is in the body, or the server's own.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from contextlib import aclosing
from pathlib import Path
from typing import Final

from lora_server.engine.messages import FinishReason, PromptLogprobs, RequestFailed
from lora_server.engine.request import AdapterUse, GenerationRequest
from lora_server.errors import EngineError, GateFailedError, InvalidRequestError, NotReadyError
from lora_server.http.choices import Choice, TextRules
from lora_server.http.generation import PreparedPrompt
from lora_server.http.logprobs import LogprobLists
from lora_server.http.prepare import encode, limits_of
from lora_server.http.sampling import build_sampling, check_token_ids
from lora_server.http.schemas.adapters import LoadBody
from lora_server.http.schemas.openai import CompletionBody
from lora_server.http.service import Service
from lora_server.smoke.baseline import (
    NUM_TOP,
    AnswerToken,
    Baseline,
    BaselineError,
    BaselinePrompt,
    parse_baseline,
    read_baseline,
)
from lora_server.smoke.compare import FoundAnswer, PromptResult, compare_prompt, failed_prompt
from lora_server.smoke.report import ModelResult

logger = logging.getLogger(__name__)

_PARAM: Final = "gate"
_CONTEXT_TOKENS: Final = 8
"""Of the prompt, for the text of the answer's first token."""


class Gate:
    """One update's gate: made from the body, then called with the digest of what was read."""

    def __init__(self, service: Service, name: str, baseline: Baseline) -> None:
        self.result: ModelResult | None = None
        """Set when it has been called."""
        self._service = service
        self._name = name
        self._baseline = baseline

    async def __call__(self, digest: str) -> None:
        """Let a version answer every prompt recorded for the name, one after the other.

        Raises:
            GateFailedError: it did not pass; `details` names prompts and tokens.
            InvalidRequestError: a prompt does not fit the model, or pins leave the version no slot.
        """
        recorded = self._baseline.models[self._name]
        prompts = [
            await _prepare(self._service, number, prompt, self._baseline.max_tokens)
            for number, prompt in enumerate(recorded.prompts, start=1)
        ]
        rules = self._baseline.rules
        results: list[PromptResult] = []
        for index, (prompt, asked) in enumerate(zip(recorded.prompts, prompts, strict=True)):
            try:
                found = await _answer(self._service, digest, asked)
            except EngineError as error:
                results.append(failed_prompt(index, prompt, str(error)))
                continue
            results.append(compare_prompt(index, prompt, found, tolerance=rules.tolerance))
        self.result = ModelResult(
            name=self._name,
            rules=rules,
            digest_recorded=recorded.digest,
            digest_found=digest,
            prompts=tuple(results),
        )
        self._decide(digest, self.result)

    def _decide(self, digest: str, result: ModelResult) -> None:
        if result.has_passed:
            logger.info("Gate of %r digest=%s passed: %s", self._name, digest[:12], result.summary)
            return
        logger.warning("Gate of %r digest=%s failed: %s", self._name, digest[:12], result.summary)
        raise GateFailedError(
            f"adapter {self._name!r}: version {digest[:12]} did not pass its gate: "
            f"{result.summary}; the version that was served still is",
            param=_PARAM,
            details=result.sentences(),
        )


async def gate_of(service: Service, body: LoadBody) -> Gate | None:
    """Read which gate a load has to pass; None when there is none.

    Without `gate` in the body, the server's own file decides for the names it holds.

    Raises:
        InvalidRequestError: the gate does not belong to an update, holds nothing for the name, is
            no baseline, or is asked of a model that does not generate.
        GateFailedError: the server's own file cannot be read, so that nothing can pass.
    """
    is_asked = body.gate is not None and body.gate is not False
    if body.gate is False or (service.gate_file is None and not is_asked):
        return None
    if not body.load_inplace:
        if is_asked:
            raise InvalidRequestError("gate: only with load_inplace: true", param=_PARAM)
        return None
    if isinstance(body.gate, dict):
        baseline = _parsed(body.gate)
    elif service.gate_file is None:
        raise InvalidRequestError(
            "gate: the server was started without --gate; send the baseline itself", param=_PARAM
        )
    else:
        baseline = await asyncio.to_thread(_read, service.gate_file)
    if body.lora_name not in baseline.models:
        if not is_asked:
            return None
        raise InvalidRequestError(
            f"gate: nothing is recorded for {body.lora_name!r}; recorded are: "
            f"{', '.join(baseline.models)}",
            param=_PARAM,
        )
    if service.pooling is not None:
        raise InvalidRequestError("gate: this model does not generate", param=_PARAM)
    return Gate(service, body.lora_name, baseline)


def _parsed(content: object) -> Baseline:
    try:
        return parse_baseline(content)
    except BaselineError as error:
        problems = [f"gate.{problem}" for problem in error.problems]
        raise InvalidRequestError("; ".join(problems), param=_PARAM, details=problems) from error


def _read(path: Path) -> Baseline:
    try:
        return read_baseline(path)
    except BaselineError as error:
        raise GateFailedError(
            "the baseline of --gate cannot be read, so that no version can pass it",
            param=_PARAM,
            details=error.problems,
        ) from error


async def _prepare(
    service: Service, number: int, prompt: BaselinePrompt, max_tokens: int
) -> PreparedPrompt:
    """Tokenise and check a prompt as `/v1/completions` does."""
    try:
        if isinstance(prompt.prompt, str):
            ids = await encode(service.text, prompt.prompt, add_special_tokens=True)
        else:
            ids = list(prompt.prompt)
        limits = limits_of(service)
        check_token_ids(ids, limits.vocab_size, param="prompt")
        body = CompletionBody(prompt=ids, max_tokens=max_tokens, temperature=0.0, logprobs=NUM_TOP)
        sampling = build_sampling(body, num_prompt_tokens=len(ids), limits=limits)
    except InvalidRequestError as error:
        raise InvalidRequestError(
            f"gate: prompt {number}: {error.message}", param=_PARAM
        ) from error
    return PreparedPrompt(token_ids=tuple(ids), sampling=sampling)


async def _answer(service: Service, digest: str, prompt: PreparedPrompt) -> FoundAnswer:
    """Run one prompt on one version, and read the answer as a client would get it."""
    request = GenerationRequest(
        request_id=f"gate-{uuid.uuid4().hex}",
        prompt_token_ids=prompt.token_ids,
        sampling=prompt.sampling,
        adapters=(AdapterUse(digest=digest),),
    )
    detokenizer = service.text.detokenizer(prompt.token_ids[-_CONTEXT_TOKENS:])
    choice = Choice(0, detokenizer, TextRules())
    lists = LogprobLists(service.text)
    texts: list[str] = []
    ids: list[int] = []
    async with aclosing(service.engine.generate(request)) as outputs:
        async for output in outputs:
            if isinstance(output, RequestFailed):
                raise output.error
            if isinstance(output, PromptLogprobs):
                continue
            if output.finish_reason is FinishReason.ABORT:
                raise NotReadyError("the service is shutting down")
            delta = choice.push(output)
            texts.append(delta.text)
            ids.extend(delta.token_ids)
            lists.add(delta.logprobs, delta.token_lens, delta.text_offset)
    return FoundAnswer(text="".join(texts), tokens=_tokens(ids, lists))


def _tokens(ids: list[int], lists: LogprobLists) -> tuple[AnswerToken, ...]:
    columns = lists.as_dict()
    rows = zip(
        ids, columns["tokens"], columns["token_logprobs"], columns["top_logprobs"], strict=True
    )
    return tuple(
        AnswerToken(id=id_, text=text, logprob=logprob, top=top) for id_, text, logprob, top in rows
    )
