"""Single flight: one execution, one outcome for all, nothing remembered."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from lora_cache import LoadFailedError, SingleFlight

NUM_CALLERS = 8
TIMEOUT_S = 10.0


class Interrupt(BaseException):
    """Stands for `KeyboardInterrupt`, which pytest itself would act on."""


def wait_for_callers(flight: SingleFlight[str, int], key: str, num_waiting: int) -> None:
    """Return when as many callers wait; called inside the flight, so no caller can be late."""
    pause = threading.Event()
    for _ in range(int(TIMEOUT_S * 1000)):
        if flight.num_waiting(key) == num_waiting:
            return
        pause.wait(0.001)
    pytest.fail(f"{flight.num_waiting(key)} callers wait, expected {num_waiting}")


def outcomes(futures: list[Future[int]]) -> list[int | BaseException | None]:
    return [future.exception(TIMEOUT_S) or future.result() for future in futures]


def test_concurrent_callers_share_one_execution_and_its_result() -> None:
    """C14."""
    flight: SingleFlight[str, int] = SingleFlight()
    calls: list[int] = []

    def read() -> int:
        wait_for_callers(flight, "a", NUM_CALLERS - 1)
        calls.append(1)
        return 42

    with ThreadPoolExecutor(NUM_CALLERS) as pool:
        futures = [pool.submit(flight.run, "a", read) for _ in range(NUM_CALLERS)]
        results = outcomes(futures)

    assert results == [42] * NUM_CALLERS
    assert calls == [1]
    assert flight.keys() == frozenset()


def test_concurrent_callers_share_one_error_and_the_next_call_tries_again() -> None:
    """C14."""
    flight: SingleFlight[str, int] = SingleFlight()
    failure = OSError("the folder is gone")
    calls: list[int] = []

    def read() -> int:
        wait_for_callers(flight, "a", NUM_CALLERS - 1)
        calls.append(1)
        raise failure

    with ThreadPoolExecutor(NUM_CALLERS) as pool:
        futures = [pool.submit(flight.run, "a", read) for _ in range(NUM_CALLERS)]
        results = outcomes(futures)

    assert all(result is failure for result in results)
    assert calls == [1]
    assert flight.run("a", lambda: 43) == 43


def test_an_interrupt_reaches_its_own_thread_and_ends_the_wait_of_the_others() -> None:
    flight: SingleFlight[str, int] = SingleFlight()

    def read() -> int:
        wait_for_callers(flight, "a", NUM_CALLERS - 1)
        raise Interrupt

    with ThreadPoolExecutor(NUM_CALLERS) as pool:
        futures = [pool.submit(flight.run, "a", read) for _ in range(NUM_CALLERS)]
        results = outcomes(futures)

    interrupted = [result for result in results if isinstance(result, Interrupt)]
    failed = [result for result in results if isinstance(result, LoadFailedError)]
    assert len(interrupted) == 1
    assert len(failed) == NUM_CALLERS - 1
    assert all(error.__cause__ is interrupted[0] for error in failed)


def test_different_keys_run_side_by_side() -> None:
    flight: SingleFlight[str, int] = SingleFlight()
    both = threading.Barrier(2)

    def read() -> int:
        return both.wait(TIMEOUT_S) * 0 + 1

    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(flight.run, key, read) for key in ("a", "b")]
        results = outcomes(futures)

    assert results == [1, 1]


def test_nothing_is_remembered_after_a_result() -> None:
    flight: SingleFlight[str, int] = SingleFlight()

    results = [flight.run("a", lambda: 1), flight.run("a", lambda: 2)]

    assert results == [1, 2]


def test_a_load_that_asks_for_itself_fails_instead_of_waiting_for_ever() -> None:
    flight: SingleFlight[str, int] = SingleFlight()

    with pytest.raises(LoadFailedError, match="loading 'a' failed: it asked for itself"):
        flight.run("a", lambda: flight.run("a", lambda: 1))

    assert flight.keys() == frozenset()


def test_a_load_may_ask_for_another_key() -> None:
    flight: SingleFlight[str, int] = SingleFlight()
    seen: list[frozenset[str]] = []

    def inner() -> int:
        seen.append(flight.keys())
        return 1

    assert flight.run("a", lambda: flight.run("b", inner)) == 1
    assert seen == [frozenset({"a", "b"})]


def test_nobody_waits_for_a_key_that_is_not_in_flight() -> None:
    flight: SingleFlight[str, int] = SingleFlight()

    assert flight.num_waiting("a") == 0
