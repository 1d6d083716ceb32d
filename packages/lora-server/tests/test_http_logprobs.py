"""The two shapes of log-probabilities."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest

from lora_server.engine.messages import TokenLogprob
from lora_server.http.logprobs import LogprobLists, chat_logprobs
from lora_server.http.text import TextProcessor

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


@pytest.fixture
def text(tokenizer: PreTrainedTokenizerFast) -> TextProcessor:
    return TextProcessor(tokenizer)


def test_lists_stand_side_by_side(text: TextProcessor) -> None:
    hello, world = text.encode("hello world")
    lists = LogprobLists(text)

    lists.add_first(hello, 0)
    lists.add(
        [
            TokenLogprob(world, -0.5, 1, ((world, -0.5), (hello, -1.5))),
            TokenLogprob(hello, -3.0, 3, ((world, -0.25),)),
        ],
        [6, 5],
        5,
    )

    assert lists.as_dict() == {
        "tokens": ["hello", " world", "hello"],
        "token_logprobs": [None, -0.5, -3.0],
        "top_logprobs": [None, {" world": -0.5, "hello": -1.5}, {" world": -0.25, "hello": -3.0}],
        "text_offset": [0, 5, 11],
    }


def test_alternatives_that_are_single_bytes_keep_their_own_places(text: TextProcessor) -> None:
    one, other, *_ = text.encode("😀")
    lists = LogprobLists(text)

    lists.add([TokenLogprob(one, -0.5, 1, ((one, -0.5), (other, -1.0)))], [0], 0)

    assert lists.as_dict()["top_logprobs"] == [{"bytes:\\xf0": -0.5, "bytes:\\x9f": -1.0}]


def test_chat_entries_carry_bytes(text: TextProcessor) -> None:
    (hello,) = text.encode("hello")
    byte = text.encode("😀")[0]

    entries = chat_logprobs(text, [TokenLogprob(hello, -0.5, 1, ((byte, -2.0),))])

    assert entries == [
        {
            "token": "hello",
            "logprob": -0.5,
            "bytes": list(b"hello"),
            "top_logprobs": [{"token": "bytes:\\xf0", "logprob": -2.0, "bytes": [0xF0]}],
        }
    ]


def test_minus_infinity_becomes_a_number_that_json_has(text: TextProcessor) -> None:
    (hello,) = text.encode("hello")

    (entry,) = chat_logprobs(text, [TokenLogprob(hello, -math.inf, 9)])

    assert entry["logprob"] == -9999.0
