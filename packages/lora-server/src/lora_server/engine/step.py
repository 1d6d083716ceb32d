"""One step: schedule, compute, emit. The engine without its thread.

A step that fails is tried again one sequence at a time, so that only the sequence at fault ends.
"""

from __future__ import annotations

import logging
import secrets
from typing import TYPE_CHECKING

import torch

from lora_server.errors import EngineError
from lora_server.logs import log_fields

from .claims import SlotClaim
from .compute import StepComputer
from .messages import (
    EngineOutput,
    FinishReason,
    PromptLogprobs,
    RequestFailed,
    SequenceOutput,
    TokenLogprob,
)
from .scheduler import ScheduledChunk, Scheduler, SchedulerLimits
from .sequence import SequenceState
from .stats import EngineStats
from .usage import count_usage

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from concurrent.futures import Future

    from lora_server.model.load import LoadedModel

    from .admission import AdapterAdmission
    from .kv import BlockPool
    from .request import GenerationRequest
    from .sampler import SampledToken
    from .step_batch import StepRows
    from .usage import AdapterUsage

_log = logging.getLogger(__name__)

_WRITING_SHARE = 0.2
"""Part of a step's time that may be spent on writing adapter slots before the next one."""
_MIN_WRITING_S = 0.002


class EngineCore:
    """All state of a running engine. Every method belongs to the engine thread."""

    def __init__(
        self,
        *,
        model: LoadedModel,
        adapters: AdapterAdmission | None,
        limits: SchedulerLimits,
        pool: BlockPool,
        max_model_len: int,
        clock: Callable[[], float],
    ) -> None:
        self.model = model
        self.adapters = adapters
        self.max_model_len = max_model_len
        self.pool = pool
        self.scheduler = Scheduler(
            limits=limits,
            pool=pool,
            adapters=adapters,
            clock=clock,
            on_slot_wait=None if adapters is None else adapters.journal.waited_for_slot,
        )
        self._clock = clock
        self.before_forward: Callable[[], None] = lambda: None
        """See `Core`."""
        self._last_step_s = 0.0
        """What the last forward pass and its sampling took."""
        self._computer = StepComputer(
            model,
            None if adapters is None else adapters.manager,
            block_size=limits.block_size,
        )
        self._requests: dict[str, list[SequenceState]] = {}
        self._prompt_tokens = 0
        self._generated_tokens = 0

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return self.scheduler.has_unfinished

    def submit(self, request: GenerationRequest) -> None:
        """Queue a request."""
        sequences: list[SequenceState] = []
        for index in range(request.n):
            sequence = SequenceState(request, index, _generator(request, index))
            sequence.bound(end_token_ids=self.model.end_token_ids, max_model_len=self.max_model_len)
            sequence.leader = sequences[0] if sequences and self.pool.keeps_prefixes else None
            sequences.append(sequence)
            self.scheduler.add(sequence)
        self._requests[request.request_id] = sequences
        self._prompt_tokens += len(request.prompt_token_ids)

    def abort(self, request_id: str) -> list[EngineOutput]:
        """End a request's unfinished sequences now; what it held is free on return."""
        outputs: list[EngineOutput] = []
        for sequence in self._requests.pop(request_id, []):
            if not sequence.is_finished:
                self.scheduler.finish(sequence)
                outputs.append(
                    SequenceOutput(
                        request_id=request_id,
                        index=sequence.index,
                        token_ids=(),
                        finish_reason=FinishReason.ABORT,
                    )
                )
        return outputs

    def abort_all(self) -> list[EngineOutput]:
        """End every request and every claim."""
        self.scheduler.fail_claims(EngineError("the engine ended all requests"))
        return [output for request_id in list(self._requests) for output in self.abort(request_id)]

    def is_known(self, request_id: str) -> bool:
        """Whether the request has an unfinished sequence."""
        return request_id in self._requests

    def step(self) -> tuple[list[EngineOutput], bool]:
        """Run one step.

        Returns:
            What is new, and whether the step was idle: requests wait, but none could run.
        """
        if self.adapters is not None:
            if self.adapters.is_busy:
                self.before_forward()
            seconds = max(self._last_step_s * _WRITING_SHARE, _MIN_WRITING_S)
            self.adapters.open_step(seconds=seconds)
        outputs: list[EngineOutput] = []
        for sequence, error in self.scheduler.take_failed():
            outputs.extend(self._fail(sequence, error))
        chunks = self.scheduler.schedule()
        if not chunks and self.adapters is not None and self.adapters.is_placing:
            self.adapters.finish_writing()
            chunks = self.scheduler.schedule()
        if chunks:
            start_s = self._clock()
            outputs.extend(self._run_beside_probe(chunks))
            self._last_step_s = self._clock() - start_s
        else:
            self.rest()
        return outputs, not chunks

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
        """Free an adapter that nobody uses, with the KV blocks that only it could use again."""
        if self.adapters is not None:
            self.adapters.retire(digest)
        self.pool.forget_owner(digest)

    def reset_statistics(self) -> None:
        """Forget what warm-up counted and cached."""
        self.pool.forget_all()
        self._prompt_tokens = self._generated_tokens = 0
        self.scheduler.prefix_queries = self.scheduler.prefix_hits = 0

    def stats(self) -> EngineStats:
        """Numbers of this moment."""
        scheduler = self.scheduler
        cache = None if self.adapters is None else self.adapters.manager.stats()
        return EngineStats(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            num_waiting_for_slot=scheduler.num_waiting_for_slot,
            num_waiting_for_load=scheduler.num_waiting_for_load,
            kv_blocks_total=self.pool.num_blocks,
            kv_block_size=scheduler.limits.block_size,
            kv_blocks_used=self.pool.num_used,
            kv_blocks_kept=self.pool.num_findable,
            prefix_queries=scheduler.prefix_queries,
            prefix_hits=scheduler.prefix_hits,
            preemptions=scheduler.num_preemptions,
            prompt_tokens=self._prompt_tokens,
            generated_tokens=self._generated_tokens,
            running_adapters=_digests(scheduler.running),
            waiting_adapters=_digests(scheduler.waiting),
            slots_total=0 if cache is None else cache.num_slots,
            slots_used=0 if cache is None else cache.slots_used,
            cache=cache,
        )

    def usage(self) -> dict[str, AdapterUsage]:
        """How much each adapter is asked for, by digest; absent when it never was."""
        hits = {} if self.adapters is None else self.adapters.hits
        scheduler = self.scheduler
        return count_usage(hits, waiting=scheduler.waiting, running=scheduler.running)

    def _run_beside_probe(self, chunks: Sequence[ScheduledChunk]) -> list[EngineOutput]:
        """Compute the chunks, and a piece of a probe if one is under way; it ends no request."""
        prober = None if self.adapters is None else self.adapters.prober
        riders = () if prober is None else prober.riders(chunks, self.scheduler)
        if prober is None or not riders:
            return self._run(chunks)
        try:
            return self._run_together(chunks, riders, prober.collect)
        except Exception as error:  # noqa: BLE001 - a probe must not end a request
            _log.warning("a step with a probe failed: running it without", exc_info=True)
            outputs = self._run(chunks)
            if not any(isinstance(output, RequestFailed) for output in outputs):
                prober.fail_ride(error)  # the requests alone can be computed
            return outputs

    def _run(self, chunks: Sequence[ScheduledChunk]) -> list[EngineOutput]:
        """Compute the chunks; on an error each alone, so that it ends one sequence only."""
        try:
            return self._run_together(chunks)
        except Exception as error:  # noqa: BLE001 - whatever a row does, only it may end
            if len(chunks) == 1:
                sequence = chunks[0].sequence
                request = sequence.request
                extra = log_fields(request_id=request.exchange_id)
                _log.exception("request %s failed", request.request_id, extra=extra)
                return self._fail(sequence, EngineError(f"{type(error).__name__}: {error}"))
            _log.warning(
                "a step of %d sequences failed: running each alone", len(chunks), exc_info=True
            )
        return [output for chunk in chunks for output in self._run_if_unfinished(chunk)]

    def _run_if_unfinished(self, chunk: ScheduledChunk) -> list[EngineOutput]:
        # An earlier chunk's failure may have ended this request too (its n > 1 siblings).
        return [] if chunk.sequence.is_finished else self._run([chunk])

    def _run_together(
        self,
        chunks: Sequence[ScheduledChunk],
        riders: tuple[ScheduledChunk, ...] = (),
        collect: Callable[[torch.Tensor, StepRows], StepRows] | None = None,
    ) -> list[EngineOutput]:
        """Compute and sample; nothing of the sequences changes before both have succeeded."""
        step = self._computer.compute(chunks, riders, collect, before_forward=self.before_forward)
        if step.token_ids is not None:
            return self._advance_plain(step.rows.sampled, step.token_ids)
        return self._advance(step.rows, step.sampled)

    def _advance(
        self,
        rows: StepRows,
        sampled: Mapping[SequenceState, SampledToken],
    ) -> list[EngineOutput]:
        """Record what was computed and say what is new."""
        outputs: list[EngineOutput] = []
        for sequence, num_tokens in rows.chunks:
            was_prefilling = sequence.num_computed < sequence.num_prompt_tokens
            self._store(sequence, num_tokens)
            if was_prefilling and not sequence.is_prefilling:
                outputs.extend(_prompt_output(sequence))
            token = sampled.get(sequence)
            if token is not None:
                outputs.append(self._append(sequence, *token))
            elif sequence.num_pending == 0:
                outputs.append(self._end(sequence, FinishReason.LENGTH))
        self._generated_tokens += len(sampled)
        return outputs

    def _advance_plain(
        self, sequences: Sequence[SequenceState], token_ids: Sequence[int]
    ) -> list[EngineOutput]:
        """As `_advance` where each sequence decoded, and nothing is asked for but its token."""
        block_size = self.scheduler.limits.block_size
        outputs: list[EngineOutput] = []
        for sequence, token_id in zip(sequences, token_ids, strict=True):
            if (sequence.num_computed + 1) % block_size:
                sequence.num_computed += 1
            else:
                self._store(sequence, 1)
            outputs.append(self._append(sequence, token_id, None))
        self._generated_tokens += len(outputs)
        return outputs

    def _store(self, sequence: SequenceState, num_tokens: int) -> None:
        """Count the tokens as computed and make full blocks findable."""
        block_size = self.scheduler.limits.block_size
        first = sequence.num_computed // block_size
        sequence.num_computed += num_tokens
        if sequence.num_computed // block_size > first and self.pool.keeps_prefixes:
            keys = sequence.keys_of_full_blocks(sequence.num_computed, block_size)
            for i in range(first, len(keys)):
                self.pool.remember(sequence.block_ids[i], keys[i], sequence.adapter_digests)

    def _append(
        self, sequence: SequenceState, token_id: int, logprob: TokenLogprob | None
    ) -> SequenceOutput:
        """Add a sampled token; end the sequence when it, or a limit, says so."""
        sequence.token_ids.append(token_id)
        output = SequenceOutput(
            request_id=sequence.request.request_id,
            index=sequence.index,
            token_ids=(token_id,),
            logprobs=() if logprob is None else (logprob,),
            num_cached_tokens=sequence.num_cached_tokens,
            admitted_s=sequence.admitted_s,
        )
        if token_id in sequence.end_token_ids and sequence.may_stop:
            output.finish_reason = FinishReason.STOP
            output.stop_token_id = token_id
        elif len(sequence.token_ids) >= sequence.max_num_tokens:
            output.finish_reason = FinishReason.LENGTH
        else:
            return output
        self._finish(sequence)
        return output

    def _end(self, sequence: SequenceState, reason: FinishReason) -> SequenceOutput:
        """End a sequence that generates nothing."""
        self._finish(sequence)
        return SequenceOutput(
            request_id=sequence.request.request_id,
            index=sequence.index,
            token_ids=(),
            finish_reason=reason,
        )

    def _fail(self, sequence: SequenceState, error: Exception) -> list[EngineOutput]:
        """End the whole request of a sequence with an error, once."""
        request_id = sequence.request.request_id
        if sequence.block_ids:
            # What it computed may not be finite, and zero times NaN is NaN: attention of the next
            # user of a block multiplies what lies beyond its own tokens by zero.
            self.model.clear_blocks(self.pool.forget(sequence.block_ids))
        if not sequence.is_finished:
            self.scheduler.finish(sequence)
        if request_id not in self._requests:
            return []
        self.abort(request_id)
        return [RequestFailed(request_id=request_id, error=error)]

    def _finish(self, sequence: SequenceState) -> None:
        self.scheduler.finish(sequence)
        request_id = sequence.request.request_id
        if all(s.is_finished for s in self._requests.get(request_id, ())):
            self._requests.pop(request_id, None)


def _generator(request: GenerationRequest, index: int) -> torch.Generator | None:
    """The continuation's own source of randomness; a greedy one needs none."""
    if request.sampling.is_greedy:
        return None
    seed = request.sampling.seed
    generator = torch.Generator()
    generator.manual_seed((secrets.randbits(63) if seed is None else seed + index) % 2**63)
    return generator


def _digests(sequences: Sequence[SequenceState]) -> tuple[str, ...]:
    return tuple(sorted({digest for s in sequences for digest in s.adapter_digests}))


def _prompt_output(sequence: SequenceState) -> list[EngineOutput]:
    """The prompt's log-probabilities, the first time the prompt is complete."""
    if sequence.sampling.prompt_logprobs is None or sequence.index or sequence.num_generated:
        return []
    return [
        PromptLogprobs(
            request_id=sequence.request.request_id, logprobs=tuple(sequence.prompt_logprobs)
        )
    ]
