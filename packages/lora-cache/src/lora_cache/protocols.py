"""What the caller supplies: the copy into a slot, the load from storage, a hook, a clock.

Generic in key and value, so that this package needs to know neither tensors nor files.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Protocol, TypeAlias, TypeVar

if TYPE_CHECKING:
    from lora_cache.tiers import Tier

K_contra = TypeVar("K_contra", bound=Hashable, contravariant=True)
V_contra = TypeVar("V_contra", contravariant=True)
V_co = TypeVar("V_co", covariant=True)

Clock: TypeAlias = Callable[[], float]
"""Returns seconds; only differences between two calls are used."""


class Placer(Protocol[K_contra, V_contra]):
    """Writes values into device slots. Called on the thread that owns the cache.

    Neither method may change the cache that calls it; reading from it is allowed.
    """

    def place(self, key: K_contra, value: V_contra, slot: int) -> None:
        """Write `value` into `slot`, over whatever an earlier entry left there.

        The cache counts the slot as free until this returns and gives it to `key` afterwards. Any
        error leaves the slot free, and the caller of the cache gets it unchanged.
        """
        ...

    def clear(self, slot: int) -> None:
        """Reset `slot`, which no entry holds any more.

        Called when an entry goes for good, by `AdapterCache.remove` or `AdapterCache.clear`; not
        when it is deactivated or evicted, since its data is unreachable then and `place` writes
        over it.
        """
        ...


class EvictionHook(Protocol[K_contra]):
    """Is told of each entry that had to make room for another.

    Called after the tables let go of `key` and before anything takes its place. An entry that
    leaves the host tier leaves its slot first: such a key is told twice, device then host. Entries
    that go by request (`remove`, `deactivate`, `clear`) are not told. It must not change the cache.
    """

    def __call__(self, key: K_contra, tier: Tier) -> None:
        """Take note that `key` left `tier`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded(Generic[V_co]):
    """What a loader returns."""

    value: V_co
    """The value, ready to be placed."""
    size_bytes: int
    """What it costs of the host tier's byte budget."""


class Loader(Protocol[K_contra, V_co]):
    """Reads the value of a key from wherever it is stored."""

    def __call__(self, key: K_contra) -> Loaded[V_co]:
        """Return the value of `key` and its size; any error becomes a `LoadFailedError`."""
        ...
