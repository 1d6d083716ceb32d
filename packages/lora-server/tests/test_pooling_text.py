"""Tokens of texts and pairs, cut where it was asked for; the tokenizer's own truncation decides."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from lora_server.errors import InvalidRequestError, StartupError
from lora_server.http.pooling_text import PoolingText

WORDS = ["[UNK]", "[PAD]", "[CLS]", "[SEP]", *(f"w{i}" for i in range(20))]


def build() -> PreTrainedTokenizerFast:
    """Return a tokenizer of words in BERT's form."""
    backend = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=backend,
        pad_token="[PAD]",
        unk_token="[UNK]",
        model_input_names=["input_ids", "token_type_ids"],
    )


def words(count: int, start: int = 0) -> str:
    """Return so many words."""
    return " ".join(f"w{i}" for i in range(start, start + count))


@pytest.mark.parametrize("max_tokens", [None, 30, 12, 9, 7, 6, 5])
@pytest.mark.parametrize("sizes", [(3, 8), (8, 3), (6, 6), (1, 10)])
def test_a_pair_is_cut_as_transformers_cuts_the_longest_first(
    max_tokens: int | None, sizes: tuple[int, int]
) -> None:
    first, second = words(sizes[0]), words(sizes[1], 10)
    options = {} if max_tokens is None else {"truncation": "longest_first"}

    expected = build()(first, second, max_length=max_tokens, **options)
    found = PoolingText(build()).encode(first, second, max_tokens=max_tokens)

    assert list(found.token_ids) == expected["input_ids"]
    assert list(found.type_ids) == expected["token_type_ids"]


@pytest.mark.parametrize("max_tokens", [None, 12, 6, 3])
def test_a_text_is_cut_at_its_end_between_the_special_tokens(max_tokens: int | None) -> None:
    options = {} if max_tokens is None else {"truncation": True}

    expected = build()(words(8), max_length=max_tokens, **options)
    found = PoolingText(build()).encode(words(8), max_tokens=max_tokens)

    assert list(found.token_ids) == expected["input_ids"]
    assert set(found.type_ids) == {0}


def test_special_tokens_can_be_left_out() -> None:
    found = PoolingText(build()).encode(words(4), add_special_tokens=False, max_tokens=3)

    assert found.token_ids == (4, 5, 6)


def test_a_limit_that_leaves_no_room_for_the_text_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="4 tokens leave no room"):
        PoolingText(build()).encode(words(3), words(3), max_tokens=4)


def test_half_of_a_surrogate_pair_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="no Unicode"):
        PoolingText(build()).encode("w1", "\ud800")


def test_a_document_is_cut_to_its_first_tokens() -> None:
    text = PoolingText(build())

    assert text.cut_text("w1  w2 w3", 2) == "w1  w2"
    assert text.cut_text("w1 w2", 2) == "w1 w2"


def test_a_tokenizer_of_another_library_is_refused() -> None:
    with pytest.raises(StartupError, match=r"tokenizer\.json is needed"):
        PoolingText(object())  # type: ignore[arg-type]
