"""Expert parallel: every rank has one contiguous block of the experts.

Pure functions. Shapes: `X` experts.
"""

from __future__ import annotations

from lora_weights.experts.parts import ExpertPair, ExpertPart


def expert_range(num_experts: int, ep_size: int, ep_rank: int) -> range:
    """Return the experts of one rank: contiguous, and one more on the first ranks where uneven.

    Args:
        num_experts: `X`.
        ep_size: ranks that the experts are spread over.
        ep_rank: which of them.

    Raises:
        ValueError: there is no such rank, or fewer experts than ranks.
    """
    if not 0 <= ep_rank < ep_size:
        raise ValueError(f"ep_rank is {ep_rank}, expected 0 to {ep_size - 1} (ep_size {ep_size})")
    if num_experts < ep_size:
        raise ValueError(f"{num_experts} experts for {ep_size} ranks, expected one each at least")
    size, larger = divmod(num_experts, ep_size)
    start = ep_rank * size + min(ep_rank, larger)
    return range(start, start + size + (ep_rank < larger))


def slice_experts(part: ExpertPart, local: range) -> ExpertPart:
    """Return a block of the experts, as views; factors that all share stay whole.

    Args:
        part: the experts of the whole model.
        local: the block, as `expert_range` returns it.
    """
    return part.map_pairs(lambda _, pair: slice_pair(pair, local))


def slice_pair(pair: ExpertPair, local: range) -> ExpertPair:
    """Return a block of the experts of one pair, as views.

    Raises:
        ValueError: a factor has neither one expert nor enough of them.
    """
    factors = []
    for factor in (pair.lora_a, pair.lora_b):
        if factor.shape[0] == 1:
            factors.append(factor)
            continue
        if local.stop > factor.shape[0]:
            raise ValueError(
                f"experts {local.start} to {local.stop - 1} of a pair that has {factor.shape[0]}"
            )
        factors.append(factor[local.start : local.stop])
    return ExpertPair(lora_a=factors[0], lora_b=factors[1])
