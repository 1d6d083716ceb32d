"""The picture of a benchmark; needs matplotlib, from the extra `bench`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from lora_kernels import Backend
from lora_kernels.bench.cases import Case
from lora_kernels.bench.measure import Options, measure_bandwidth, measure_case
from lora_kernels.bench.plot import plot_rows
from lora_kernels.testing import Popularity

if TYPE_CHECKING:
    from pathlib import Path

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


def test_rows_become_a_picture(tmp_path: Path) -> None:
    options = Options(backends=(Backend.ATEN,), device=torch.device("cpu"), seconds=0.0)
    rows, bandwidth = measure_bandwidth(options)
    for popularity in (Popularity.DISTINCT, Popularity.IDENTICAL):
        case = Case(op="shrink", model="smollm2-135m", popularity=popularity, tokens=2, slots=2)
        rows += measure_case(case, options, bandwidth)

    plot_rows(rows, tmp_path / "rows.png", "a machine")

    assert (tmp_path / "rows.png").read_bytes().startswith(PNG_SIGNATURE)
