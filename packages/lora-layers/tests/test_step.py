"""The routing of a step: built from runs, kept while runs and layout stay, never stale."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from lora_kernels import Routing
from lora_layers import AdapterNotActiveError
from lora_layers.step import NO_ROUTING, StepState, route_runs
from lora_layers.testing import runs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lora_layers import RowRun

CPU = torch.device("cpu")


def lookup(slots: dict[str, int]) -> object:
    """Return a slot lookup over a fixed table."""

    def slots_of(runs: Sequence[RowRun]) -> dict[str, int]:
        keys = {key for run in runs for key, _ in run.adapters}
        absent = sorted(keys - slots.keys())
        if absent:
            raise AdapterNotActiveError(dict.fromkeys(absent, "host"))
        return {key: slots[key] for key in keys}

    return slots_of


def set_step(step: StepState, tokens: object, logits: object, version: int, **slots: int) -> None:
    """Set both kinds of rows."""
    step.set(tokens, logits, layout_version=version, slots_of=lookup(slots))  # type: ignore[arg-type]


@pytest.fixture
def step() -> StepState:
    """Return the state of a model with four slots."""
    return StepState(num_slots=4, device=CPU)


def test_base_rows_have_no_entry_and_a_weighted_set_has_several() -> None:
    rows = runs((2, None), (1, "a"), (2, [("a", 0.5), ("b", 2.0)]))

    routing = route_runs(rows, {"a": 3, "b": 0}, num_slots=4, device=CPU)

    entries = zip(
        routing.entry_slots.tolist(),
        routing.token_idx.tolist(),
        routing.scales.tolist(),
        strict=True,
    )
    assert list(entries) == [(0, 3, 2.0), (0, 4, 2.0), (3, 2, 1.0), (3, 3, 0.5), (3, 4, 0.5)]
    assert routing.num_tokens == 5


def test_same_runs_and_layout_keep_the_same_routing(step: StepState) -> None:
    set_step(step, runs((3, "a")), runs((1, "a")), 1, a=0)
    first = step.tokens.active

    set_step(step, runs((3, "a")), runs((1, "a")), 1, a=0)

    assert step.tokens.active is first
    assert step.num_builds == 2  # tokens and logits, once each


def test_other_runs_give_another_routing(step: StepState) -> None:
    set_step(step, runs((3, "a")), runs((1, "a")), 1, a=0)

    set_step(step, runs((4, "a")), runs((1, "a")), 1, a=0)

    assert isinstance(step.tokens.active, Routing)
    assert step.tokens.active.num_tokens == 4
    assert step.num_builds == 3


def test_same_runs_under_another_layout_use_the_new_slots(step: StepState) -> None:
    set_step(step, runs((3, "a")), runs((1, "a")), 1, a=0)

    set_step(step, runs((3, "a")), runs((1, "a")), 2, a=2)

    assert isinstance(step.tokens.active, Routing)
    assert step.tokens.active.segments[0].slot == 2


def test_another_scale_is_another_mapping(step: StepState) -> None:
    set_step(step, runs((1, [("a", 1.0)])), (), 1, a=0)

    set_step(step, runs((1, [("a", 0.5)])), (), 1, a=0)

    assert isinstance(step.tokens.active, Routing)
    assert step.tokens.active.scales.tolist() == [0.5]


def test_equal_runs_of_tokens_and_logits_share_one_routing(step: StepState) -> None:
    set_step(step, runs((3, "a")), runs((3, "a")), 1, a=0)

    assert step.logits.active is step.tokens.active
    assert step.num_builds == 1


def test_a_step_without_adapters_has_nothing_active(step: StepState) -> None:
    set_step(step, runs((3, None)), runs((3, None)), 1)

    assert step.tokens.active is None
    assert step.logits.active is None


def test_a_step_after_one_without_adapters_is_active_again(step: StepState) -> None:
    set_step(step, runs((3, None)), (), 1)
    set_step(step, runs((3, "a")), (), 1, a=1)

    assert isinstance(step.tokens.active, Routing)


def test_no_routing_is_set_at_first_and_after_forgetting(step: StepState) -> None:
    assert step.tokens.active is NO_ROUTING

    set_step(step, runs((1, "a")), (), 1, a=0)
    step.forget()

    assert step.tokens.active is NO_ROUTING
    assert not step.uses_slot(0)


def test_an_adapter_in_no_slot_raises_and_leaves_no_routing_behind(step: StepState) -> None:
    set_step(step, runs((1, "a")), runs((1, "a")), 1, a=0)

    with pytest.raises(AdapterNotActiveError, match=r"'b' \(residency host\)"):
        set_step(step, runs((1, "a")), runs((1, "b")), 1, a=0)

    assert step.tokens.active is NO_ROUTING
    assert step.logits.active is NO_ROUTING


def test_it_knows_which_slots_the_step_reads(step: StepState) -> None:
    set_step(step, runs((2, "a")), runs((1, "b")), 1, a=1, b=3)

    assert [step.uses_slot(slot) for slot in range(4)] == [False, True, False, True]
