"""Log-probabilities in the two shapes of the OpenAI API: lists side by side, and objects."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Final

from lora_server.engine.messages import TokenLogprob
from lora_server.http.text import TextProcessor

_LOWEST: Final = -9999.0
"""Stands for minus infinity, which JSON cannot say."""


class LogprobLists:
    """The shape of text completions: `tokens`, `token_logprobs`, `top_logprobs`, `text_offset`."""

    def __init__(self, text: TextProcessor) -> None:
        self._text = text
        self._tokens: list[str] = []
        self._logprobs: list[float | None] = []
        self._tops: list[dict[str, float] | None] = []
        self._offsets: list[int] = []

    def add_first(self, token_id: int, offset: int) -> None:
        """Add the first token of a prompt, which nothing predicts."""
        self._tokens.append(self._text.token_text(token_id))
        self._logprobs.append(None)
        self._tops.append(None)
        self._offsets.append(offset)

    def add(self, logprobs: Sequence[TokenLogprob], lens: Sequence[int], offset: int) -> None:
        """Add tokens that follow each other.

        Args:
            logprobs: one for each token.
            lens: characters that each token adds to the text.
            offset: characters before the first of them.
        """
        for item, length in zip(logprobs, lens, strict=True):
            self._tokens.append(self._text.token_text(item.token_id))
            self._logprobs.append(_finite(item.logprob))
            self._tops.append(self._top(item))
            self._offsets.append(offset)
            offset += length

    def as_dict(self) -> dict[str, Any]:
        """Return the four lists."""
        return {
            "tokens": self._tokens,
            "token_logprobs": self._logprobs,
            "top_logprobs": self._tops,
            "text_offset": self._offsets,
        }

    def _top(self, item: TokenLogprob) -> dict[str, float]:
        """Return the most likely tokens and, where it is none of them, the token itself."""
        pairs = [*item.top, (item.token_id, item.logprob)]
        top: dict[str, float] = {}
        for token_id, logprob in pairs:
            top.setdefault(self._text.token_text(token_id), _finite(logprob))
        return top


def chat_logprobs(text: TextProcessor, logprobs: Iterable[TokenLogprob]) -> list[dict[str, Any]]:
    """Return the shape of chat completions: one object for each token, bytes included."""
    return [
        _entry(text, item.token_id, item.logprob)
        | {"top_logprobs": [_entry(text, token_id, value) for token_id, value in item.top]}
        for item in logprobs
    ]


def _entry(text: TextProcessor, token_id: int, logprob: float) -> dict[str, Any]:
    return {
        "token": text.token_text(token_id),
        "logprob": _finite(logprob),
        "bytes": list(text.token_bytes(token_id)),
    }


def _finite(logprob: float) -> float:
    return _LOWEST if math.isinf(logprob) else logprob
