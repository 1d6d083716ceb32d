"""What is put for an event loop arrives there, in order, and before the end."""

from __future__ import annotations

import asyncio
import threading
from functools import partial

from lora_server.engine.hand_over import HandOver

WAIT_S = 10.0


def test_functions_run_on_their_loop_in_order_and_none_is_lost_at_the_end() -> None:
    async def main() -> tuple[list[int], set[int]]:
        found: list[int] = []
        threads: set[int] = set()
        last = asyncio.Event()

        def note(number: int) -> None:
            found.append(number)
            threads.add(threading.get_ident())
            if number == 99:
                last.set()

        hand_over = HandOver()
        hand_over.start()
        loop = asyncio.get_running_loop()
        for number in range(100):
            hand_over.put(loop, partial(note, number))
        hand_over.stop()
        await asyncio.wait_for(last.wait(), WAIT_S)
        return found, threads

    found, threads = asyncio.run(main())

    assert found == list(range(100))
    assert threads == {threading.get_ident()}


def test_a_loop_that_has_closed_does_not_keep_others_from_theirs() -> None:
    closed = asyncio.new_event_loop()
    closed.close()

    async def main() -> None:
        arrived = asyncio.Event()
        hand_over = HandOver()
        hand_over.start()
        hand_over.put(closed, lambda: None)
        hand_over.put(asyncio.get_running_loop(), arrived.set)
        await asyncio.wait_for(arrived.wait(), WAIT_S)
        hand_over.stop()

    asyncio.run(main())


def test_one_that_was_never_started_can_be_stopped() -> None:
    HandOver().stop()
