"""The workload builders and the tolerance table."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from lora_kernels.testing import Popularity, random_weights, slots_by_popularity, tolerance


def draw(
    popularity: Popularity, num_tokens: int = 400, num_slots: int = 8, seed: int = 0
) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return slots_by_popularity(
        popularity, num_tokens=num_tokens, num_slots=num_slots, generator=generator
    )


@pytest.mark.parametrize("popularity", Popularity)
def test_a_slot_in_range_is_drawn_for_each_token(popularity: Popularity) -> None:
    assert len(draw(popularity)) == 400
    assert set(draw(popularity)) <= set(range(8))
    assert draw(popularity, num_tokens=0) == []
    assert draw(popularity) == draw(popularity)


def test_popularities_differ_in_the_share_of_the_first_slot() -> None:
    shares = {popularity: Counter(draw(popularity))[0] / 400 for popularity in Popularity}

    assert shares[Popularity.IDENTICAL] == 1
    assert shares[Popularity.DISTINCT] == 1 / 8
    assert abs(shares[Popularity.UNIFORM] - 1 / 8) < 0.06
    assert 0.4 < shares[Popularity.ZIPF] < 0.7


def test_tolerance_grows_with_coarser_dtypes_and_longer_sums() -> None:
    assert tolerance(torch.float32, reduction=64).atol < 1e-5
    assert tolerance(torch.float32, reduction=64).atol < tolerance(torch.float16, reduction=64).atol
    assert (
        tolerance(torch.float16, reduction=64).atol < tolerance(torch.bfloat16, reduction=64).atol
    )
    assert tolerance(torch.bfloat16, reduction=576).atol < 3e-2
    assert (
        tolerance(torch.float32, reduction=64).atol < tolerance(torch.float32, reduction=4096).atol
    )


def test_random_weights_have_the_ranks_asked_for_and_deltas_of_unit_scale() -> None:
    weights = random_weights(
        [4, (0, 2)],
        max_rank=8,
        in_features=256,
        out_features=(256, 64),
        dtype=torch.float32,
        generator=torch.Generator().manual_seed(0),
    )
    x = torch.randn(256, 64, generator=torch.Generator().manual_seed(1))

    delta = weights.lora_b[0][0] @ (weights.lora_a[0][0] @ x)

    assert weights.slot_ranks == [(4, 4), (0, 2)]
    assert 0.7 < delta.std() < 1.4
