"""Slots written a few modules at a time: nobody sees half an adapter, and every wait ends."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from lora_cache.testing import ManualClock
from lora_kernels import UnsupportedShapeError
from lora_layers import AdapterNotActiveError, LoraModelConfig, LoraModelManager
from lora_layers.content import SlotContent
from lora_layers.testing import (
    PACKED_MODULES,
    BuiltAdapter,
    TinyDecoder,
    build_adapter,
    dense_logits,
    runs,
    stack_of,
)

if TYPE_CHECKING:
    from pathlib import Path

IDS = torch.tensor([3, 17, 30, 0])
NUM_MODULES = 10
"""Modules and packed groups of the decoder that have slots."""


class TickingClock(ManualClock):
    """A clock on which each module takes a second: every look at it lets one pass."""

    def __call__(self) -> float:
        self.advance(1.0)
        return self.now_s


class Setup:
    """A decoder with two slots and adapters a, b, c of all its modules."""

    def __init__(self, folder: Path, *, is_paced: bool = True) -> None:
        self.model = TinyDecoder()
        self.state = {name: value.clone() for name, value in self.model.state_dict().items()}
        config = LoraModelConfig(max_loras=2, max_lora_rank=8, packed_modules=PACKED_MODULES)
        self.manager = LoraModelManager(self.model, config, is_paced=is_paced, clock=TickingClock())
        self.built: dict[str, BuiltAdapter] = {}
        for seed, key in enumerate("abc"):
            self.built[key] = build_adapter(folder / key, r=4 + seed, seed=seed)
            self.manager.register(key, self.manager.prepare(self.built[key].adapter))

    def check(self, *keys: str | None) -> None:
        """One row for each key answers as merged weights do."""
        rows = runs(*((1, key) for key in keys))
        self.manager.set_routing(rows, rows)
        y = self.model(IDS[: len(keys)])
        expected = [
            dense_logits(self.state, IDS[i : i + 1], *([(self.built[key], 1.0)] if key else []))
            for i, key in enumerate(keys)
        ]
        torch.testing.assert_close(y.double(), torch.cat(expected), atol=2e-4, rtol=1e-4)

    def num_written(self, slot: int) -> int:
        return sum(slot in stack.occupied for stack in self.manager._injection.stacks.values())


@pytest.fixture
def setup(tmp_path: Path) -> Setup:
    return Setup(tmp_path)


def test_a_slot_is_written_piece_by_piece_while_the_other_adapter_answers(setup: Setup) -> None:
    running = setup.manager.acquire(["a"])
    lease = setup.manager.begin(["b"])

    pieces = 0
    while not lease.is_ready and pieces <= NUM_MODULES:
        assert setup.num_written(1) == pieces
        with pytest.raises(AdapterNotActiveError):
            setup.check("b")
        setup.check("a", None)
        setup.manager.advance(1.0)
        pieces += 1

    assert pieces == NUM_MODULES
    setup.check("a", "b", None)
    assert setup.manager.stats().device.loads == 2
    for held in (running, lease):
        held.release()


def test_without_a_limit_everything_is_written_at_once(setup: Setup) -> None:
    lease = setup.manager.begin(["a", "b"])

    setup.manager.advance()

    assert lease.is_ready
    assert not setup.manager.has_slot_work
    setup.check("b", "a")


def test_no_time_writes_nothing(setup: Setup) -> None:
    lease = setup.manager.begin(["a"])

    setup.manager.advance(0.0)

    assert setup.num_written(0) == 0
    assert setup.manager.is_placing
    lease.release()


def test_c37_a_removed_adapters_slot_is_cleared_piece_by_piece(setup: Setup) -> None:
    with setup.manager.acquire(["a"]):
        setup.manager.remove("a")
        setup.check("a")
    assert setup.num_written(0) == NUM_MODULES

    setup.manager.advance(3.0)
    assert 0 < setup.num_written(0) < NUM_MODULES
    setup.manager.advance()

    assert setup.num_written(0) == 0
    assert not any(
        bool(tensor[0].any())
        for path in setup.manager._injection.stacks
        for weights in [stack_of(setup.manager, path).weights]
        for tensor in (*weights.lora_a, *weights.lora_b)
    )


def test_a_slot_that_is_wanted_again_is_not_cleared_under_its_new_adapter(setup: Setup) -> None:
    setup.manager.activate("a")
    setup.manager.remove("a")
    setup.manager.advance(3.0)

    lease = setup.manager.begin(["b"])
    setup.manager.advance()

    assert lease.slots == {"b": 0}
    setup.check("b")


def test_an_adapter_that_is_given_up_half_written_leaves_its_slot_to_the_next(
    setup: Setup,
) -> None:
    lease = setup.manager.begin(["a"])
    setup.manager.advance(3.0)
    lease.release()
    setup.manager.remove("a")

    lease = setup.manager.begin(["b"])
    setup.manager.advance()

    assert lease.slots == {"b": 0}
    setup.check("b", None)


def test_an_adapter_that_is_acquired_while_it_is_being_written_is_there_at_once(
    setup: Setup,
) -> None:
    pending = setup.manager.begin(["a"])
    setup.manager.advance(3.0)

    lease = setup.manager.acquire(["a"])

    assert pending.is_ready
    setup.check("a")
    assert not setup.manager.is_placing
    lease.release()


def test_c47_a_module_that_refuses_its_part_ends_the_wait_and_leaves_nothing_in_the_slot(
    setup: Setup,
) -> None:
    """All or nothing over all parts of a model; a part without tensors is fine (the third one)."""
    good = setup.manager.acquire(["a"])
    prepared = setup.manager.prepare(setup.built["b"].adapter)
    bad = SlotContent(slices=((torch.ones(4, 16), torch.ones(31, 4)),))
    setup.manager.register("bad", replace(prepared, contents={**prepared.contents, "lm_head": bad}))
    few = {path: prepared.contents[path] for path in ("layers.0.mlp.down_proj",)}
    setup.manager.register("few", replace(prepared, contents=few))
    lease = setup.manager.begin(["bad", "a"])

    setup.manager.advance()

    assert isinstance(lease.failure, UnsupportedShapeError)
    assert lease.is_released
    assert setup.num_written(1) == 0
    assert setup.manager.stats().device.load_failures == 1
    setup.check("a", None)
    with setup.manager.acquire(["few"]):
        assert setup.num_written(1) == 1
    good.release()
