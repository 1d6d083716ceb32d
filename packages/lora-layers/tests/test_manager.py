"""Many adapters in one batch: each row as if it were alone, whatever happens beside it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor

from lora_cache import NoFreeSlotError, Residency, SetTooLargeError, UnknownKeyError
from lora_layers import (
    AdapterNotActiveError,
    LoraModelConfig,
    LoraModelManager,
    RoutingNotSetError,
)
from lora_layers.testing import (
    LINEARS,
    PACKED_MODULES,
    BuiltAdapter,
    TinyDecoder,
    build_adapter,
    dense_logits,
    runs,
)

if TYPE_CHECKING:
    from pathlib import Path

    from lora_layers import RowRun

IDS = torch.tensor([3, 17, 30, 0, 3, 9])


class Setup:
    """A wrapped decoder, its base weights, and adapters of ranks 1 to 8 under single letters."""

    def __init__(self, folder: Path, *, tied: bool = False, max_loras: int = 3) -> None:
        self.model = TinyDecoder(tied=tied)
        self.state = {name: value.clone() for name, value in self.model.state_dict().items()}
        config = LoraModelConfig(
            max_loras=max_loras, max_lora_rank=8, packed_modules=PACKED_MODULES
        )
        self.manager = LoraModelManager(self.model, config)
        self.built: dict[str, BuiltAdapter] = {}
        everything = (*LINEARS, "embed_tokens")
        choices = {"a": (1, everything), "b": (8, everything[::2]), "c": (5, everything[1::3])}
        for seed, (key, (rank, paths)) in enumerate(choices.items()):
            self.built[key] = build_adapter(folder / key, paths, r=rank, seed=seed)
            self.manager.register(key, self.manager.prepare(self.built[key].adapter))

    def run(self, rows: tuple[RowRun, ...], ids: Tensor = IDS) -> Tensor:
        """Return the logits of a step whose rows all get logits."""
        self.manager.set_routing(rows, rows)
        logits: Tensor = self.model(ids)
        return logits

    def expected(self, *keys: str | None, ids: Tensor = IDS) -> Tensor:
        """Return each row's logits from merged weights, `keys[i]` for row i."""
        rows = []
        for key, token in zip(keys, ids, strict=True):
            weighted = [] if key is None else [(self.built[key], 1.0)]
            rows.append(dense_logits(self.state, token[None], *weighted))
        return torch.cat(rows)


def close(y: Tensor, expected: Tensor) -> None:
    """Compare within float32's tolerance over two blocks."""
    torch.testing.assert_close(y.double(), expected, atol=2e-4, rtol=1e-4)


@pytest.fixture
def setup(tmp_path: Path) -> Setup:
    """Return a fresh setup."""
    return Setup(tmp_path)


# A mixed batch.


def test_a_mixed_batch_equals_each_adapter_alone_in_merged_weights(setup: Setup) -> None:
    with setup.manager.acquire(["a", "b", "c"]):
        y = setup.run(runs((2, "a"), (1, None), (1, "c"), (2, "b")))

    close(y, setup.expected("a", "a", None, "c", "b", "b"))


def test_every_adapter_changes_the_answer(setup: Setup) -> None:
    base = setup.expected(*[None] * 6)

    for key in "abc":
        assert (setup.expected(*[key] * 6) - base).abs().max() > 0.1


def test_permuting_the_rows_permutes_the_outputs(setup: Setup) -> None:
    order = torch.tensor([5, 2, 0, 3, 1, 4])
    keys = ["a", "a", None, "c", "b", "b"]
    with setup.manager.acquire(["a", "b", "c"]):
        y = setup.run(runs((2, "a"), (1, None), (1, "c"), (2, "b")))

        permuted = setup.run(runs(*[(1, keys[i]) for i in order]), IDS[order])

    torch.testing.assert_close(permuted, y[order], atol=1e-5, rtol=1e-5)


