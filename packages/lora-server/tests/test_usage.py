"""Counts by adapter of those who wait and run."""

from __future__ import annotations

from dataclasses import dataclass, field

from lora_server.engine.usage import AdapterUsage, count_usage


@dataclass(frozen=True)
class User:
    adapter_digests: frozenset[str]
    lease: None = field(default=None)


def users(*sets: str) -> list[User]:
    return [User(frozenset(digests)) for digests in sets]


def test_each_member_of_a_weighted_set_is_counted_and_the_base_is_not() -> None:
    usage = count_usage({"a": 7}, waiting=users("a", "", "ab"), running=users("b", "bc"))

    assert usage == {
        "a": AdapterUsage(hits=7, waiting=2),
        "b": AdapterUsage(waiting=1, running=2),
        "c": AdapterUsage(running=1),
    }


def test_without_requests_there_is_nothing_to_tell() -> None:
    assert count_usage({}, waiting=[]) == {}
