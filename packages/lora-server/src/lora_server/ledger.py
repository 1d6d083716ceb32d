"""The memory ledger: what each part of the service takes, planned or measured, in one form.

Values only, and their JSON. Knows nothing of tensors or models; `cli/ledger` fills it in.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

_TIGHT = 0.9
"""From this part of the memory at hand on it is called tight."""


class LedgerKind(StrEnum):
    """Where the numbers come from."""

    PLANNED = "planned"
    """From the configuration of the model and the headers of the adapters."""
    MEASURED = "measured"
    """From the tensors of a running server."""


class LayerKind(StrEnum):
    """What a module with slots is in the model."""

    ATTENTION = "attention"
    MLP = "mlp"
    EXPERTS = "experts"
    EMBEDDINGS = "embeddings"
    LM_HEAD = "lm_head"
    HEADS = "heads"
    """Classification heads, and what is between them and the body."""
    OTHER = "other"


class Verdict(StrEnum):
    """Whether the machine has what is needed."""

    FITS = "fits"
    TIGHT = "tight"
    """It fits, and leaves less than a tenth of what is free."""
    DOES_NOT_FIT = "does not fit"
    UNKNOWN = "unknown"
    """The device is not in this machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsLedger:
    """The base model."""

    size_bytes: int
    """Parameters and buffers; tied ones once, further copies left out."""
    tied_bytes: int
    """What tying saves."""
    prepacked_bytes: int
    """Second copies of weights in the CPU library's own layout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KvLedger:
    """The cache of keys and values."""

    size_bytes: int
    block_bytes: int
    num_blocks: int
    block_size: int
    """Tokens a block."""
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotBytes:
    """Slots, or a part of them: used, padding and empty add up to the size."""

    size_bytes: int
    used_bytes: int
    """Filled by the adapters in slots, at their true ranks."""
    padding_bytes: int
    """The rest of the slots that hold an adapter: ranks up to the highest, modules it leaves."""
    empty_bytes: int
    """Slots without an adapter."""
    num_modules: int
    """Modules with slots; a packed group is one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotsLedger:
    """The adapter slots on the device."""

    total: SlotBytes
    by_kind: Mapping[LayerKind, SlotBytes]
    num_slots: int
    max_rank: int
    slot_bytes: int
    """Bytes of one slot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTierLedger:
    """Adapters in host memory."""

    size_bytes: int
    """Of those that are there; planned: of those named at start."""
    num_adapters: int
    capacity: int
    """Most adapters it holds."""
    adapter_bytes: int
    """Of the largest adapter known; of one of the highest rank on all modules if none is."""
    limit_bytes: int
    """`capacity` adapters of that size; as large as it can become when adapters are loaded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkspaceLedger:
    """The largest temporary tensors of one step: an estimate, in both kinds of ledger."""

    size_bytes: int
    activations_bytes: int
    """Between the products of one layer, with the most tokens a step has."""
    attention_bytes: int
    """Keys and values gathered for one layer, masks, and scores where they are formed."""
    logits_bytes: int
    """Logits of all sequences, and their float32 copies for sampling. Not at the same time as the
    other two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterLedger:
    """One adapter."""

    name: str
    rank: int
    size_bytes: int
    """In host memory, packed, at its true ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessLedger:
    """The process of a running server."""

    rss_bytes: int
    """Resident memory now."""
    peak_rss_bytes: int
    """The largest it has been."""
    resident_bytes: int
    """The part of this ledger that is resident: pages never touched, such as those of an unused KV
    cache, take no memory."""
    unaccounted_bytes: int
    """Resident, and not in this ledger: Python, torch and its caches, the HTTP stack, and pages of
    the weight files that were read and are not in use any more."""
    file_bytes: int
    """The part of the resident memory that is pages of files: libraries and weights. The system
    takes unused ones back when it needs them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineLedger:
    """What there is; without what the service itself takes while it runs."""

    device: str
    host_total_bytes: int
    """Of the machine, or of the container's limit."""
    host_available_bytes: int
    device_total_bytes: int | None
    """None on a CPU, and for a device that is not here."""
    device_available_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLedger:
    """Everything."""

    kind: LedgerKind
    model: str
    task: str
    device: str
    dtype: str
    lora_dtype: str | None
    """None without adapters."""
    weights: WeightsLedger
    kv_cache: KvLedger | None
    """None for models that do not generate."""
    slots: SlotsLedger | None
    """None without adapters."""
    host_tier: HostTierLedger | None
    workspace: WorkspaceLedger
    runtime_bytes: int
    """The interpreter and its libraries: planned, what planning itself took; measured, what is
    unaccounted for."""
    adapters: tuple[AdapterLedger, ...]
    machine: MachineLedger
    process: ProcessLedger | None
    """None in a plan."""
    notes: tuple[str, ...] = field(default=())

    @property
    def is_on_device(self) -> bool:
        """Whether model, cache and slots are in a memory of their own, beside the host's."""
        return self.device != "cpu"

    @property
    def model_bytes(self) -> int:
        """Everything that lives where the model runs."""
        return (
            self.weights.size_bytes
            + self.weights.prepacked_bytes
            + (self.kv_cache.size_bytes if self.kv_cache else 0)
            + (self.slots.total.size_bytes if self.slots else 0)
            + self.workspace.size_bytes
        )

    @property
    def total_bytes(self) -> int:
        """Everything, with the host tier as it is."""
        return (
            self.model_bytes
            + self.runtime_bytes
            + (self.host_tier.size_bytes if self.host_tier else 0)
        )

    @property
    def limit_bytes(self) -> int:
        """Everything, with a full host tier."""
        host = self.host_tier
        return self.total_bytes + (host.limit_bytes - host.size_bytes if host else 0)

    @property
    def verdict(self) -> Verdict:
        """Whether what is needed at most is there."""
        if not self.is_on_device:
            return _judge(self.limit_bytes, self.machine.host_available_bytes)
        if self.machine.device_available_bytes is None:
            return Verdict.UNKNOWN
        on_host = self.limit_bytes - self.model_bytes
        verdicts = (
            _judge(self.model_bytes, self.machine.device_available_bytes),
            _judge(on_host, self.machine.host_available_bytes),
        )
        order = list(Verdict)
        return max(verdicts, key=order.index)

    def as_json(self) -> dict[str, Any]:
        """Return the ledger as JSON's types."""
        return {
            **dataclasses.asdict(self),
            "total_bytes": self.total_bytes,
            "limit_bytes": self.limit_bytes,
            "verdict": self.verdict,
        }


def _judge(needed: int, available: int) -> Verdict:
    if needed > available:
        return Verdict.DOES_NOT_FIT
    return Verdict.TIGHT if needed > _TIGHT * available else Verdict.FITS
