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
    from lora_server.model.attention_step import AttentionStep, DecodeGroup

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


def blocks_of(group: DecodeGroup) -> list[list[int]]:
    """The blocks that each token of a group may look at."""
    table = group.blocks.view(-1, group.blocks_per_sequence).tolist()
    lengths = (group.positions // BLOCK_SIZE + 1).tolist()
    return [blocks[:length] for blocks, length in zip(table, lengths, strict=True)]


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
            assert blocks_of(group) == [
                chunks[row].sequence.block_ids[: wanted[row][1] // BLOCK_SIZE + 1].tolist()
                for row in rows
            ]
        advance(chunks)

    assert num_again == 11


def test_tensors_of_a_step_that_is_the_same_object_have_not_moved() -> None:
    bench = Bench(budget=64)
    for prompt in (3, 5, 30):
        bench.add(prompt, 60)
    builder = BatchBuilder(block_size=BLOCK_SIZE, device=torch.device("cpu"))
    scheduled(bench)

    seen: dict[int, tuple[AttentionStep, list[int]]] = {}
    for _ in range(30):
        chunks = bench.scheduler.schedule()
        step = builder.build(chunks).attention
        tensors = [step.token_slots, *(t for g in step.decode for t in (g.blocks, g.positions))]
        addresses = [tensor.data_ptr() for tensor in tensors]
        assert seen.setdefault(id(step), (step, addresses))[1] == addresses
        advance(chunks)

    assert 1 < len(seen) < 20


def test_on_another_device_each_step_has_tensors_of_the_right_sizes_there() -> None:
    bench = Bench(budget=64)
    for prompt in (1, 3, 30):
        bench.add(prompt, 60)
    meta = torch.device("meta")
    builder = BatchBuilder(block_size=BLOCK_SIZE, device=meta)
    scheduled(bench)

    for _ in range(20):
        chunks = bench.scheduler.schedule()
        batch = builder.build(chunks)
        step = batch.attention
        assert batch.input_ids.shape == batch.position_ids.shape == (1, 3)
        assert step.token_slots.shape == (3,)
        lengths = sorted(chunk.sequence.num_computed // BLOCK_SIZE + 1 for chunk in chunks)
        assert max(group.blocks_per_sequence for group in step.decode) == lengths[-1]
        for group in step.decode:
            assert group.blocks.shape == (group.num_sequences * group.blocks_per_sequence,)
            assert {group.blocks.device, group.positions.device} == {meta}
        advance(chunks)


def test_the_plan_is_kept_while_sequences_begin_blocks() -> None:
    bench = Bench(budget=64)
    sequences = [bench.add(4, 40), bench.add(6, 40)]
    scheduled(bench)

    plans = [scheduled(bench) for _ in range(20)]

    assert all(plan is plans[0] for plan in plans)
    assert [s.num_computed for s in sequences] == [24, 26]
    assert [len(s.block_ids) for s in sequences] == [6, 7]
    used = [block for s in sequences for block in s.block_ids]
    assert len(set(used)) == len(used) == bench.pool.num_used


def test_a_plan_that_finds_no_block_ends_and_the_latest_arrival_starts_over() -> None:
    bench = Bench(budget=64, blocks=4)
    first, second = bench.add(4, 40), bench.add(4, 40)
    scheduled(bench)
    plans = [scheduled(bench) for _ in range(4)]

    after = scheduled(bench)

    assert all(dict(plan) == {first: 1, second: 1} for plan in plans)
    assert dict(after) == {first: 1}
    assert (len(first.block_ids), len(second.block_ids)) == (3, 0)
    assert bench.scheduler.num_preemptions == 1


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
