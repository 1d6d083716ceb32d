"""Texts and pairs of texts to tokens, with the base model's tokenizer.

Cuts a text only where the caller asked for it. Knows nothing of requests or engines.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lora_server.errors import InvalidRequestError, StartupError

if TYPE_CHECKING:
    from tokenizers import Encoding
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedText:
    """One text, or a pair, as the model reads it."""

    token_ids: tuple[int, ...]
    type_ids: tuple[int, ...]
    """One a token: 1 in the second text of a pair where the tokenizer tells texts apart."""


class PoolingText:
    """Wraps a tokenizer. All methods may be called from any thread.

    Takes the tokenizer over: truncation and padding, which belong to training, are switched off.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Wrap a tokenizer.

        Raises:
            StartupError: it is not one of the tokenizers library, which can be used by threads.
        """
        from transformers import PreTrainedTokenizerFast

        if not isinstance(tokenizer, PreTrainedTokenizerFast):
            kind = type(tokenizer).__name__
            raise StartupError([f"the model's tokenizer is a {kind}; a tokenizer.json is needed"])
        self._backend = tokenizer.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()

    def encode(
        self,
        text: str,
        pair: str | None = None,
        *,
        max_tokens: int | None = None,
        add_special_tokens: bool = True,
    ) -> EncodedText:
        """Return the tokens of a text or a pair, the tokenizer's special tokens around them.

        Args:
            text: the text, or the first of a pair.
            pair: the second of a pair.
            max_tokens: cut to so many tokens, special ones included: the end of the text, of a pair
                the longer one first. None keeps all.
            add_special_tokens: whether to put the special tokens around.

        Raises:
            InvalidRequestError: the text holds half of a surrogate pair, or `max_tokens` leaves no
                room for a token of it.
        """
        for part in (text, pair or ""):
            _check_unicode(part)
        whole = self._backend.encode(text, pair, add_special_tokens=add_special_tokens)
        if max_tokens is not None and len(whole.ids) > max_tokens:
            whole = self._cut(text, pair, max_tokens, add_special_tokens=add_special_tokens)
        return EncodedText(token_ids=tuple(whole.ids), type_ids=tuple(whole.type_ids))

    def cut_text(self, text: str, max_tokens: int) -> str:
        """Return the beginning of a text, so many tokens of it."""
        _check_unicode(text)
        encoding = self._backend.encode(text, add_special_tokens=False)
        if len(encoding.ids) <= max_tokens:
            return text
        return text[: encoding.offsets[max_tokens - 1][1]]

    def token_text(self, token_id: int) -> str:
        """Return a token as the vocabulary spells it."""
        return self._backend.id_to_token(token_id) or ""

    def _cut(
        self, text: str, pair: str | None, max_tokens: int, *, add_special_tokens: bool
    ) -> Encoding:
        special = self._backend.num_special_tokens_to_add(pair is not None)
        room = max_tokens - (special if add_special_tokens else 0)
        parts = [self._backend.encode(text, add_special_tokens=False)]
        if pair is not None:
            parts.append(self._backend.encode(pair, add_special_tokens=False))
        if room < len(parts):
            raise InvalidRequestError(
                f"truncate_prompt_tokens: {max_tokens} tokens leave no room for the text beside "
                f"{special} special ones",
                param="truncate_prompt_tokens",
            )
        for part, length in zip(parts, _shares([len(p.ids) for p in parts], room), strict=True):
            part.truncate(length)
        return self._backend.post_process(
            parts[0],
            parts[1] if pair is not None else None,
            add_special_tokens=add_special_tokens,
        )


def _shares(lengths: Sequence[int], room: int) -> list[int]:
    """Return how much of each part stays: the longer one loses first, as in the tokenizers library.

    Args:
        lengths: tokens of one part or two.
        room: tokens that may stay of all.
    """
    if len(lengths) == 1:
        return [room]
    shorter = min(lengths)
    longer = max(shorter, room - shorter)
    if shorter + longer > room:
        shorter, longer = room // 2, room - room // 2
    return [longer, shorter] if lengths[0] > lengths[1] else [shorter, longer]


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidRequestError(
            "the text holds half of a surrogate pair: it is no Unicode"
        ) from None
