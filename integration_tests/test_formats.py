"""Every adapter format on every kind of base against PEFT, and the page that says so."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from parity.bases import BASES
from parity.measure import Cell
from parity.table import measure_base, outcomes, render

if TYPE_CHECKING:
    from parity.measure import Cell

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "formats.md"
TOLERANCE = 2e-5
"""Largest difference of a logit in float32; the adapters move logits by more than `MIN_EFFECT`."""
MIN_EFFECT = 0.1


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Cell]]:
    """Measure everything once."""
    return {
        name: measure_base(base, tmp_path_factory.mktemp("formats")) for name, base in BASES.items()
    }


@pytest.mark.filterwarnings("ignore::UserWarning:peft.*", "ignore::RuntimeWarning:peft.*")
@pytest.mark.parametrize("base", BASES)
def test_what_loads_equals_peft_in_a_mixed_batch(
    base: str, table: dict[str, dict[str, Cell]]
) -> None:
    loaded = {name: cell for name, cell in table[base].items() if cell.difference is not None}

    assert len(loaded) > 15
    assert {n: c.difference for n, c in loaded.items() if (c.difference or 0) > TOLERANCE} == {}
    assert {n: c.effect for n, c in loaded.items() if (c.effect or 0) < MIN_EFFECT} == {}


def test_the_page_in_the_repository_says_what_was_measured(
    table: dict[str, dict[str, Cell]],
) -> None:
    assert list(outcomes(PAGE.read_text())) == list(outcomes(render(table)))
