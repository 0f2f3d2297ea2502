"""The plots of a report as SVG."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fdfo_client.bench import metrics
from fdfo_client.bench.load import Record
from fdfo_client.bench.report import Report

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_POINTS = 400


@dataclass(frozen=True)
class Plot:
    """An <svg> element, what it shows, and how that is defined."""

    caption: str
    definition: str
    svg: str


def plots(report: Report) -> list[Plot]:
    """All plots of a page; one without data says so."""
    records = report.measurement.records
    ok = [record for record in records if record.is_ok]
    block_size = report.server.block_size
    wall_s = report.measurement.wall_s
    per_block = list(metrics.time_per_block_ms(ok, block_size))
    forwards = list(metrics.forwards_per_block(ok, block_size))
    share = "share of the samples that took at most so long; lines at p50, p95 and p99"
    drawings: list[tuple[str, str, Callable[[Axes], None]]] = [
        ("Time to first tokens", share, lambda axes: _cdf(axes, list(metrics.ttft_ms(ok)), "ttft_ms")),
        ("Time per block", share, lambda axes: _cdf(axes, per_block, "time_per_block_ms")),
        ("End to end", share, lambda axes: _cdf(axes, list(metrics.end_to_end_ms(ok)), "end_to_end_ms")),
        (
            "Output tokens per second over time",
            "output tokens of all requests in bins of equal width",
            lambda axes: _tokens_over_time(axes, records, wall_s),
        ),
        (
            "Requests in flight over time",
            "requests that were sent and had not ended",
            lambda axes: _in_flight(axes, records, wall_s),
        ),
        (
            "Forwards per block",
            "forwards of a request between two Committed events, by the blocks of the later one; of requests_ok",
            lambda axes: _histogram(axes, forwards),
        ),
    ]
    return [Plot(caption, definition, _element(svg(caption, draw))) for caption, definition, draw in drawings]


def svg(caption: str, draw: Callable[[Axes], None], *, transparent: bool = True) -> str:
    """The <svg> element of a file of its own, without metadata; the same drawing gives the same text."""
    import matplotlib
    from matplotlib.figure import Figure

    # The salt makes the ids that are referred to those of this plot alone, and the same on every run.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": caption}):
        figure = Figure(figsize=(5.2, 2.9), layout="constrained")
        axes = figure.add_subplot()
        axes.spines[["top", "right"]].set_visible(False)
        draw(axes)
        out = io.StringIO()
        figure.savefig(out, format="svg", transparent=transparent, metadata={"Date": None, "Creator": None})
    text = out.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"\s*<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'<g id="[^"]*">', "<g>", text)
    return text.replace("<svg", f'<svg role="img" aria-label="{caption}"', 1)


def _element(text: str) -> str:
    """An <svg> element to stand in a page, without links."""
    return re.sub(r'\sxmlns(:xlink)?="[^"]*"', "", text)  # HTML knows both


def _cdf(axes: Axes, values: Sequence[float], label: str) -> None:
    import numpy as np

    axes.set(xlabel=label, ylabel="share of samples", ylim=(0, 1.02))
    if not values:
        return _empty(axes)
    shares = np.linspace(0, 1, MAX_POINTS + 1)
    axes.plot(np.quantile(values, shares), shares)
    axes.set_xlim(left=0)
    for share in (0.5, 0.95, 0.99):
        axes.axhline(share, color="0.8", linewidth=0.8, zorder=0)


def _tokens_over_time(axes: Axes, records: Sequence[Record], wall_s: float) -> None:
    import numpy as np

    axes.set(xlabel="seconds from the load's start", ylabel="output tokens / s")
    commits = [commit for record in records for commit in record.commits]
    if not commits or wall_s <= 0:
        return _empty(axes)
    # About ten events a bin, so that the line shows the rate and not the events.
    num_bins = max(1, min(MAX_POINTS // 4, len(commits) // 10))
    tokens, edges = np.histogram(
        [commit.at_s for commit in commits],
        bins=num_bins,
        range=(0, wall_s),
        weights=[commit.num_tokens for commit in commits],
    )
    axes.stairs(tokens / (wall_s / num_bins), edges, fill=True, alpha=0.4)
    axes.set(xlim=(0, wall_s), ylim=(0, None))


def _in_flight(axes: Axes, records: Sequence[Record], wall_s: float) -> None:
    import numpy as np

    axes.set(xlabel="seconds from the load's start", ylabel="requests in flight")
    if not records or wall_s <= 0:
        return _empty(axes)
    at_s = np.linspace(0, wall_s, MAX_POINTS + 1)
    sent = np.sort([record.sent_at_s for record in records])
    ended = np.sort([record.ended_at_s for record in records if record.ended_at_s is not None])
    in_flight = np.searchsorted(sent, at_s, side="right") - np.searchsorted(ended, at_s, side="right")
    axes.plot(at_s, in_flight, drawstyle="steps-post")
    axes.set(xlim=(0, wall_s), ylim=(0, None))


def _histogram(axes: Axes, values: Sequence[float]) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set(xlabel="forwards per block", ylabel="blocks")
    if not values:
        return _empty(axes)
    top = math.ceil(max(values))
    width = top // 100 + 1
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.hist(values, bins=[edge - 0.5 for edge in range(0, top + 1 + width, width)], rwidth=0.9)


def _empty(axes: Axes) -> None:
    axes.text(0.5, 0.5, "no data", ha="center", va="center", transform=axes.transAxes)
