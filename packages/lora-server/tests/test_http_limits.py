"""Requests and tokens per minute: buckets with a clock of their own, and what replies tell."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from lora_server.errors import RateLimitError
from lora_server.http.keys import Access, ApiKey, ApiKeys, digest_of
from lora_server.http.limits import KeyLimits, TokenBucket

if TYPE_CHECKING:
    from collections.abc import Callable

    import httpx
    from conftest import Harness

PROMPT = [5] * 10


class Clock:
    """Stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Keys:
    """Keys that a test may change."""

    def __init__(self, *keys: ApiKey) -> None:
        self.all = keys

    def current(self) -> tuple[ApiKey, ...]:
        return self.all

    def reload(self) -> None:
        """Nothing to read."""


def limits_of(keys: ApiKeys) -> KeyLimits:
    limits = keys.admit("Bearer team", Access.USER).limits
    assert limits is not None
    return limits


@pytest.fixture
def clock() -> Clock:
    return Clock()


def limited(name: str = "team", **limits: Any) -> ApiKey:
    return ApiKey(name=name, digest=digest_of(name), **limits)


def ask(harness: Harness, key: str = "team", **body: Any) -> httpx.Response:
    content = {"prompt": PROMPT, "max_tokens": 4, **body}
    return harness.post("/v1/completions", content, headers={"Authorization": f"Bearer {key}"})


def test_a_bucket_fills_evenly_up_to_a_minutes_worth(clock: Clock) -> None:
    bucket = TokenBucket(60, clock=clock)

    bucket.take(60)
    assert (bucket.level, bucket.wait_s(1), bucket.full_in_s) == (0, 1, 60)
    clock.now += 1.5
    assert (bucket.level, bucket.wait_s(1)) == (1.5, 0)
    clock.now += 1000
    assert (bucket.level, bucket.full_in_s) == (60, 0)


def test_what_is_overdrawn_has_to_be_waited_for(clock: Clock) -> None:
    bucket = TokenBucket(60, clock=clock)

    bucket.take(90)

    assert bucket.level == -30
    assert bucket.wait_s(10) == 40


def test_more_than_a_minutes_worth_waits_for_a_full_bucket_only(clock: Clock) -> None:
    limits = KeyLimits(tokens_per_minute=60, clock=clock)

    limits.take_tokens(150)

    with pytest.raises(RateLimitError) as caught:
        limits.take_tokens(150)
    assert caught.value.retry_after_s == 150
    clock.now += 150
    limits.take_tokens(150)


def test_a_refused_request_costs_nothing(clock: Clock) -> None:
    limits = KeyLimits(requests_per_minute=1, tokens_per_minute=100, clock=clock)
    limits.take_request()

    for _ in range(5):
        with pytest.raises(RateLimitError):
            limits.take_request()

    clock.now += 60
    limits.take_request()


def test_requests_beyond_the_limit_get_429_until_time_has_passed(
    make_harness: Callable[..., Harness], clock: Clock
) -> None:
    keys = ApiKeys(file=Keys(limited(requests_per_minute=2), limited("other")), clock=clock)
    harness = make_harness(keys=keys)
    harness.says("hello")

    replies = [ask(harness) for _ in range(3)]

    assert [reply.status_code for reply in replies] == [200, 200, 429]
    assert [reply.headers["x-ratelimit-remaining-requests"] for reply in replies] == ["1", "0", "0"]
    refused = replies[2]
    error = harness.error(refused)
    assert (error["code"], error["type"]) == ("rate_limit_exceeded", "requests")
    assert refused.headers["retry-after"] == "30"
    assert refused.headers["x-ratelimit-limit-requests"] == "2"
    assert refused.headers["x-ratelimit-reset-requests"] == "60.000s"
    assert "x-ratelimit-limit-tokens" not in refused.headers
    assert ask(harness, "other").status_code == 200
    clock.now += 29
    assert ask(harness).status_code == 429
    clock.now += 1
    assert ask(harness).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_prompt_and_answer_count_as_tokens(
    make_harness: Callable[..., Harness], clock: Clock, stream: bool
) -> None:
    keys = ApiKeys(file=Keys(limited(tokens_per_minute=30)), clock=clock)
    harness = make_harness(keys=keys)
    harness.says("hello world")
    num_answered = len(harness.ids("hello world"))

    first = ask(harness, stream=stream)
    left = 30 - len(PROMPT) - num_answered
    second = ask(harness, stream=stream)

    assert first.status_code == second.status_code == 200
    assert first.headers["x-ratelimit-remaining-tokens"] == str(30 - len(PROMPT))
    assert second.headers["x-ratelimit-remaining-tokens"] == str(left - len(PROMPT))
    third = ask(harness, stream=stream)
    assert third.status_code == 429
    assert harness.error(third)["type"] == "tokens"
    owed = len(PROMPT) - (left - len(PROMPT) - num_answered)
    assert third.headers["retry-after"] == str(owed * 2)
    assert len(harness.engine.requests) == 2


def test_an_answer_whose_client_left_counts_as_far_as_it_went(
    make_harness: Callable[..., Harness], clock: Clock
) -> None:
    keys = ApiKeys(file=Keys(limited(tokens_per_minute=30)), clock=clock)
    harness = make_harness(keys=keys)
    harness.says("hello", finish=None)

    sent = harness.leave(
        "/v1/completions",
        {"prompt": PROMPT, "max_tokens": 4, "stream": True},
        headers=[(b"authorization", b"Bearer team")],
    )

    assert sent[0]["status"] == 200
    told = dict(limits_of(keys).headers())
    assert told["x-ratelimit-remaining-tokens"] == str(30 - 10 - len(harness.ids("hello")))


def test_limits_outlive_a_reload_that_does_not_change_them(clock: Clock) -> None:
    source = Keys(limited(requests_per_minute=1))
    keys = ApiKeys(file=source, clock=clock)
    before = limits_of(keys)
    before.take_request()

    source.all = (limited(requests_per_minute=1), limited("new"))
    with pytest.raises(RateLimitError):
        limits_of(keys).take_request()

    source.all = (limited(requests_per_minute=5),)
    limits_of(keys).take_request()
