"""One continuation of a request while the engine works on it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .kv_layout import int64_array
from .prefix import BlockKey, child_key, root_key

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from lora_cache import Lease

    from .messages import TokenLogprob
    from .request import GenerationRequest


class SequenceState:
    """Tokens, KV blocks and the lease of one continuation. Owned by the engine thread."""

    __slots__ = (
        "adapter_digests",
        "adapter_order",
        "adapters",
        "admitted_s",
        "arrival",
        "block_ids",
        "block_keys",
        "blocked_since_s",
        "end_token_ids",
        "generator",
        "index",
        "is_finished",
        "is_plain",
        "last_step",
        "leader",
        "lease",
        "max_num_tokens",
        "num_cached_tokens",
        "num_computed",
        "num_generated_before",
        "num_prompt_tokens",
        "prompt_logprobs",
        "request",
        "runnable_since_s",
        "sampling",
        "token_ids",
    )

    def __init__(
        self, request: GenerationRequest, index: int, generator: torch.Generator | None
    ) -> None:
        self.request = request
        self.index = index
        self.generator = generator
        self.token_ids: list[int] = list(request.prompt_token_ids)
        self.num_computed = 0
        """Tokens whose keys and values are stored."""
        self.block_ids = int64_array()
        """KV blocks, in the order of the tokens."""
        self.block_keys: list[BlockKey] = []
        """Keys of the full blocks of `token_ids`, as far as they were needed."""
        self.lease: Lease[str] | None = None
        self.leader: SequenceState | None = None
        """The sequence of the same request whose prompt blocks this one waits to share."""
        self.is_finished = False
        self.arrival = 0
        """Position in the order of arrival."""
        self.admitted_s = 0.0
        """When it last began to run."""
        self.num_generated_before = 0
        """Tokens it had generated when it last began to run."""
        self.last_step = -1
        """Number of the engine step that last computed tokens of it."""
        self.num_cached_tokens = 0
        self.prompt_logprobs: list[TokenLogprob] = []
        self.runnable_since_s: float | None = None
        """When its adapters were first in the host tier while it waited; None before."""
        self.blocked_since_s: float | None = None
        """When it was first found to lack nothing but slots, or the copy into one; None before."""
        # Read for every token: plain attributes, made once.
        self.sampling = request.sampling
        """The request's sampling parameters."""
        self.adapters = request.adapters
        """The request's weighted set."""
        self.adapter_digests = frozenset(use.digest for use in request.adapters)
        self.adapter_order = tuple((use.digest, use.scale) for use in request.adapters)
        """Sorts a step's rows, and names their runs."""
        self.num_prompt_tokens = len(request.prompt_token_ids)
        """Prompt tokens."""
        self.max_num_tokens = self.num_prompt_tokens + self.sampling.max_tokens
        """It ends when it has so many tokens; see `bound`."""
        self.end_token_ids = self.sampling.stop_token_ids
        """Tokens that end it once it has generated `min_tokens`; see `bound`."""
        self.is_plain = self.sampling.is_plain
        """Whether its next token is the largest of the raw logits, and nothing else is asked."""

    def __repr__(self) -> str:
        return (
            f"Sequence({self.request.request_id}#{self.index}, tokens={self.num_tokens},"
            f" computed={self.num_computed})"
        )

    def bound(self, *, end_token_ids: frozenset[int], max_model_len: int) -> None:
        """Let the model's end tokens and its longest sequence end it as well."""
        self.max_num_tokens = min(self.max_num_tokens, max_model_len)
        if not self.sampling.ignore_eos:
            self.end_token_ids |= end_token_ids

    @property
    def num_tokens(self) -> int:
        """Prompt and generated tokens."""
        return len(self.token_ids)

    @property
    def num_generated(self) -> int:
        """Generated tokens."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_pending(self) -> int:
        """Tokens still to be computed before the next one can be sampled; 1 while decoding."""
        return len(self.token_ids) - self.num_computed

    @property
    def is_prefilling(self) -> bool:
        """Whether its prompt is not fully computed yet."""
        return self.num_computed < self.num_prompt_tokens

    @property
    def may_stop(self) -> bool:
        """Whether its last token may be the one that ends it."""
        return self.num_generated >= self.sampling.min_tokens

    @property
    def needs_prompt_rows(self) -> bool:
        """Whether prompt rows must still reach the logits, which cached blocks would skip."""
        if self.sampling.prompt_logprobs is None:
            return False
        return self.index == 0 and len(self.prompt_logprobs) < self.num_prompt_tokens - 1

    def output_token_ids(self) -> list[int]:
        """Generated tokens."""
        return self.token_ids[self.num_prompt_tokens :]

    def keys_of_full_blocks(self, num_tokens: int, block_size: int) -> Sequence[BlockKey]:
        """Keys of the blocks that the first `num_tokens` tokens fill."""
        wanted = num_tokens // block_size
        while len(self.block_keys) < wanted:
            start = len(self.block_keys) * block_size
            parent = self.block_keys[-1] if self.block_keys else root_key(self.adapters)
            self.block_keys.append(child_key(parent, self.token_ids[start : start + block_size]))
        return self.block_keys[:wanted]
