"""The steps that chat and text completions share: who answers, and what the engine is asked."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Final, Protocol

from fastapi import Request

from lora_server.http.choices import TextRules
from lora_server.http.context import context_of
from lora_server.http.generation import Generation, Plan, PreparedPrompt, Usage
from lora_server.http.sampling import Limits
from lora_server.http.schemas.openai import (
    ChatBody,
    CompletionBody,
    GenerationBody,
    WeightedAdapter,
)
from lora_server.http.select import HEADER, Selection, select
from lora_server.http.service import Service
from lora_server.http.streaming import together
from lora_server.http.text import TextProcessor
from lora_server.http.tracing import on_end
from lora_server.http.visible import VisibleCatalog

_LONG_TEXT_CHARS: Final = 8192
_OPERATIONS: Final = MappingProxyType({"chatcmpl": "chat", "cmpl": "text_completion"})
"""The beginning of a reply's id to what traces call the request."""
# Made once: a call of json.dumps with these options makes a new one each time.
_ENCODER: Final = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyHead:
    """The fields with which every reply and every chunk of one request begins."""

    id: str
    created: int
    model: str
    system_fingerprint: str

    def as_dict(self, kind: str) -> dict[str, Any]:
        """Return the fields, `kind` being the reply's `object`."""
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.system_fingerprint,
        }


class ChunkWriter:
    """Writes the chunks of one stream; the part that never changes is written once."""

    def __init__(self, head: ReplyHead, kind: str, *, with_usage: bool) -> None:
        self._start = dumps(head.as_dict(kind))[:-1] + ',"choices":['
        # Clients that ask for usage find the field in every chunk, null until the last one.
        self._end = '],"usage":null}' if with_usage else "]}"
        self._with_usage = with_usage

    def choice(self, choice: dict[str, Any]) -> str:
        """Write a chunk with one choice."""
        return f"{self._start}{dumps(choice)}{self._end}"

    def text_writer(self, index: int, before: str, after: str) -> Callable[[str], str]:
        """Return what writes a chunk whose choice has nothing new but text.

        Args:
            index: of the choice.
            before: JSON of the choice between its index and the text.
            after: JSON of the choice behind the text.
        """
        start = f'{self._start}{{"index":{index},{before}'
        end = f"{after}}}{self._end}"
        return lambda text: f"{start}{dumps(text)}{end}"

    def last_choice(self, choice: dict[str, Any], usage: Usage) -> str:
        """Write a chunk after which there is no further choice, with the usage where asked for."""
        chunk = self.choice(choice)
        return together(chunk, self._usage(usage.as_dict())) if self._with_usage else chunk

    def _usage(self, usage: dict[str, object]) -> str:
        """Write the chunk that holds the usage alone."""
        return f'{self._start}],"usage":{dumps(usage)}}}'


def dumps(value: object) -> str:
    """Write compact JSON; NaN, which JSON does not have, is an error."""
    return _ENCODER.encode(value)


def service_of(request: Request) -> Service:
    """Return the service that the app was made for, with what the caller's key may use of it."""
    service: Service = request.app.state.service
    caller = context_of(request).caller
    if caller is None or caller.key.sees_everything:
        return service
    return replace(service, catalog=VisibleCatalog(service.catalog, caller.key))


def charge_tokens(request: Request, usage: Usage) -> None:
    """Count a request's prompt against its key's allowance, and its answer once that is complete.

    Raises:
        RateLimitError: the key has used up its tokens.
    """
    context = context_of(request)
    if context.caller is None or context.caller.limits is None:
        return
    limits = context.caller.limits
    limits.take_tokens(usage.prompt_tokens)
    context.held.callback(lambda: limits.settle(usage.completion_tokens))


def limits_of(service: Service) -> Limits:
    """Return what the model can take."""
    return Limits(max_model_len=service.max_model_len, vocab_size=service.vocab_size)


class ChoosingBody(Protocol):
    """The fields of a body that say who answers."""

    @property
    def model(self) -> str | None:
        """A name of the base or of an adapter."""

    @property
    def lora(self) -> list[WeightedAdapter] | None:
        """A weighted set."""


def choose(request: Request, body: ChoosingBody) -> Selection:
    """Decide what answers, hold it until the reply is complete, and note it for the header.

    Raises:
        NotReadyError: the server is starting or draining.
        RequestError: as `select`.
    """
    service = service_of(request)
    context = context_of(request)
    context.held.enter_context(service.readiness.working())
    selection = select(
        service.catalog,
        model=body.model,
        header_values=request.headers.getlist(HEADER),
        weighted=body.lora,
        max_loras=service.max_loras,
    )
    # Nothing is awaited between the choice and the hold: the version cannot go away in between.
    context.held.enter_context(service.catalog.hold(use.digest for use in selection.adapters))
    context.adapter_label = selection.label
    return selection


def start(
    service: Service,
    body: CompletionBody | ChatBody,
    selection: Selection,
    prompts: Sequence[PreparedPrompt],
    *,
    id_prefix: str,
) -> tuple[ReplyHead, Generation]:
    """Make the reply's head and the generation, which starts when its events are read."""
    unique = uuid.uuid4().hex
    head = ReplyHead(
        id=f"{id_prefix}-{unique}",
        created=int(service.now()),
        model=selection.model,
        system_fingerprint=(
            f"lora-server-{service.version}:{service.catalog.base_names[0]}:{selection.label}"
        ),
    )
    plan = Plan(
        id=unique,
        prompts=tuple(prompts),
        adapters=selection.adapters,
        n=body.n or 1,
        rules=_rules(body),
        metrics_label=selection.metrics_label,
    )
    ended = on_end(service, selection, operation=_OPERATIONS[id_prefix], response_id=head.id)
    return head, Generation(service, plan, on_end=ended)


async def encode(text: TextProcessor, prompt: str, *, add_special_tokens: bool) -> list[int]:
    """Tokenise a prompt; a long one beside the event loop, which other streams need."""
    if len(prompt) <= _LONG_TEXT_CHARS:
        return text.encode(prompt, add_special_tokens=add_special_tokens)
    return await asyncio.to_thread(text.encode, prompt, add_special_tokens=add_special_tokens)


def _rules(body: GenerationBody) -> TextRules:
    stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
    return TextRules(
        stops=tuple(stops),
        include_stop=bool(body.include_stop_str_in_output),
        min_tokens=body.min_tokens or 0,
    )


def wants_usage(body: GenerationBody) -> bool:
    """Whether a stream ends with its usage."""
    return body.stream_options is not None and bool(body.stream_options.include_usage)
