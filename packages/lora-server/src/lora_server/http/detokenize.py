"""Tokens to text, a token at a time.

Knows nothing of requests: one `Detokenizer` follows one sequence of tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from tokenizers import Tokenizer

REPLACEMENT: Final = "\ufffd"
"""What a decoder shows for bytes that are no character (yet)."""

_CONTEXT_TOKENS: Final = 6
# A character has at most four bytes, so at most four byte tokens. What is still undecodable
# after this many tokens never becomes text, and holding it would grow the window for ever.
_MAX_PENDING_TOKENS: Final = 16


class Detokenizer:
    """Turns the tokens of one sequence into text as they come.

    A token's text depends on its neighbours (leading spaces, characters of several byte tokens).
    A short window of tokens is therefore decoded with and without the newest ones; the difference
    is the new text. It is held back while it ends in the middle of a character.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        special_ids: frozenset[int],
        context: Sequence[int] = (),
        *,
        texts_alone: dict[int, str] | None = None,
    ) -> None:
        """Follow a new sequence.

        Args:
            tokenizer: decodes.
            special_ids: tokens that are no text.
            context: tokens that the sequence continues.
            texts_alone: text of single tokens, filled as they occur; to be shared among all
                sequences of a tokenizer.
        """
        self._texts_alone = {} if texts_alone is None else texts_alone
        self._tokenizer = tokenizer
        self._special_ids = special_ids
        self._window = [id_ for id_ in context[-_CONTEXT_TOKENS:] if id_ not in special_ids]
        self._num_read = len(self._window)
        # A context that ends inside a character leaves the whole character to what follows.
        self._read_text = self._decode(self._window).rstrip(REPLACEMENT)

    def push(self, token_id: int) -> str:
        """Add a token and return the text that is certain now; "" for special tokens."""
        if token_id in self._special_ids:
            return ""
        self._window.append(token_id)
        text = self._decode(self._window)
        num_pending = len(self._window) - self._num_read
        if text.endswith(REPLACEMENT) and num_pending < _MAX_PENDING_TOKENS:
            return ""
        return self._advance(text)

    def flush(self) -> str:
        """Return the text that was held back: the sequence ends here."""
        if len(self._window) == self._num_read:
            return ""
        return self._advance(self._decode(self._window))

    def _advance(self, text: str) -> str:
        new_text = text[len(self._read_text) :]
        del self._window[: self._num_read]
        self._num_read = len(self._window)
        self._read_text = self._decode_read()
        return new_text

    def _decode_read(self) -> str:
        """Decode a window that was all read: mostly the one newest token, which comes again."""
        if len(self._window) != 1:
            return self._decode(self._window)
        token_id = self._window[0]
        text = self._texts_alone.get(token_id)
        if text is None:
            text = self._texts_alone[token_id] = self._decode(self._window)
        return text

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False) if token_ids else ""


def token_texts(detokenizer: Detokenizer, token_ids: Iterable[int]) -> list[str]:
    """Split the text of a whole sequence at its tokens; the joined pieces are the text."""
    pieces = [detokenizer.push(token_id) for token_id in token_ids]
    if pieces:
        pieces[-1] += detokenizer.flush()
    return pieces
