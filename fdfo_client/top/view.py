"""The picture of one refresh: a line of the last minute, and a table each of schedulers and workers. Needs rich."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fdfo_client._types import WorkerInfo
from fdfo_client.commands.words import count, duration
from fdfo_client.top.rates import Rates, SchedulerState, State

Row: TypeAlias = tuple[str | Text, ...]

GAP = 2  # behind each column
# The columns, and how soon a narrow terminal does without them: 0 never, the largest first.
SCHEDULER_COLUMNS = {
    "scheduler": 0, "state": 0, "model": 3, "queued": 0, "running": 0, "rows/fwd": 1, "fwd/s": 2, "tokens/s": 0,
    "blocks/s": 7, "reqs/s": 6, "preempt.": 4, "restarts": 5,
}  # fmt: skip
WORKER_COLUMNS = {
    "worker": 0, "state": 0, "device": 4, "rows": 0, "KV held": 1, "cached": 3, "free": 2, "pages": 5, "in use": 0,
}  # fmt: skip
BARS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float | None]) -> str:
    """A character a value, from 0 to the largest; a blank where there is none."""
    most = max((value for value in values if value is not None), default=0.0)
    last = len(BARS) - 1
    return "".join(
        " " if value is None else BARS[min(int(value / most * len(BARS)), last) if most else 0] for value in values
    )


def render(
    state: State, tokens_per_s: Sequence[float | None], interval_s: float, clock: str, width: int
) -> RenderableType:
    """`tokens_per_s`: of all refreshes that the line shows, the last one now. `clock`: the time of day. `width`: of the
    console, in columns; a narrow one has less columns of the tables."""
    num_gone = sum(scheduler.sample.info is None for scheduler in state.schedulers)
    gone = f" ({num_gone} gone)" if num_gone else ""
    head = Text(f"fdfo top  {clock}  {count(len(state.schedulers), 'scheduler')}{gone}, ")
    head.append(count(len(state.workers), "worker"))
    known = [value for value in tokens_per_s if value is not None]
    line = Text("tokens/s  ")
    line.append(sparkline(tokens_per_s), style="cyan")
    if known:
        line.append(f"  0 to {max(known):.0f}, last {duration(len(tokens_per_s) * interval_s)}")
    parts: list[RenderableType] = [head, line, Text(), _schedulers(state, width), Text()]
    parts.append(_workers(state.workers, width))
    errors = [
        Text(f"{one.sample.target}: {one.sample.error}", style="red") for one in state.schedulers if not one.sample.info
    ]
    errors += [Text(f"{one.target}: {one.last_error}", style="red") for one in state.workers if one.last_error]
    for error in errors:
        error.no_wrap, error.overflow = True, "ellipsis"
    return Group(*parts, *([Text(), *errors] if errors else []))


def _schedulers(state: State, width: int) -> Table:
    rows: list[Row] = []
    for scheduler in state.schedulers:
        info = scheduler.sample.info
        if info is None:
            rows.append((scheduler.sample.target, _state(scheduler)))
            continue
        counters = info.counters
        rows.append(
            (
                scheduler.sample.target,
                _state(scheduler),
                info.served_model_name,
                f"{info.queued}/{info.max_queued_requests}",
                str(info.running),
                *_rate_cells(scheduler.rates),
                str(counters.preemptions),
                str(counters.restarts),
            )
        )
    if len(state.schedulers) > 1:
        totals = state.totals
        cells = (str(totals.queued), str(totals.running), *_rate_cells(totals.rates))
        rows.append(("all", "", "", *cells, str(totals.preemptions), str(totals.restarts)))
    return _table(SCHEDULER_COLUMNS, rows, width)


def _state(scheduler: SchedulerState) -> Text:
    info = scheduler.sample.info
    if info is None:
        return Text(f"gone {duration(scheduler.gone_s)}", style="red")
    if not any(worker.ready for worker in info.workers):
        return Text("no worker", style="red")
    return Text(f"up {duration(info.uptime_s)}", style="green")


def _rate_cells(rates: Rates | None) -> tuple[str, ...]:
    if rates is None:
        return ("-",) * 5
    values = (rates.rows_per_forward, rates.forwards_per_s, rates.tokens_per_s, rates.blocks_per_s)
    return tuple("-" if value is None else f"{value:.1f}" for value in (*values, rates.requests_per_s))


def _workers(workers: Sequence[WorkerInfo], width: int) -> Table:
    rows: list[Row] = [
        (
            worker.target,
            Text("ready", style="green") if worker.ready else Text("not ready", style="red"),
            f"{worker.device} {worker.dtype}".strip() or "-",
            f"{worker.rows}/{worker.max_rows}",
            *(str(pages) for pages in (worker.pages_held, worker.pages_cached, worker.pages_free, worker.pages_total)),
            f"{worker.pages_held / worker.pages_total:.0%}" if worker.pages_total else "-",
        )
        for worker in workers
    ]
    return _table(WORKER_COLUMNS, rows, width)


def _table(columns: Mapping[str, int], rows: Sequence[Row], width: int) -> Table:
    """Of the columns those that fit: the first three are words, the others numbers. Only the first is ever cut."""
    cells = {name: [row[place] if place < len(row) else "" for row in rows] for place, name in enumerate(columns)}
    widths = {name: GAP + max(cell_len(str(cell)) for cell in (name, *column)) for name, column in cells.items()}
    shown = sorted(columns, key=columns.__getitem__)
    while columns[shown[-1]] and sum(widths[name] for name in shown) > width:
        shown.pop()
    table = Table(box=None, padding=(0, GAP, 0, 0), header_style="reverse")
    words, names = list(columns)[:3], [name for name in columns if name in shown]
    for name in names:
        is_first = name == words[0]
        table.add_column(name, no_wrap=not is_first, overflow="ellipsis", justify="left" if name in words else "right")
    for place, row in enumerate(rows):
        table.add_row(*(cells[name][place] for name in names), style="bold" if row[0] == "all" else None)
    return table
