"""The program with a model that takes 10 ms a step and thinks nothing: what is left is the rest.

`python integration_tests/support/asleep.py serve MODEL ...` is `lora-server serve MODEL ...`, but
each forward pass sleeps and answers with fixed random logits, or the largest of them. It takes
10 ms where nothing else runs: what the timer adds to a sleep is measured at the start and left out.
"""

from __future__ import annotations

import ctypes
import statistics
import sys
import threading
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

from lora_server.cli.main import main
from lora_server.model.greedy import Largest
from lora_server.model.load import LoadedModel

if TYPE_CHECKING:
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


class Sleeper:
    """What replaces the forward passes of `LoadedModel`."""

    def __init__(self) -> None:
        """Measure and draw nothing yet."""
        self._prctl = ctypes.CDLL(None).prctl
        self._sleep_s_of: dict[int, float] = {}
        """Thread -> what it asks for to sleep 10 ms."""
        self._logits: list[torch.Tensor] = []
        """For each number of rows."""
        self._token_ids: list[int] = []
        """The largest of each row."""

    def forward(
        self,
        model: LoadedModel,
        _input_ids: torch.Tensor,
        _position_ids: torch.Tensor,
        _step: AttentionStep,
        logits_idx: torch.Tensor,
    ) -> torch.Tensor:
        """Sleep; answer as many rows of logits as are wanted."""
        self._sleep(model)
        return self._logits[len(logits_idx)]

    def forward_greedy(
        self,
        model: LoadedModel,
        _input_ids: torch.Tensor,
        _position_ids: torch.Tensor,
        _step: AttentionStep,
        logits_idx: torch.Tensor,
    ) -> Largest:
        """Sleep; answer with the largest logits of as many rows as are wanted."""
        self._sleep(model)
        return Largest(self._token_ids[: len(logits_idx)], is_finite=True)

    def _sleep(self, model: LoadedModel) -> None:
        thread = threading.get_ident()
        if thread not in self._sleep_s_of:
            self._prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(1))
            self._sleep_s_of[thread] = STEP_S - sleep_lasts_longer_s()
        if not self._logits:
            generator = torch.Generator().manual_seed(0)
            table = torch.randn(MAX_ROWS, model.vocab_size, generator=generator).to(model.dtype)
            self._token_ids = table.max(dim=1).indices.tolist()
            self._logits = [table[:count] for count in range(MAX_ROWS + 1)]
        time.sleep(self._sleep_s_of[thread])


def asleep() -> ExitStack:
    """Let every model sleep, until the stack is closed."""
    sleeper = Sleeper()

    def forward(model: LoadedModel, *inputs: Any) -> torch.Tensor:
        return sleeper.forward(model, *inputs)

    def forward_greedy(model: LoadedModel, *inputs: Any) -> Largest:
        return sleeper.forward_greedy(model, *inputs)

    stack = ExitStack()
    for run in (forward, forward_greedy):
        stack.enter_context(mock.patch.object(LoadedModel, run.__name__, run))
    return stack


if __name__ == "__main__":
    with asleep():
        sys.exit(main(sys.argv[1:]))
