"""The pictures beside the tables (docs/pictures), by experiment."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from bench.experiments.cases import Case
from bench.experiments.growing import CONTEXTS, ROWS, case_name
from fdfo_client.bench.plots import svg

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def growth(cases: Sequence[Case]) -> str:
    """Host time of a round by rows, a line for each length of context. An <svg> element."""
    host_ms = {case.name: case.medians["host ms/round"] for case in cases if "host ms/round" in case.medians}

    def draw(axes: Axes) -> None:
        axes.set(xlabel="rows", ylabel="host ms a round")
        for context in CONTEXTS:
            values = [host_ms[case_name(num_rows, context)] for num_rows in ROWS]
            axes.plot(ROWS, values, marker="o", markersize=3, label=f"{context} tokens of context")
        axes.set(xlim=(0, None), ylim=(0, None), xticks=ROWS)
        axes.legend(frameon=False)

    return svg("Host time of a round by rows and context", draw, transparent=False)


PICTURES: Mapping[str, Callable[[Sequence[Case]], str]] = {"growth": growth}
