"""The alarm of too few slots, by a clock of its own."""

from __future__ import annotations

from lora_server.metrics import Thrash, ThrashAlarm

WINDOW_S = 60.0


class Slots:
    """Requests, one a second, of `num_adapters` adapters in turn; each evicts another or not."""

    def __init__(self, window_s: float = WINDOW_S) -> None:
        self.now_s = 1000.0
        self.alarm = ThrashAlarm(window_s, clock=lambda: self.now_s)
        self.raised: list[Thrash] = []

    def admit(self, count: int, *, num_adapters: int, every: int = 1) -> None:
        for i in range(count):
            self.now_s += 1.0
            if i % every == 0:
                self.alarm.evicted()
            thrash = self.alarm.admitted({f"a{i % num_adapters}"})
            if thrash is not None:
                self.raised.append(thrash)


def test_evictions_that_stay_above_half_the_requests_raise_it_once() -> None:
    slots = Slots()

    slots.admit(200, num_adapters=12)

    assert slots.raised == [
        Thrash(window_s=WINDOW_S, num_evictions=61, num_admitted=61, num_adapters=12)
    ]
    assert slots.alarm.is_on
    assert slots.alarm.ratio == 1.0


def test_a_burst_shorter_than_the_window_does_not() -> None:
    slots = Slots()

    slots.admit(50, num_adapters=12)

    assert not slots.alarm.is_on
    assert slots.raised == []


def test_fewer_evictions_do_not() -> None:
    slots = Slots()

    slots.admit(200, num_adapters=12, every=3)

    assert 0.3 < slots.alarm.ratio < 0.4
    assert slots.raised == []


def test_it_ends_when_nothing_is_evicted_any_more_and_may_be_raised_again() -> None:
    slots = Slots()
    slots.admit(100, num_adapters=12)
    slots.admit(100, num_adapters=2, every=1000)
    ended = not slots.alarm.is_on

    slots.admit(100, num_adapters=12)

    assert ended
    assert len(slots.raised) == 2


def test_it_ends_by_itself_when_no_request_comes() -> None:
    slots = Slots()
    slots.admit(100, num_adapters=12)

    slots.now_s += WINDOW_S + 1

    assert not slots.alarm.is_on
    assert slots.alarm.ratio == 0.0


def test_a_window_of_0_never_raises_it() -> None:
    slots = Slots(window_s=0.0)

    slots.admit(200, num_adapters=12)

    assert slots.raised == []
    assert slots.alarm.ratio == 0.0
