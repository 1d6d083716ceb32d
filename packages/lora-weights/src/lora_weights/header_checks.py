"""Checks of a file's header against the configuration: types, shapes, ranks. Reads no numbers.

Shapes: `r` rank, `I` in, `O` out, `V` vocabulary, `D` embedding width. Knows no base model;
`validate` compares with one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lora_weights.errors import Problem, ProblemCode
from lora_weights.fields import CONFIG_FILE
from lora_weights.inventory import FLOAT_DTYPES, STACKED_AXES
from lora_weights.methods import ia3, loha, lokr, vera
from lora_weights.methods.build import exact_rank
from lora_weights.names import Part
from lora_weights.placement import (
    EMBEDDING_NAMES,
    LINEAR_PAIR,
    LOHA_PARTS,
    LOKR_PARTS,
    METHOD_PARTS,
    VERA_PARTS,
    is_listed,
)
from lora_weights.target_parameters import check_parameter
from lora_weights.token_rows import check_rows

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from lora_weights.config import AdapterConfig
    from lora_weights.inventory import Inventory, ModuleEntries, PairEntries
    from lora_weights.scaling import ModuleScaling
    from lora_weights.tensor_format import TensorEntry

_NAMES = {Part.LORA_A: "lora_A", Part.LORA_B: "lora_B"}


def check_header(
    inventory: Inventory,
    config: AdapterConfig,
    scalings: Mapping[str, ModuleScaling],
    token_ids: Mapping[str, tuple[int, ...]],
) -> Iterator[Problem]:
    """Yield what is wrong with types and shapes.

    Args:
        inventory: what the file holds.
        config: the adapter's configuration.
        scalings: module path -> rank and scaling.
        token_ids: path of a module, as the file spells it -> tokens of its rows.
    """
    for pair in inventory.pairs:
        rank = scalings[pair.module].rank
        yield from check_pair(pair, rank)
        if config.target_parameters:
            yield from check_parameter(pair, rank, config)
    for path, pairs in inventory.experts.items():
        for pair in pairs.values():
            yield from _check_stacked(path, pair)
    if config.peft_type == "VERA":
        yield from vera.check_shared(inventory.shared, config)
    for entries in inventory.modules:
        rank = scalings[entries.module].rank
        yield from _check_types(entries.module, entries.parts)
        if len(entries.parts) == len(LINEAR_PAIR) and entries.parts.keys() >= LINEAR_PAIR:
            continue  # A and B alone, as in nearly every file
        yield from _check_vectors(entries)
        yield from _check_full(entries)
        yield from _check_method(entries, config, inventory.shared, rank)
        rows = entries.parts.get(Part.TOKEN_ROWS)
        if rows is not None and entries.stored_as in token_ids:
            yield from check_rows(entries.module, rows, token_ids[entries.stored_as])
    for module, copies in inventory.base_copies.items():
        yield from _check_types(module, copies)
    yield from _check_types("", inventory.shared)
    yield from _check_own(inventory, config)


def check_pair(pair: PairEntries, rank: int) -> list[Problem]:
    """Return what is wrong with the shapes of a pair.

    Args:
        pair: A and B as stored.
        rank: the rank that the configuration gives the module.
    """
    names = _part_names(pair)
    problems = []
    entries = (pair.lora_a, pair.lora_b)
    for name, entry, axis in zip(names, entries, (0, 1), strict=True):
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
    inventory: Inventory,
    config: AdapterConfig,
    scalings: Mapping[str, ModuleScaling],
    max_rank: int,
) -> list[Problem]:
    """Return a problem for each place where a rank is above the limit, with both numbers.

    Args:
        inventory: stored ranks count, and the ranks that other methods' factors make.
        config: `r` and the rank patterns of a LoRA count, whether or not a module uses them.
        scalings: module path -> rank and scaling.
        max_rank: the limit.
    """
    if config.peft_type != "LORA":
        return list(_check_exact_ranks(inventory, config, scalings, max_rank))
    ranks = {(f"{CONFIG_FILE} r", ""): config.r}
    for pattern, rank in config.rank_pattern.items():
        ranks[f"{CONFIG_FILE} rank_pattern[{pattern!r}]", ""] = rank
    declared = set(ranks.values())
    for pair in inventory.pairs:
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


def _check_exact_ranks(
    inventory: Inventory,
    config: AdapterConfig,
    scalings: Mapping[str, ModuleScaling],
    max_rank: int,
) -> Iterator[Problem]:
    """Yield modules whose factors make a pair that is too wide."""
    own = METHOD_PARTS[config.peft_type]
    for entries in inventory.modules:
        parts = {part: entry for part, entry in entries.parts.items() if part in own}
        if not parts or Part.IA3_GAIN in parts:
            continue
        rank = scalings[entries.module].rank
        exact = exact_rank(config.peft_type, parts, inventory.shared, rank=rank)
        if exact > max_rank:
            yield Problem(
                code=ProblemCode.RANK_TOO_LARGE,
                module=entries.module,
                tensor=f"the {config.peft_type} update",
                found=f"of rank {exact} as an exact pair (r {rank})",
                expected=f"at most {max_rank}",
            )


def _check_stacked(path: str, pair: PairEntries) -> Iterator[Problem]:
    """Yield what is wrong with a pair over all experts, as far as it can be told without them."""
    shape_a, shape_b = pair.lora_a.shape, pair.lora_b.shape
    if pair.lora_a.dtype not in FLOAT_DTYPES or pair.lora_b.dtype not in FLOAT_DTYPES:
        yield from _check_types(path, {Part.LORA_A: pair.lora_a, Part.LORA_B: pair.lora_b})
    elif not all(shape_a) or not all(shape_b) or len(shape_a) not in (2, STACKED_AXES):
        found, expected = f"{list(shape_a)} with {list(shape_b)}", "matrices, or stacks of them"
        yield _mismatch(pair.module, Part.LORA_A, found, expected)
    elif len(shape_b) != len(shape_a) or shape_a[-2] != shape_b[-1]:
        found = str(list(shape_b))
        expected = f"as many columns as lora_A has rows ({shape_a[-2]})"
        yield _mismatch(pair.module, Part.LORA_B, found, expected)


def _check_types(module: str, parts: Mapping[Part, TensorEntry]) -> Iterator[Problem]:
    for part, entry in parts.items():
        if entry.dtype not in FLOAT_DTYPES:
            yield Problem(
                code=ProblemCode.UNSUPPORTED_DTYPE,
                module=module,
                tensor=_NAMES.get(part, part),
                found=entry.dtype,
                expected="F32, F16, BF16 or F64",
            )


def _check_vectors(entries: ModuleEntries) -> Iterator[Problem]:
    """Yield vectors that are none, or not as long as lora_B is high."""
    high = entries.parts.get(Part.LORA_B) or entries.parts.get(Part.EMBEDDING_B)
    size = high.shape[0] if high is not None and high.shape else None
    for part in (Part.MAGNITUDE, Part.LORA_BIAS, Part.BASE_BIAS):
        entry = entries.parts.get(part)
        if entry is None:
            continue
        wanted = "[O]" if size is None else f"[{size}], one for each row of lora_B"
        if (
            len(entry.shape) != 1
            or not entry.shape[0]
            or entry.shape[0] != (size or entry.shape[0])
        ):
            yield _mismatch(entries.module, part, str(list(entry.shape)), wanted)


def _check_full(entries: ModuleEntries) -> Iterator[Problem]:
    """Yield a whole weight without values, or a bias that does not fit it."""
    weight, bias = entries.parts.get(Part.FULL_WEIGHT), entries.parts.get(Part.FULL_BIAS)
    if weight is None:
        return
    if not weight.shape or not all(weight.shape):
        yield _mismatch(entries.module, Part.FULL_WEIGHT, str(list(weight.shape)), "values")
    # A Conv1D keeps its outputs in the second dimension.
    elif bias is not None and bias.shape not in [(size,) for size in weight.shape[:2]]:
        expected = f"[{weight.shape[0]}], one for each row of the weight"
        yield _mismatch(entries.module, Part.FULL_BIAS, str(list(bias.shape)), expected)


def _check_method(
    entries: ModuleEntries,
    config: AdapterConfig,
    shared: Mapping[Part, TensorEntry],
    rank: int,
) -> Iterator[Problem]:
    """Yield what is wrong with the tensors of a method other than LoRA."""
    module, parts = entries.module, entries.parts
    if Part.IA3_GAIN in parts:
        yield from ia3.check_gain(entries.stored_as, parts[Part.IA3_GAIN], config)
    if parts.keys() >= VERA_PARTS:
        yield from vera.check_vectors(module, parts, shared, rank)
    if parts.keys() >= LOHA_PARTS:
        yield from loha.check_factors(module, parts, rank)
    if parts.keys() & LOKR_PARTS:
        yield from lokr.check_factors(module, parts, rank)


def _check_own(inventory: Inventory, config: AdapterConfig) -> Iterator[Problem]:
    """Yield whole embeddings in a file that holds nothing else: a model, not an adapter."""
    own = METHOD_PARTS[config.peft_type] | {Part.BASE_BIAS}
    # Other whole weights that are not listed are named already.
    whole = [
        entries
        for entries in inventory.modules
        if Part.FULL_WEIGHT in entries.parts
        and entries.stored_as.rpartition(".")[2] in EMBEDDING_NAMES
    ]
    if inventory.experts or any(own & entries.parts.keys() for entries in inventory.modules):
        return
    if any(is_listed(entries.stored_as, config) for entries in inventory.modules):
        return
    for entries in whole:
        yield Problem(
            code=ProblemCode.UNSUPPORTED_TENSOR,
            tensor=entries.parts[Part.FULL_WEIGHT].key,
            found=f"a whole weight in a file without a tensor of {config.peft_type}",
            expected="an adapter, or the module in modules_to_save",
        )


def _mismatch(module: str, part: Part, found: str, expected: str) -> Problem:
    return Problem(
        code=ProblemCode.SHAPE_MISMATCH,
        module=module,
        tensor=_NAMES.get(part, part),
        found=found,
        expected=expected,
    )
