"""The steps that all pooling routes share: who answers, which tokens, and the engine's answers."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from fastapi import Request

from lora_server.engine.pooling_request import PoolingKind, PoolingOutput, PoolingRequest
from lora_server.errors import InvalidRequestError
from lora_server.exchange import current_request_id
from lora_server.http.context import context_of
from lora_server.http.errors import context_length_error
from lora_server.http.limits import KeyLimits
from lora_server.http.pooling_service import PoolingService
from lora_server.http.pooling_text import EncodedText
from lora_server.http.prepare import choose, service_of
from lora_server.http.sampling import check_token_ids
from lora_server.http.schemas.pooling import PoolingBody
from lora_server.http.select import Selection
from lora_server.http.service import Service
from lora_server.http.tracing import on_end
from lora_server.metrics import RequestTimer

_LONG_TEXT_CHARS: Final = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingCall:
    """One HTTP request to a pooling route, its adapter chosen and held."""

    service: Service
    pooling: PoolingService
    selection: Selection
    body: PoolingBody
    unique: str
    """Part of the reply's id, and of the engine's request ids."""
    limits: KeyLimits | None = None
    """What the caller's key has left."""

    def head(self, kind: str, id_prefix: str) -> dict[str, Any]:
        """Return the fields with which a reply begins."""
        return {
            "id": f"{id_prefix}-{self.unique}",
            "object": kind,
            "created": int(self.service.now()),
            "model": self.selection.model,
        }

    async def encode(self, texts: Sequence[tuple[str, str | None]]) -> list[EncodedText]:
        """Tokenise texts and pairs; many or long ones beside the event loop.

        Raises:
            InvalidRequestError: one has no tokens, or is longer than the model takes and may not be
                cut.
        """
        if sum(len(text) + len(pair or "") for text, pair in texts) <= _LONG_TEXT_CHARS:
            return self._encode(texts)
        return await asyncio.to_thread(self._encode, texts)

    async def run(self, texts: Sequence[EncodedText], kind: PoolingKind) -> list[np.ndarray]:
        """Answer every text; the first failure ends the others.

        Raises:
            RateLimitError: the caller's key has used up its tokens.
            ServerError: the engine could not answer one of them.
        """
        if self.limits is not None:
            self.limits.take_tokens(sum(len(text.token_ids) for text in texts))
        requests = [
            PoolingRequest(
                request_id=f"{self.unique}-{idx}",
                token_ids=text.token_ids,
                type_ids=text.type_ids,
                kind=kind,
                adapters=self.selection.adapters,
                exchange_id=current_request_id(),
            )
            for idx, text in enumerate(texts)
        ]
        timer = RequestTimer(
            self.service.metrics,
            self.selection.metrics_label,
            clock=self.service.clock,
            num_prompt_tokens=sum(len(text.token_ids) for text in texts),
            num_sequences=len(texts),
            on_end=on_end(
                self.service,
                self.selection,
                operation="embeddings" if kind is PoolingKind.EMBED else "classify",
                response_id=self.unique,
            ),
        )
        with timer:
            outputs = await _all([self.pooling.engine.pool(request) for request in requests])
            timer.admitted(min(output.admitted_s for output in outputs))
            timer.answered()
        return [output.values for output in outputs]

    def _encode(self, texts: Sequence[tuple[str, str | None]]) -> list[EncodedText]:
        limit = self.service.max_model_len
        wanted = self.body.truncate_prompt_tokens
        cut = None if wanted is None else limit if wanted < 0 else min(wanted, limit)
        encoded = [
            self.pooling.text.encode(
                text,
                pair,
                max_tokens=cut,
                add_special_tokens=self.body.add_special_tokens is not False,
            )
            for text, pair in texts
        ]
        for text in encoded:
            check_length(len(text.token_ids), limit)
            if not text.token_ids:
                raise InvalidRequestError("a text has no tokens")
        return encoded


def start_call(request: Request, body: PoolingBody) -> PoolingCall:
    """Choose what answers and hold it until the reply is complete.

    Raises:
        NotReadyError: the server is starting or draining.
        RequestError: as `select`; or texts are to be cut to nothing.
    """
    service = service_of(request)
    pooling = service.pooling
    assert pooling is not None, "these routes are there for pooling models only"
    if body.truncate_prompt_tokens == 0:
        raise InvalidRequestError(
            "truncate_prompt_tokens is 0, expected -1 or at least 1", param="truncate_prompt_tokens"
        )
    caller = context_of(request).caller
    return PoolingCall(
        service=service,
        limits=None if caller is None else caller.limits,
        pooling=pooling,
        selection=choose(request, body),
        body=body,
        unique=uuid.uuid4().hex,
    )


async def encode_input(
    call: PoolingCall, value: str | list[str] | list[int] | list[list[int]]
) -> list[EncodedText]:
    """Turn the four forms of `input` into tokens.

    Raises:
        InvalidRequestError: there is no text, one has no tokens or too many, or a token is none of
            the model's.
    """
    texts, token_lists = _split(value)
    encoded = await call.encode([(text, None) for text in texts])
    limit, wanted = call.service.max_model_len, call.body.truncate_prompt_tokens
    cut = None if wanted is None else limit if wanted < 0 else min(wanted, limit)
    for token_ids in token_lists:
        check_token_ids(token_ids, call.service.vocab_size, param="input")
        kept = token_ids[:cut]
        check_length(len(kept), limit)
        encoded.append(EncodedText(token_ids=tuple(kept), type_ids=(0,) * len(kept)))
    if not encoded:
        raise InvalidRequestError("input: the list is empty", param="input")
    if any(not text.token_ids for text in encoded):
        raise InvalidRequestError("input: a text has no tokens", param="input")
    return encoded


def check_length(num_tokens: int, limit: int) -> None:
    """Refuse a text that the model cannot take."""
    if num_tokens > limit:
        raise context_length_error(
            f"the text has {num_tokens} tokens, and this model takes {limit}; "
            "truncate_prompt_tokens cuts it",
            param="input",
        )


def usage_of(texts: Sequence[EncodedText]) -> dict[str, int]:
    """Return the `usage` of a reply that generates nothing."""
    count = sum(len(text.token_ids) for text in texts)
    return {"prompt_tokens": count, "total_tokens": count, "completion_tokens": 0}


def wants_activation(body: Any) -> bool:
    """Whether probabilities are wanted, not logits."""
    return body.use_activation is not False and body.activation is not False


def _split(
    value: str | list[str] | list[int] | list[list[int]],
) -> tuple[list[str], list[list[int]]]:
    if isinstance(value, str):
        return [value], []
    texts = [item for item in value if isinstance(item, str)]
    token_lists = [item for item in value if isinstance(item, list)]
    token_ids = [item for item in value if isinstance(item, int)]
    return texts, [token_ids] if token_ids else token_lists


async def _all(calls: Sequence[Coroutine[Any, Any, PoolingOutput]]) -> list[PoolingOutput]:
    """Await all calls; after the first failure, or a cancellation, none goes on."""
    if len(calls) == 1:
        return [await calls[0]]
    tasks = [asyncio.create_task(call) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
