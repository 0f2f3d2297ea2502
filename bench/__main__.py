"""`python -m bench`: measure what the project claims, and print it as a table with the targets."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from bench.experiments import EXPERIMENTS, NOT_QUICK
from bench.experiments.cases import FULL, QUICK, Case
from bench.markdown import number, page, picture_path
from bench.pictures import PICTURES
from bench.services import Services
from common.logging import configure_logging
from fdfo_client._arguments import output_file


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0 all targets met, 1 some missed."""
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        description="Measure the services against their baselines: medians of interleaved runs.",
        epilog="example: python -m bench --quick --only modes,re-loop --json figures.json",
    )
    parser.add_argument("--quick", action="store_true", help="five short runs of each case, about three minutes")
    parser.add_argument(
        "--only",
        type=_names,
        metavar="NAME,...",
        help=f"of {', '.join(EXPERIMENTS)} (all; with --quick all but {', '.join(NOT_QUICK)})",
    )
    parser.add_argument(
        "--markdown", type=output_file, metavar="FILE", help="write the tables as a page, its pictures beside it"
    )
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write all figures with the runs behind them")
    arguments = parser.parse_args(argv)
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    torch.set_num_threads(1)
    configure_logging("console", "warning")

    scale = QUICK if arguments.quick else FULL
    started_on = machine()
    print(f"{started_on}; medians of {scale.runs} interleaved runs; targets in brackets\n", flush=True)
    results: dict[str, list[Case]] = {}
    started_at = time.monotonic()
    with tempfile.NamedTemporaryFile(prefix="fdfo-bench-", suffix=".log", delete=False) as log:
        pass
    try:
        with Services(Path(log.name)) as services:
            for name in arguments.only or [
                name for name in EXPERIMENTS if not arguments.quick or name not in NOT_QUICK
            ]:
                experiment = EXPERIMENTS[name]
                print(f"{name}: {experiment.__doc__}", flush=True)
                results[name] = []
                for case in experiment(services, scale, _show_progress):
                    _clear_progress()
                    print(line(case), flush=True)
                    results[name].append(case)
                print(flush=True)
    except RuntimeError as error:
        print(f"bench: {error}; the log of the services is {log.name}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        Path(log.name).unlink()
        return 130
    Path(log.name).unlink()
    missed = [
        f"{case.name}: {target.figure} {number(case.medians[target.figure])}, not {target}"
        for cases in results.values()
        for case in cases
        for target in case.missed()
    ]
    print(
        f"took {time.monotonic() - started_at:.0f} s; "
        + (f"MISSED: {'; '.join(missed)}" if missed else "all targets met")
    )
    if arguments.markdown is not None:
        write_page(arguments.markdown, page(results, started_on, scale.runs), results)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(to_json(results, started_on, scale.runs), indent=1) + "\n")
    return 1 if missed else 0


def line(case: Case) -> str:
    """A case in one line; a figure with a target has it behind, `!` if missed."""
    parts = [f"  {case.name:<34}"]
    for figure, value in case.medians.items():
        bounds = [target for target in case.targets if target.figure == figure]
        marks = "".join(f" [{target}]{'' if target.is_met(case.medians) else '!'}" for target in bounds)
        parts.append(f"{figure} {number(value)}{marks}")
    return "  ".join(parts)


def write_page(path: Path, text: str, results: Mapping[str, Sequence[Case]]) -> None:
    """The page and the pictures it shows."""
    path.write_text(text)
    for name in PICTURES.keys() & results.keys():
        picture = path.parent / picture_path(name)
        picture.parent.mkdir(exist_ok=True)
        picture.write_text(PICTURES[name](results[name]) + "\n")


def to_json(results: dict[str, list[Case]], machine: str, runs: int) -> dict[str, object]:
    return {
        "machine": machine,
        "runs": runs,
        "experiments": {name: [dataclasses.asdict(case) for case in cases] for name, cases in results.items()},
    }


def machine() -> str:
    load = os.getloadavg()[0]
    return (
        f"{os.cpu_count()} cores ({_processor()}), Python {platform.python_version()}, torch {torch.__version__}, "
        f"load average {load:.1f} before"
    )


def _processor() -> str:
    """Its name where the system tells, else its kind."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def _show_progress(what: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\x1b[K  ... {what}", end="", file=sys.stderr, flush=True)


def _clear_progress() -> None:
    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def _names(text: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in EXPERIMENTS]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is not one of {', '.join(EXPERIMENTS)}")
    return names


if __name__ == "__main__":
    sys.exit(main())
