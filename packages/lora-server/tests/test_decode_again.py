"""Steps in which the same sequences decode: what is kept of the last one, and when it is not."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from lora_server.engine.batch import BatchBuilder
from lora_server.engine.simulation import Bench

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lora_server.engine.scheduler import ScheduledChunk
    from lora_server.engine.sequence import SequenceState
    from lora_server.engine.step_batch import StepBatch

BLOCK_SIZE = 4


def scheduled(bench: Bench) -> Sequence[ScheduledChunk]:
    """Plan a step and let its tokens appear."""
    chunks = bench.scheduler.schedule()
    advance(chunks)
    return chunks


def advance(chunks: Sequence[ScheduledChunk]) -> None:
    """Let each sequence get a token of its own."""
    for sequence, count in chunks:
        sequence.num_computed += count
        if sequence.num_pending == 0:
            sequence.token_ids.append(100 + sequence.num_tokens)


def place(sequence: SequenceState, position: int) -> int:
    """Where a token's keys belong."""
    block = sequence.block_ids[position // BLOCK_SIZE]
    return block * BLOCK_SIZE + position % BLOCK_SIZE


def newest(batch: StepBatch) -> list[tuple[int, int, int]]:
    """Id, position and place of each row."""
    columns = batch.input_ids[0], batch.position_ids[0], batch.attention.token_slots
    return list(zip(*(column.tolist() for column in columns), strict=True))


def test_each_step_has_the_newest_tokens_at_their_places_in_and_across_blocks() -> None:
    bench = Bench(budget=64)
    sequences = [bench.add(prompt, 40) for prompt in (1, 3, 30)]
    builder = BatchBuilder(block_size=BLOCK_SIZE, device=torch.device("cpu"))
    advance(bench.scheduler.schedule())

    num_again = 0
    last: object = None
    for _ in range(12):
        chunks = bench.scheduler.schedule()
        num_again += chunks is last
        last = chunks
        batch = builder.build(chunks)
        assert {chunk.sequence for chunk in chunks} == set(sequences)
        wanted = [(s.token_ids[-1], s.num_computed, place(s, s.num_computed)) for s, _ in chunks]
        assert newest(batch) == wanted
        for group in batch.attention.decode:
            rows = range(len(chunks)) if group.rows is None else group.rows.tolist()
            assert group.positions.tolist() == [wanted[row][1] for row in rows]
        advance(chunks)

    assert num_again > 0


def test_the_plan_is_kept_until_a_sequence_needs_a_block() -> None:
    bench = Bench(budget=64)
    sequence = bench.add(4, 40)
    scheduled(bench)

    plans = [scheduled(bench) for _ in range(8)]

    assert plans[0] is plans[3]
    assert plans[4] is not plans[3]
    assert plans[4] is plans[7]
    assert len(sequence.block_ids) == 3


def test_an_arrival_or_an_end_ends_the_plan() -> None:
    bench = Bench(budget=64)
    first, second = bench.add(4, 40), bench.add(4, 40)
    scheduled(bench)
    plan = scheduled(bench)

    third = bench.add(5, 40)
    with_third = scheduled(bench)
    bench.scheduler.finish(first)
    without_first = scheduled(bench)

    assert dict(plan) == {first: 1, second: 1}
    assert dict(with_third) == {first: 1, second: 1, third: 5}
    assert dict(without_first) == {second: 1, third: 1}


def test_sequences_of_a_kept_plan_have_had_their_turns() -> None:
    bench = Bench(budget=64)
    first = bench.add(4, 40)
    scheduled(bench)
    scheduled(bench)
    scheduled(bench)

    second = bench.add(4, 40)
    scheduled(bench)

    assert first.last_step == second.last_step == 4
