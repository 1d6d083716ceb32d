"""Decides what is resident: a host tier, a table of device slots, pins and leases.

Generic in key and value. Knows nothing of tensors, adapters or layers and needs the standard
library only. One thread owns a cache and is the only one to call it; `SingleFlight` alone may be
shared between threads.
"""

from __future__ import annotations

from lora_cache.cache import AdapterCache
from lora_cache.errors import (
    CacheError,
    HostTierFullError,
    InUseError,
    LoadFailedError,
    NoFreeSlotError,
    NoPinsError,
    RemovingError,
    SetTooLargeError,
    UnknownKeyError,
)
from lora_cache.flight import SingleFlight
from lora_cache.host import HostTier
from lora_cache.lease import Lease
from lora_cache.protocols import Clock, EvictionHook, Loaded, Loader, Placer
from lora_cache.slots import Move, SlotTable
from lora_cache.stats import CacheStats, TierStats
from lora_cache.tiers import EvictionPolicy, Residency, Tier
from lora_cache.view import CacheView

__all__ = [
    "AdapterCache",
    "CacheError",
    "CacheStats",
    "CacheView",
    "Clock",
    "EvictionHook",
    "EvictionPolicy",
    "HostTier",
    "HostTierFullError",
    "InUseError",
    "Lease",
    "LoadFailedError",
    "Loaded",
    "Loader",
    "Move",
    "NoFreeSlotError",
    "NoPinsError",
    "Placer",
    "RemovingError",
    "Residency",
    "SetTooLargeError",
    "SingleFlight",
    "SlotTable",
    "Tier",
    "TierStats",
    "UnknownKeyError",
]
