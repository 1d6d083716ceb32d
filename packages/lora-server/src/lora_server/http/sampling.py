"""From a request's body to `SamplingParams`, with every check against the model's limits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, TypeVar

from lora_server.engine.request import SamplingParams
from lora_server.errors import InvalidRequestError
from lora_server.http.errors import context_length_error
from lora_server.http.schemas.openai import ChatBody, CompletionBody, GenerationBody

_COMPLETION_MAX_TOKENS: Final = 16

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the model can take."""

    max_model_len: int
    """Longest sequence in tokens, prompt and output together."""
    vocab_size: int
    """Token ids are below this."""


def build_sampling(
    body: CompletionBody | ChatBody, *, num_prompt_tokens: int, limits: Limits
) -> SamplingParams:
    """Translate a body for one prompt. A field that is absent or null takes its default.

    Raises:
        InvalidRequestError: prompt and output do not fit the context, or a field names a token
            that the model does not have.
    """
    max_tokens = _max_tokens(body, num_prompt_tokens, limits)
    min_tokens = _or(body.min_tokens, 0)
    if min_tokens > max_tokens:
        raise InvalidRequestError(
            f"min_tokens is {min_tokens}, above max_tokens, which is {max_tokens}",
            param="min_tokens",
        )
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        temperature=_or(body.temperature, 1.0),
        top_p=_or(body.top_p, 1.0),
        top_k=max(_or(body.top_k, 0), 0),
        min_p=_or(body.min_p, 0.0),
        presence_penalty=_or(body.presence_penalty, 0.0),
        frequency_penalty=_or(body.frequency_penalty, 0.0),
        repetition_penalty=_or(body.repetition_penalty, 1.0),
        logit_bias=_logit_bias(body.logit_bias or {}, limits.vocab_size),
        seed=body.seed,
        stop_token_ids=_stop_token_ids(body, limits.vocab_size),
        ignore_eos=bool(body.ignore_eos),
        logprobs=num_logprobs(body),
        prompt_logprobs=_num_prompt_logprobs(body, max_tokens),
    )


def num_logprobs(body: CompletionBody | ChatBody) -> int | None:
    """Alternatives to report for each token; None reports no log-probabilities."""
    if isinstance(body, CompletionBody):
        return body.logprobs
    return _or(body.top_logprobs, 0) if body.logprobs else None


def check_token_ids(token_ids: list[int], vocab_size: int, *, param: str) -> None:
    """Refuse ids that the model does not have."""
    if token_ids and max(token_ids) >= vocab_size:
        unknown = next(id_ for id_ in token_ids if id_ >= vocab_size)
        raise InvalidRequestError(
            f"{param}: there is no token {unknown}; ids are below {vocab_size}", param=param
        )


def _max_tokens(body: GenerationBody, num_prompt_tokens: int, limits: Limits) -> int:
    asked = _asked_max_tokens(body)
    room = limits.max_model_len - num_prompt_tokens
    param = "messages" if isinstance(body, ChatBody) else "prompt"
    if room < (0 if asked == 0 else 1):
        raise context_length_error(
            f"the prompt has {num_prompt_tokens} tokens, and the longest sequence of the model "
            f"is {limits.max_model_len} tokens, output included",
            param=param,
        )
    if asked is None:
        return min(_COMPLETION_MAX_TOKENS, room) if isinstance(body, CompletionBody) else room
    if asked > room:
        raise context_length_error(
            f"the prompt has {num_prompt_tokens} tokens and max_tokens is {asked}, together "
            f"{num_prompt_tokens + asked}; the longest sequence of the model is "
            f"{limits.max_model_len} tokens",
            param=param,
        )
    return asked


def _asked_max_tokens(body: GenerationBody) -> int | None:
    one, other = body.max_tokens, body.max_completion_tokens
    if one is not None and other is not None and one != other:
        raise InvalidRequestError(
            f"max_tokens is {one}, and max_completion_tokens is {other}", param="max_tokens"
        )
    asked = one if one is not None else other
    if asked == 0 and not (isinstance(body, CompletionBody) and body.echo):
        raise InvalidRequestError(
            "max_tokens: 0 is allowed for completions with echo: true only", param="max_tokens"
        )
    return asked


def _num_prompt_logprobs(body: GenerationBody, max_tokens: int) -> int | None:
    if not isinstance(body, CompletionBody) or not body.echo:
        return None
    # Scoring the prompt is all that a request without output can do.
    return 0 if max_tokens == 0 and body.logprobs is None else body.logprobs


def _logit_bias(bias: Mapping[str, float], vocab_size: int) -> dict[int, float]:
    unknown = [key for key in bias if not _is_token_id(key, vocab_size)]
    if unknown:
        raise InvalidRequestError(
            f"logit_bias: no token ids: {', '.join(repr(key[:20]) for key in unknown)}; ids are "
            f"integers from 0 to {vocab_size - 1}",
            param="logit_bias",
        )
    return {int(key): value for key, value in bias.items()}


def _is_token_id(key: str, vocab_size: int) -> bool:
    """Whether a JSON key spells an id; its length is bounded before it becomes a number."""
    is_number = key.isascii() and key.isdecimal() and len(key) <= len(str(vocab_size))
    return is_number and int(key) < vocab_size


def _stop_token_ids(body: GenerationBody, vocab_size: int) -> frozenset[int]:
    token_ids = body.stop_token_ids or []
    check_token_ids(token_ids, vocab_size, param="stop_token_ids")
    return frozenset(token_ids)


def _or(value: _T | None, default: _T) -> _T:
    return default if value is None else value
