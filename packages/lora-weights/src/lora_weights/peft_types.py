"""PEFT's methods by name: which are applied, and why each other one is not.

Knows names and reasons, no fields and no tensors.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

from lora_weights.errors import Problem, ProblemCode
from lora_weights.fields import CONFIG_FILE, short

if TYPE_CHECKING:
    from collections.abc import Mapping

APPLIED_TYPES = ("LORA", "IA3", "VERA", "LOHA", "LOKR")
"""Values of ``peft_type`` that are read; each is applied exactly or refused by name."""

_CONVERT = "peft.convert_to_lora approximates it by an ordinary LoRA"

_PROMPT = "it adds trained vectors to the input or to the cache, and changes no module's weight"

REFUSED_TYPES: Mapping[str, str] = MappingProxyType(
    {
        "ADALORA": "lora_E scales the ranks of A and the update is divided by the ranks kept; "
        "multiply lora_A by lora_E, set lora_alpha for that division, and save it as LORA",
        "ADAPTION_PROMPT": "it adds trained vectors inside attention and changes no weight",
        "BOFT": "it rotates the base weight; merge it into the base",
        "C3A": f"its update is a circulant matrix of full rank; {_CONVERT}",
        "CPT": _PROMPT,
        "DELORA": f"it normalises each rank by its own factors; {_CONVERT}",
        "FOURIERFT": f"its update is a sum of waves of full rank; {_CONVERT}",
        "GRALORA": f"its update is made of blocks; {_CONVERT}",
        "HRA": "it reflects the base weight; merge it into the base",
        "LN_TUNING": "it replaces normalisation layers, which every request shares",
        "MISS": f"its update is made of blocks; {_CONVERT}",
        "MULTITASK_PROMPT_TUNING": _PROMPT,
        "OFT": "it rotates the base weight; merge it into the base",
        "POLY": "it mixes several adapters by task",
        "PREFIX_TUNING": _PROMPT,
        "PROMPT_TUNING": _PROMPT,
        "P_TUNING": _PROMPT,
        "RANDLORA": f"its update has full rank; {_CONVERT}",
        "SHIRA": f"its update is sparse and of full rank; {_CONVERT}",
        "TRAINABLE_TOKENS": "use a LORA adapter with trainable_token_indices",
        "VBLORA": f"its vectors come out of a bank shared by all modules; {_CONVERT}",
        "XLORA": "it mixes several adapters by what a model says of the input",
    }
)
"""Other methods whose reason is worth saying."""


def check_type(data: Mapping[str, object]) -> Problem | None:
    """Return a problem unless a configuration is of a method that is read.

    Args:
        data: content of an ``adapter_config.json``.
    """
    kind = data.get("peft_type")
    if kind in APPLIED_TYPES:
        return None
    if kind is None:
        keys = ", ".join(sorted(data)[:12]) or "no keys"
        return Problem(
            code=ProblemCode.NOT_PEFT,
            tensor=f"{CONFIG_FILE} peft_type",
            found=f"missing ({_seems(data)}the file holds {keys})",
            expected=f"one of {', '.join(APPLIED_TYPES)}, as PEFT writes it",
        )
    reason = REFUSED_TYPES.get(kind) if isinstance(kind, str) else None
    return Problem(
        code=ProblemCode.UNSUPPORTED_TYPE,
        tensor=f"{CONFIG_FILE} peft_type",
        found=short(kind),
        expected=f"one of {', '.join(APPLIED_TYPES)}" + (f": {reason}" if reason else ""),
    )


def _seems(data: Mapping[str, object]) -> str:
    """Return what a file without ``peft_type`` seems to be, where that can be told."""
    if isinstance(data.get("config"), dict):
        return "it seems to describe a bottleneck adapter of another library; "
    if any("projector" in key for key in data):
        return "it seems to describe a projector; "
    if "model_type" in data or "architectures" in data:
        return "it seems to be the configuration of a model; "
    return ""
