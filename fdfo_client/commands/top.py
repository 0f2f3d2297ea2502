"""`fdfo top`: schedulers and workers, live."""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import importlib.util
import itertools
import json
import sys
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from datetime import datetime

from fdfo_client._access import access_from
from fdfo_client._arguments import above_zero
from fdfo_client._errors import FdfoError
from fdfo_client.commands.flags import add_target
from fdfo_client.top.rates import History, State
from fdfo_client.top.sampling import Sampler

HISTORY = 60  # refreshes in the line of the last values
PLAIN_WIDTH = 140  # columns where there is no terminal
MIN_TIMEOUT_S = 1.0

EXAMPLES = """\
examples:
  fdfo top                                       # Ctrl-C ends it
  fdfo top --target a:50051,b:50051
  fdfo top --target dns:///schedulers:50051      # each scheduler behind the name, also those that come later
  fdfo top --once                                # one view, after one interval, so that rates are known
  fdfo top --json --interval 10 >> load.jsonl

Rates are what a scheduler's counters grew by since the last refresh. Preemptions and restarts count from its start.
A narrow terminal does without some of the columns.
With --once the exit status is 1 when a scheduler does not answer."""

Show = Callable[[State], None]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `fdfo top`."""
    parser.description = "Show schedulers, workers, queue, running rows, KV pages and rates, refreshed each second."
    parser.epilog = EXAMPLES
    add_target(parser)
    parser.add_argument("--interval", type=above_zero, default=1.0, metavar="S", help="seconds between refreshes (1)")
    parser.add_argument("--once", action="store_true", help="show one view, then end")
    parser.add_argument("--json", action="store_true", help="print one line of JSON a refresh")


def main(arguments: argparse.Namespace) -> int:
    """`fdfo top`. Raises FdfoError without the package rich, but for --json."""
    if not arguments.json and importlib.util.find_spec("rich") is None:
        raise FdfoError("top: the picture needs the package rich: pip install 'fdfo[cli]'; --json does without")
    return asyncio.run(_top(arguments))


async def _top(arguments: argparse.Namespace) -> int:
    sampler = Sampler(arguments.target, access_from(arguments))
    async with contextlib.aclosing(_states(sampler, arguments.interval)) as states:
        with _json_lines() if arguments.json else _picture(arguments.interval, is_live=not arguments.once) as show:
            number = 0
            async for state in states:
                if not arguments.once:
                    show(state)
                elif number == 1:
                    show(state)
                    return 1 if any(scheduler.sample.info is None for scheduler in state.schedulers) else 0
                number += 1
    raise AssertionError("it goes on until it is interrupted")


async def _states(sampler: Sampler, interval_s: float) -> AsyncGenerator[State, None]:
    """A state at each multiple of the interval from now on; those that the answers took longer than are left out."""
    history, started_at = History(), time.monotonic()
    try:
        for _ in itertools.count():
            yield history.state(await sampler.sample(max(interval_s, MIN_TIMEOUT_S)))
            passed_s = time.monotonic() - started_at
            await asyncio.sleep(interval_s - passed_s % interval_s)
    finally:
        await sampler.close()


@contextlib.contextmanager
def _json_lines() -> Iterator[Show]:
    yield lambda state: print(json.dumps(state.to_json(time.time())), flush=True)


@contextlib.contextmanager
def _picture(interval_s: float, *, is_live: bool) -> Iterator[Show]:
    """On a terminal a picture that changes, else one after the other."""
    from rich.console import Console
    from rich.live import Live

    from fdfo_client.top.view import render

    console = Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH)
    tokens_per_s: collections.deque[float | None] = collections.deque(maxlen=HISTORY)
    live = Live(console=console, screen=True, auto_refresh=False) if is_live and console.is_terminal else None

    def show(state: State) -> None:
        tokens_per_s.append(None if state.totals.rates is None else state.totals.rates.tokens_per_s)
        picture = render(state, tokens_per_s, interval_s, datetime.now().strftime("%H:%M:%S"), console.width)
        if live is not None:
            live.update(picture, refresh=True)
        else:
            console.print(picture)
            console.print()

    with live or contextlib.nullcontext():
        yield show
