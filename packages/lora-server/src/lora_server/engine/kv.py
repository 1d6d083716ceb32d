"""Which KV block is free, used by whom, and worth keeping for its contents.

Numbers only: the tensors belong to `lora_server.model.kv_cache`. One thread owns a pool.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .prefix import BlockKey


class BlockPool:
    """Blocks with reference counts; a full block may stay findable by its key after its last user.

    A block is in exactly one of three states: free (no key, no user), kept (a key, no user; the
    least recently released goes first when room is needed), or used (one or more users).
    """

    def __init__(self, num_blocks: int, *, keeps_prefixes: bool) -> None:
        if num_blocks < 1:
            raise ValueError(f"a block pool needs at least 1 block, got {num_blocks}")
        self.num_blocks = num_blocks
        self.keeps_prefixes = keeps_prefixes
        self._free: deque[int] = deque(range(num_blocks))
        self._kept: OrderedDict[int, None] = OrderedDict()
        self._users = [0] * num_blocks
        self._key_of: dict[int, BlockKey] = {}
        self._block_of: dict[BlockKey, int] = {}
        self._blocks_of_owner: dict[str, set[int]] = {}
        self._owners_of: dict[int, frozenset[str]] = {}

    def __repr__(self) -> str:
        return f"BlockPool(blocks={self.num_blocks}, used={self.num_used}, kept={len(self._kept)})"

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` could hand out now."""
        return len(self._free) + len(self._kept)

    @property
    def num_used(self) -> int:
        """Blocks with a user."""
        return self.num_blocks - self.num_available

    @property
    def num_findable(self) -> int:
        """Blocks without a user that `find` may still return."""
        return len(self._kept)

    def can_allocate(self, count: int) -> bool:
        """Whether `allocate(count)` would succeed."""
        return count <= self.num_available

    def allocate(self, count: int) -> list[int]:
        """Hand out `count` blocks with one user each, forgetting kept ones when needed.

        Raises:
            RuntimeError: fewer are available; nothing was changed.
        """
        if not self.can_allocate(count):
            raise RuntimeError(f"{count} KV blocks asked for, {self.num_available} available")
        blocks = []
        for _ in range(count):
            if self._free:
                block = self._free.popleft()
            else:
                block, _ = self._kept.popitem(last=False)
                self._forget(block)
            self._users[block] = 1
            blocks.append(block)
        return blocks

    def release(self, blocks: Sequence[int]) -> None:
        """Take one user from each block. The last of a sequence is offered for reuse first."""
        for block in reversed(blocks):
            self._users[block] -= 1
            assert self._users[block] >= 0, f"block {block} released more often than used"
            if self._users[block] == 0:
                if block in self._key_of:
                    self._kept[block] = None
                else:
                    # To be used next: its memory has been touched, others' perhaps never.
                    self._free.appendleft(block)

    def find(self, keys: Sequence[BlockKey]) -> list[int]:
        """The blocks that hold the longest known prefix of a chain of keys; no user is added."""
        blocks = []
        for key in keys:
            block = self._block_of.get(key)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def share(self, blocks: Sequence[int]) -> None:
        """Add a user to each block found by `find`."""
        for block in blocks:
            if self._users[block] == 0:
                del self._kept[block]
            self._users[block] += 1

    def num_kept(self, blocks: Sequence[int]) -> int:
        """How many of `blocks` have no user, so that sharing them uses up availability."""
        return sum(1 for block in blocks if self._users[block] == 0)

    def remember(self, block: int, key: BlockKey, owners: frozenset[str] = frozenset()) -> None:
        """Make a full, used block findable. The first block of a key wins.

        Args:
            block: which one.
            key: what it holds.
            owners: the adapters without any of which nobody will ask for that key.
        """
        if self.keeps_prefixes and key not in self._block_of and block not in self._key_of:
            self._block_of[key] = block
            self._key_of[block] = key
            self._owners_of[block] = owners
            for owner in owners:
                self._blocks_of_owner.setdefault(owner, set()).add(block)

    def forget_owner(self, owner: str) -> None:
        """Make the blocks of an adapter unfindable; those without a user become free."""
        for block in self._blocks_of_owner.pop(owner, ()):
            self._forget(block)
            if block in self._kept:
                del self._kept[block]
                self._free.appendleft(block)

    def forget(self, blocks: Sequence[int]) -> list[int]:
        """Make used blocks unfindable, because their contents are bad.

        Returns:
            Those that have no other user, whose contents may be overwritten at once.
        """
        for block in blocks:
            if block in self._key_of:
                self._forget(block)
        return [block for block in blocks if self._users[block] == 1]

    def forget_all(self) -> None:
        """Drop every key; kept blocks become free."""
        self._free.extendleft(self._kept)
        self._kept.clear()
        self._key_of.clear()
        self._block_of.clear()
        self._owners_of.clear()
        self._blocks_of_owner.clear()

    def _forget(self, block: int) -> None:
        del self._block_of[self._key_of.pop(block)]
        for owner in self._owners_of.pop(block):
            blocks = self._blocks_of_owner.get(owner, set())
            blocks.discard(block)
            if not blocks:
                self._blocks_of_owner.pop(owner, None)
