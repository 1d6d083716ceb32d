"""StepComputer: lays a step out, runs the model, and chooses what follows.

Changes nothing of the sequences but the log-probabilities of their prompts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from lora_server.errors import EngineError
from lora_server.model.greedy import find_largest

from .batch import BatchBuilder
from .logprobs import token_logprobs
from .sampler import SampledToken, Sampler, SamplerRow

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch

    from lora_layers import LoraModelManager
    from lora_server.model.greedy import Largest
    from lora_server.model.load import LoadedModel

    from .scheduler import ScheduledChunk
    from .sequence import SequenceState
    from .step_batch import LogitsRows, StepRows


class ComputedStep(NamedTuple):
    """A step whose tokens have been chosen."""

    rows: StepRows
    sampled: Mapping[SequenceState, SampledToken]
    """The next token of each sequence that gets one."""
    token_ids: list[int] | None = None
    """The same of `rows.sampled`, where nothing else is asked for; `sampled` is empty then."""


class StepComputer:
    """Computes steps. Owned by the engine thread."""

    def __init__(
        self,
        model: LoadedModel,
        manager: LoraModelManager | None,
        *,
        block_size: int,
    ) -> None:
        """Start without a step.

        Args:
            model: the model.
            manager: of its adapters; None where they are switched off.
            block_size: tokens of a KV block.
        """
        self._model = model
        self._manager = manager
        self._batches = BatchBuilder(block_size=block_size, device=model.device)
        self._sampler = Sampler()

    def compute(
        self,
        chunks: Sequence[ScheduledChunk],
        riders: tuple[ScheduledChunk, ...],
        collect: Callable[[torch.Tensor, StepRows], StepRows] | None,
        *,
        before_forward: Callable[[], None],
    ) -> ComputedStep:
        """Run the model and choose tokens.

        Args:
            chunks: what the scheduler chose.
            riders: what is computed with them and belongs to no request.
            collect: takes the riders' logits, and returns the rows without them.
            before_forward: called when only the model's forward is left to be run.

        Raises:
            EngineError: the model's output is not finite.
        """
        batch = self._batches.build((*chunks, *riders) if riders else chunks)
        rows = batch.rows
        if self._manager is not None:
            self._manager.set_routing(rows.token_runs, rows.logits_runs)
        before_forward()
        inputs = batch.input_ids, batch.position_ids, batch.attention, rows.logits_idx
        if rows.is_plain:
            return ComputedStep(rows, {}, _finite(self._model.forward_greedy(*inputs)))
        logits = self._model.forward(*inputs)
        if collect is not None:
            rows = collect(logits, rows)
        sampled = self._sample(logits, rows)
        for prompt_rows in rows.logits_rows:
            if prompt_rows.num_prompt_rows:
                _score_prompt(logits, prompt_rows)
        return ComputedStep(rows, sampled)

    def _sample(self, logits: torch.Tensor, rows: StepRows) -> dict[SequenceState, SampledToken]:
        """Choose a token for each sequence whose last token was computed."""
        sequences = rows.sampled
        if not sequences:
            return {}
        if len(sequences) != logits.shape[0]:
            logits = logits[list(rows.sampled_idx)]
        token_ids = _finite(find_largest(logits, self._model.attention.kernels))
        sampled = dict(zip(sequences, map(SampledToken, token_ids), strict=True))
        shaped = [i for i, sequence in enumerate(sequences) if not sequence.is_plain]
        if shaped:
            sampled.update(self._draw(logits, [sequences[i] for i in shaped], shaped))
        return sampled

    def _draw(
        self, logits: torch.Tensor, sequences: Sequence[SequenceState], idx: list[int]
    ) -> dict[SequenceState, SampledToken]:
        """Choose the tokens of those that want more than the largest logit."""
        wanted = logits if len(idx) == logits.shape[0] else logits[idx]
        tokens = self._sampler.sample(wanted, [self._sampler_row(s) for s in sequences])
        return dict(zip(sequences, tokens, strict=True))

    def _sampler_row(self, sequence: SequenceState) -> SamplerRow:
        return SamplerRow(
            sampling=sequence.sampling,
            prompt_token_ids=sequence.request.prompt_token_ids,
            output_token_ids=sequence.output_token_ids(),
            generator=sequence.generator,
            end_token_ids=self._model.end_token_ids,
        )


def _score_prompt(logits: torch.Tensor, rows: LogitsRows) -> None:
    """Add the log-probabilities of the prompt tokens that these rows predict."""
    sequence = rows.sequence
    num_top = sequence.sampling.prompt_logprobs
    assert num_top is not None
    known = len(sequence.prompt_logprobs)
    skipped = max(known - sequence.num_computed, 0)  # scored before a preemption
    first = sequence.num_computed + skipped
    count = rows.num_prompt_rows - skipped
    if count <= 0:
        return
    row = rows.first + skipped
    scored = token_logprobs(
        logits[row : row + count],
        sequence.token_ids[first + 1 : first + 1 + count],
        num_top,
    )
    sequence.prompt_logprobs.extend(scored)


def _finite(largest: Largest) -> list[int]:
    """Return the tokens that were chosen, if the logits are such that one can choose."""
    if not largest.is_finite:
        raise EngineError("the model's output is not a finite number")
    return largest.token_ids
