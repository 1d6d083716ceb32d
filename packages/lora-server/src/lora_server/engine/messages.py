"""What the engine thread says to those who wait for a request.

Every message belongs to one request. The stream of a request ends after `n` outputs with a
`finish_reason`, or after one `RequestFailed`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class FinishReason(StrEnum):
    """Why a sequence ended; the values are the OpenAI API's where it has one."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability of one token, natural logarithm, before temperature and penalties."""

    token_id: int
    logprob: float
    rank: int
    """1 for the most likely token of the vocabulary."""
    top: tuple[tuple[int, float], ...] = ()
    """(token id, log-probability) of the most likely tokens, best first."""


# Not frozen: one is made for every token, and a frozen one takes three times as long.
@dataclass(slots=True, kw_only=True)
class SequenceOutput:
    """New tokens of one continuation of a request. Nobody changes it."""

    request_id: str
    index: int
    """Which of the request's `n` continuations."""
    token_ids: tuple[int, ...]
    """Tokens generated since the last message; the ending token is included."""
    logprobs: tuple[TokenLogprob, ...] = ()
    """One for each of `token_ids` when asked for."""
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    """The end or stop token that ended the sequence, which is also the last of `token_ids`."""
    num_cached_tokens: int = 0
    """Prompt tokens whose KV came from the prefix cache."""
    admitted_s: float | None = None
    """When the sequence last began to run, on the engine's clock; None when it did not."""


def merge_tokens(earlier: SequenceOutput, later: SequenceOutput) -> SequenceOutput:
    """Return one message for two of the same continuation that follow each other."""
    return SequenceOutput(
        request_id=earlier.request_id,
        index=earlier.index,
        token_ids=earlier.token_ids + later.token_ids,
        logprobs=earlier.logprobs + later.logprobs,
        finish_reason=later.finish_reason,
        stop_token_id=later.stop_token_id,
        num_cached_tokens=earlier.num_cached_tokens,
        admitted_s=earlier.admitted_s,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLogprobs:
    """Log-probabilities of the prompt: entry i is for prompt token i + 1. Sent once, first."""

    request_id: str
    logprobs: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFailed:
    """The request ended without an answer."""

    request_id: str
    error: Exception
    """A `ServerError`; what the caller is told follows from its class."""


EngineOutput = SequenceOutput | PromptLogprobs | RequestFailed
