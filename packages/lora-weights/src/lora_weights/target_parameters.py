"""Pairs on parameters outside experts modules (PEFT's ``target_parameters``).

PEFT names the pair of a parameter after its module, whatever the parameter is called. A matrix
called ``weight`` is that of a linear module, and its pair an ordinary one; anything else is not
known from the module's size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lora_weights.errors import Problem, ProblemCode

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lora_weights.config import AdapterConfig
    from lora_weights.inventory import PairEntries

_EXPECTED = "a matrix called weight, or a parameter of a module called experts"


def declared_parameters(module: str, config: AdapterConfig) -> list[str]:
    """Return the listed parameters of a module, by their last names.

    Args:
        module: module path as the file spells it.
        config: the adapter's configuration.
    """
    found = []
    for path in config.target_parameters:
        parent, _, name = path.rpartition(".")
        if parent and (module == parent or module.endswith(f".{parent}")):
            found.append(name)
    return found


def check_parameter(pair: PairEntries, rank: int, config: AdapterConfig) -> Iterator[Problem]:
    """Yield why the pair of a listed parameter cannot be applied.

    Args:
        pair: a pair outside experts modules.
        rank: the rank that the configuration gives the module.
        config: the adapter's configuration.
    """
    names = declared_parameters(pair.stored_as, config)
    rows = pair.lora_a.shape[0] if pair.lora_a.shape else 0
    if names and "weight" not in names:
        found = f"on the parameter {' or '.join(sorted(names))}"
    elif names and rows > rank and rows % rank == 0:
        found = f"over {rows // rank} matrices in one parameter (rank {rank}, {rows} rows)"
    else:
        return
    yield Problem(
        code=ProblemCode.UNSUPPORTED_TENSOR,
        module=pair.module,
        tensor="lora_A",
        found=found,
        expected=_EXPECTED,
    )
