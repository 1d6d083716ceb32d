"""Text that comes a token at a time equals the text of the whole."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from lora_server.http.detokenize import Detokenizer, token_texts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

WORDS = ["\u2581hello", "\u2581world", "!", "<0xF0>", "<0x9F>", "<0x98>", "<0x80>", "<s>"]


def sentencepiece_like() -> Tokenizer:
    """Build a tokenizer whose decoder drops the first space and joins byte tokens."""
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens([AddedToken("<s>", special=True)])
    return tokenizer


@pytest.fixture(scope="module")
def backend(tokenizer: PreTrainedTokenizerFast) -> Tokenizer:
    return tokenizer.backend_tokenizer


def test_a_character_of_several_tokens_comes_with_its_last_token(backend: Tokenizer) -> None:
    ids = backend.encode("a😀b").ids

    pieces = token_texts(Detokenizer(backend, frozenset()), ids)

    assert pieces == ["a", "", "", "", "😀", "b"]


def test_bytes_that_never_become_a_character_come_at_the_end(backend: Tokenizer) -> None:
    ids = backend.encode("a😀").ids[:-1]

    detokenizer = Detokenizer(backend, frozenset())

    assert [detokenizer.push(id_) for id_ in ids] == ["a", "", "", ""]
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.flush() == ""


def test_endless_broken_bytes_are_not_held_for_ever(backend: Tokenizer) -> None:
    broken = backend.encode("😀").ids[0]

    detokenizer = Detokenizer(backend, frozenset())
    text = "".join(detokenizer.push(broken) for _ in range(64))

    assert len(text) >= 48


def test_the_space_of_the_first_token_is_kept_after_a_prompt() -> None:
    tokenizer = sentencepiece_like()

    after_prompt = Detokenizer(tokenizer, frozenset({7}), context=[0])
    alone = Detokenizer(tokenizer, frozenset({7}))

    assert [after_prompt.push(1), after_prompt.push(2)] == [" world", "!"]
    assert [alone.push(1), alone.push(2)] == ["world", "!"]


def test_special_tokens_add_no_text_and_break_no_spaces() -> None:
    detokenizer = Detokenizer(sentencepiece_like(), frozenset({7}), context=[0])

    assert [detokenizer.push(id_) for id_ in (1, 7, 7, 0)] == [" world", "", "", " hello"]


def test_byte_tokens_of_a_word_vocabulary_become_a_character() -> None:
    detokenizer = Detokenizer(sentencepiece_like(), frozenset({7}), context=[0])

    assert [detokenizer.push(id_) for id_ in (3, 4, 5, 6, 2)] == ["", "", "", "😀", "!"]


def test_a_character_that_the_prompt_began_is_completed(backend: Tokenizer) -> None:
    ids = backend.encode("x😀y").ids

    detokenizer = Detokenizer(backend, frozenset(), context=ids[:3])

    assert "".join(detokenizer.push(id_) for id_ in ids[3:]) == "😀y"


@given(st.text(max_size=40), st.integers(0, 10))
def test_the_pieces_make_up_the_whole_text(
    tokenizer: PreTrainedTokenizerFast, text: str, num_context: int
) -> None:
    backend = tokenizer.backend_tokenizer
    context = backend.encode("hello world").ids[:num_context]
    ids = backend.encode(text, add_special_tokens=False).ids

    pieces = token_texts(Detokenizer(backend, frozenset(), context), ids)

    assert "".join(pieces) == backend.decode(ids, skip_special_tokens=False)
