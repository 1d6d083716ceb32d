"""A transformers model, run for its hidden states, and the head that reads some of them.

The body is called on one packed `[1, T]` row where its attention can be ours, else on a padded
batch; the head then sees the rows it would have picked itself, as many sequences of one token. Both
are transformers' own code. Knows nothing of adapters or requests. `T` tokens, `B` sequences, `S`
the longest of them, `N` rows of the head, `H` hidden width, `W` labels.
"""

from __future__ import annotations

import copy
import inspect
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutputWithPoolingAndCrossAttentions

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

    from .embedding_recipe import EmbeddingRecipe
    from .labels import LabelNotes, LabelSet
    from .pooling_attention import PackedAttention, PackedStep


class HeadRows(StrEnum):
    """Which hidden states of a sequence its head reads."""

    FIRST = "first"
    LAST = "last"
    """The last token that is not padding."""
    MEAN = "mean"
    ALL = "all"
    """Every token: token classification."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadInfo:
    """The classification head of the base."""

    rows: HeadRows
    labels: LabelSet
    """The base's own labels."""
    notes: LabelNotes
    """What the base's configuration says of labels, for adapters that say nothing."""
    is_trained: bool
    """Whether the checkpoint holds it; otherwise adapters must bring theirs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedInputs:
    """Sequences one after the other in a single row."""

    input_ids: torch.Tensor
    """`[1, T]` int64."""
    positions: torch.Tensor
    """`[1, T]` int64, from 0 for each sequence."""
    type_ids: torch.Tensor
    """`[1, T]` int64: 1 for the second text of a pair, where the model tells texts apart."""
    step: PackedStep
    """Which rows belong together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddedInputs:
    """Sequences below each other, padded at their ends."""

    input_ids: torch.Tensor
    """`[B, S]` int64."""
    type_ids: torch.Tensor
    """`[B, S]` int64, as in `PackedInputs`."""
    mask: torch.Tensor
    """`[B, S]` bool: a token, not padding."""


PoolingInputs = PackedInputs | PaddedInputs
"""What one call of the body reads; the model says which form it takes."""


@dataclass(kw_only=True)
class LoadedPooler:
    """A model without generation, its tokenizer, and what the engine must know of both."""

    module: nn.Module
    """The whole model, whose parts are wrapped."""
    tokenizer: PreTrainedTokenizerBase
    text_config: PreTrainedConfig
    attention: PackedAttention | None
    """None for a model whose attention is its own, which takes padded batches."""
    recipe: EmbeddingRecipe
    head: HeadInfo | None
    """None for a model without a head."""
    dtype: torch.dtype
    device: torch.device
    vocab_size: int
    hidden_size: int
    """`H`, also the length of an embedding."""
    num_positions: int
    """Tokens the model has positions for."""
    max_length: int
    """Longest sequence it was trained with, where its files say so; else `num_positions`."""
    position_offset: int
    """Position of a sequence's first token (RoBERTa counts from its padding id on)."""
    has_types: bool
    """Whether the model tells the first and the second text of a pair apart."""
    pad_token_id: int | None
    """Token that a decoder's head passes over at the end of a sequence, and that pads a batch."""

    @property
    def body(self) -> nn.Module:
        """The part that gives hidden states; the module itself where there is no head."""
        return body_of(self.module)

    @property
    def head_paths(self) -> frozenset[str]:
        """Paths of the modules that see the rows of the head, not those of the tokens."""
        return head_paths(self.module)

    @property
    def has_head_rows(self) -> bool:
        """Whether some modules see the rows of a head; true of every model of this kind."""
        return True

    @property
    def is_per_token(self) -> bool:
        """Whether its head reads every token."""
        return self.head is not None and self.head.rows is HeadRows.ALL

    @property
    def is_packed(self) -> bool:
        """Whether the body takes `PackedInputs`."""
        return self.attention is not None

    def hidden(self, inputs: PoolingInputs) -> torch.Tensor:
        """Run the body and return the hidden states of all tokens, `[T, H]`, without padding."""
        body = self.body
        extra: dict[str, Any] = {}
        if self.has_types:
            extra["token_type_ids"] = inputs.type_ids
        if "use_cache" in inspect.signature(body.forward).parameters:
            extra["use_cache"] = False
        if isinstance(inputs, PackedInputs):
            assert self.attention is not None, "packed inputs are for packed attention"
            self.attention.step = inputs.step
            extra["position_ids"] = inputs.positions + self.position_offset
        else:
            extra["attention_mask"] = inputs.mask.to(torch.int64)
        with _without_pooler(body):
            hidden: torch.Tensor = body(input_ids=inputs.input_ids, **extra).last_hidden_state
        return hidden[0] if isinstance(inputs, PackedInputs) else hidden[inputs.mask]

    def head_rows(self, hidden: torch.Tensor, token_ids: Sequence[int]) -> torch.Tensor:
        """Return the rows `[N, H]` of one sequence that the head reads, of its `hidden [S, H]`."""
        assert self.head is not None, "asked of models with a head only"
        match self.head.rows:
            case HeadRows.FIRST:
                return hidden[:1]
            case HeadRows.MEAN:
                return hidden.mean(dim=0, keepdim=True)
            case HeadRows.LAST:
                last = _last_token(token_ids, self.pad_token_id)
                return hidden[last : last + 1]
            case HeadRows.ALL:
                return hidden

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        """Run the head over rows `[N, H]` and return `[N, W]`."""
        return run_head(self.module, rows)


