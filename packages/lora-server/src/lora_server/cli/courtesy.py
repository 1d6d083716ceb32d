"""How the event loop's thread shares cores with the engine's.

Linux lets a thread that wakes up interrupt the running one. The loop wakes when the engine hands
out tokens, which is when a forward pass begins: on a busy core the pass would wait until every
stream is written. As a batch thread the loop waits for a free core, or for its turn.
"""

from __future__ import annotations

import logging
import os

_logger = logging.getLogger(__name__)


def wait_for_turns() -> None:
    """Let this thread interrupt no other one; threads that it makes from now on are the same.

    Does nothing where the system has no such threads, or does not allow it.
    """
    policy = getattr(os, "SCHED_BATCH", None)
    if policy is None:
        return
    try:
        os.sched_setscheduler(0, policy, os.sched_param(0))
    except OSError as error:
        _logger.debug("the event loop stays an ordinary thread: %s", error)