def test_neighbours_of_a_row_change_nothing(setup: Setup) -> None:
    with setup.manager.acquire(["a", "b", "c"]):
        alone = setup.run(runs((6, "a")))
        mixed = setup.run(runs((3, "a"), (1, "b"), (1, "c"), (1, None)))
        base = setup.run(runs((6, None)))

    torch.testing.assert_close(mixed[:3], alone[:3], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(mixed[5:], base[5:], atol=1e-5, rtol=1e-5)


def test_adapters_that_are_active_but_not_used_change_no_bit(setup: Setup) -> None:
    with setup.manager.acquire(["a"]):
        before = setup.run(runs((3, "a"), (3, None)))
        with setup.manager.acquire(["b", "c"]):
            after = setup.run(runs((3, "a"), (3, None)))

    assert torch.equal(before, after)


def test_base_rows_of_a_mixed_batch_equal_a_base_step_bit_for_bit(setup: Setup) -> None:
    with setup.manager.acquire(["a", "b"]):
        base = setup.run(runs((6, None)))
        mixed = setup.run(runs((2, "a"), (2, None), (2, "b")))

    assert torch.equal(mixed[2:4], base[2:4])


def test_a_base_step_right_after_a_mixed_one_is_untouched(setup: Setup) -> None:
    with setup.manager.acquire(["a"]):
        base = setup.run(runs((6, None)))
        setup.run(runs((6, "a")))
        again = setup.run(runs((6, None)))

    assert torch.equal(base, again)


@pytest.mark.parametrize("shape", [(1, 6), (2, 3)])
def test_batch_dimensions_are_flattened_and_restored(setup: Setup, shape: tuple[int, ...]) -> None:
    with setup.manager.acquire(["a", "b"]):
        y = setup.run(runs((4, "a"), (2, "b")), IDS.view(shape))

    assert y.shape == (*shape, 32)
    close(y.view(6, 32), setup.expected("a", "a", "a", "a", "b", "b"))


# Weighted sets and scales.


def test_a_scale_multiplies_the_delta(setup: Setup) -> None:
    with setup.manager.acquire(["a"]):
        y = setup.run(runs((6, [("a", 0.5)])))

    close(y, dense_logits(setup.state, IDS, (setup.built["a"], 0.5)))


def test_a_weighted_set_equals_the_scaled_sum_of_the_deltas(setup: Setup) -> None:
    weights = [("a", 0.75), ("b", -0.5), ("c", 1.5)]
    with setup.manager.acquire(["a", "b", "c"]):
        y = setup.run(runs((6, weights)))

    close(y, dense_logits(setup.state, IDS, *((setup.built[k], w) for k, w in weights)))


def test_two_halves_of_a_scale_are_the_whole(setup: Setup) -> None:
    with setup.manager.acquire(["b"]):
        whole = setup.run(runs((6, "b")))
        halves = setup.run(runs((6, [("b", 0.5), ("b", 0.5)])))

    torch.testing.assert_close(halves, whole, atol=1e-4, rtol=1e-4)


# Heads, tied and not; logits rows.


def test_logits_rows_have_a_routing_of_their_own(setup: Setup) -> None:
    keep = torch.tensor([1, 5])
    with setup.manager.acquire(["a", "b"]):
        tokens = runs((2, "a"), (2, None), (2, "b"))
        setup.manager.set_routing(tokens, runs((1, "a"), (1, "b")))
        y = setup.model(IDS, keep)

    close(y, setup.expected("a", "a", None, None, "b", "b")[keep])


def test_prompt_rows_that_all_get_logits_are_routed_row_by_row(setup: Setup) -> None:
    keep = torch.tensor([0, 1, 2, 4])
    with setup.manager.acquire(["a", "b"]):
        tokens = runs((3, "b"), (1, None), (2, "a"))
        setup.manager.set_routing(tokens, runs((3, "b"), (1, "a")))
        y = setup.model(IDS, keep)

    close(y, setup.expected("b", "b", "b", None, "a", "a")[keep])


def test_lora_on_the_head_of_a_tied_model_leaves_the_embedding_alone(tmp_path: Path) -> None:
    setup = Setup(tmp_path, tied=True)
    setup.built["head"] = build_adapter(tmp_path / "head", ["lm_head"], seed=9)
    setup.manager.register("head", setup.manager.prepare(setup.built["head"].adapter))
    hidden = setup.model.hidden(IDS)
    with setup.manager.acquire(["head"]):
        y = setup.run(runs((6, "head")))
        assert torch.equal(setup.model.hidden(IDS), hidden)

    close(y, setup.expected(*["head"] * 6))


def test_lora_on_the_embedding_of_a_tied_model_leaves_the_head_alone(tmp_path: Path) -> None:
    setup = Setup(tmp_path, tied=True)
    setup.built["table"] = build_adapter(tmp_path / "table", ["embed_tokens"], seed=9)
    setup.manager.register("table", setup.manager.prepare(setup.built["table"].adapter))
    x = torch.randn(6, 16)
    head = setup.model.lm_head(x)
    with setup.manager.acquire(["table"]):
        y = setup.run(runs((6, "table")))
        assert torch.equal(setup.model.lm_head(x), head)

    close(y, setup.expected(*["table"] * 6))


# Slots that move, adapters that come and go.


def test_moving_an_adapter_to_another_slot_changes_no_bit(setup: Setup) -> None:
    with setup.manager.acquire(["a"]):
        first = setup.run(runs((3, "a"), (3, None)))
        assert setup.manager.slot_of("a") == 0
    setup.manager.deactivate("a")
    setup.manager.activate("b")

    with setup.manager.acquire(["a"]):
        assert setup.manager.slot_of("a") == 1
        moved = setup.run(runs((3, "a"), (3, None)))

    assert torch.equal(first, moved)


def test_the_same_mapping_after_a_load_on_the_side_uses_the_new_slots(tmp_path: Path) -> None:
    setup = Setup(tmp_path, max_loras=2)
    rows = runs((6, "a"))
    with setup.manager.acquire(["a"]):
        first = setup.run(rows)
    setup.manager.activate("b")
    setup.manager.activate("c")  # takes the slot of a
    setup.manager.activate("a")  # takes the slot of b

    assert setup.manager.slot_of("a") == 1
    assert torch.equal(setup.run(rows), first)


def test_an_adapter_activated_on_the_side_changes_no_output_of_the_running_batch(
    setup: Setup,
) -> None:
    rows = runs((3, "a"), (3, None))
    with setup.manager.acquire(["a"]):
        before = setup.run(rows)
        setup.manager.activate("b")

        during = setup.model(IDS)  # still under the routing of the running batch

    assert torch.equal(before, during)


def test_an_adapter_removed_and_registered_again_gives_the_same_bits(setup: Setup) -> None:
    rows = runs((6, "b"))
    with setup.manager.acquire(["b"]):
        first = setup.run(rows)

    assert setup.manager.remove("b")
    assert "b" not in setup.manager
    setup.manager.register("b", setup.manager.prepare(setup.built["b"].adapter))

    with setup.manager.acquire(["b"]):
        assert torch.equal(setup.run(rows), first)


def test_more_adapters_than_slots_take_turns_and_come_back_unchanged(tmp_path: Path) -> None:
    setup = Setup(tmp_path, max_loras=1)
    answers: dict[str, Tensor] = {}
    for key in "abcabc":
        with setup.manager.acquire([key]):
            y = setup.run(runs((6, key)))
        assert torch.equal(answers.setdefault(key, y), y)
        close(y, setup.expected(*[key] * 6))


def test_a_removed_adapter_still_serves_those_who_lease_it(setup: Setup) -> None:
    lease = setup.manager.acquire(["a"])
    before = setup.run(runs((6, "a")))

    setup.manager.remove("a")

    assert "a" not in setup.manager
    assert torch.equal(setup.run(runs((6, "a"))), before)
    lease.release()
    with pytest.raises(AdapterNotActiveError):
        setup.run(runs((6, "a")))


def test_a_routing_whose_adapter_is_gone_never_runs_as_base(setup: Setup) -> None:
    setup.manager.activate("a")
    setup.manager.activate("b")
    setup.run(runs((6, "a")))

    setup.manager.remove("a")

    with pytest.raises(RoutingNotSetError, match="no routing is set"):
        setup.model(IDS)


def test_a_routing_whose_slot_is_overwritten_never_runs_as_the_other_adapter(
    tmp_path: Path,
) -> None:
    setup = Setup(tmp_path, max_loras=1)
    setup.manager.activate("a")
    setup.run(runs((6, "a")))

    setup.manager.activate("b")

    with pytest.raises(RoutingNotSetError, match="no routing is set"):
        setup.model(IDS)


def test_clearing_removes_every_adapter_and_the_remembered_mapping(setup: Setup) -> None:
    rows = runs((6, "a"))
    with setup.manager.acquire(["a"]):
        setup.run(rows)

    setup.manager.clear()

    assert setup.manager.keys() == ()
    with pytest.raises(AdapterNotActiveError):
        setup.manager.set_routing(rows, rows)
    close(setup.run(runs((6, None))), setup.expected(*[None] * 6))


# Refusals.


@pytest.mark.parametrize("key", ["c", "never-registered"])
def test_a_row_naming_an_adapter_in_no_slot_raises_before_the_forward(
    setup: Setup, key: str
) -> None:
    setup.manager.activate("a")
    setup.run(runs((6, "a")))
    where = "host" if key == "c" else "disk"

    with pytest.raises(AdapterNotActiveError, match=rf"'{key}' \(residency {where}\)"):
        setup.manager.set_routing(runs((5, "a"), (1, key)), runs((1, "a")))

    with pytest.raises(RoutingNotSetError):
        setup.model(IDS)


def test_too_many_adapters_for_the_slots_are_refused_whole(tmp_path: Path) -> None:
    setup = Setup(tmp_path, max_loras=2)

    assert not setup.manager.can_admit(["a", "b", "c"])
    with pytest.raises(SetTooLargeError):
        setup.manager.acquire(["a", "b", "c"])
    assert setup.manager.stats().slots_used == 0


def test_a_leased_adapter_is_not_evicted(tmp_path: Path) -> None:
    setup = Setup(tmp_path, max_loras=1)

    with setup.manager.acquire(["a"]), pytest.raises(NoFreeSlotError):
        setup.manager.acquire(["b"])

    with setup.manager.acquire(["b"]):
        assert setup.manager.residency("a") is Residency.HOST


def test_registering_twice_changes_nothing(setup: Setup) -> None:
    prepared = setup.manager.prepare(setup.built["b"].adapter)

    assert setup.manager.register("a", prepared) is False

    with setup.manager.acquire(["a"]):
        close(setup.run(runs((6, "a"))), setup.expected(*["a"] * 6))


def test_an_unknown_adapter_cannot_be_acquired_and_is_not_removed(setup: Setup) -> None:
    with pytest.raises(UnknownKeyError):
        setup.manager.acquire(["x"])
    assert setup.manager.remove("x") is False


def test_pins_keep_an_adapter_in_its_slot(tmp_path: Path) -> None:
    setup = Setup(tmp_path, max_loras=2)
    setup.manager.pin("a")
    for key in "bcb":
        setup.manager.activate(key)

    assert setup.manager.is_pinned("a")
    assert setup.manager.residency("a") is Residency.DEVICE
    setup.manager.unpin("a")
    setup.manager.activate("c")
    assert setup.manager.residency("a") is Residency.HOST


def test_touching_saves_an_adapter_from_being_the_next_to_leave(tmp_path: Path) -> None:
    setup = Setup(tmp_path)

    setup.manager.touch(["a"])

    assert setup.manager.keys()[-1] == "a"


def test_a_removal_that_still_drains_can_be_taken_back(setup: Setup) -> None:
    lease = setup.manager.acquire(["a"])
    setup.manager.remove("a")

    assert setup.manager.restore("a")
    lease.release()

    assert "a" in setup.manager


# Memory and work.


def test_slot_bytes_are_what_one_slot_takes_over_all_modules(setup: Setup) -> None:
    rank, item = 8, 4
    widths = sum(i + o for i, o in LINEARS.values()) + 32 + 16

    assert setup.manager.slot_bytes == rank * item * widths
    assert setup.manager.buffer_bytes == 3 * setup.manager.slot_bytes


def test_steps_with_the_same_runs_build_no_routing(setup: Setup) -> None:
    rows = runs((5, "a"), (1, None))
    setup.manager.activate("a")
    setup.run(rows)
    built = setup.manager.num_routing_builds

    for _ in range(3):
        setup.run(rows)

    assert setup.manager.num_routing_builds == built


# Warm-up.


def test_warm_up_runs_through_every_module_and_leaves_no_trace(setup: Setup) -> None:
    setup.manager.activate("b")
    base = setup.expected(*[None] * 6)
    stats, keys = setup.manager.stats(), setup.manager.keys()

    with setup.manager.warm_up() as dummies:
        assert dummies == ("warmup_1", "warmup_2")
        stacks = setup.manager._injection.stacks.values()
        assert all(len(stack.occupied) >= 2 for stack in stacks)
        y = setup.run(runs((3, "warmup_1"), (3, "warmup_2")))

    close(y, base)
    assert setup.manager.stats() == stats
    assert setup.manager.keys() == keys
    b_slot = setup.manager.slot_of("b")
    assert all(stack.occupied <= {b_slot} for stack in setup.manager._injection.stacks.values())
    with pytest.raises(AdapterNotActiveError):
        setup.manager.set_routing(runs((6, "warmup_1")), ())
    with setup.manager.acquire(["a", "b", "c"]):
        close(setup.run(runs((6, "c"))), setup.expected(*["c"] * 6))


def test_warm_up_asks_for_free_slots(setup: Setup) -> None:
    setup.manager.activate("a")

    with (
        pytest.raises(ValueError, match="warm-up with 3 adapters, 2 slots are free"),
        setup.manager.warm_up(3),
    ):
        pass


def test_no_adapter_is_activated_during_the_warm_up(setup: Setup) -> None:
    with setup.manager.warm_up(1), pytest.raises(AssertionError, match="after the warm-up"):
        setup.manager.acquire(["a"])

    assert setup.manager.can_admit(["a"])
