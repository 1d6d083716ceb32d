"""A picture of a run's rows: the time of each implementation, case by case. Needs matplotlib."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from lora_kernels.bench.harness import Row

_INCHES_PER_BAR = 0.16


def plot_rows(rows: Sequence[Row], path: Path, machine: str) -> None:
    """Write bars on a logarithmic axis, one group a case, with p20 and p80 as whiskers.

    Args:
        rows: of one run; those of `bandwidth` are left out.
        path: of the picture; its ending chooses the format.
        machine: written under the title.
    """
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt
    from matplotlib.patches import Patch

    shown = [row for row in rows if row.op != "bandwidth"]
    names = sorted({row.implementation for row in shown})
    colours = {name: f"C{index % 10}" for index, name in enumerate(names)}
    figure, axes = plt.subplots(
        figsize=(10, 2 + _INCHES_PER_BAR * len(shown)), layout="constrained"
    )
    labels, places, place, case = [], [], 0.0, ""
    for row in shown:
        if _case(row) != case:
            case, place = _case(row), place + 1
            labels.append(case)
            places.append(place)
        below, above = max(0.0, row.p50_us - row.p20_us), max(0.0, row.p80_us - row.p50_us)
        colour = colours[row.implementation]
        axes.barh(place, row.p50_us, 0.9, xerr=[[below], [above]], color=colour, ecolor="grey")
        place += 1
    axes.set_yticks(places, labels, fontsize=6)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlabel("microseconds, median (p20 to p80)")
    axes.set_title(machine, fontsize=6)
    handles = [Patch(color=colours[name]) for name in names]
    axes.legend(handles, names, fontsize=6)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _case(row: Row) -> str:
    return (
        f"{row.op} {row.model} {row.mode} {row.popularity}, {row.tokens} tokens, "
        f"{row.slots} slots, rank {row.rank}"
    )
