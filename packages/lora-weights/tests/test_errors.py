"""Errors: the drawn tree, the texts, the problems they carry."""

from __future__ import annotations

import re

import pytest

from lora_weights import (
    AdapterError,
    AdapterNotFoundError,
    InvalidAdapterError,
    Problem,
    ProblemCode,
    SourceError,
    UnsafeFormatError,
    errors,
)

LINE = re.compile(r"^( +)(\w+)\((\w+)\)$", re.MULTILINE)


def test_drawn_tree_is_the_class_tree() -> None:
    drawn = {name: (len(indent), base) for indent, name, base in LINE.findall(errors.__doc__ or "")}

    classes = {
        name: value
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, Exception)
    }

    assert drawn.pop("AdapterError") == (4, "Exception")
    assert set(drawn) == set(classes) - {"AdapterError"}
    for name, (indent, base) in drawn.items():
        assert indent == 8
        assert [cls.__name__ for cls in classes[name].__bases__] == ["AdapterError", base]


@pytest.mark.parametrize(
    "error",
    [
        AdapterNotFoundError(source="x", reason="there is no folder x"),
        SourceError(source="x", reason="refused"),
        UnsafeFormatError(source="x", file_name="adapter_model.bin"),
        InvalidAdapterError([], source="x"),
    ],
)
def test_every_error_is_an_adapter_error_that_names_its_source(error: AdapterError) -> None:
    assert isinstance(error, AdapterError)
    assert getattr(error, "source", None) == "x"
    assert "'x'" in str(error)


def test_a_problem_says_where_found_and_expected() -> None:
    problem = Problem(
        code=ProblemCode.SHAPE_MISMATCH,
        module="model.layers.0.self_attn.q_proj",
        tensor="lora_B",
        found="[4096, 16]",
        expected="[4096, 8]",
    )

    text = "model.layers.0.self_attn.q_proj lora_B is [4096, 16], expected [4096, 8]"
    assert str(problem) == text


def test_one_problem_makes_one_line_and_several_make_a_list() -> None:
    problem = Problem(code=ProblemCode.NO_EFFECT, found="empty")

    one = str(InvalidAdapterError([problem], source="a"))
    three = str(InvalidAdapterError([problem] * 3, source="a"))

    assert one == "adapter 'a': the adapter is empty"
    assert three.splitlines() == ["adapter 'a': 3 problems", *["  the adapter is empty"] * 3]


def test_a_long_list_is_cut_in_the_text_and_whole_in_the_attribute() -> None:
    problems = [Problem(code=ProblemCode.NO_EFFECT, found=str(i)) for i in range(60)]

    error = InvalidAdapterError(problems)

    assert len(error.problems) == 60
    assert str(error).endswith("and 10 more")
