"""Runs the prompts of one HTTP request in the engine and merges what comes back.

Whatever ends the iteration (the last token, a stop string, an error, a client that left) closes
the engine's iterators, and with them the engine's work.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from lora_server.engine.messages import (
    PromptLogprobs,
    RequestFailed,
    SequenceOutput,
    TokenLogprob,
)
from lora_server.engine.request import AdapterUse, GenerationRequest, SamplingParams
from lora_server.errors import EngineError
from lora_server.exchange import current_request_id
from lora_server.http.choices import Choice, ChoiceDelta, TextRules
from lora_server.http.service import Service
from lora_server.metrics import RequestRecord, RequestTimer


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedPrompt:
    """One prompt, checked and tokenised."""

    token_ids: tuple[int, ...]
    sampling: SamplingParams
    text: str | None = None
    """The text it was made from; None for token ids."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything that one HTTP request asks of the engine."""

    id: str
    """Unique; the reply's `id` without its prefix."""
    prompts: tuple[PreparedPrompt, ...]
    adapters: tuple[AdapterUse, ...]
    n: int
    rules: TextRules
    metrics_label: str
    """Adapter label of the metrics."""


@dataclass(frozen=True, slots=True)
class PromptScored:
    """Log-probabilities of a prompt's tokens from the second on; sent before its choices."""

    prompt_idx: int
    logprobs: tuple[TokenLogprob, ...]


@dataclass(slots=True)
class Usage:
    """Tokens read and generated so far."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0

    def as_dict(self) -> dict[str, object]:
        """Return the OpenAI API's `usage`."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


GenerationEvent = PromptScored | ChoiceDelta


class Generation:
    """One run of a plan; iterate `events` once, then read `usage`."""

    def __init__(
        self,
        service: Service,
        plan: Plan,
        *,
        on_end: Callable[[RequestRecord], None] | None = None,
    ) -> None:
        """Prepare a run; `on_end` gets its numbers when it is over."""
        self.plan = plan
        self.usage = Usage(prompt_tokens=sum(len(prompt.token_ids) for prompt in plan.prompts))
        self._service = service
        self._timer = RequestTimer(
            service.metrics,
            plan.metrics_label,
            clock=service.clock,
            num_prompt_tokens=self.usage.prompt_tokens,
            num_sequences=len(plan.prompts) * plan.n,
            on_end=on_end,
        )

    async def events(self) -> AsyncGenerator[GenerationEvent, None]:
        """Yield what the engine produces, each prompt's events in order.

        Raises:
            ServerError: the engine could not answer one of the prompts; the others are ended.
        """
        runs = [self._run_prompt(idx) for idx in range(len(self.plan.prompts))]
        events = runs[0] if len(runs) == 1 else _merged(runs)
        with self._timer:
            async with aclosing(events):
                async for event in events:
                    yield event

    async def _run_prompt(self, prompt_idx: int) -> AsyncGenerator[GenerationEvent, None]:
        prompt = self.plan.prompts[prompt_idx]
        context = prompt.token_ids[-8:]
        choices = [
            Choice(
                prompt_idx * self.plan.n + i,
                self._service.text.detokenizer(context),
                self.plan.rules,
            )
            for i in range(self.plan.n)
        ]
        request = GenerationRequest(
            request_id=f"{self.plan.id}-{prompt_idx}",
            prompt_token_ids=prompt.token_ids,
            sampling=prompt.sampling,
            adapters=self.plan.adapters,
            n=self.plan.n,
            exchange_id=current_request_id(),
        )
        num_open = len(choices)
        async with aclosing(self._service.engine.generate(request)) as outputs:
            async for output in outputs:
                if not isinstance(output, SequenceOutput):
                    yield _scored(output, prompt_idx)
                    continue
                choice = choices[output.index]
                if choice.is_finished:
                    continue
                # The first continuation reads the prompt; the others find its blocks in the cache.
                if output.index == 0 and choice.num_tokens == 0:
                    self._note_start(output)
                delta = choice.push(output)
                self.usage.completion_tokens += len(delta.token_ids)
                self._timer.add_tokens(len(delta.token_ids))
                num_open -= choice.is_finished
                yield delta
                if not num_open:  # by the engine, or by a stop string
                    return
        raise EngineError("the engine ended the request before its last token")

    def _note_start(self, output: SequenceOutput) -> None:
        self.usage.cached_tokens += output.num_cached_tokens
        self._timer.add_cached_tokens(output.num_cached_tokens)
        self._timer.admitted(output.admitted_s)


def _scored(output: PromptLogprobs | RequestFailed, prompt_idx: int) -> PromptScored:
    """Return the prompt's log-probabilities, or raise why the request failed."""
    if isinstance(output, RequestFailed):
        raise output.error
    return PromptScored(prompt_idx, output.logprobs)


async def _merged(
    runs: Sequence[AsyncGenerator[GenerationEvent, None]],
) -> AsyncGenerator[GenerationEvent, None]:
    """Yield the events of all runs as they come; the first error ends them all."""
    queue: asyncio.Queue[GenerationEvent | Exception | None] = asyncio.Queue()
    tasks = [asyncio.create_task(_pump(run, queue)) for run in runs]
    try:
        num_open = len(tasks)
        while num_open:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                num_open -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(
    run: AsyncGenerator[GenerationEvent, None],
    queue: asyncio.Queue[GenerationEvent | Exception | None],
) -> None:
    """Move one run's events into the queue; its end is None, its failure the exception."""
    try:
        async with aclosing(run):
            async for event in run:
                queue.put_nowait(event)
    except Exception as error:  # noqa: BLE001 - handed to the reader, which raises it
        queue.put_nowait(error)
    else:
        queue.put_nowait(None)
