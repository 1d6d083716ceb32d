"""What an adapter was shown to change: what of its file is applied, how far it moves answers.

Values only. Weak is what moves the probe less than a person would notice; an adapter for other
texts than the probe's may be weak on it and strong where it is meant.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

WEAK_LOGPROB_SHIFT: Final = 0.02
"""Largest shift of any log-probability, in nats, below which an adapter is weak: 2 % of a
probability. Trained adapters move the probe by 1 and more."""
WEAK_EMBEDDING_SHIFT: Final = 0.002
"""The same of a component of an embedding of length 1."""


class ShiftOf(StrEnum):
    """What was compared with the base's."""

    LOG_PROBABILITIES = "log_probabilities"
    LOGITS = "logits"
    """Of a head with one label, whose probabilities are always 1."""
    EMBEDDING = "embedding"
    """Scaled to length 1; for models without a head, and adapters with other labels."""


class ProbeState(StrEnum):
    """How far the proof has come."""

    DONE = "done"
    WAITING = "waiting"
    """No slot was free: it is run when the adapter is in one."""
    FAILED = "failed"
    """The model failed on the probe, or gave no finite numbers."""
    OFF = "off"


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitShift:
    """How far the answers to the probe move from the base's."""

    max: float
    """Largest absolute difference, over all positions and tokens."""
    mean: float
    """Mean absolute difference."""
    kl: float | None
    """Divergence of the adapter's distribution from the base's at the last position, in nats."""
    of: ShiftOf

    @property
    def is_weak(self) -> bool:
        """Whether it is hardly there."""
        limit = WEAK_EMBEDDING_SHIFT if self.of is ShiftOf.EMBEDDING else WEAK_LOGPROB_SHIFT
        return self.max < limit


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterEffect:
    """All of it, for one version."""

    applied_tensors: int
    total_tensors: int
    """In the file. The difference is state of training and copies of the base's own."""
    update_norm: float
    """Frobenius norm of all updates together, scaling included; gains, biases and whole modules
    have none."""
    largest_module: str | None
    """Where the update is largest; None without a pair."""
    logit_shift: LogitShift | None = None
    """None until the probe has run."""
    probe: ProbeState = ProbeState.OFF

    @property
    def is_weak(self) -> bool:
        """Whether the probe has run and hardly moved."""
        return self.logit_shift is not None and self.logit_shift.is_weak

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON's types."""
        return {**dataclasses.asdict(self), "is_weak": self.is_weak}
