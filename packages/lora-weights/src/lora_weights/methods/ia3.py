"""IA3: one factor for each output of a module, or for each input of a feed-forward one.

    y' = l * (W x + b)        stored as `[O, 1]`
    y' = W (l * x) + b        stored as `[1, I]`, of the modules in ``feedforward_modules``

(``peft/tuners/ia3/layer.py``, ``Linear.forward``.) The first is an output gain. The second is no
gain and has full rank; it is refused.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from lora_weights.errors import Problem, ProblemCode
from lora_weights.scaling import pattern_fault

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from lora_weights.config import AdapterConfig
    from lora_weights.tensor_format import TensorEntry

GAIN = "ia3_l"


def is_feedforward(module: str, config: AdapterConfig) -> bool | None:
    """Return whether the configuration counts a module as feed-forward; None where it is silent.

    PEFT compares a list by the plain end of the name and a pattern with the whole name.
    """
    names = config.feedforward_modules
    if names is None:
        return None
    if isinstance(names, str):
        return None if pattern_fault(names) else re.fullmatch(names, module) is not None
    return module.endswith(names)


def check_gain(module: str, entry: TensorEntry, config: AdapterConfig) -> Iterator[Problem]:
    """Yield what is wrong with the shape of a gain, or that it is one of the inputs.

    Args:
        module: module path as the file spells it.
        entry: the stored vector.
        config: says which modules are feed-forward.
    """
    declared = is_feedforward(module, config)
    rows, columns = entry.shape if len(entry.shape) == 2 else (0, 0)  # noqa: PLR2004
    is_output = columns == 1 and rows > 0 and not (declared and rows == 1)
    is_input = rows == 1 and columns > 0 and not is_output
    found, code = str(list(entry.shape)), ProblemCode.SHAPE_MISMATCH
    if not is_output and not is_input:
        expected = "[O, 1], a gain of the module's output"
    elif declared is not None and declared is not is_input:
        expected = (
            "[1, I], as feedforward_modules names the module"
            if declared
            else "[O, 1], as feedforward_modules does not name the module"
        )
    elif is_input:
        code = ProblemCode.UNSUPPORTED_TENSOR
        found = f"{found}, a gain of the module's input"
        expected = (
            "[O, 1]: a gain of the input changes the weight by a matrix of full rank, which is "
            "neither a low-rank pair nor an output gain; merge the adapter into the base, or "
            "train without feedforward_modules"
        )
    else:
        return
    yield Problem(code=code, module=module, tensor=GAIN, found=found, expected=expected)


def build_gain(stored: torch.Tensor) -> torch.Tensor:
    """Return the output gain `[O]`, float32, of a stored `[O, 1]`."""
    return stored.float().flatten()
