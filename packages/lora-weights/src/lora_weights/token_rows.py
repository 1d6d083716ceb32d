"""Which tokens the stored rows of a module belong to (PEFT's ``trainable_token_indices``).

A list means the input embedding, which only the tensors name. A mapping names modules by the plain
end of their path. A head that is tied to the embedding follows it and stores nothing
(``peft/utils/other.py``, ``set_additional_trainable_modules``).
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from lora_weights.errors import Problem, ProblemCode
from lora_weights.fields import CONFIG_FILE, short
from lora_weights.names import Part

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from lora_weights.config import AdapterConfig
    from lora_weights.tensor_format import TensorEntry

FIELD = f"{CONFIG_FILE} trainable_token_indices"


def assign_tokens(
    modules: Iterable[str], config: AdapterConfig
) -> tuple[dict[str, tuple[int, ...]], list[Problem]]:
    """Return the token ids of each module that has rows, and what cannot be told.

    Args:
        modules: paths of the modules that have rows, as the file spells them.
        config: names the tokens.
    """
    modules = list(modules)
    indices = config.trainable_token_indices
    if indices is None or not indices:
        return {}, [
            _problem(
                ProblemCode.UNSUPPORTED_TENSOR,
                module,
                "rows of nobody knows which tokens",
                "trainable_token_indices in adapter_config.json",
            )
            for module in modules
        ]
    if isinstance(indices, tuple):
        if len(modules) == 1:
            return {modules[0]: indices}, []
        found = f"stored for {', '.join(modules)}" if modules else "not in the file"
        expected = "rows of the input embedding only, as the tokens are given as a list"
        return {}, [_problem(ProblemCode.INCOMPLETE_PAIR, "", found, expected)]
    return _assign_by_name(modules, indices)


def _assign_by_name(
    modules: list[str], indices: Mapping[str, tuple[int, ...]]
) -> tuple[dict[str, tuple[int, ...]], list[Problem]]:
    assigned, problems = {}, []
    matched = set()
    for module in modules:
        names = [name for name in indices if module.endswith(name)]
        matched.update(names)
        choices = {indices[name] for name in names}
        if len(choices) == 1:
            assigned[module] = choices.pop()
        else:
            found = "named more than once" if choices else "not named"
            expected = "it under one name in trainable_token_indices"
            problems.append(_problem(ProblemCode.AMBIGUOUS_MODULE, module, found, expected))
    for name, ids in indices.items():
        if name not in matched and ids not in assigned.values():
            found = f"without rows for {name!r} in the file"
            problems.append(
                Problem(
                    code=ProblemCode.MISSING_WEIGHTS,
                    tensor=FIELD,
                    found=found,
                    expected="the trained rows of every module it names",
                )
            )
    return assigned, problems


def check_rows(module: str, entry: TensorEntry, ids: tuple[int, ...]) -> Iterator[Problem]:
    """Yield what is wrong with the rows of one module.

    Args:
        module: module path.
        entry: the stored rows.
        ids: their tokens.
    """
    double = [token for token, count in Counter(ids).items() if count > 1]
    wrong = [token for token in ids if token < 0] + double
    if wrong:
        yield Problem(
            code=ProblemCode.INVALID_FIELD,
            module=module,
            tensor=FIELD,
            found=f"with the tokens {short(wrong)}, negative or repeated",
            expected="each token once",
        )
    shape = entry.shape
    if len(shape) != 2 or shape[0] != len(ids) or not shape[1]:  # noqa: PLR2004
        found, expected = str(list(shape)), f"[{len(ids)}, D], a row for each token"
        yield _problem(ProblemCode.SHAPE_MISMATCH, module, found, expected)


def _problem(code: ProblemCode, module: str, found: str, expected: str) -> Problem:
    return Problem(code=code, module=module, tensor=Part.TOKEN_ROWS, found=found, expected=expected)
