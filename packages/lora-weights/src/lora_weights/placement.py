"""Which tensors together make a whole part of a module, and which are out of place.

Knows names, not shapes: `methods` and `checks` look at those.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

from lora_weights.errors import Problem, ProblemCode
from lora_weights.methods.lokr import SIDES
from lora_weights.names import PAIR_PARTS, SHARED_PARTS, Part

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from lora_weights.config import AdapterConfig
    from lora_weights.tensor_format import TensorEntry

LINEAR_PAIR = frozenset({Part.LORA_A, Part.LORA_B})
EMBEDDING_PAIR = frozenset({Part.EMBEDDING_A, Part.EMBEDDING_B})
LOHA_PARTS = frozenset({Part.HADA_W1_A, Part.HADA_W1_B, Part.HADA_W2_A, Part.HADA_W2_B})
LOKR_PARTS = frozenset(part for side in SIDES for part in side)
VERA_PARTS = frozenset({Part.VERA_B, Part.VERA_D})
CONVOLUTION_PARTS = frozenset({Part.HADA_T1, Part.HADA_T2, Part.LOKR_T2})
COPY_PARTS = frozenset({Part.BASE_WEIGHT, Part.ORIGINAL_WEIGHT, Part.ORIGINAL_BIAS})
FULL_PARTS = frozenset({Part.FULL_WEIGHT, Part.FULL_BIAS})

METHOD_PARTS: Mapping[str, frozenset[Part]] = MappingProxyType(
    {
        "LORA": PAIR_PARTS | {Part.LORA_BIAS, Part.MAGNITUDE, Part.TOKEN_ROWS},
        "IA3": frozenset({Part.IA3_GAIN}),
        "VERA": VERA_PARTS | SHARED_PARTS,
        "LOHA": LOHA_PARTS | {Part.HADA_T1, Part.HADA_T2},
        "LOKR": LOKR_PARTS | {Part.LOKR_T2},
    }
)
"""``peft_type`` -> the parts that only this method stores."""

EMBEDDING_NAMES = frozenset(
    {"embed_in", "embed_out", "embed_tokens", "lm_head", "shared", "tok_embeddings"}
    | {"word_embeddings", "wte"}
)
"""Names of input and output embeddings. PEFT stores them whole, listed or not, when the vocabulary
was resized (``save_embedding_layers``), and loads them over the base's."""

_OWNERS = {part: name for name, parts in METHOD_PARTS.items() for part in parts}


def foreign_owner(part: Part, config: AdapterConfig) -> str | None:
    """Return the other method that stores a part, or None when it is in place."""
    owner = _OWNERS.get(part)
    return None if owner == config.peft_type else owner


def is_listed(module: str, config: AdapterConfig) -> bool:
    """Return whether a module is, or lies in, one of ``modules_to_save``.

    PEFT compares by the plain end of a name, so ``classifier`` stands for ``pre_classifier`` too.
    """
    return any(is_saved_as(module, name) for name in config.modules_to_save)


def is_saved_as(module: str, name: str) -> bool:
    """Return whether one name in ``modules_to_save`` stands for a module or for its parent."""
    segments = module.split(".")
    return any(
        ".".join(segments[:end]).endswith(name) for end in range(1, len(segments) + 1) if name
    )


def _may_be_whole(stored_as: str, config: AdapterConfig) -> bool:
    return is_listed(stored_as, config) or stored_as.rpartition(".")[2] in EMBEDDING_NAMES


