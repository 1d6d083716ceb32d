"""The event loop's thread interrupts no other."""

from __future__ import annotations

import os
import threading

import pytest

from lora_server.cli.courtesy import wait_for_turns

pytestmark = pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="only Linux has it")


def test_only_the_thread_that_asks_waits_for_turns() -> None:
    found: list[int] = []

    def ask() -> None:
        wait_for_turns()
        found.append(os.sched_getscheduler(0))

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    assert found == [os.SCHED_BATCH]
    assert os.sched_getscheduler(0) == os.SCHED_OTHER


def test_a_system_that_does_not_allow_it_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "not allowed")

    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    wait_for_turns()
    assert os.sched_getscheduler(0) == os.SCHED_OTHER
