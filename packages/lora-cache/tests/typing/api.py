"""How a user's typed code looks; read by the type checker only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lora_cache import (
    AdapterCache,
    CacheView,
    EvictionHook,
    Lease,
    Loaded,
    Loader,
    Placer,
    Residency,
    SingleFlight,
    Tier,
)

if TYPE_CHECKING:
    from collections.abc import Mapping


class Buffers:
    """A placer by structure; it inherits nothing."""

    def place(self, key: str, value: bytes, slot: int) -> None:
        """Write a value."""

    def clear(self, slot: int) -> None:
        """Reset a slot."""


class Anything:
    """A placer of any key and value serves where a narrower one is asked for."""

    def place(self, key: object, value: object, slot: int) -> None:
        """Write a value."""

    def clear(self, slot: int) -> None:
        """Reset a slot."""


def note(key: str, tier: Tier) -> None:
    """Serve as an eviction hook."""


def read(key: str) -> Loaded[bytes]:
    """Serve as a loader."""
    return Loaded(value=key.encode(), size_bytes=len(key))


placer: Placer[str, bytes] = Buffers()
wider: Placer[str, bytes] = Anything()
hook: EvictionHook[str] = note
loader: Loader[str, bytes] = read

cache: AdapterCache[str, bytes] = AdapterCache(
    placer=placer, num_slots=2, max_host=4, on_evict=hook, clock=lambda: 0.0
)
view: CacheView[str, bytes] = cache
value: bytes = cache.load("a", loader)
is_new: bool = cache.register("b", b"two", size_bytes=3)
lease: Lease[str] = cache.acquire({"a", "b"})
slots: Mapping[str, int] = lease.slots
residency: Residency = view.residency("a")
flight: SingleFlight[str, Loaded[bytes]] = SingleFlight()
loaded: Loaded[bytes] = flight.run("a", lambda: read("a"))

cache.register(1, b"one", size_bytes=3)  # type: ignore[arg-type]
cache.register("a", "one", size_bytes=3)  # type: ignore[arg-type]
view.register("a", b"one", size_bytes=3)  # type: ignore[attr-defined]