def body_of(module: nn.Module) -> nn.Module:
    """Return the part of a transformers model below its head; the model itself without one."""
    body = getattr(module, str(getattr(module, "base_model_prefix", "")), module)
    assert isinstance(body, nn.Module)
    return body


def head_paths(module: nn.Module) -> frozenset[str]:
    """Return the paths of all modules outside the body, and of the pooler inside it."""
    body = body_of(module)
    prefix = "" if body is module else f"{module.base_model_prefix}."
    pooler = f"{prefix}pooler"
    return frozenset(
        path
        for path, _ in module.named_modules()
        if path
        and (path == pooler or path.startswith(f"{pooler}.") or not f"{path}.".startswith(prefix))
    )


def run_head(module: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    """Run a model's own head over rows `[N, H]` of hidden states and return `[N, W]`.

    The model is called on `N` sequences of one token, with a body that answers with the rows.
    """
    twin = copy.copy(module)
    children = dict(module._modules)  # noqa: SLF001 - a twin with another body and the same rest
    children[str(module.base_model_prefix)] = _GivenRows(rows, body_of(module))
    object.__setattr__(twin, "_modules", children)
    ids = torch.zeros((rows.shape[0], 1), dtype=torch.int64, device=rows.device)
    logits: torch.Tensor = twin(input_ids=ids).logits
    return logits.flatten(0, -2)


class _GivenRows(nn.Module):
    """Stands where a body would be and answers with rows that were computed before."""

    def __init__(self, rows: torch.Tensor, body: nn.Module) -> None:
        super().__init__()
        self._rows = rows.unsqueeze(1)  # [N, H] -> [N, 1, H]
        self._pooler: nn.Module | None = getattr(body, "pooler", None)

    def forward(self, *_args: Any, **_kwargs: Any) -> Any:
        pooler = self._pooler
        return BaseModelOutputWithPoolingAndCrossAttentions(
            last_hidden_state=self._rows,
            pooler_output=None if pooler is None else pooler(self._rows),
        )


@contextmanager
def _without_pooler(body: nn.Module) -> Iterator[None]:
    """Keep a body from running its pooler, which belongs to the head and sees other rows."""
    pooler = getattr(body, "pooler", None)
    if pooler is None:
        yield
        return
    body.pooler = None  # type: ignore[assignment]  # transformers' own spelling of "no pooler"
    try:
        yield
    finally:
        body.pooler = pooler


def _last_token(token_ids: Sequence[int], pad_token_id: int | None) -> int:
    """Return the index of the last token that is not padding; 0 when all are, as transformers."""
    if pad_token_id is None:
        return len(token_ids) - 1
    return max((i for i, token in enumerate(token_ids) if token != pad_token_id), default=0)
