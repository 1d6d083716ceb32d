"""How much memory the parts of the service take, and what is left for keys and values.

Numbers only; knows nothing of models or tensors.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from lora_server.errors import StartupError


@dataclass(frozen=True, slots=True, kw_only=True)
class KvBudget:
    """How the KV cache is cut."""

    num_blocks: int
    block_size: int
    max_model_len: int
    """Tokens of prompt and answer together; never more than the cache holds."""

    @property
    def num_tokens(self) -> int:
        """Tokens the cache holds."""
        return self.num_blocks * self.block_size


def free_host_bytes() -> int:
    """Bytes of host memory that nobody uses now."""
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def plan_kv(
    *,
    token_bytes: int,
    block_size: int,
    context_length: int,
    max_model_len: int | None,
    max_num_seqs: int,
    memory_bytes: int | None,
    default_bytes: int,
) -> KvBudget:
    """Choose the number of blocks.

    Args:
        token_bytes: keys and values of one token over all layers.
        block_size: tokens a block.
        context_length: positions the model was made for.
        max_model_len: the operator's limit, or None for the model's (or what fits, if less).
        max_num_seqs: sequences that run at once; more than they can use is never taken.
        memory_bytes: the operator's choice, or None.
        default_bytes: what may be taken when it is None.

    Raises:
        StartupError: the limit is above the model's, or the cache does not hold one sequence.
    """
    if max_model_len is not None and max_model_len > context_length:
        raise StartupError(
            [f"--max-model-len is {max_model_len}, the model was made for {context_length}"]
        )
    block_bytes = token_bytes * block_size
    wanted_len = max_model_len or context_length
    most_blocks = -(-wanted_len // block_size) * max_num_seqs
    if memory_bytes is None:
        num_blocks = min(max(default_bytes // block_bytes, 1), most_blocks)
    else:
        num_blocks = memory_bytes // block_bytes
    held = num_blocks * block_size
    if num_blocks < 1 or (max_model_len is not None and held < max_model_len):
        problem = (
            f"the KV cache holds {held} tokens, --max-model-len asks for {wanted_len}: a token"
            f" takes {token_bytes} bytes; raise --kv-cache-memory or lower --max-model-len"
        )
        raise StartupError([problem])
    return KvBudget(
        num_blocks=num_blocks, block_size=block_size, max_model_len=min(wanted_len, held)
    )
