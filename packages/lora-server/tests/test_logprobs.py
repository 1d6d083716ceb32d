"""Log-probabilities against float64 arithmetic. `B` rows, `V` vocabulary."""

from __future__ import annotations

import math

import pytest
import torch

from lora_server.engine.logprobs import ROWS_PER_CHUNK, token_logprobs


def exact_logprobs(row: list[float]) -> list[float]:
    total = math.fsum(math.exp(x) for x in row)
    return [x - math.log(total) for x in row]


def test_equals_float64_arithmetic() -> None:
    logits_BV = torch.randn(3, 50, generator=torch.Generator().manual_seed(1)) * 4
    token_ids = [7, 0, 49]

    found = token_logprobs(logits_BV, token_ids, 5)

    for row, token_id, entry in zip(logits_BV.tolist(), token_ids, found, strict=True):
        exact = exact_logprobs(row)
        order = sorted(range(50), key=lambda v: -exact[v])
        assert entry.token_id == token_id
        assert entry.logprob == pytest.approx(exact[token_id], abs=1e-5)
        assert entry.rank == order.index(token_id) + 1
        assert [v for v, _ in entry.top] == order[:5]
        assert [p for _, p in entry.top] == pytest.approx([exact[v] for v in order[:5]], abs=1e-5)


def test_the_softmax_of_half_precision_logits_is_taken_in_float32() -> None:
    logits_BV = torch.randn(1, 4000, generator=torch.Generator().manual_seed(2)).bfloat16()

    (entry,) = token_logprobs(logits_BV, [11], 0)

    exact = exact_logprobs(logits_BV[0].double().tolist())
    assert entry.logprob == pytest.approx(exact[11], abs=1e-5)


def test_equal_logits_share_a_rank_and_are_listed_by_token_id() -> None:
    logits_BV = torch.tensor([[1.0, 3.0, 0.0, 3.0, 3.0, 1.0]])

    (entry,) = token_logprobs(logits_BV, [4], 4)

    assert entry.rank == 1
    assert [v for v, _ in entry.top] == [1, 3, 4, 0]


def test_each_row_may_ask_for_another_number_of_alternatives() -> None:
    logits_BV = torch.randn(3, 10)

    found = token_logprobs(logits_BV, [1, 2, 3], [0, 2, 20])

    assert [len(entry.top) for entry in found] == [0, 2, 10]


def test_many_rows_are_reported_in_order() -> None:
    num_rows = 2 * ROWS_PER_CHUNK + 3
    logits_BV = torch.randn(num_rows, 7, generator=torch.Generator().manual_seed(3))
    token_ids = [b % 7 for b in range(num_rows)]

    found = token_logprobs(logits_BV, token_ids, 1)

    assert [entry.token_id for entry in found] == token_ids
    assert [entry.top[0][0] for entry in found] == logits_BV.argmax(dim=1).tolist()


def test_no_rows_give_no_entries() -> None:
    assert token_logprobs(torch.zeros(0, 7), [], 3) == []


def test_a_wrong_number_of_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="2 rows of logits, 1 tokens"):
        token_logprobs(torch.zeros(2, 7), [1], 3)
