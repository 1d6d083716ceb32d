"""What a step is made of: whose rows it has, and the tensors that a forward pass needs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Collection

    import torch

    from lora_layers import RowRun
    from lora_server.model.attention_step import AttentionStep

    from .scheduler import ScheduledChunk
    from .sequence import SequenceState


class LogitsRows(NamedTuple):
    """The rows of one sequence that reach the logits."""

    sequence: SequenceState
    first: int
    """Its first row among the step's logits."""
    num_prompt_rows: int
    """Leading rows, each of which scores the prompt token after it."""
    is_sampled: bool
    """Whether one more row follows, which chooses the next token."""

    @property
    def num_rows(self) -> int:
        """All its rows."""
        return self.num_prompt_rows + int(self.is_sampled)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRows:
    """Whose rows a step has; does not depend on how far the sequences have come."""

    chunks: tuple[ScheduledChunk, ...]
    token_runs: tuple[RowRun, ...]
    """Adapters of the token rows."""
    logits_runs: tuple[RowRun, ...]
    """Adapters of the rows that reach the logits."""
    logits_idx: torch.Tensor
    """`[S]` int64 token rows that reach the logits."""
    logits_rows: tuple[LogitsRows, ...]
    sampled: tuple[SequenceState, ...]
    """Those that get a token."""
    sampled_idx: tuple[int, ...]
    """Row of the logits that each of `sampled` gets it from."""
    is_decode: bool
    """Whether each sequence brings one token, from which its next one is sampled."""
    is_plain: bool
    """Whether, besides, nothing is asked of any of them but the largest of its raw logits."""

    def without(self, sequences: Collection[SequenceState]) -> StepRows:
        """Return whose logits the other rows are; their places among the logits stay."""
        return replace(
            self,
            chunks=tuple(chunk for chunk in self.chunks if chunk.sequence not in sequences),
            logits_rows=tuple(rows for rows in self.logits_rows if rows.sequence not in sequences),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBatch:
    """Everything a forward pass needs, in row order."""

    rows: StepRows
    input_ids: torch.Tensor
    """`[1, T]` int64."""
    position_ids: torch.Tensor
    """`[1, T]` int64."""
    attention: AttentionStep
