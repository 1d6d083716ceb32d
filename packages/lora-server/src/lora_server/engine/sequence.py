"""One continuation of a request while the engine works on it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .prefix import BlockKey, child_key, root_key

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from lora_cache import Lease

    from .messages import TokenLogprob
    from .request import AdapterUse, GenerationRequest, SamplingParams


class SequenceState:
    """Tokens, KV blocks and the lease of one continuation. Owned by the engine thread."""

    __slots__ = (
        "adapter_digests",
        "admitted_s",
        "arrival",
        "block_ids",
        "block_keys",
        "blocked_since_s",
        "generator",
        "index",
        "is_finished",
        "last_step",
        "leader",
        "lease",
        "num_cached_tokens",
        "num_computed",
        "num_generated_before",
        "prompt_logprobs",
        "request",
        "runnable_since_s",
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
        self.block_ids: list[int] = []
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
        self.adapter_digests = frozenset(use.digest for use in request.adapters)

    def __repr__(self) -> str:
        return (
            f"Sequence({self.request.request_id}#{self.index}, tokens={self.num_tokens},"
            f" computed={self.num_computed})"
        )

    @property
    def sampling(self) -> SamplingParams:
        """The request's sampling parameters."""
        return self.request.sampling

    @property
    def adapters(self) -> tuple[AdapterUse, ...]:
        """The request's weighted set."""
        return self.request.adapters

    @property
    def num_tokens(self) -> int:
        """Prompt and generated tokens."""
        return len(self.token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        """Prompt tokens."""
        return len(self.request.prompt_token_ids)

    @property
    def num_generated(self) -> int:
        """Generated tokens."""
        return self.num_tokens - self.num_prompt_tokens

    @property
    def num_pending(self) -> int:
        """Tokens still to be computed before the next one can be sampled; 1 while decoding."""
        return self.num_tokens - self.num_computed

    @property
    def is_prefilling(self) -> bool:
        """Whether its prompt is not fully computed yet."""
        return self.num_computed < self.num_prompt_tokens

    @property
    def needs_prompt_rows(self) -> bool:
        """Whether prompt rows must still reach the logits, which cached blocks would skip."""
        wanted = self.sampling.prompt_logprobs is not None and self.index == 0
        return wanted and len(self.prompt_logprobs) < self.num_prompt_tokens - 1

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
