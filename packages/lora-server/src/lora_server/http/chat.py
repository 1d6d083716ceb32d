"""`POST /v1/chat/completions`: a conversation in, the assistant's next message out."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any, Final

from fastapi import APIRouter, Request, Response

from lora_server.http.auth import UserRoute
from lora_server.http.choices import ChoiceDelta
from lora_server.http.context import context_of
from lora_server.http.describe import streams
from lora_server.http.generation import Generation, PreparedPrompt, PromptScored
from lora_server.http.logprobs import chat_logprobs
from lora_server.http.prepare import (
    ChunkWriter,
    ReplyHead,
    charge_tokens,
    choose,
    dumps,
    encode,
    limits_of,
    service_of,
    start,
    wants_usage,
)
from lora_server.http.sampling import build_sampling
from lora_server.http.schemas import replies
from lora_server.http.schemas.openai import ChatBody, ChatMessage
from lora_server.http.service import Service
from lora_server.http.streaming import EventStream, reply_while_connected
from lora_server.http.text import TextProcessor

router = APIRouter(route_class=UserRoute)

_ASSISTANT: Final = "assistant"


@router.post("/v1/chat/completions", **streams(replies.ChatReply))
async def create_chat_completion(body: ChatBody, request: Request) -> Response:
    """Answer a conversation."""
    selection = choose(request, body)
    service = service_of(request)
    prompt = await _prepare(service, body)
    head, generation = start(service, body, selection, [prompt], id_prefix="chatcmpl")
    charge_tokens(request, generation.usage)
    reply = _ChatReply(service.text, body, head, generation)
    if body.stream:
        return EventStream(reply.chunks(), request_id=context_of(request).request_id)
    return await reply_while_connected(request, reply.whole())


async def _prepare(service: Service, body: ChatBody) -> PreparedPrompt:
    text = service.text.render_chat(
        [_template_message(message) for message in body.messages],
        add_generation_prompt=body.add_generation_prompt is not False,
        template_args=body.chat_template_kwargs,
    )
    # The template writes the special tokens itself.
    add_special_tokens = body.add_special_tokens is True
    token_ids = await encode(service.text, text, add_special_tokens=add_special_tokens)
    sampling = build_sampling(body, num_prompt_tokens=len(token_ids), limits=limits_of(service))
    return PreparedPrompt(token_ids=tuple(token_ids), sampling=sampling, text=text)


def _template_message(message: ChatMessage) -> dict[str, str]:
    """Return a message as templates know it; `developer` is the newer word for `system`."""
    role = "system" if message.role == "developer" else message.role
    named = {} if message.name is None else {"name": message.name}
    return {"role": role, "content": message.text} | named


class _ChatReply:
    """Writes the events of one generation. Use `whole` or `chunks`, once."""

    def __init__(
        self, text: TextProcessor, body: ChatBody, head: ReplyHead, generation: Generation
    ) -> None:
        self._text = text
        self._body = body
        self._head = head
        self._generation = generation

    async def whole(self) -> Response:
        """Collect everything into one reply."""
        deltas: list[list[ChoiceDelta]] = [[] for _ in range(self._generation.plan.n)]
        async with aclosing(self._generation.events()) as events:
            async for event in events:
                assert isinstance(event, ChoiceDelta)
                deltas[event.index].append(event)
        content = self._head.as_dict("chat.completion") | {
            "choices": [self._choice(idx, parts) for idx, parts in enumerate(deltas)],
            "usage": self._generation.usage.as_dict(),
        }
        return Response(dumps(content | self._prompt_ids()), media_type="application/json")

    def _choice(self, index: int, deltas: list[ChoiceDelta]) -> dict[str, Any]:
        text = "".join(delta.text for delta in deltas)
        message = {"role": _ASSISTANT, "content": text, "refusal": None}
        choice: dict[str, Any] = {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(deltas),
            "finish_reason": deltas[-1].finish_reason,
            "stop_reason": deltas[-1].stop_reason,
        }
        return choice | self._token_ids(deltas)

    async def chunks(self) -> AsyncGenerator[str, None]:
        """Yield the chunks of a stream; a choice's first one says who speaks."""
        kind = "chat.completion.chunk"
        writer = ChunkWriter(self._head, kind, with_usage=wants_usage(self._body))
        num_open = self._generation.plan.n
        for idx in range(self._generation.plan.n):
            delta = {"role": _ASSISTANT, "content": ""}
            yield writer.choice(
                {"index": idx, "delta": delta, "logprobs": None, "finish_reason": None}
            )
        write_text = self._text_writers(writer)
        async with aclosing(self._generation.events()) as events:
            async for event in events:
                assert not isinstance(event, PromptScored)
                num_open -= event.finish_reason is not None
                if not num_open:
                    choice = self._chunk_choice(event)
                    yield writer.last_choice(choice, self._generation.usage)
                elif write_text and event.finish_reason is None:
                    if event.text:
                        yield write_text[event.index](event.text)
                elif self._has_news(event):
                    yield writer.choice(self._chunk_choice(event))

    def _text_writers(self, writer: ChunkWriter) -> list[Callable[[str], str]]:
        """Return what writes a chunk of each choice in which only text is new; none may do so."""
        if self._body.logprobs or self._body.return_token_ids:
            return []
        after = '},"logprobs":null,"finish_reason":null'
        return [
            writer.text_writer(idx, '"delta":{"content":', after)
            for idx in range(self._generation.plan.n)
        ]

    def _has_news(self, delta: ChoiceDelta) -> bool:
        """Whether there is anything to send; text may be held back for a stop string."""
        is_asked = self._body.logprobs or self._body.return_token_ids
        return bool(delta.text) or delta.finish_reason is not None or bool(is_asked)

    def _chunk_choice(self, delta: ChoiceDelta) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": delta.index,
            "delta": {"content": delta.text} if delta.text else {},
            "logprobs": self._logprobs([delta]),
            "finish_reason": delta.finish_reason,
        }
        if delta.finish_reason is not None:
            choice["stop_reason"] = delta.stop_reason
        return choice | self._token_ids([delta])

    def _logprobs(self, deltas: list[ChoiceDelta]) -> dict[str, Any] | None:
        if not self._body.logprobs:
            return None
        items = [item for delta in deltas for item in delta.logprobs]
        return {"content": chat_logprobs(self._text, items), "refusal": None}

    def _token_ids(self, deltas: list[ChoiceDelta]) -> dict[str, Any]:
        if not self._body.return_token_ids:
            return {}
        return {"token_ids": [id_ for delta in deltas for id_ in delta.token_ids]}

    def _prompt_ids(self) -> dict[str, Any]:
        if not self._body.return_token_ids:
            return {}
        return {"prompt_token_ids": list(self._generation.plan.prompts[0].token_ids)}
