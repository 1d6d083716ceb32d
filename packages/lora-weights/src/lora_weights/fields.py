"""Every field of PEFT's ``adapter_config.json`` and what this package does with it.

A field is applied, training-only (no influence on the trained weights' product, so it is ignored)
or refused while it is active. Knows nothing of tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING

from lora_weights.errors import Problem, ProblemCode

if TYPE_CHECKING:
    from collections.abc import Mapping

CONFIG_FILE = "adapter_config.json"


class FieldClass(StrEnum):
    """What happens to a field."""

    APPLIED = "applied"
    TRAINING_ONLY = "training_only"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldRule:
    """How one field is treated."""

    field_class: FieldClass
    """Applied, ignored, or refused while active."""
    reason: str = ""
    """For a refused field: what it does to the model and why that cannot be honoured."""


_APPLIED = FieldRule(field_class=FieldClass.APPLIED)
_TRAINING = FieldRule(field_class=FieldClass.TRAINING_ONLY)


def _refused(reason: str) -> FieldRule:
    return FieldRule(field_class=FieldClass.REFUSED, reason=reason)


_COMMON: dict[str, FieldRule] = {
    "peft_type": _APPLIED,
    # The tensors are the inventory; these are read for checks and for the report.
    "target_modules": _APPLIED,
    "modules_to_save": _APPLIED,
    "base_model_name_or_path": _APPLIED,
    # Decides where two layouts of expert tensors look alike.
    "peft_version": _APPLIED,
    # How it was trained and where. What a file holds is never filtered by them.
    "task_type": _TRAINING,
    "auto_mapping": _TRAINING,
    "revision": _TRAINING,
    "inference_mode": _TRAINING,
    # What the rows of a classification head mean; read by whoever serves one.
    "id2label": _TRAINING,
    "label2id": _TRAINING,
    "num_labels": _TRAINING,
    "problem_type": _TRAINING,
    "threshold": _TRAINING,
    "thresholds": _TRAINING,
    "exclude_modules": _TRAINING,
    "layers_to_transform": _TRAINING,
    "layers_pattern": _TRAINING,
}
"""Fields of every method."""

FIELDS: Mapping[str, FieldRule] = MappingProxyType(
    {
        **_COMMON,
        "r": _APPLIED,
        "lora_alpha": _APPLIED,
        "use_rslora": _APPLIED,
        "rank_pattern": _APPLIED,
        "alpha_pattern": _APPLIED,
        "use_dora": _APPLIED,
        "lora_bias": _APPLIED,
        "bias": _APPLIED,
        "trainable_token_indices": _APPLIED,
        "target_parameters": _APPLIED,
        # A and B of a Conv1D layer have the same form as those of a linear layer.
        "fan_in_fan_out": _APPLIED,
        # Some initialisations change the base weight; the accepted values are in `field_reader`.
        "init_lora_weights": _APPLIED,
        # What the embedding gets, a head that is tied to it gets too.
        "ensure_weight_tying": _APPLIED,
        "alora_invocation_tokens": _refused("activated LoRA is not applied yet"),
        "layer_replication": _refused("it builds another stack of layers than the base has"),
        "use_bdlora": _refused("block-diagonal factors change the product"),
        "use_qalora": _refused("it pools the input before A"),
        "arrow_config": _refused("it routes between several adapters inside one layer"),
        "kasa_config": _refused("it truncates the base weight and adds a diagonal factor"),
        "monteclora_config": _refused("it adds sampled factors to A"),
        "megatron_config": _refused("the file may hold one rank's slices of A and B"),
        "enable_lora": _refused("it fuses several adapters in one layer, an early PEFT format"),
        "lora_dropout": _TRAINING,
        "megatron_core": _TRAINING,
        "loftq_config": _TRAINING,
        "eva_config": _TRAINING,
        "corda_config": _TRAINING,
        "lora_ga_config": _TRAINING,
        # It compresses what the backward pass keeps; its buffers play no part in the forward pass.
        "velora_config": _TRAINING,
        "qalora_group_size": _TRAINING,
        "runtime_config": _TRAINING,
        "merge_weights": _TRAINING,
    }
)
"""Field name -> rule, for all LoRA fields of PEFT up to 0.21 and two that early releases wrote."""

_LYCORIS: dict[str, FieldRule] = {
    **_COMMON,
    "r": _APPLIED,
    "alpha": _APPLIED,
    "rank_pattern": _APPLIED,
    "alpha_pattern": _APPLIED,
    "rank_dropout": _TRAINING,
    "module_dropout": _TRAINING,
    # About convolutions, whose tensors are refused by their shape.
    "use_effective_conv2d": _TRAINING,
    "init_weights": _TRAINING,
}
"""Fields that LoHa and LoKr share."""

METHOD_FIELDS: Mapping[str, Mapping[str, FieldRule]] = MappingProxyType(
    {
        "LORA": FIELDS,
        "IA3": MappingProxyType(
            {
                **_COMMON,
                "feedforward_modules": _APPLIED,
                "fan_in_fan_out": _APPLIED,
                "init_ia3_weights": _TRAINING,
            }
        ),
        "VERA": MappingProxyType(
            {
                **_COMMON,
                "r": _APPLIED,
                "bias": _APPLIED,
                "fan_in_fan_out": _APPLIED,
                "save_projection": _APPLIED,
                # The projections are in the file, or the adapter is refused.
                "projection_prng_key": _TRAINING,
                "vera_dropout": _TRAINING,
                "d_initial": _TRAINING,
                "init_weights": _TRAINING,
            }
        ),
        "LOHA": MappingProxyType(_LYCORIS),
        "LOKR": MappingProxyType(
            {
                **_LYCORIS,
                # The stored shapes say how the factors were split.
                "decompose_both": _TRAINING,
                "decompose_factor": _TRAINING,
                "rank_dropout_scale": _TRAINING,
            }
        ),
    }
)
"""``peft_type`` -> its fields."""


def is_active(value: object) -> bool:
    """Return whether a field asks for something: not null, false or empty."""
    if value is None or value is False:
        return False
    return not isinstance(value, str | list | tuple | dict | set) or bool(value)


def check_fields(data: Mapping[str, object], peft_type: str = "LORA") -> list[Problem]:
    """Return a problem for each active field that is refused or not known.

    Args:
        data: the whole content of an ``adapter_config.json``.
        peft_type: the method, which decides what fields there are.
    """
    problems = []
    rules = METHOD_FIELDS[peft_type]
    for name, value in data.items():
        rule = rules.get(name)
        if rule is None:
            if is_active(value):
                problems.append(_unknown(name, value, peft_type))
        elif rule.field_class is FieldClass.REFUSED and is_active(value):
            problems.append(
                Problem(
                    code=ProblemCode.UNSUPPORTED_FIELD,
                    tensor=f"{CONFIG_FILE} {name}",
                    found=short(value),
                    expected=f"it unset: {rule.reason}",
                )
            )
    return problems


def _unknown(name: str, value: object, peft_type: str) -> Problem:
    return Problem(
        code=ProblemCode.UNKNOWN_FIELD,
        tensor=f"{CONFIG_FILE} {name}",
        found=short(value),
        expected=f"only fields that PEFT 0.21 has for {peft_type}, since an unknown one may change "
        "the result",
    )


def short(value: object, limit: int = 80) -> str:
    """Return a value's text cut to `limit` characters: it comes from a file nobody checked."""
    text = repr(value)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."
