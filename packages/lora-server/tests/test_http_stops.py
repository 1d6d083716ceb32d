"""Stop strings across the borders of pieces."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_server.http.stops import StopMatcher


def run(stops: list[str], pieces: list[str]) -> tuple[list[str], str | None]:
    """Return what was handed on after each piece and at the end, and the stop string."""
    matcher = StopMatcher(stops)
    handed: list[str] = []
    for piece in pieces:
        new = matcher.push(piece)
        handed.append(new.text)
        if new.stop is not None:
            return handed, new.stop
    return [*handed, matcher.flush()], None


def test_text_before_a_stop_string_that_lies_across_pieces_is_kept() -> None:
    assert run(["END"], ["abE", "N", "Dxyz"]) == (["ab", "", ""], "END")


def test_held_text_is_handed_on_when_it_becomes_no_stop_string() -> None:
    assert run(["END"], ["abE", "N", "ough"]) == (["ab", "", "ENough", ""], None)


def test_held_text_is_handed_on_at_the_end() -> None:
    assert run(["END"], ["abEN"]) == (["ab", "EN"], None)


def test_a_text_that_begins_a_stop_string_again_is_held_from_there() -> None:
    assert run(["aab"], ["aa", "ab!"]) == (["", "a"], "aab")


def test_without_stop_strings_nothing_is_held() -> None:
    assert run([], ["ab", "c"]) == (["ab", "c", ""], None)


def test_the_stop_string_that_is_complete_first_wins() -> None:
    assert run(["abcd", "bc"], ["abcd"]) == (["a"], "bc")


def test_of_stop_strings_that_end_together_the_longest_is_cut() -> None:
    assert run(["bc", "abc"], ["xabc"]) == (["x"], "abc")


@pytest.mark.parametrize("stop", ["\n\n", " ", "é", "😀"])
def test_any_text_may_be_a_stop_string(stop: str) -> None:
    assert run([stop], [f"one{stop}two"]) == (["one"], stop)


@given(
    st.text("ab", max_size=12),
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    st.data(),
)
def test_the_result_does_not_depend_on_how_the_text_is_cut(
    text: str, stops: list[str], data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]

    handed, stop = run(stops, pieces)

    ends = [(text.find(s) + len(s), text.find(s)) for s in stops if s in text]
    assert "".join(handed) == (text[: min(ends)[1]] if ends else text)
    assert (stop is not None) == bool(ends)
