"""The tree drawn in the docstring is the tree of the classes, and texts name every problem."""

from __future__ import annotations

import inspect

from lora_layers import (
    AdapterMismatchError,
    LayerConfigError,
    RoutingNotSetError,
    UnsupportedModuleError,
    errors,
)
from lora_weights import Problem, ProblemCode


def test_the_drawn_tree_is_the_tree_of_the_classes() -> None:
    drawn = {
        line.strip()
        for line in (errors.__doc__ or "").splitlines()
        if line.startswith("    ") and "Error" in line
    }

    classes = {
        f"{name} ({cls.__bases__[1].__name__})"
        for name, cls in inspect.getmembers(errors, inspect.isclass)
        if issubclass(cls, errors.LayerError) and cls is not errors.LayerError
    }

    assert drawn == classes
    assert all(
        cls.__bases__[0] is errors.LayerError
        for cls in vars(errors).values()
        if inspect.isclass(cls) and len(cls.__bases__) > 1
    )


def test_a_text_lists_every_problem_and_its_source() -> None:
    problems = [
        Problem(code=ProblemCode.UNKNOWN_MODULE, module="layers.9.q_proj", found="unknown"),
        Problem(code=ProblemCode.RANK_TOO_LARGE, module="b", found="rank 9", expected="at most 8"),
    ]

    text = str(AdapterMismatchError(problems, source="/adapters/sql"))

    assert "/adapters/sql" in text
    assert "2 problems" in text
    assert "layers.9.q_proj is unknown" in text
    assert "b is rank 9, expected at most 8" in text


def test_a_long_list_is_cut_in_the_text_but_not_in_the_attribute() -> None:
    error = LayerConfigError(f"field{i} is wrong" for i in range(60))

    assert len(error.problems) == 60
    assert "and 10 more" in str(error)


def test_one_problem_takes_one_line() -> None:
    assert str(UnsupportedModuleError({"norm": "is a LayerNorm"})) == (
        "target_modules: norm is a LayerNorm"
    )


def test_the_row_counts_are_in_the_text() -> None:
    text = str(RoutingNotSetError(module="lm_head", num_rows=3, num_routed=5))

    assert "lm_head is called with 3 rows" in text
    assert "the routing has 5 rows" in text
