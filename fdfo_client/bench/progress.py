"""What a person sees on stderr while a load runs."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import TypeAlias

from fdfo_client.bench.load import Load

EVERY_S = 5.0
REDRAW_EVERY_S = 0.1

OnProgress: TypeAlias = Callable[[Load], None]


@contextlib.contextmanager
def progress(what: str, total: int | None) -> Iterator[OnProgress]:
    """A bar on a terminal, else a line every few seconds. total: requests to come, None if nobody knows."""
    with _bar(what, total) if sys.stderr.isatty() else _lines(what, total) as on_progress:
        yield on_progress


def status(load: Load) -> str:
    """The state of a load in a few words."""
    return (
        f"{load.num_ended - load.num_failed} done, {load.num_failed} failed, {load.num_in_flight} in flight, "
        f"{load.num_tokens} tokens"
    )


@contextlib.contextmanager
def _bar(what: str, total: int | None) -> Iterator[OnProgress]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn(what), BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total)
        yield _at_most_every(
            REDRAW_EVERY_S, lambda load: bar.update(task, completed=load.num_ended, description=status(load))
        )


@contextlib.contextmanager
def _lines(what: str, total: int | None) -> Iterator[OnProgress]:
    of = "" if total is None else f" of {total}"
    yield _at_most_every(
        EVERY_S,
        lambda load: print(f"{what}: {len(load.records)}{of} sent, {status(load)}", file=sys.stderr, flush=True),
    )


def _at_most_every(seconds: float, show: OnProgress) -> OnProgress:
    """show, called for the first time after so many seconds: a person's, also when the load's time is virtual."""
    shown_at: float | None = None

    def on_progress(load: Load) -> None:
        nonlocal shown_at
        now = time.monotonic()
        if shown_at is None:
            shown_at = now
        elif now - shown_at >= seconds:
            shown_at = now
            show(load)

    return on_progress
