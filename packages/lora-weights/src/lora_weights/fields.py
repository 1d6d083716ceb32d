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


FIELDS: Mapping[str, FieldRule] = MappingProxyType(
    {
        # What the adapter is, and the numbers that shape it.
        "peft_type": _APPLIED,
        "r": _APPLIED,
        "lora_alpha": _APPLIED,
        "use_rslora": _APPLIED,
        "rank_pattern": _APPLIED,
        "alpha_pattern": _APPLIED,
        # The tensors are the inventory; these three are read for the report.
        "target_modules": _APPLIED,
        "modules_to_save": _APPLIED,
        "base_model_name_or_path": _APPLIED,
        # A and B of a Conv1D layer have the same form as those of a linear layer.
        "fan_in_fan_out": _APPLIED,
        # Some initialisations change the base weight; the accepted values are in `config`.
        "init_lora_weights": _APPLIED,
        # Tied adapters are stored under both names; `load` checks that both are there.
        "ensure_weight_tying": _APPLIED,
        "bias": _refused("trained biases replace those of the base, which is not applied yet"),
        "lora_bias": _refused("the bias of lora_B is not applied yet"),
        "use_dora": _refused("DoRA magnitudes are not applied yet"),
        "alora_invocation_tokens": _refused("activated LoRA is not applied yet"),
        "target_parameters": _refused("adapters on expert parameters are not applied yet"),
        "trainable_token_indices": _refused("trained token embeddings are not applied yet"),
        "layer_replication": _refused("it builds another stack of layers than the base has"),
        "use_bdlora": _refused("block-diagonal factors change the product"),
        "use_qalora": _refused("it pools the input before A"),
        "arrow_config": _refused("it routes between several adapters inside one layer"),
        "kasa_config": _refused("it truncates the base weight and adds a diagonal factor"),
        "monteclora_config": _refused("it adds sampled factors to A"),
        "velora_config": _refused("its files hold projection buffers that are not read yet"),
        "megatron_config": _refused("the file may hold one rank's slices of A and B"),
        "enable_lora": _refused("it fuses several adapters in one layer, an early PEFT format"),
        # How it was trained, where, and by which release.
        "task_type": _TRAINING,
        "auto_mapping": _TRAINING,
        "peft_version": _TRAINING,
        "revision": _TRAINING,
        "inference_mode": _TRAINING,
        "exclude_modules": _TRAINING,
        "lora_dropout": _TRAINING,
        "layers_to_transform": _TRAINING,
        "layers_pattern": _TRAINING,
        "megatron_core": _TRAINING,
        "loftq_config": _TRAINING,
        "eva_config": _TRAINING,
        "corda_config": _TRAINING,
        "lora_ga_config": _TRAINING,
        "qalora_group_size": _TRAINING,
        "runtime_config": _TRAINING,
        "merge_weights": _TRAINING,
    }
)
"""Field name -> rule, for all fields of PEFT up to 0.21 and two that early releases wrote."""

INACTIVE_VALUES: Mapping[str, object] = MappingProxyType({"bias": "none"})
"""Values besides null, false and empty that mean "off", for refused fields that have one."""


def is_active(name: str, value: object) -> bool:
    """Return whether a field asks for something: not null, false, empty or its "off" value."""
    if value is None or value is False:
        return False
    if isinstance(value, str | list | tuple | dict | set) and not value:
        return False
    return name not in INACTIVE_VALUES or value != INACTIVE_VALUES[name]


def check_fields(data: Mapping[str, object]) -> list[Problem]:
    """Return a problem for each active field that is refused or not known.

    Args:
        data: the whole content of an ``adapter_config.json``.
    """
    problems = []
    for name, value in data.items():
        rule = FIELDS.get(name)
        if rule is None:
            if is_active(name, value):
                problems.append(_unknown(name, value))
        elif rule.field_class is FieldClass.REFUSED and is_active(name, value):
            problems.append(
                Problem(
                    code=ProblemCode.UNSUPPORTED_FIELD,
                    tensor=f"{CONFIG_FILE} {name}",
                    found=short(value),
                    expected=f"it unset: {rule.reason}",
                )
            )
    return problems


def _unknown(name: str, value: object) -> Problem:
    return Problem(
        code=ProblemCode.UNKNOWN_FIELD,
        tensor=f"{CONFIG_FILE} {name}",
        found=short(value),
        expected="only fields of PEFT 0.21, since an unknown one may change the result",
    )


def short(value: object, limit: int = 80) -> str:
    """Return a value's text cut to `limit` characters: it comes from a file nobody checked."""
    text = repr(value)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."
