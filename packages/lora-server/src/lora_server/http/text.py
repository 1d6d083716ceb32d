"""Text to tokens and tokens to text, with the base model's tokenizer and chat template.

An adapter's own tokenizer and template are not used. Knows nothing of requests or engines.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from jinja2.exceptions import TemplateError

from lora_server.errors import InvalidRequestError, StartupError
from lora_server.http.detokenize import REPLACEMENT, Detokenizer

if TYPE_CHECKING:
    # transformers takes seconds to import, and only its instances are needed here.
    from transformers import PreTrainedTokenizerBase

_BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TextProcessor:
    """Wraps a tokenizer. All methods may be called from any thread.

    Takes the tokenizer over: truncation and padding, which belong to training, are switched off.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Wrap a tokenizer.

        Raises:
            StartupError: it is not one of the tokenizers library, which streams are decoded with.
        """
        from transformers import PreTrainedTokenizerFast

        if not isinstance(tokenizer, PreTrainedTokenizerFast):
            kind = type(tokenizer).__name__
            raise StartupError([f"the model's tokenizer is a {kind}; a tokenizer.json is needed"])
        self._tokenizer = tokenizer
        self._own_template_args = frozenset(
            inspect.signature(tokenizer.apply_chat_template).parameters
        )
        self._backend = tokenizer.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        added = self._backend.get_added_tokens_decoder()
        self._special_ids = frozenset(id_ for id_, token in added.items() if token.special)
        self._byte_of_char = _byte_alphabet()
        # Decoders drop the space before a sequence's first token: an ordinary token goes before.
        self._anchor = self._backend.encode("a", add_special_tokens=False).ids[-1:]
        self._anchor_text = self._backend.decode(self._anchor)
        self._token_texts: dict[int, str] = {}
        self._texts_alone: dict[int, str] = {}

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of `text`; the tokenizer's own special tokens around them if asked.

        Raises:
            InvalidRequestError: the text holds half of a surrogate pair.
        """
        if not _is_unicode(text):
            raise InvalidRequestError("the text holds half of a surrogate pair: it is no Unicode")
        ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def render_chat(
        self,
        messages: Sequence[Mapping[str, str]],
        *,
        add_generation_prompt: bool = True,
        template_args: Mapping[str, Any] | None = None,
    ) -> str:
        """Write a conversation with the base model's chat template.

        Raises:
            InvalidRequestError: there is no template, or it refuses these messages.
        """
        if not self._tokenizer.chat_template:
            raise InvalidRequestError(
                "the base model has no chat template: use /v1/completions", param="messages"
            )
        args = dict(template_args or {})
        # A template given by a client would run here, and other arguments change what is returned.
        taken = sorted(self._own_template_args & args.keys())
        if taken:
            raise InvalidRequestError(
                f"chat_template_kwargs: not allowed here: {', '.join(taken)}",
                param="chat_template_kwargs",
            )
        try:
            text = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **args,
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise InvalidRequestError(
                f"the chat template refuses these messages: {error}", param="messages"
            ) from error
        return str(text)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of a whole sequence, without special tokens."""
        return self._backend.decode(list(token_ids), skip_special_tokens=True)

    def detokenizer(self, context: Sequence[int] = ()) -> Detokenizer:
        """Follow a new sequence that continues `context`, whose text is not repeated."""
        return Detokenizer(self._backend, self._special_ids, context, texts_alone=self._texts_alone)

    def token_text(self, token_id: int) -> str:
        """Return a single token as text; one that is part of a character shows its bytes."""
        text = self._token_texts.get(token_id)
        if text is None:
            text = self._decode_alone(token_id)
            if REPLACEMENT in text and (raw := self.token_bytes(token_id)) != text.encode():
                text = "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
            self._token_texts[token_id] = text
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """Return a single token's UTF-8 bytes, which need not be whole characters."""
        text = self._decode_alone(token_id)
        if REPLACEMENT not in text:
            return text.encode()
        piece = self._backend.id_to_token(token_id) or ""
        if match := _BYTE_TOKEN.fullmatch(piece):
            return bytes.fromhex(match[1])
        if piece and all(char in self._byte_of_char for char in piece):
            return bytes(self._byte_of_char[char] for char in piece)
        return text.encode()

    def _decode_alone(self, token_id: int) -> str:
        text = self._backend.decode([*self._anchor, token_id], skip_special_tokens=False)
        return text[len(self._anchor_text) :]


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _byte_alphabet() -> dict[str, int]:
    """Return the byte behind each character of byte-level vocabularies.

    Printable Latin-1 stands for itself; the other bytes, in order, for the characters from 256 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(256 + idx): byte for idx, byte in enumerate(others)}
