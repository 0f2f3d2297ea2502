"""The picture of one refresh: a line of the last minute, and a table each of schedulers and workers. Needs rich."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fdfo_client._types import WorkerInfo
from fdfo_client.commands.words import count, duration
from fdfo_client.top.rates import Rates, SchedulerState, State

BARS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float | None]) -> str:
    """A character a value, from 0 to the largest; a blank where there is none."""
    most = max((value for value in values if value is not None), default=0.0)
    last = len(BARS) - 1
    return "".join(
        " " if value is None else BARS[min(int(value / most * len(BARS)), last) if most else 0] for value in values
    )


def render(state: State, tokens_per_s: Sequence[float | None], interval_s: float, clock: str) -> RenderableType:
    """`tokens_per_s`: of all refreshes that the line shows, the last one now. `clock`: the time of day."""
    num_gone = sum(scheduler.sample.info is None for scheduler in state.schedulers)
    gone = f" ({num_gone} gone)" if num_gone else ""
    head = Text(f"fdfo top  {clock}  {count(len(state.schedulers), 'scheduler')}{gone}, ")
    head.append(count(len(state.workers), "worker"))
    known = [value for value in tokens_per_s if value is not None]
    line = Text("tokens/s  ")
    line.append(sparkline(tokens_per_s), style="cyan")
    if known:
        line.append(f"  0 to {max(known):.0f}, last {duration(len(tokens_per_s) * interval_s)}")
    parts: list[RenderableType] = [head, line, Text(), _schedulers(state), Text(), _workers(state.workers)]
    errors = [
        Text(f"{one.sample.target}: {one.sample.error}", style="red") for one in state.schedulers if not one.sample.info
    ]
    errors += [Text(f"{one.target}: {one.last_error}", style="red") for one in state.workers if one.last_error]
    for error in errors:
        error.no_wrap, error.overflow = True, "ellipsis"
    return Group(*parts, *([Text(), *errors] if errors else []))


def _schedulers(state: State) -> Table:
    table = _table("scheduler", "state", "model")
    for name in ("queued", "running", "rows/fwd", "fwd/s", "tokens/s", "blocks/s", "reqs/s", "preempt.", "restarts"):
        table.add_column(name, justify="right")
    for scheduler in state.schedulers:
        info = scheduler.sample.info
        if info is None:
            table.add_row(scheduler.sample.target, _state(scheduler))
            continue
        counters = info.counters
        table.add_row(
            scheduler.sample.target,
            _state(scheduler),
            info.served_model_name,
            f"{info.queued}/{info.max_queued_requests}",
            str(info.running),
            *_rate_cells(scheduler.rates),
            str(counters.preemptions),
            str(counters.restarts),
        )
    if len(state.schedulers) > 1:
        totals = state.totals
        cells = (str(totals.queued), str(totals.running), *_rate_cells(totals.rates))
        table.add_row("all", "", "", *cells, str(totals.preemptions), str(totals.restarts), style="bold")
    return table


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


def _workers(workers: Sequence[WorkerInfo]) -> Table:
    table = _table("worker", "state", "device")
    for name in ("rows", "KV held", "cached", "free", "pages", "in use"):
        table.add_column(name, justify="right")
    for worker in workers:
        table.add_row(
            worker.target,
            Text("ready", style="green") if worker.ready else Text("not ready", style="red"),
            f"{worker.device} {worker.dtype}".strip() or "-",
            f"{worker.rows}/{worker.max_rows}",
            *(str(pages) for pages in (worker.pages_held, worker.pages_cached, worker.pages_free, worker.pages_total)),
            f"{worker.pages_held / worker.pages_total:.0%}" if worker.pages_total else "-",
        )
    return table


def _table(*names: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="reverse")
    for name in names:
        table.add_column(name, no_wrap=True)
    return table
