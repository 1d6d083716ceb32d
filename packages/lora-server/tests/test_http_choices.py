"""One continuation: text, stop strings, stop tokens and counts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from lora_server.engine.messages import FinishReason, SequenceOutput, TokenLogprob
from lora_server.errors import EngineError
from lora_server.http.choices import Choice, ChoiceDelta, TextRules
from lora_server.http.text import TextProcessor

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

END = 1


@pytest.fixture
def text(tokenizer: PreTrainedTokenizerFast) -> TextProcessor:
    return TextProcessor(tokenizer)


def output(
    *token_ids: int, finish: FinishReason | None = None, stop: int | None = None
) -> SequenceOutput:
    return SequenceOutput(
        request_id="r",
        index=0,
        token_ids=token_ids,
        logprobs=tuple(TokenLogprob(id_, -1.0, 1) for id_ in token_ids),
        finish_reason=finish,
        stop_token_id=stop,
    )


def choice_of(text: TextProcessor, rules: TextRules) -> Choice:
    return Choice(0, text.detokenizer(), rules)


def pushed(choice: Choice, *outputs: SequenceOutput) -> list[ChoiceDelta]:
    return [choice.push(item) for item in outputs]


def test_the_end_token_adds_no_text_but_counts(text: TextProcessor) -> None:
    choice = choice_of(text, TextRules())

    (delta,) = pushed(
        choice, output(*text.encode("hello"), END, finish=FinishReason.STOP, stop=END)
    )

    assert (delta.text, delta.finish_reason, delta.stop_reason) == ("hello", "stop", END)
    assert (choice.num_tokens, len(delta.token_ids), len(delta.logprobs)) == (2, 2, 2)
    assert delta.token_lens == (5, 0)


def test_a_stop_token_that_is_text_is_left_out_unless_asked_for(text: TextProcessor) -> None:
    hello, world = text.encode("hello world")
    final = output(hello, world, finish=FinishReason.STOP, stop=world)

    without = choice_of(text, TextRules()).push(final)
    with_it = choice_of(text, TextRules(include_stop=True)).push(final)

    assert (without.text, with_it.text) == ("hello", "hello world")


def test_a_stop_string_ends_the_choice_and_drops_the_tokens_behind_it(text: TextProcessor) -> None:
    choice = choice_of(text, TextRules(stops=("o w",)))

    (delta,) = pushed(choice, output(*text.encode("hello world, the cat")))

    assert choice.is_finished
    assert (delta.text, delta.finish_reason, delta.stop_reason) == ("hell", "stop", "o w")
    assert len(delta.token_ids) == len(delta.logprobs) == choice.num_tokens == 2


def test_a_stop_string_may_be_left_at_the_end(text: TextProcessor) -> None:
    choice = choice_of(text, TextRules(stops=("o w",), include_stop=True))

    assert choice.push(output(*text.encode("hello world"))).text == "hello w"


def test_text_is_held_back_while_it_may_become_a_stop_string(text: TextProcessor) -> None:
    hello, world = text.encode("hello world")
    choice = choice_of(text, TextRules(stops=("lo worse",)))

    first, second = pushed(choice, output(hello), output(world, finish=FinishReason.LENGTH))

    assert (first.text, second.text) == ("hel", "lo world")
    assert (first.text_offset, second.text_offset) == (0, 5)


def test_stop_strings_wait_for_the_smallest_number_of_tokens(text: TextProcessor) -> None:
    hello, world = text.encode("hello world")
    choice = choice_of(text, TextRules(stops=("hello",), min_tokens=2))

    texts = [delta.text for delta in pushed(choice, *map(output, (hello, world, hello)))]

    assert texts == ["hello", " world", ""]
    assert choice.is_finished


def test_a_broken_character_at_the_end_is_shown_as_such(text: TextProcessor) -> None:
    ids = text.encode("a😀")[:-1]

    delta = choice_of(text, TextRules()).push(output(*ids, finish=FinishReason.LENGTH))

    assert delta.text == "a\ufffd"


def test_a_stop_string_in_the_very_last_text_is_found(text: TextProcessor) -> None:
    ids = text.encode("a😀")[:-1]

    delta = choice_of(text, TextRules(stops=("\ufffd",))).push(
        output(*ids, finish=FinishReason.LENGTH)
    )

    assert (delta.text, delta.finish_reason, delta.stop_reason) == ("a", "stop", "\ufffd")


def test_an_aborted_sequence_says_so(text: TextProcessor) -> None:
    delta = choice_of(text, TextRules()).push(output(finish=FinishReason.ABORT))

    assert (delta.text, delta.finish_reason) == ("", "abort")


@pytest.mark.parametrize("top", [(), ((3, float("nan")),)])
def test_nan_is_never_reported(text: TextProcessor, top: tuple[tuple[int, float], ...]) -> None:
    value = -1.0 if top else float("nan")
    broken = SequenceOutput(
        request_id="r", index=0, token_ids=(5,), logprobs=(TokenLogprob(5, value, 1, top),)
    )

    with pytest.raises(EngineError, match="NaN"):
        choice_of(text, TextRules()).push(broken)
