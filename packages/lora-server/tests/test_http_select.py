"""Which adapter answers: every combination of `model`, header and weighted set."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from lora_server.errors import AdapterConflictError, InvalidRequestError, ModelNotFoundError
from lora_server.http.schemas.openai import WeightedAdapter
from lora_server.http.select import Selection, select

if TYPE_CHECKING:
    from collections.abc import Callable

    from conftest import Catalog, Harness

SQL, LEGAL = "73716c000000", "4c6567616c00"


@pytest.fixture
def catalog(make_harness: Callable[..., Harness]) -> Catalog:
    return make_harness().catalog


def choose(
    catalog: Catalog,
    *,
    model: str | None = None,
    header: str | list[str] | None = None,
    weighted: list[tuple[str, float]] | None = None,
) -> Selection:
    values = [header] if isinstance(header, str) else header or []
    members = [WeightedAdapter(name=name, scale=scale) for name, scale in weighted or []]
    return select(
        catalog,
        model=model,
        header_values=values,
        weighted=None if weighted is None else members,
        max_loras=2,
    )


@pytest.mark.parametrize(
    ("model", "header", "label", "shown"),
    [
        (None, None, "base", "base-model"),
        ("", None, "base", "base-model"),
        ("base-model", None, "base", "base-model"),
        ("alias", None, "base", "alias"),
        ("sql", None, f"sql@{SQL}", "sql"),
        ("sql", "", f"sql@{SQL}", "sql"),
        (None, "sql", f"sql@{SQL}", "sql"),
        ("", "sql", f"sql@{SQL}", "sql"),
        ("sql", "sql", f"sql@{SQL}", "sql"),
        (None, "base", "base", "base-model"),
        ("alias", "base", "base", "alias"),
        (None, "alias", "base", "base-model"),
        ("Legal", ["Legal", "Legal"], f"Legal@{LEGAL}", "Legal"),
    ],
)
def test_model_and_header_choose(
    catalog: Catalog, model: str | None, header: str | list[str] | None, label: str, shown: str
) -> None:
    selection = choose(catalog, model=model, header=header)

    assert (selection.label, selection.model) == (label, shown)
    assert [use.digest[:12] for use in selection.adapters] == label.split("@")[1:]


@pytest.mark.parametrize(
    ("model", "header"),
    [
        ("sql", "Legal"),
        ("sql", "base"),
        ("sql", "base-model"),
        ("base-model", "sql"),
        (None, ["sql", "Legal"]),
        (None, ["sql", "base"]),
    ],
)
def test_two_different_answers_are_a_conflict(
    catalog: Catalog, model: str | None, header: str | list[str]
) -> None:
    with pytest.raises(AdapterConflictError):
        choose(catalog, model=model, header=header)


@pytest.mark.parametrize("name", ["a-typo", "SQL", "legal", "sql ", " ", "base", "Base-model"])
def test_names_are_exact_and_never_answered_by_the_base(catalog: Catalog, name: str) -> None:
    with pytest.raises(ModelNotFoundError, match="base-model, alias, sql, Legal") as caught:
        choose(catalog, model=name)

    assert caught.value.param == "model"


def test_an_unknown_name_in_the_header_names_the_header(catalog: Catalog) -> None:
    with pytest.raises(ModelNotFoundError) as caught:
        choose(catalog, header="a-typo")

    assert caught.value.param == "X-Use-LoRA"


def test_a_header_in_utf8_names_an_adapter_beyond_ascii(catalog: Catalog) -> None:
    catalog.by_name["größe"] = catalog.by_name["sql"]

    selection = choose(catalog, header="größe".encode().decode("latin-1"))

    assert selection.metrics_label == "sql"


def test_a_weighted_set_adds_up_scales_and_says_what_runs(catalog: Catalog) -> None:
    selection = choose(catalog, weighted=[("sql", 0.7), ("Legal", -0.3)])

    assert selection.label == f"sql@{SQL}*0.7,Legal@{LEGAL}*-0.3"
    assert [(use.digest[:12], use.scale) for use in selection.adapters] == [
        (SQL, 0.7),
        (LEGAL, -0.3),
    ]
    assert (selection.model, selection.metrics_label) == ("base-model", "weighted_set")


@pytest.mark.parametrize(
    "weighted", [[("dora", 0.5)], [("dora", 1.0), ("sql", 1.0)], [("sql", 0.3), ("dora", 0.0)]]
)
def test_an_adapter_that_is_not_linear_is_neither_scaled_nor_combined(
    catalog: Catalog, weighted: list[tuple[str, float]]
) -> None:
    sql = catalog.by_name["sql"]
    catalog.by_name["dora"] = replace(sql, name="dora", digest="d" * 64, is_linear=False)

    with pytest.raises(InvalidRequestError, match="'dora' can neither be scaled nor combined"):
        choose(catalog, weighted=weighted)

    assert choose(catalog, weighted=[("dora", 1.0)]).adapters[0].scale == 1.0


def test_a_set_of_one_with_scale_one_is_the_plain_adapter(catalog: Catalog) -> None:
    plain, weighted = choose(catalog, model="sql"), choose(catalog, weighted=[("sql", 1.0)])

    assert weighted.adapters == plain.adapters
    assert weighted.label == plain.label
    assert weighted.metrics_label == "sql"


def test_two_names_of_the_same_content_are_one_adapter_with_the_sum_of_the_scales(
    catalog: Catalog,
) -> None:
    catalog.by_name["copy"] = catalog.by_name["sql"]

    selection = choose(catalog, weighted=[("sql", 0.25), ("copy", 0.5)])

    assert [use.scale for use in selection.adapters] == [0.75]


@pytest.mark.parametrize(
    ("model", "header"), [("sql", None), (None, "sql"), (None, "base"), ("base-model", "sql")]
)
def test_a_weighted_set_beside_another_choice_is_a_conflict(
    catalog: Catalog, model: str | None, header: str | None
) -> None:
    with pytest.raises(AdapterConflictError) as caught:
        choose(catalog, model=model, header=header, weighted=[("sql", 1.0)])

    assert caught.value.param == "lora"


def test_a_weighted_set_may_stand_beside_the_bases_name(catalog: Catalog) -> None:
    selection = choose(catalog, model="alias", weighted=[("sql", 0.5)])

    assert (selection.model, selection.label) == ("alias", f"sql@{SQL}*0.5")


@pytest.mark.parametrize(
    ("weighted", "reason"),
    [
        ([], "no adapter"),
        ([("sql", 1.0), ("sql", 0.5)], "twice: sql"),
        ([("sql", 1.0), ("Legal", 1.0), ("more", 1.0)], "3 adapters.*2 slots"),
        ([("base-model", 1.0)], "base model"),
    ],
)
def test_a_set_that_makes_no_sense_is_refused(
    catalog: Catalog, weighted: list[tuple[str, float]], reason: str
) -> None:
    with pytest.raises(InvalidRequestError, match=reason):
        choose(catalog, weighted=weighted)


def test_an_unknown_member_is_not_found(catalog: Catalog) -> None:
    with pytest.raises(ModelNotFoundError) as caught:
        choose(catalog, weighted=[("sql", 1.0), ("a-typo", 1.0)])

    assert (caught.value.name, caught.value.param) == ("a-typo", "lora")


def test_a_name_cannot_break_the_reply_header(catalog: Catalog) -> None:
    catalog.by_name["x"] = type(catalog.by_name["sql"])(name="a\r\nB: ü,", digest="d" * 64)

    assert choose(catalog, model="x").label == "a%0D%0AB: %C3%BC%2C@dddddddddddd"
