"""Token counters: who goes first, and how far anybody may be behind."""

from __future__ import annotations

from lora_server.engine.fairness import TokenShares
from lora_server.engine.request import AdapterUse, GenerationRequest, SamplingParams
from lora_server.engine.sequence import SequenceState

A, B, C = (frozenset((name,)) for name in "abc")
BASE: frozenset[str] = frozenset()


def sequence(arrival: int, digests: frozenset[str]) -> SequenceState:
    request = GenerationRequest(
        request_id=f"r{arrival}",
        prompt_token_ids=(1,),
        sampling=SamplingParams(max_tokens=1),
        adapters=tuple(AdapterUse(digest=digest) for digest in sorted(digests)),
    )
    made = SequenceState(request, 0, None)
    made.arrival = arrival
    return made


def test_tokens_count_for_every_member_of_a_set_and_the_set_counts_as_its_fullest() -> None:
    shares = TokenShares(max_credit=100)
    shares.settle([A, B, BASE])

    shares.charge(A | B, 5)
    shares.charge(A, 2)
    shares.charge(BASE, 3)

    assert [shares.level(d) for d in (A, B, A | B, BASE)] == [7, 5, 7, 3]


def test_a_newcomer_starts_level_with_the_one_that_had_fewest() -> None:
    shares = TokenShares(max_credit=100)
    shares.settle([A, B])
    shares.charge(A, 30)
    shares.charge(B, 20)

    shares.settle([A, B, C])

    assert shares.level(C) == 20


def test_who_stays_away_is_forgotten_and_gains_nothing() -> None:
    shares = TokenShares(max_credit=100)
    shares.settle([A, B])
    shares.charge(A, 30)
    shares.settle([A])

    shares.settle([A, B])

    assert shares.level(B) == 30


def test_nobody_is_further_behind_than_the_credit() -> None:
    shares = TokenShares(max_credit=10)
    shares.settle([A, B])
    shares.charge(A, 1000)

    shares.settle([A, B])

    assert (shares.level(A), shares.level(B)) == (1000, 990)


def test_turns_go_to_the_lowest_counter_and_charges_count_at_once() -> None:
    shares = TokenShares(max_credit=100)
    shares.settle([A, B, BASE])
    shares.charge(A, 2)
    waiting = [sequence(i, d) for i, d in enumerate([A, A, B, B, BASE])]

    order = []
    for one in shares.in_turn(waiting):
        order.append(one.arrival)
        shares.charge(one.adapter_digests, 3)

    # Counters a, b, base: 2 0 0 -> b, base (3 3), a (5), b (6), a.
    assert order == [2, 4, 0, 3, 1]


def test_within_an_adapter_the_order_stays_and_none_is_left_out() -> None:
    shares = TokenShares(max_credit=100)
    waiting = [sequence(i, d) for i, d in enumerate([B, A, B, A, B])]

    order = [one.arrival for one in shares.in_turn(waiting)]

    assert sorted(order) == [0, 1, 2, 3, 4]
    assert [i for i in order if i % 2] == [1, 3]
    assert [i for i in order if not i % 2] == [0, 2, 4]
