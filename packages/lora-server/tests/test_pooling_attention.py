"""Packed attention against one dense masked softmax over all rows, in float64."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from lora_server.model.pooling_attention import PackedAttention
from lora_server.model.pooling_inputs import pack

HEADS, KV_HEADS, WIDTH = 4, 2, 8


def dense(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lengths: list[int],
    *,
    is_causal: bool,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attend over all rows at once; a mask keeps sequences apart. Letters: `T` rows."""
    owner = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    position = torch.cat([torch.arange(n) for n in lengths])
    distance = position[:, None] - position
    hidden = owner[:, None] != owner
    if is_causal:
        hidden |= distance < 0
    if window is not None:
        hidden |= distance.abs() >= window
    q_HTD, k_HTD, v_HTD = (
        t[0].double().repeat_interleave(HEADS // t.shape[1], dim=0) for t in (query, key, value)
    )
    logits = q_HTD @ k_HTD.transpose(1, 2) * WIDTH**-0.5
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        column = sinks.double()[:, None, None].expand(*logits.shape[:2], 1)
        weights = torch.cat([logits, column], dim=-1).softmax(dim=-1)[..., :-1]
    else:
        weights = logits.softmax(dim=-1)
    return (weights @ v_HTD).transpose(0, 1)


@pytest.mark.parametrize("lengths", [[5], [4, 4, 4], [3, 7, 3, 1, 7]], ids=str)
@pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "both ways"])
@pytest.mark.parametrize(
    ("window", "softcap", "with_sinks"),
    [(None, None, False), (3, None, False), (None, 2.0, False), (3, 2.0, True)],
)
def test_sequences_attend_to_themselves_alone(
    lengths: list[int], is_causal: bool, window: int | None, softcap: float | None, with_sinks: bool
) -> None:
    generator = torch.Generator().manual_seed(sum(lengths))
    total = sum(lengths)
    query = torch.randn(1, HEADS, total, WIDTH, generator=generator)
    key, value = (torch.randn(1, KV_HEADS, total, WIDTH, generator=generator) for _ in range(2))
    sinks = torch.randn(HEADS, generator=generator) if with_sinks else None
    attention = PackedAttention()
    ids = [[1] * length for length in lengths]
    attention.step = pack(ids, ids, device=torch.device("cpu")).step

    found, weights = attention(
        SimpleNamespace(is_causal=is_causal),  # type: ignore[arg-type]
        query,
        key,
        value,
        None,
        sliding_window=window,
        softcap=softcap,
        s_aux=sinks,
    )

    expected = dense(
        query, key, value, lengths, is_causal=is_causal, window=window, softcap=softcap, sinks=sinks
    )
    assert weights is None
    assert attention.is_causal == is_causal
    torch.testing.assert_close(found[0].double(), expected, rtol=1e-5, atol=1e-5)


def test_packing_numbers_positions_and_groups_rows_by_length() -> None:
    inputs = pack(
        [[5, 6], [7, 8, 9], [1, 2]], [[0, 0], [0, 1, 1], [0, 0]], device=torch.device("cpu")
    )

    assert inputs.input_ids.tolist() == [[5, 6, 7, 8, 9, 1, 2]]
    assert inputs.positions.tolist() == [[0, 1, 0, 1, 2, 0, 1]]
    assert inputs.type_ids.tolist() == [[0, 0, 0, 1, 1, 0, 0]]
    two, three = inputs.step.groups
    assert isinstance(two.rows, torch.Tensor)
    assert two.rows.tolist() == [0, 1, 5, 6]
    assert three.rows == slice(2, 5)
