"""The time between the wish to end and the end, by a clock of its own."""

from __future__ import annotations

import pytest

from lora_server.cli.drain import Drain


class Service:
    def __init__(self, num_running: int) -> None:
        self.num_running = num_running
        self.is_taking = True

    def begin_drain(self) -> None:
        self.is_taking = False


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_it_is_not_over_before_it_has_begun() -> None:
    service = Service(num_running=0)
    drain = Drain(service, timeout_s=5, clock=Clock())

    assert not drain.is_over()
    assert service.is_taking


def test_new_requests_are_refused_as_it_begins() -> None:
    service = Service(num_running=3)
    drain = Drain(service, timeout_s=5, clock=Clock())

    drain.begin()

    assert drain.is_begun
    assert not service.is_taking
    assert not drain.is_over()


def test_it_is_over_when_the_last_request_has_ended() -> None:
    service = Service(num_running=1)
    drain = Drain(service, timeout_s=5, clock=Clock())
    drain.begin()

    service.num_running = 0

    assert drain.is_over()


@pytest.mark.parametrize(("later_s", "is_over"), [(4.9, False), (5.0, True)])
def test_it_is_over_when_its_time_is(
    later_s: float, is_over: bool, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    drain = Drain(Service(num_running=2), timeout_s=5, clock=clock)
    drain.begin()

    clock.now_s += later_s

    assert drain.is_over() == is_over
    assert ("still run" in caplog.text) == is_over
