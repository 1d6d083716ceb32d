"""Checks of one adapter by itself: shapes and ranks against its configuration, numbers, effect.

Shapes: `r` rank, `I` in, `O` out. Knows no base model; `validate` compares with one.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from lora_weights.errors import Problem, ProblemCode
from lora_weights.fields import CONFIG_FILE
from lora_weights.inventory import FLOAT_DTYPES

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from lora_weights.config import AdapterConfig
    from lora_weights.inventory import Inventory, PairEntries
    from lora_weights.modules import LoraPair
    from lora_weights.scaling import ModuleScaling
    from lora_weights.tensor_format import TensorEntry
    from lora_weights.tensors import TensorFile


def check_pair(pair: PairEntries, rank: int) -> list[Problem]:
    """Return what is wrong with the shapes and types of a pair.

    Args:
        pair: A and B as stored.
        rank: the rank that the configuration gives the module.
    """
    names = _part_names(pair)
    problems = []
    entries = (pair.lora_a, pair.lora_b)
    for name, entry, axis in zip(names, entries, (0, 1), strict=True):
        if entry.dtype not in FLOAT_DTYPES:
            expected = "F32, F16, BF16 or F64"
            problems.append(_problem("UNSUPPORTED_DTYPE", pair, name, entry.dtype, expected))
        if not _fits(entry.shape, axis, rank):
            form = f"[{rank}, I]" if axis == 0 else f"[O, {rank}]"
            expected = f"{form} (rank {rank} by {CONFIG_FILE})"
            found = str(list(entry.shape))
            problems.append(_problem("SHAPE_MISMATCH", pair, name, found, expected))
    return problems


def _fits(shape: Sequence[int], axis: int, rank: int) -> bool:
    return len(shape) == 2 and shape[axis] == rank and shape[1 - axis] > 0  # noqa: PLR2004


def _part_names(pair: PairEntries) -> tuple[str, str]:
    return ("lora_embedding_A", "lora_embedding_B") if pair.is_embedding else ("lora_A", "lora_B")


def _problem(code: str, pair: PairEntries, tensor: str, found: str, expected: str) -> Problem:
    return Problem(
        code=ProblemCode[code],
        module=pair.module,
        tensor=tensor,
        found=found,
        expected=expected,
    )


def check_max_rank(
    config: AdapterConfig, pairs: Iterable[PairEntries], max_rank: int
) -> list[Problem]:
    """Return a problem for each place where a rank is above the limit, with both numbers.

    Args:
        config: `r` and the rank patterns count, whether or not a module uses them.
        pairs: stored ranks count too.
        max_rank: the limit.
    """
    ranks = {(f"{CONFIG_FILE} r", ""): config.r}
    for pattern, rank in config.rank_pattern.items():
        ranks[f"{CONFIG_FILE} rank_pattern[{pattern!r}]", ""] = rank
    declared = set(ranks.values())
    for pair in pairs:
        rank = pair.lora_a.shape[0] if pair.lora_a.shape else 0
        if rank not in declared:
            ranks[_part_names(pair)[0], pair.module] = rank
    return [
        Problem(
            code=ProblemCode.RANK_TOO_LARGE,
            module=module,
            tensor=tensor,
            found=f"rank {rank}",
            expected=f"at most {max_rank}",
        )
        for (tensor, module), rank in ranks.items()
        if rank > max_rank
    ]


def check_finite(file: TensorFile) -> tuple[float, list[Problem]]:
    """Look for NaN and infinity in the whole file.

    Returns:
        An upper bound of the absolute values, and a problem for each tensor that has any.
    """
    largest, problems = 0.0, []
    for flat, entries in file.runs():
        if not flat.is_floating_point() or flat.dtype.itemsize == 1 or not flat.numel():
            continue
        bound = _bound(flat)
        if math.isfinite(bound):
            largest = max(largest, bound)
        else:
            problems += _not_finite(file, entries)
    return largest, problems


def _bound(flat: torch.Tensor) -> float:
    """Return at least the largest absolute value; not finite when any value is not."""
    if flat.dtype == torch.float32:
        # The norm takes a fifth of the time of a search; squares of huge values overflow in it.
        norm = float(torch.linalg.vector_norm(flat))
        if math.isfinite(norm):
            return norm
    low, high = (bound.item() for bound in torch.aminmax(flat))
    return max(abs(low), abs(high)) if math.isfinite(low + high) else math.inf


def _not_finite(file: TensorFile, entries: Iterable[TensorEntry]) -> list[Problem]:
    problems = []
    for entry in entries:
        tensor = file.tensor(entry)
        count = tensor.numel() - int(torch.isfinite(tensor).sum())
        if count:
            found = f"NaN or infinite in {count} of {tensor.numel()} values"
            problems.append(
                Problem(
                    code=ProblemCode.NOT_FINITE,
                    tensor=entry.key,
                    found=found,
                    expected="finite numbers",
                )
            )
    return problems


def check_overflow(pairs: Mapping[str, LoraPair]) -> list[Problem]:
    """Return a problem for each pair whose values left the range of its type.

    Args:
        pairs: module path -> pair after scaling and cast.
    """
    problems = []
    for module, pair in pairs.items():
        for name, tensor in (("lora_A", pair.lora_a), ("lora_B", pair.lora_b)):
            if not torch.isfinite(tensor).all():
                limit = torch.finfo(tensor.dtype).max
                problems.append(
                    Problem(
                        code=ProblemCode.NOT_FINITE,
                        module=module,
                        tensor=name,
                        found=f"outside the range of {tensor.dtype} once it is scaled",
                        expected=f"values up to {limit:g}",
                    )
                )
    return problems


def check_effect(
    file: TensorFile, inventory: Inventory, scalings: Mapping[str, ModuleScaling]
) -> list[Problem]:
    """Return a problem when an adapter would change nothing.

    Args:
        file: the numbers.
        inventory: what the file holds; tensors other than pairs may have an effect of their own.
        scalings: module path -> scaling.
    """
    if inventory.has_more or (inventory.problems and not inventory.pairs):
        return []
    if not inventory.pairs:
        return [no_effect("without a single LoRA tensor")]
    for pair in inventory.pairs:
        if scalings[pair.module].scaling and _is_set(file, pair.lora_b, pair.lora_a):
            return []
    return [no_effect("zero in A, B or scaling of every module")]


def _is_set(file: TensorFile, *entries: TensorEntry) -> bool:
    """Return whether no tensor is all zero; types that are refused anyway count as set."""
    return all(e.dtype not in FLOAT_DTYPES or bool(file.tensor(e).any()) for e in entries)


def no_effect(found: str) -> Problem:
    """Return the problem of an adapter that would change nothing."""
    return Problem(
        code=ProblemCode.NO_EFFECT,
        found=found,
        expected="at least one pair whose A and B are not all zero; it would change nothing",
    )


def check_tied(config: AdapterConfig, pairs: Mapping[str, LoraPair]) -> list[Problem]:
    """Return a problem when the head's half of a tied adapter is not in the file.

    With ``ensure_weight_tying`` PEFT gives the tied head the embedding's factors transposed, and
    stores both. Serving the embedding's alone would be another adapter.
    """
    if not config.ensure_weight_tying:
        return []
    heads = [pair for pair in pairs.values() if not pair.is_embedding]
    return [
        Problem(
            code=ProblemCode.INCOMPLETE_PAIR,
            module=module,
            tensor="lora_embedding_A",
            found="tied to a head (ensure_weight_tying) whose pair is not in the file",
            expected="the head's lora_A and lora_B as well",
        )
        for module, pair in pairs.items()
        if pair.is_embedding and not any(_is_tied_head(pair, head) for head in heads)
    ]


def _is_tied_head(embedding: LoraPair, head: LoraPair) -> bool:
    """Return whether a head's shapes are those of the transposed embedding pair."""
    return (
        head.lora_a.shape == embedding.lora_b.T.shape
        and head.lora_b.shape == embedding.lora_a.T.shape
    )
