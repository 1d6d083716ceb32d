"""LoraModelConfig: how many adapters, how large, and which modules carry them.

Knows no model family: what a family packs and how its head is called is data given by the caller.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from lora_cache import EvictionPolicy
from lora_kernels import Backend
from lora_layers.errors import LayerConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

DEFAULT_MAX_CPU_LORAS = 32
"""Least host-tier capacity when none is given; more when there are more slots."""

MIN_GROUP_SIZE = 2
"""A packed module of one member would be the member itself."""

LORA_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraModelConfig:
    """How many adapters, how large, and which modules carry them.

    Raises:
        LayerConfigError: any value is out of range; all problems at once.
    """

    max_loras: int = 8
    """Device slots `N`, the largest number of distinct adapters in one step."""

    max_lora_rank: int = 64
    """Largest rank `R` an adapter may have; slot buffers are this wide."""

    max_cpu_loras: int | None = None
    """Host-tier entries. None or 0: max(32, max_loras). At least `max_loras`."""

    max_host_bytes: int | None = None
    """Byte budget of the host tier; None means no limit."""

    lora_dtype: torch.dtype | None = None
    """dtype of the slot buffers; None takes each module's own (vLLM's `auto`)."""

    target_modules: frozenset[str] | None = None
    """Last name parts or full paths of the modules that carry LoRA; None means every module that
    can, the empty set none."""

    packed_modules: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Packed name -> members, in output order, e.g. `qkv_proj: (q_proj, k_proj, v_proj)`. Members
    found side by side run as one matrix product."""

    fused_modules: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Name of a linear module that the model stores as one -> its parts and their rows, in order,
    e.g. `qkv_proj: {q_proj: 64, k_proj: 32, v_proj: 32}`. Adapters may then name the whole or its
    parts. A module of that name with another number of rows keeps its one name."""

    logits_modules: frozenset[str] = frozenset({"lm_head"})
    """Last name parts or full paths of the modules that see logits rows, not token rows."""

    head_modules: frozenset[str] = frozenset({"score", "classifier"})
    """Last name parts of the modules that are a classification head. It is wrapped whatever
    `target_modules` says, and adapters may bring their own with other numbers of labels."""

    max_labels: int | None = None
    """Most labels an adapter's own head may have; None: as many as the base's head has."""

    head_task_type: str | None = None
    """PEFT's `task_type` that adapters with a head of their own must have been trained for, where
    they name one; None accepts any."""

    moe_shared_loras: bool = False
    """Expert adapters share the factors next to the hidden state between experts (A of gate and
    up, B of down). Their slots are that much smaller, and other expert adapters are refused."""

    backend: Backend = Backend.ATEN
    """Implementation of the LoRA operators."""

    prepack_linear: bool = False
    """Keep a second copy of bfloat16 CPU weights in oneDNN's own layout: about 30 % faster base
    products at 2 to 128 rows, for the memory of the copy. No effect on other dtypes and devices."""

    policy: EvictionPolicy = EvictionPolicy.LRU
    """What both tiers do when they are full."""

    allow_pin_all: bool = False
    """Whether pins may take the last slot."""

    def __post_init__(self) -> None:
        fused = {name: tuple(parts) for name, parts in self.fused_modules.items()}
        problems = [
            *_size_problems(self),
            *_group_problems("packed_modules", self.packed_modules),
            *_group_problems("fused_modules", fused),
            *(
                f"fused_modules[{name!r}] has {rows} rows for {part!r}, expected at least 1"
                for name, parts in self.fused_modules.items()
                for part, rows in parts.items()
                if rows < 1
            ),
        ]
        if problems:
            raise LayerConfigError(problems)

    @property
    def host_capacity(self) -> int:
        """Entries the host tier holds, defaults resolved."""
        return self.max_cpu_loras or max(DEFAULT_MAX_CPU_LORAS, self.max_loras)


def _size_problems(config: LoraModelConfig) -> list[str]:
    """Return what is wrong with sizes and dtype."""
    problems = [
        f"{name} is {value}, expected at least 1"
        for name, value in (
            ("max_loras", config.max_loras),
            ("max_lora_rank", config.max_lora_rank),
            ("max_labels", 1 if config.max_labels is None else config.max_labels),
        )
        if value < 1
    ]
    max_cpu_loras = config.max_cpu_loras or 0
    if max_cpu_loras < 0:
        problems.append(f"max_cpu_loras is {max_cpu_loras}, expected at least 1, or 0 for unset")
    elif 0 < max_cpu_loras < config.max_loras:
        problems.append(
            f"max_cpu_loras is {max_cpu_loras}, expected at least max_loras ({config.max_loras})"
        )
    if config.max_host_bytes is not None and config.max_host_bytes < 1:
        problems.append(f"max_host_bytes is {config.max_host_bytes}, expected at least 1 or None")
    if config.lora_dtype is not None and config.lora_dtype not in LORA_DTYPES:
        problems.append(
            f"lora_dtype is {config.lora_dtype}, expected None, float32, float16 or bfloat16"
        )
    return problems


def _group_problems(option: str, groups: Mapping[str, tuple[str, ...]]) -> list[str]:
    """Return what is wrong with groups of modules: sizes, names, members in two groups."""
    problems = []
    owner: dict[str, str] = {}
    for name, members in groups.items():
        if len(members) < MIN_GROUP_SIZE or len(set(members)) < len(members):
            problems.append(
                f"{option}[{name!r}] is {list(members)}, "
                f"expected at least {MIN_GROUP_SIZE} different members"
            )
        bad = [part for part in (name, *members) if not part or "." in part]
        if bad:
            problems.append(f"{option}[{name!r}] names {bad}, expected names without dots")
        for member in members:
            if member in groups:
                problems.append(f"{option}: {member!r} is both a group and a member")
            if owner.setdefault(member, name) != name:
                problems.append(
                    f"{option}: {member!r} is in {owner[member]!r} and in {name!r}, "
                    "expected one group"
                )
    return problems
