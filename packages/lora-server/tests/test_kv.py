"""The block pool: a block is free, kept for its contents, or used; never two of these."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

import lora_server
from lora_server.engine.kv import BlockPool
from lora_server.engine.prefix import child_key, root_key
from lora_server.engine.request import AdapterUse


def test_hands_out_every_block_once() -> None:
    pool = BlockPool(5, keeps_prefixes=True)

    blocks = pool.allocate(5)

    assert sorted(blocks) == [0, 1, 2, 3, 4]
    with pytest.raises(RuntimeError, match="1 KV blocks asked for, 0 available"):
        pool.allocate(1)


def test_a_released_full_block_is_found_again_until_its_room_is_needed() -> None:
    pool = BlockPool(2, keeps_prefixes=True)
    key = child_key(root_key(()), [1, 2])
    (block,) = pool.allocate(1)
    pool.remember(block, key)
    pool.release([block])

    assert pool.find([key]) == [block]
    assert pool.num_used == 0

    pool.allocate(2)

    assert pool.find([key]) == []


def test_the_least_recently_released_block_is_given_up_first() -> None:
    pool = BlockPool(3, keeps_prefixes=True)
    keys = [child_key(root_key(()), [i]) for i in range(3)]
    blocks = pool.allocate(3)
    for block, key in zip(blocks, keys, strict=True):
        pool.remember(block, key)
    for i in (1, 2, 0):
        pool.release([blocks[i]])

    pool.allocate(1)

    assert [bool(pool.find([key])) for key in keys] == [True, False, True]


def test_a_shared_block_survives_the_end_of_one_user() -> None:
    pool = BlockPool(2, keeps_prefixes=True)
    key = child_key(root_key(()), [4])
    blocks = pool.allocate(1)
    pool.remember(blocks[0], key)
    pool.share(pool.find([key]))

    pool.release(blocks)

    assert pool.num_used == 1
    assert pool.num_available == 1


def test_without_prefixes_nothing_is_found() -> None:
    pool = BlockPool(2, keeps_prefixes=False)
    key = child_key(root_key(()), [4])
    blocks = pool.allocate(1)

    pool.remember(blocks[0], key)
    pool.release(blocks)

    assert pool.find([key]) == []


def test_an_owner_that_goes_takes_what_only_it_could_find_along() -> None:
    pool = BlockPool(4, keeps_prefixes=True)
    blocks = pool.allocate(4)
    keys = [child_key(root_key(()), [i]) for i in range(4)]
    for block, key, owners in zip(blocks, keys, ("a", "b", "ab", ""), strict=True):
        pool.remember(block, key, frozenset(owners))
    pool.release(blocks[:1] + blocks[2:])

    pool.forget_owner("a")

    assert [pool.find([key]) for key in keys] == [[], [blocks[1]], [], [blocks[3]]]
    assert (pool.num_findable, pool.num_available, pool.num_used) == (1, 3, 1)
    pool.forget_owner("b")
    pool.release(blocks[1:2])
    assert (pool.num_findable, pool.num_available) == (1, 4)
    assert not pool._owners_of.keys() - {blocks[3]}
    assert not pool._blocks_of_owner


def test_c35_every_kv_tier_takes_its_keys_from_the_one_builder() -> None:
    """The tiers are those classes that keep blocks findable; the builder is `engine/prefix.py`."""
    sources = {
        path: path.read_text(encoding="utf-8")
        for path in Path(lora_server.__file__).parent.rglob("*.py")
    }

    tiers = {path.name for path, text in sources.items() if "def remember(" in text}
    builders = {path.name for path, text in sources.items() if "blake2b(" in text}
    callers = {
        path.name for path, text in sources.items() if "child_key(" in text or "root_key(" in text
    }

    assert tiers == {"kv.py"}
    assert builders == {"prefix.py"}
    assert callers == {"prefix.py", "sequence.py"}


def test_a_pool_without_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1 block, got 0"):
        BlockPool(0, keeps_prefixes=True)


def test_keys_differ_by_adapter_scale_and_every_token_before() -> None:
    base = root_key(())
    roots = {
        base,
        root_key([AdapterUse(digest="a")]),
        root_key([AdapterUse(digest="b")]),
        root_key([AdapterUse(digest="a", scale=0.5)]),
        root_key([AdapterUse(digest="a"), AdapterUse(digest="b")]),
    }

    assert len(roots) == 5
    assert child_key(child_key(base, [1, 2]), [3, 4]) != child_key(child_key(base, [1, 9]), [3, 4])
    assert child_key(base, [1, 2]) != child_key(base, [2, 1])
    one, two = AdapterUse(digest="a", scale=0.3), AdapterUse(digest="b", scale=0.7)
    assert root_key([one, two]) == root_key([two, one])


class PoolMachine(RuleBasedStateMachine):
    """Random use by sequences that allocate, share, remember and release."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(7, keeps_prefixes=True)
        self.held: list[list[int]] = []
        self.serial = 0

    @rule(count=st.integers(1, 4))
    def allocate(self, count: int) -> None:
        if self.pool.can_allocate(count):
            self.held.append(self.pool.allocate(count))
        else:
            before = self.pool.num_available
            with pytest.raises(RuntimeError):
                self.pool.allocate(count)
            assert self.pool.num_available == before

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.held) - 1))
        self.pool.release(self.held.pop(index))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def remember_and_share(self, data: st.DataObject) -> None:
        blocks = data.draw(st.sampled_from(self.held))
        self.serial += 1
        key = child_key(root_key(()), [self.serial])
        self.pool.remember(blocks[0], key, frozenset(data.draw(st.sampled_from(["", "a", "ab"]))))
        found = self.pool.find([key])
        self.pool.share(found)
        if found:
            self.held.append(found)

    @rule(owner=st.sampled_from("ab"))
    def forget_owner(self, owner: str) -> None:
        self.pool.forget_owner(owner)
        assert all(owner not in owners for owners in self.pool._owners_of.values())

    @invariant()
    def what_is_findable_has_a_key_and_owners(self) -> None:
        assert self.pool._key_of.keys() == self.pool._owners_of.keys()
        assert set(self.pool._kept) <= self.pool._key_of.keys()
        free, kept = set(self.pool._free), set(self.pool._kept)
        assert not free & kept
        assert len(free) + len(kept) == self.pool.num_available

    @invariant()
    def users_add_up(self) -> None:
        used = {block for blocks in self.held for block in blocks}
        assert self.pool.num_used == len(used)
        assert self.pool.num_available == 7 - len(used)


PoolMachine.TestCase.settings = settings(max_examples=60, deadline=None)
TestPool = PoolMachine.TestCase
