"""Shifts are those of the rows, weak is what hardly moves, and a card tells all of it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import torch

from lora_server.config import EffectProbe
from lora_server.effect import (
    WEAK_EMBEDDING_SHIFT,
    WEAK_LOGPROB_SHIFT,
    AdapterEffect,
    LogitShift,
    ProbeState,
    ShiftOf,
)
from lora_server.engine.shift import compare_rows
from lora_server.options import resolve

if TYPE_CHECKING:
    from pathlib import Path


def shift(largest: float, of: ShiftOf = ShiftOf.LOG_PROBABILITIES) -> LogitShift:
    return LogitShift(max=largest, mean=largest / 2, kl=None, of=of)


def test_rows_that_did_not_move_have_no_shift() -> None:
    rows = torch.randn(3, 5).log_softmax(-1)

    found = compare_rows(rows, rows.clone(), of=ShiftOf.LOG_PROBABILITIES)

    assert found == LogitShift(max=0.0, mean=0.0, kl=0.0, of=ShiftOf.LOG_PROBABILITIES)
    assert found.is_weak


def test_largest_mean_and_divergence_are_those_of_the_definition() -> None:
    base = torch.tensor([[0.5, 0.5], [0.25, 0.75]]).log()
    own = torch.tensor([[0.5, 0.5], [0.5, 0.5]]).log()

    found = compare_rows(base, own, of=ShiftOf.LOG_PROBABILITIES)

    assert found is not None
    rise, fall = torch.tensor([2.0, 1.5]).log().tolist()
    assert found.max == pytest.approx(rise)
    assert found.mean == pytest.approx((rise + fall) / 4)
    # D(p || q) = sum p log(p / q), p the base's: 1/4 log 1/2 + 3/4 log 3/2
    assert found.kl == pytest.approx(-0.25 * rise + 0.75 * fall)
    assert not found.is_weak


def test_tokens_that_both_rule_out_have_not_moved() -> None:
    base = torch.tensor([[0.0, float("-inf")]])

    found = compare_rows(base, base.clone(), of=ShiftOf.LOG_PROBABILITIES)

    assert found is not None
    assert (found.max, found.kl) == (0.0, 0.0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_numbers_that_are_not_finite_are_no_shift(bad: float) -> None:
    base = torch.zeros(2, 3)
    own = base.clone()
    own[1, 2] = bad

    assert compare_rows(base, own, of=ShiftOf.LOG_PROBABILITIES) is None


def test_only_distributions_have_a_divergence() -> None:
    found = compare_rows(torch.zeros(1, 4), torch.ones(1, 4), of=ShiftOf.EMBEDDING)

    assert found == LogitShift(max=1.0, mean=1.0, kl=None, of=ShiftOf.EMBEDDING)


def test_weak_is_below_the_limit_of_its_kind() -> None:
    assert shift(WEAK_LOGPROB_SHIFT * 0.99).is_weak
    assert not shift(WEAK_LOGPROB_SHIFT).is_weak
    assert shift(WEAK_LOGPROB_SHIFT * 0.99, ShiftOf.LOGITS).is_weak
    assert shift(WEAK_EMBEDDING_SHIFT * 0.99, ShiftOf.EMBEDDING).is_weak
    assert not shift(WEAK_EMBEDDING_SHIFT, ShiftOf.EMBEDDING).is_weak


def test_an_effect_is_told_whole_and_is_not_weak_before_it_was_probed() -> None:
    effect = AdapterEffect(
        applied_tensors=4,
        total_tensors=5,
        update_norm=1.5,
        largest_module="m",
        probe=ProbeState.OFF,
    )

    assert json.loads(json.dumps(effect.as_json())) == {
        "applied_tensors": 4,
        "total_tensors": 5,
        "update_norm": 1.5,
        "largest_module": "m",
        "logit_shift": None,
        "probe": "off",
        "is_weak": False,
    }


@pytest.mark.parametrize("text", ["off", "no", "false"])
def test_the_words_that_yaml_takes_for_truth_values_switch_the_probe_off(
    tmp_path: Path, text: str
) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(f"model: m\neffect_probe: {text}\n")

    resolved = resolve({}, config_file=str(file), environ={})

    assert resolved.config.effect_probe == EffectProbe.OFF


def test_the_probe_is_on_unless_it_is_switched_off() -> None:
    assert resolve({"model": "m"}, environ={}).config.effect_probe == EffectProbe.ON
    off = resolve({"model": "m", "effect_probe": "off"}, environ={})
    assert off.config.effect_probe == EffectProbe.OFF
