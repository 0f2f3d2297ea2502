"""What `fdfo bench` and `fdfo replay` have in common: a load with its progress, and its report."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import json
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from fdfo_client._access import ACCESS_ARGUMENTS
from fdfo_client._arguments import above_zero, output_file, output_file_or_dash
from fdfo_client._errors import FdfoError
from fdfo_client._waiting import waiting
from fdfo_client.bench.load import Load
from fdfo_client.bench.measure import Measurement, World, measure
from fdfo_client.bench.progress import progress
from fdfo_client.bench.report import Report, table, to_json
from fdfo_client.bench.workload import Item, Lengths

# Of an extra, packages that tell whether it is installed.
EXTRA = {"bench": ("jinja2", "matplotlib", "numpy", "rich")}


def add_output_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--timeout", type=above_zero, metavar="SECONDS", help="a request fails after so long (never)")
    add("--json", type=output_file_or_dash, metavar="FILE", help="write all figures as JSON; - is standard output")
    add("--html", type=output_file, metavar="FILE", help="write a page with figures, their definitions and plots")


def require(extras: Mapping[str, Iterable[str]]) -> None:
    """Raises FdfoError naming the extras of which a package is missing."""
    missing = [
        extra for extra, names in extras.items() if any(importlib.util.find_spec(name) is None for name in names)
    ]
    if missing:
        raise FdfoError(
            f"this command needs more than the client: install the extra: pip install 'fdfo[{','.join(missing)}]'"
        )


async def run(
    world: World,
    items: Iterable[Item],
    *,
    total: int | None,
    concurrency: int | None,
    duration_s: float | None = None,
) -> Measurement:
    """Measure a load (see `Load.run`) with its progress on stderr; Ctrl-C cuts it short."""
    with progress("measuring", total) as on_progress:
        load = Load(world.stream, on_progress)
        with _on_interrupt(load.cut_short):
            return await measure(world, load, items, concurrency=concurrency, duration_s=duration_s)


def finish(report: Report, arguments: argparse.Namespace) -> int:
    """Write what the flags ask for, the table to standard output if nothing else goes there. The exit status."""
    as_json = json.dumps(to_json(report)) + "\n"
    print(as_json if arguments.json == "-" else "\n".join(table(report)) + "\n", end="", flush=True)
    if isinstance(arguments.json, Path):
        _write("--json", arguments.json, as_json)
    if arguments.html is not None:
        from fdfo_client.bench.page import render

        with waiting(f"drawing {arguments.html}"):
            page = render(report)
        _write("--html", arguments.html, page)
    if report.measurement.was_cut_short:
        return 130
    return 1 if report.summary.requests_failed or not report.summary.requests_ok else 0


def settings_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """The flags as JSON has them."""
    others = ("command", "main", "target", "virtual_flags", *ACCESS_ARGUMENTS)
    return {name: plain(value) for name, value in vars(arguments).items() if name not in others} | {
        "target": list(arguments.target)
    }


def plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path | Lengths) else value


def _write(flag: str, path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise FdfoError(f"{flag} {path}: {error.strerror}") from None


@contextlib.contextmanager
def _on_interrupt(call: Callable[[], None]) -> Iterator[None]:
    """Call this on SIGINT, instead of what is usual."""
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, call)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)
