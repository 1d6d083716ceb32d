"""The table of blocks equals the sequences' own lists, whatever happens to them."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lora_server.engine.block_table import BlockTable
from lora_server.engine.request import GenerationRequest, SamplingParams
from lora_server.engine.sequence import SequenceState

BLOCK_SIZE = 4


def sequence(*blocks: int) -> SequenceState:
    """Make one that holds blocks."""
    request = GenerationRequest(
        request_id="r", prompt_token_ids=(1,), sampling=SamplingParams(max_tokens=1)
    )
    made = SequenceState(request, 0, None)
    made.block_ids = list(blocks)
    return made


def rows_of(table: BlockTable, sequences: list[SequenceState]) -> list[list[int]]:
    """Update the table and read what each sequence has in it."""
    table.update(sequences)
    width = max((len(s.block_ids) for s in sequences), default=0)
    found = table.first_blocks(np.arange(len(sequences)), width).tolist()
    return [row[: len(s.block_ids)] for row, s in zip(found, sequences, strict=True)]


def test_pads_with_a_sequences_own_first_block() -> None:
    table = BlockTable()
    short, long = sequence(7), sequence(1, 2, 3)

    table.update([short, long])

    assert table.first_blocks(np.array([0, 1]), 3).tolist() == [[7, 7, 7], [1, 2, 3]]


def test_says_where_tokens_are_stored() -> None:
    table = BlockTable()
    table.update([sequence(5, 9), sequence(2)])

    slots = table.slots(np.array([0, 0, 1]), np.array([3, 4, 1]), BLOCK_SIZE)

    assert slots.tolist() == [5 * 4 + 3, 9 * 4 + 0, 2 * 4 + 1]


def test_reads_the_new_list_of_a_sequence_that_started_over() -> None:
    table = BlockTable()
    other, again = sequence(1, 2), sequence(3, 4)
    rows_of(table, [other, again])

    again.block_ids = [8, 9]

    assert rows_of(table, [other, again]) == [[1, 2], [8, 9]]


EVENTS = st.lists(
    st.tuples(st.sampled_from(("grow", "restart", "add", "drop", "swap")), st.integers(0, 9)),
    max_size=40,
)


@given(EVENTS)
def test_follows_any_history_of_its_sequences(events: list[tuple[str, int]]) -> None:
    table = BlockTable()
    sequences = [sequence(0)]
    next_block = 1
    for kind, number in events:
        chosen = sequences[number % len(sequences)]
        new = list(range(next_block, next_block + 1 + number))
        next_block += len(new)
        if kind == "grow":
            chosen.block_ids.extend(new)
        elif kind == "restart":
            chosen.block_ids = new
        elif kind == "add":
            sequences.append(sequence(*new))
        elif kind == "drop" and len(sequences) > 1:
            sequences.remove(chosen)
        else:
            sequences.reverse()

        assert rows_of(table, sequences) == [s.block_ids for s in sequences]
