"""The program with a model that takes 10 ms a step and thinks nothing: what is left is the rest.

`python integration_tests/support/asleep.py serve MODEL ...` is `lora-server serve MODEL ...`, but
each forward pass sleeps and answers with fixed random logits. It takes 10 ms where nothing else
runs: what the timer adds to a sleep is measured at the start, and left out of it.
"""

from __future__ import annotations

import ctypes
import statistics
import sys
import threading
import time
from typing import TYPE_CHECKING
from unittest import mock

import torch

from lora_server.cli.main import main
from lora_server.model.load import LoadedModel

if TYPE_CHECKING:
    from collections.abc import Callable

    from lora_server.model.attention_step import AttentionStep

STEP_S = 0.010
_PR_SET_TIMERSLACK = 29
"""Of prctl(2): by how many nanoseconds a thread may wake later than it asked; 50 000 at first."""
MAX_ROWS = 64
"""Most rows of a step that sample: the server's most sequences in one."""
_TRIALS = 21


def sleep_lasts_longer_s() -> float:
    """Return by how many seconds this thread wakes later than it asked, where nothing else runs."""
    found = []
    for _ in range(_TRIALS):
        start_s = time.perf_counter()
        time.sleep(STEP_S)
        found.append(time.perf_counter() - start_s - STEP_S)
    return statistics.median(found)


def sleeping_forward() -> Callable[..., torch.Tensor]:
    """Return what replaces `LoadedModel.forward`."""
    answers: list[torch.Tensor] = []
    prctl = ctypes.CDLL(None).prctl
    sleep_s_of: dict[int, float] = {}

    def forward(
        self: LoadedModel,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        step: AttentionStep,
        logits_idx: torch.Tensor,
    ) -> torch.Tensor:
        """Sleep; answer as many rows of logits as are wanted."""
        thread = threading.get_ident()
        if thread not in sleep_s_of:
            prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(1))
            sleep_s_of[thread] = STEP_S - sleep_lasts_longer_s()
        if not answers:
            generator = torch.Generator().manual_seed(0)
            table = torch.randn(MAX_ROWS, self.vocab_size, generator=generator).to(self.dtype)
            answers.extend(table[:count] for count in range(MAX_ROWS + 1))
        # Before the sleep: torch's operators take 0.3 ms after one, and a forward pass takes 10.
        answer = answers[len(logits_idx)]
        time.sleep(sleep_s_of[thread])
        return answer

    return forward


if __name__ == "__main__":
    with mock.patch.object(LoadedModel, "forward", sleeping_forward()):
        sys.exit(main(sys.argv[1:]))
