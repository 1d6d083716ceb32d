"""What the engine is asked to do: one prompt, how to sample from it, and which adapters apply.

Knows nothing of HTTP, text or adapter names; adapters are digests here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterUse:
    """One adapter of a request's weighted set."""

    digest: str
    """Content hash of the adapter; its key in every cache."""
    scale: float = 1.0
    """Factor on the adapter's output; 1 for a plain request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the next token is chosen. Defaults are those of the OpenAI API."""

    max_tokens: int
    """Largest number of tokens to generate, at least 1 (0 with `prompt_logprobs` only)."""
    min_tokens: int = 0
    """End tokens and stop tokens are not sampled before this many tokens."""
    temperature: float = 1.0
    """0 means greedy."""
    top_p: float = 1.0
    """Nucleus mass in (0, 1]."""
    top_k: int = 0
    """Number of candidates kept; 0 keeps all."""
    min_p: float = 0.0
    """Smallest probability kept, relative to the most likely token."""
    presence_penalty: float = 0.0
    """Subtracted once from the logit of every token generated so far."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit once for each time it was generated."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens in the prompt or the output."""
    logit_bias: Mapping[int, float] = field(default_factory=lambda: MappingProxyType({}))
    """Added to the logits of the named tokens."""
    seed: int | None = None
    """Seed of the request's own generator; None draws one."""
    stop_token_ids: frozenset[int] = frozenset()
    """Tokens that end the sequence besides the model's own end tokens."""
    ignore_eos: bool = False
    """Go on after the model's end tokens."""
    logprobs: int | None = None
    """Alternatives reported for each generated token; 0 reports the token's own only."""
    prompt_logprobs: int | None = None
    """As `logprobs`, for the prompt's tokens from the second on."""

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0.0

    @property
    def is_plain(self) -> bool:
        """Whether each token is the largest of the raw logits, without its log-probability."""
        return (
            self.is_greedy
            and self.min_tokens == 0
            and not self.logit_bias
            and self.repetition_penalty == 1.0
            and not self.presence_penalty
            and not self.frequency_penalty
            and self.logprobs is None
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """A prompt to continue `n` times."""

    request_id: str
    """Unique among the requests in flight."""
    prompt_token_ids: tuple[int, ...]
    """At least one token, checked against the context length by the caller."""
    sampling: SamplingParams
    adapters: tuple[AdapterUse, ...] = ()
    """Empty: the base model alone."""
    n: int = 1
    """Independent continuations; continuation i uses `seed + i`."""
    exchange_id: str | None = None
    """Names the HTTP request in log lines; not unique."""
