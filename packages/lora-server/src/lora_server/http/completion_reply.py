"""What `/v1/completions` answers: one generation written as a whole, or in chunks."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any, Final

from fastapi import Response

from lora_server.http.choices import ChoiceDelta
from lora_server.http.detokenize import token_texts
from lora_server.http.generation import Generation, PreparedPrompt, PromptScored
from lora_server.http.logprobs import LogprobLists
from lora_server.http.prepare import ChunkWriter, ReplyHead, dumps, wants_usage
from lora_server.http.schemas.openai import CompletionBody
from lora_server.http.text import TextProcessor

_KIND: Final = "text_completion"


class CompletionReply:
    """Writes the events of one generation. Use `whole` or `chunks`, once."""

    def __init__(
        self, text: TextProcessor, body: CompletionBody, head: ReplyHead, generation: Generation
    ) -> None:
        self._body = body
        self._head = head
        self._generation = generation
        self._prompts = [_PromptPart(text, body, prompt) for prompt in generation.plan.prompts]

    async def whole(self) -> Response:
        """Collect everything into one reply."""
        num_choices = len(self._prompts) * self._generation.plan.n
        choices = [_Choice(self._prompt(idx)) for idx in range(num_choices)]
        async with aclosing(self._generation.events()) as events:
            async for event in events:
                if isinstance(event, PromptScored):
                    self._prompts[event.prompt_idx].scored = event
                else:
                    choices[event.index].add(event)
        content = self._head.as_dict(_KIND) | {
            "choices": [choice.as_dict(idx) for idx, choice in enumerate(choices)],
            "usage": self._generation.usage.as_dict(),
        }
        return Response(dumps(content), media_type="application/json")

    async def chunks(self) -> AsyncGenerator[str, None]:
        """Yield the chunks of a stream; a choice's first one repeats the prompt where asked."""
        writer = ChunkWriter(self._head, _KIND, with_usage=wants_usage(self._body))
        num_open = len(self._prompts) * self._generation.plan.n
        started: set[int] = set()
        write_text = self._text_writers(writer)
        async with aclosing(self._generation.events()) as events:
            async for event in events:
                if isinstance(event, PromptScored):
                    self._prompts[event.prompt_idx].scored = event
                    continue
                if write_text and event.finish_reason is None and event.index in started:
                    if event.text:
                        yield write_text[event.index](event.text)
                    continue
                choice = _Choice(self._prompt(event.index), is_first=event.index not in started)
                choice.add(event)
                num_open -= event.finish_reason is not None
                if not num_open:
                    yield writer.last_choice(choice.as_dict(event.index), self._generation.usage)
                elif choice.has_news:
                    started.add(event.index)
                    yield writer.choice(choice.as_dict(event.index))

    def _text_writers(self, writer: ChunkWriter) -> list[Callable[[str], str]]:
        """Return what writes a chunk of each choice in which only text is new; none may do so."""
        if self._body.logprobs is not None or self._body.return_token_ids:
            return []
        after = ',"logprobs":null,"finish_reason":null,"stop_reason":null'
        num_choices = len(self._prompts) * self._generation.plan.n
        return [writer.text_writer(idx, '"text":', after) for idx in range(num_choices)]

    def _prompt(self, choice_idx: int) -> _PromptPart:
        return self._prompts[choice_idx // self._generation.plan.n]


class _PromptPart:
    """What choices say about the prompt that they continue."""

    def __init__(self, text: TextProcessor, body: CompletionBody, prompt: PreparedPrompt) -> None:
        self.processor = text
        self.body = body
        self.token_ids = prompt.token_ids
        self.scored: PromptScored | None = None
        """Set before the first tokens of a choice arrive."""
        self.text = ""
        if body.echo:
            self.text = text.decode(prompt.token_ids) if prompt.text is None else prompt.text

    def add_to(self, lists: LogprobLists) -> None:
        """Repeat the prompt's tokens with their log-probabilities."""
        if not self.body.echo or self.scored is None:
            return
        pieces = token_texts(self.processor.detokenizer(), self.token_ids)
        lens = [len(piece) for piece in pieces]
        lists.add_first(self.token_ids[0], 0)
        lists.add(self.scored.logprobs, lens[1:], lens[0])


class _Choice:
    """One element of `choices`: the whole continuation, or what is new of it."""

    def __init__(self, prompt: _PromptPart, *, is_first: bool = True) -> None:
        self._prompt = prompt
        self._is_first = is_first
        self._deltas: list[ChoiceDelta] = []

    def add(self, delta: ChoiceDelta) -> None:
        """Append what the engine produced."""
        self._deltas.append(delta)

    @property
    def has_news(self) -> bool:
        """Whether there is anything to send; text may be held back for a stop string."""
        delta = self._deltas[-1]
        has_text = bool(delta.text) or (self._is_first and bool(self._prompt.text))
        is_asked = self._prompt.body.logprobs is not None or self._prompt.body.return_token_ids
        return has_text or delta.finish_reason is not None or bool(is_asked)

    def as_dict(self, index: int) -> dict[str, Any]:
        """Return the element."""
        last = self._deltas[-1]
        echo = self._prompt.text if self._is_first else ""
        choice: dict[str, Any] = {
            "index": index,
            "text": echo + "".join(delta.text for delta in self._deltas),
            "logprobs": self._logprobs(),
            "finish_reason": last.finish_reason,
            "stop_reason": last.stop_reason,
        }
        if self._prompt.body.return_token_ids:
            choice["token_ids"] = [id_ for delta in self._deltas for id_ in delta.token_ids]
            choice["prompt_token_ids"] = list(self._prompt.token_ids) if self._is_first else None
        return choice

    def _logprobs(self) -> dict[str, Any] | None:
        if self._prompt.body.logprobs is None:
            return None
        lists = LogprobLists(self._prompt.processor)
        if self._is_first:
            self._prompt.add_to(lists)
        for delta in self._deltas:
            offset = len(self._prompt.text) + delta.text_offset
            lists.add(delta.logprobs, delta.token_lens, offset)
        return lists.as_dict()
