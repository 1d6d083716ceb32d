"""What attention must know about a step: where its tokens go, and what each may look at.

Built once a step by the engine, read by every layer. Knows nothing of adapters or sampling.
`B` sequences, `L` context positions.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


def _window_bias(
    query_pos: torch.Tensor, num_keys: int, window: int | None, dtype: torch.dtype
) -> torch.Tensor:
    """Additive mask `[..., L]`: 0 where key position <= query position (and inside the window)."""
    key_pos = torch.arange(num_keys, device=query_pos.device)
    hidden = key_pos > query_pos.unsqueeze(-1)
    if window is not None:
        hidden |= key_pos <= (query_pos.unsqueeze(-1) - window)
    bias = torch.zeros(hidden.shape, dtype=dtype, device=query_pos.device)
    return bias.masked_fill_(hidden, float("-inf"))


@dataclass(kw_only=True)
class DecodeGroup:
    """Sequences of similar length that bring one token each."""

    rows: torch.Tensor | None
    """`[B]` int64 rows of the step, or None when they are all its rows in order."""
    blocks: torch.Tensor
    """`[B * M]` int64, M blocks a sequence, padded with any valid block."""
    blocks_per_sequence: int
    positions: torch.Tensor
    """`[B]` int64 position of the token, which is also the last one it may look at."""
    _biases: dict[int | None, torch.Tensor] = field(default_factory=dict)

    @property
    def num_sequences(self) -> int:
        """Number of sequences in the group."""
        return int(self.positions.shape[0])

    def bias(self, window: int | None, num_keys: int, dtype: torch.dtype) -> torch.Tensor:
        """Additive mask `[B, 1, 1, L]`; the same tensor for every layer with this window."""
        found = self._biases.get(window)
        if found is None:
            found = _window_bias(self.positions, num_keys, window, dtype)[:, None, None, :]
            self._biases[window] = found
        return found

    def forget_masks(self) -> None:
        """Make masks anew, since the positions have changed."""
        self._biases.clear()


@dataclass(kw_only=True)
class PrefillChunk:
    """Consecutive tokens of one sequence."""

    start: int
    """First row in the step."""
    num_tokens: int
    context: int
    """Tokens of the sequence before this chunk."""
    blocks: torch.Tensor
    """`[M]` int64 blocks that hold the context and the chunk."""
    _biases: dict[int | None, torch.Tensor] = field(default_factory=dict)

    @property
    def num_keys(self) -> int:
        """Tokens the last one may look at, itself included."""
        return self.context + self.num_tokens

    def bias(self, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        """Additive mask `[num_tokens, num_keys]`; the same tensor for every layer."""
        found = self._biases.get(window)
        if found is None:
            device = self.blocks.device
            query_pos = torch.arange(self.context, self.num_keys, device=device)
            found = _window_bias(query_pos, self.num_keys, window, dtype)
            self._biases[window] = found
        return found


@dataclass(kw_only=True)
class AttentionStep:
    """The whole step."""

    token_slots: torch.Tensor
    """`[T]` int64 place of each token in the flat store."""
    decode: tuple[DecodeGroup, ...]
    prefill: tuple[PrefillChunk, ...]
