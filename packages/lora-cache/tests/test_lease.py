"""The handle alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from lora_cache import Lease

if TYPE_CHECKING:
    from collections.abc import Mapping


def test_releases_once_however_often_it_is_asked() -> None:
    released: list[Mapping[str, int]] = []
    lease = Lease({"a": 0}, released.append)

    lease.release()
    lease.release()

    assert released == [{"a": 0}]
    assert lease.is_released


def test_releases_when_its_block_ends() -> None:
    released: list[Mapping[str, int]] = []

    with Lease({"a": 0}, released.append) as lease:
        assert not lease.is_released
        assert released == []

    assert released == [{"a": 0}]


def test_releases_when_its_block_raises() -> None:
    released: list[Mapping[str, int]] = []

    with pytest.raises(ZeroDivisionError), Lease({"a": 0}, released.append):
        _ = 1 / 0

    assert released == [{"a": 0}]


def test_a_release_that_raises_is_not_repeated() -> None:
    calls: list[int] = []

    def fail(slots: Mapping[str, int]) -> None:
        calls.append(len(slots))
        raise OSError

    lease = Lease({"a": 0}, fail)
    with pytest.raises(OSError):  # noqa: PT011 -- any text will do
        lease.release()
    lease.release()

    assert calls == [1]


def test_its_slots_cannot_be_written() -> None:
    lease = Lease({"a": 0}, lambda slots: None)

    with pytest.raises(TypeError):
        lease.slots["b"] = 1  # type: ignore[index]


def test_says_its_state_in_its_repr() -> None:
    lease = Lease({"a": 0}, lambda slots: None)

    assert repr(lease) == "Lease({'a': 0}, held)"
    lease.release()
    assert repr(lease) == "Lease({'a': 0}, released)"
