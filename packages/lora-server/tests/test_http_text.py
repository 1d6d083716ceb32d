"""The tokenizer and the chat template, as requests meet them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from transformers import PreTrainedTokenizerBase

from lora_server.errors import InvalidRequestError, StartupError
from lora_server.http.text import TextProcessor

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


@pytest.fixture
def text(tokenizer: PreTrainedTokenizerFast) -> TextProcessor:
    return TextProcessor(tokenizer)


@pytest.mark.parametrize("prompt", ["", "hello world", "<s>user\nhé 😀<|end|>", " x\n"])
@pytest.mark.parametrize("add", [True, False])
def test_encodes_as_the_tokenizer_itself_does(
    text: TextProcessor, tokenizer: PreTrainedTokenizerFast, prompt: str, *, add: bool
) -> None:
    expected = tokenizer(prompt, add_special_tokens=add).input_ids

    assert text.encode(prompt, add_special_tokens=add) == expected


def test_truncation_that_belongs_to_training_is_off(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.backend_tokenizer.enable_truncation(2)

    ids = TextProcessor(tokenizer).encode("hello world hello world")

    assert len(ids) > 2


def test_half_a_surrogate_pair_is_the_callers_mistake(text: TextProcessor) -> None:
    with pytest.raises(InvalidRequestError, match="surrogate"):
        text.encode("a\ud800")


def test_a_conversation_is_written_with_the_template(text: TextProcessor) -> None:
    messages = [{"role": "user", "content": "hi"}]

    assert text.render_chat(messages) == "<s>user\nhi<|end|>\n<s>assistant\n"
    assert text.render_chat(messages, add_generation_prompt=False) == "<s>user\nhi<|end|>\n"


@pytest.mark.parametrize(
    ("template", "args", "reason"),
    [
        (None, {}, "no chat template"),
        ("{{ raise_exception('roles must alternate') }}", {}, "roles must alternate"),
        ("{{ messages[0].content + 1 }}", {}, "refuses these messages"),
        ("{{ nothing.at.all }}", {}, "refuses these messages"),
        ("x", {"tokenize": True}, "tokenize"),
        ("x", {"chat_template": "y"}, "chat_template"),
    ],
)
def test_what_the_template_cannot_write_is_the_callers_mistake(
    tokenizer: PreTrainedTokenizerFast,
    monkeypatch: pytest.MonkeyPatch,
    template: str | None,
    args: dict[str, object],
    reason: str,
) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", template)

    with pytest.raises(InvalidRequestError, match=reason):
        TextProcessor(tokenizer).render_chat(
            [{"role": "user", "content": "hi"}], template_args=args
        )


def test_template_arguments_reach_the_template(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", "{{ mood }}")

    text = TextProcessor(tokenizer).render_chat(
        [{"role": "user", "content": "hi"}], template_args={"mood": "calm"}
    )

    assert text == "calm"


def test_single_tokens_show_their_spaces_and_bytes(text: TextProcessor) -> None:
    word = text.encode("hello world")[1]
    emoji = text.encode("😀")

    assert text.token_text(word) == " world"
    assert text.token_bytes(word) == b" world"
    assert [text.token_text(id_) for id_ in emoji] == [
        "bytes:\\xf0",
        "bytes:\\x9f",
        "bytes:\\x98",
        "bytes:\\x80",
    ]
    assert b"".join(text.token_bytes(id_) for id_ in emoji) == "😀".encode()


def test_special_tokens_show_their_name_but_are_no_text(text: TextProcessor) -> None:
    assert text.token_text(1) == "<|end|>"
    assert text.decode([1, *text.encode("hello"), 1]) == "hello"


def test_ids_beyond_the_vocabulary_are_empty(text: TextProcessor) -> None:
    assert text.token_text(9_999) == ""
    assert text.token_bytes(9_999) == b""


def test_a_tokenizer_without_the_tokenizers_library_is_refused() -> None:
    with pytest.raises(StartupError, match=r"tokenizer\.json"):
        TextProcessor(PreTrainedTokenizerBase())  # type: ignore[no-untyped-call]
