"""One step of the pooling engine: schedule, route, forward, pool, answer.

A step that fails is tried again one text at a time, so that only the text at fault ends.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import numpy as np
import torch

from lora_layers import NotLinearError
from lora_server.errors import EngineError, InvalidRequestError
from lora_server.logs import log_fields

from .claims import SlotClaim
from .messages import RequestFailed
from .pooling_batch import build_batches
from .pooling_request import PoolingOutput
from .pooling_scheduler import PoolingLimits, PoolingScheduler
from .pooling_sequence import PoolingSequence
from .stats import EngineStats
from .usage import count_usage

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future

    from lora_server.model.pooling_model import LoadedPooler

    from .admission import AdapterAdmission
    from .pooling_batch import PoolingBatch
    from .pooling_request import PoolingRequest
    from .usage import AdapterUsage

_log = logging.getLogger(__name__)

_WRITING_SHARE = 0.15
"""Part of a step's time that may be spent on writing adapter slots before the next one."""
_MIN_WRITING_S = 0.002

_Output = PoolingOutput | RequestFailed


class PoolingCore:
    """All state of a running pooling engine. Every method belongs to the engine thread."""

    def __init__(
        self,
        *,
        model: LoadedPooler,
        adapters: AdapterAdmission | None,
        limits: PoolingLimits,
        clock: Callable[[], float],
    ) -> None:
        self.model = model
        self.adapters = adapters
        self.scheduler = PoolingScheduler(
            limits=limits,
            adapters=adapters,
            clock=clock,
            on_slot_wait=None if adapters is None else adapters.journal.waited_for_slot,
        )
        self._clock = clock
        self.before_forward: Callable[[], None] = lambda: None
        """See `Core`."""
        self._last_step_s = 0.0
        """What the last forward pass took."""
        self._sequences: dict[str, PoolingSequence] = {}
        self._num_arrivals = 0
        self._prompt_tokens = 0

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return self.scheduler.has_unfinished

    def submit(self, request: PoolingRequest) -> None:
        """Queue a request."""
        sequence = PoolingSequence(request, self._num_arrivals)
        self._num_arrivals += 1
        self._sequences[request.request_id] = sequence
        self.scheduler.add(sequence)
        self._prompt_tokens += sequence.num_tokens

    def abort(self, request_id: str) -> list[_Output]:
        """End a request now; what it held is free on return."""
        sequence = self._sequences.pop(request_id, None)
        if sequence is None:
            return []
        self.scheduler.finish(sequence)
        return [RequestFailed(request_id=request_id, error=EngineError("the request was ended"))]

    def abort_all(self) -> list[_Output]:
        """End every request and every claim."""
        self.scheduler.fail_claims(EngineError("the engine ended all requests"))
        return [out for request_id in list(self._sequences) for out in self.abort(request_id)]

    def is_known(self, request_id: str) -> bool:
        """Whether the request is unfinished."""
        return request_id in self._sequences

    def step(self) -> tuple[list[_Output], bool]:
        """Run one step.

        Returns:
            The answers, and whether the step was idle: requests wait, but none could run.
        """
        if self.adapters is not None:
            if self.adapters.is_busy:
                self.before_forward()
            seconds = max(self._last_step_s * _WRITING_SHARE, _MIN_WRITING_S)
            self.adapters.open_step(seconds=seconds)
        outputs: list[_Output] = []
        for sequence, error in self.scheduler.take_failed():
            self._sequences.pop(sequence.request.request_id, None)
            outputs.append(RequestFailed(request_id=sequence.request.request_id, error=error))
        chosen = self.scheduler.schedule()
        if not chosen and self.adapters is not None and self.adapters.is_placing:
            self.adapters.finish_writing()
            chosen = self.scheduler.schedule()
        if chosen:
            self.before_forward()
            start_s = self._clock()
            outputs += self._run(chosen, start_s)
            self._last_step_s = self._clock() - start_s
        return outputs, not chosen

    def rest(self) -> bool:
        """Do what was put off while requests ran: clear the slots of removed adapters, and probe.

        Returns:
            Whether there may be more of it.
        """
        return self.adapters is not None and self.adapters.rest()

    def claim_slot(self, digest: str, action: Callable[[], None]) -> Future[None]:
        """Call `action` once an adapter is in a slot; it waits for one as requests do.

        Returns:
            Ends when the action has been done, or with why it cannot be. Its result comes between
            two steps, so that whoever runs on the engine's thread must not wait for it.
        """
        claim = SlotClaim(digest, action)
        self.scheduler.claims.append(claim)
        return claim.outcome

    def retire(self, digest: str) -> None:
        """Free an adapter that nobody uses."""
        if self.adapters is not None:
            self.adapters.retire(digest)

    def reset_statistics(self) -> None:
        """Forget what warm-up counted."""
        self._prompt_tokens = 0

    def stats(self) -> EngineStats:
        """Numbers of this moment; there is no KV cache, and nothing runs between two steps."""
        scheduler = self.scheduler
        cache = None if self.adapters is None else self.adapters.manager.stats()
        waiting = {digest for s in scheduler.waiting for digest in s.adapter_digests}
        return EngineStats(
            num_running=0,
            num_waiting=len(scheduler.waiting),
            num_waiting_for_slot=scheduler.num_waiting_for_slot,
            num_waiting_for_load=scheduler.num_waiting_for_load,
            kv_blocks_total=0,
            kv_block_size=0,
            kv_blocks_used=0,
            kv_blocks_kept=0,
            prefix_queries=0,
            prefix_hits=0,
            preemptions=0,
            prompt_tokens=self._prompt_tokens,
            generated_tokens=0,
            running_adapters=(),
            waiting_adapters=tuple(sorted(waiting)),
            slots_total=0 if cache is None else cache.num_slots,
            slots_used=0 if cache is None else cache.slots_used,
            cache=cache,
        )

    def usage(self) -> dict[str, AdapterUsage]:
        """How much each adapter is asked for, by digest; absent when it never was."""
        hits = {} if self.adapters is None else self.adapters.hits
        return count_usage(hits, waiting=self.scheduler.waiting)

    def _run(self, sequences: Sequence[PoolingSequence], start_s: float) -> list[_Output]:
        """Compute the texts; on an error each alone, so that it ends one only."""
        try:
            values = self._compute(sequences)
        except Exception as error:  # noqa: BLE001 - whatever a row does, only it may end
            if len(sequences) == 1:
                return [self._fail(sequences[0], error)]
            _log.warning(
                "a step of %d texts failed: running each alone", len(sequences), exc_info=True
            )
            return [output for s in sequences for output in self._run([s], start_s)]
        return [self._answer(s, values[s], start_s) for s in sequences]

    def _answer(self, sequence: PoolingSequence, values: np.ndarray, start_s: float) -> _Output:
        if not np.isfinite(values).all():
            return self._fail(sequence, EngineError("the model's output is not a finite number"))
        request_id = sequence.request.request_id
        self._forget(sequence)
        return PoolingOutput(request_id=request_id, values=values, admitted_s=start_s)

    def _fail(self, sequence: PoolingSequence, error: Exception) -> RequestFailed:
        request_id = sequence.request.request_id
        self._forget(sequence)
        if isinstance(error, NotLinearError):
            error = InvalidRequestError(str(error), param="lora")
        elif not isinstance(error, EngineError):
            extra = log_fields(request_id=sequence.request.exchange_id)
            _log.error("request %s failed", request_id, exc_info=error, extra=extra)
            error = EngineError(f"{type(error).__name__}: {error}")
        return RequestFailed(request_id=request_id, error=error)

    def _forget(self, sequence: PoolingSequence) -> None:
        self._sequences.pop(sequence.request.request_id, None)
        self.scheduler.finish(sequence)

    def _compute(self, sequences: Sequence[PoolingSequence]) -> dict[PoolingSequence, np.ndarray]:
        """Run texts through the model; nothing of them changes."""
        values: dict[PoolingSequence, np.ndarray] = {}
        for batch in build_batches(sequences, self.model):
            if self.adapters is not None:
                self.adapters.manager.set_routing(batch.token_runs, batch.logits_runs)
            hidden = self.model.hidden(batch.inputs)
            parts = torch.split(hidden, [s.num_tokens for s in batch.sequences])
            by_sequence = dict(zip(batch.sequences, parts, strict=True))
            values |= self._embed(by_sequence)
            values |= self._classify(batch, by_sequence)
        return values

    def _embed(
        self, hidden: dict[PoolingSequence, torch.Tensor]
    ) -> dict[PoolingSequence, np.ndarray]:
        """Make the embeddings of those that want one."""
        wanted = [s for s in hidden if not s.wants_logits]
        if not wanted:
            return {}
        rows = torch.stack([self.model.recipe.apply(hidden[s]) for s in wanted]).cpu().numpy()
        return dict(zip(wanted, rows, strict=True))

    def _classify(
        self, batch: PoolingBatch, hidden: dict[PoolingSequence, torch.Tensor]
    ) -> dict[PoolingSequence, np.ndarray]:
        """Run the head over the rows of those that want logits; each gets its own labels."""
        wanted = [s for s in batch.sequences if s.wants_logits]
        if not wanted:
            return {}
        rows = [self.model.head_rows(hidden[s], s.request.token_ids) for s in wanted]
        logits = self.model.logits(torch.cat(rows)).float().cpu().numpy()
        parts = np.split(logits, np.cumsum([row.shape[0] for row in rows])[:-1])
        return {
            s: np.ascontiguousarray(part[:, : self._num_labels(s)])
            for s, part in zip(wanted, parts, strict=True)
        }

    def _num_labels(self, sequence: PoolingSequence) -> int | None:
        """Columns that belong to a text; None takes all there are."""
        if self.adapters is None:
            return None
        return self.adapters.manager.num_labels(sequence.adapter_digests)