def check_module(
    module: str, stored_as: str, parts: Mapping[Part, TensorEntry], config: AdapterConfig
) -> Iterator[Problem]:
    """Yield what is missing or out of place among the tensors of one module.

    Args:
        module: module path.
        stored_as: module path as the file spells it.
        parts: its tensors, all of the adapter's own method.
        config: says which of them there must be.
    """
    is_plain = not (config.use_dora or config.lora_bias)
    if is_plain and len(parts) == len(LINEAR_PAIR) and parts.keys() >= LINEAR_PAIR:
        return  # A and B alone, as in nearly every file
    yield from _check_update(module, parts)
    is_pair = bool(PAIR_PARTS & parts.keys())
    yield from _check_flag(
        module, parts, Part.MAGNITUDE, flag="use_dora", is_set=config.use_dora, is_due=is_pair
    )
    yield from _check_flag(
        module,
        parts,
        Part.LORA_BIAS,
        flag="lora_bias",
        is_set=config.lora_bias,
        is_due=Part.LORA_B in parts,
    )
    own = METHOD_PARTS[config.peft_type] & parts.keys()
    whole = parts.get(Part.FULL_WEIGHT)
    if whole is not None and own:
        found = f"a whole weight beside {', '.join(sorted(own))}"
        yield _unsupported(whole, found, "one of the two")
    elif whole is not None and not _may_be_whole(stored_as, config):
        found = f"a whole weight of {stored_as}"
        yield _unsupported(whole, found, "the module in modules_to_save, or an embedding")
    for part in (Part.BASE_WEIGHT, Part.BASE_BIAS):
        entry = parts.get(part)
        if entry is not None and not own and not (part is Part.BASE_BIAS and _has_biases(config)):
            found = f"a base {part.value.rpartition('.')[2]} without a pair"
            yield _unsupported(entry, found, "a low-rank pair beside it")
    bias = parts.get(Part.FULL_BIAS)
    if bias is not None and whole is None:
        yield _unsupported(
            bias,
            f"a bias of {module} alone",
            "the weight beside it (modules_to_save), or bias all or lora_only in "
            "adapter_config.json",
        )


def _has_biases(config: AdapterConfig) -> bool:
    return config.bias != "none"


def _check_update(module: str, parts: Mapping[Part, TensorEntry]) -> Iterator[Problem]:
    """Yield what is missing of the module's update."""
    pair = PAIR_PARTS & parts.keys()
    if pair and pair not in (LINEAR_PAIR, EMBEDDING_PAIR):
        names = " and ".join(sorted(part.value.removesuffix(".weight") for part in pair))
        yield Problem(
            code=ProblemCode.INCOMPLETE_PAIR,
            module=module,
            tensor=names,
            found="there without its counterpart" if len(pair) == 1 else "a mixed pair",
            expected="lora_A with lora_B, or lora_embedding_A with lora_embedding_B",
        )
    for group in (VERA_PARTS, LOHA_PARTS):
        found = group & parts.keys()
        if found and found != group:
            yield Problem(
                code=ProblemCode.INCOMPLETE_PAIR,
                module=module,
                tensor=" and ".join(sorted(found)),
                found=f"there without {' and '.join(sorted(group - found))}",
                expected="all of them",
            )
    for part in sorted(CONVOLUTION_PARTS & parts.keys()):
        yield _unsupported(parts[part], "a factor of a convolution", "linear modules only")
    if {Part.MAGNITUDE, Part.LORA_BIAS} & parts.keys() and not pair:
        names = " and ".join(sorted({Part.MAGNITUDE, Part.LORA_BIAS} & parts.keys()))
        yield Problem(
            code=ProblemCode.INCOMPLETE_PAIR,
            module=module,
            tensor=names,
            found="there without a pair",
            expected="lora_A and lora_B beside it",
        )


def _check_flag(
    module: str,
    parts: Mapping[Part, TensorEntry],
    part: Part,
    *,
    flag: str,
    is_set: bool,
    is_due: bool,
) -> Iterator[Problem]:
    """Yield a problem when a tensor and the flag that announces it do not go together."""
    entry = parts.get(part)
    if entry is not None and not is_set:
        yield _unsupported(
            entry,
            f"there with {flag} false",
            f"{flag} true in adapter_config.json, or no such tensor",
        )
    elif entry is None and is_set and is_due:
        yield Problem(
            code=ProblemCode.INCOMPLETE_PAIR,
            module=module,
            tensor=part,
            found="not in the file",
            expected=f"one for each pair, as {flag} is true in adapter_config.json",
        )


def _unsupported(entry: TensorEntry, found: str, expected: str) -> Problem:
    return Problem(
        code=ProblemCode.UNSUPPORTED_TENSOR, tensor=entry.key, found=found, expected=expected
    )
