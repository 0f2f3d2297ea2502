"""`python -m tests.chaos`, or `fdfo chaos` in a checkout: run scenarios of faults against real processes.

Exit status: 0 all passed (or skipped), 1 one failed, 2 wrong usage, 130 ended by Ctrl-C.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import sys
import time
from collections.abc import Sequence
from datetime import date
from pathlib import Path

from tests.chaos.runner import Result, run_scenario, shown
from tests.chaos.scenario import BadScenario, Scenario, names, read

BEGIN, END = "<!-- results: written by `fdfo chaos --markdown` -->", "<!-- end of results -->"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="fdfo chaos",
        description="Inject faults into real processes on this machine and check what must hold.",
        epilog="examples:\n  fdfo chaos --list\n  fdfo chaos worker-kills\n  fdfo chaos worker-kills --short\n"
        "  fdfo chaos all --markdown docs/reliability.md",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "scenarios", nargs="*", metavar="SCENARIO", help="names, a .toml file, or all (every one but soak)"
    )
    parser.add_argument("--list", action="store_true", help="print the scenarios that there are")
    parser.add_argument("--short", action="store_true", help="the short versions, as in the tests")
    parser.add_argument("--quiet", action="store_true", help="no progress on stderr")
    parser.add_argument(
        "--markdown", type=Path, metavar="FILE", help="put the table between the marks of results in this page"
    )
    arguments = parser.parse_args(argv)
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    try:
        chosen = _chosen(arguments.scenarios or (names() if arguments.list else []), arguments.short)
        if not chosen:
            parser.error("name a scenario, or all; --list prints them")
        if arguments.list:
            print("\n".join(f"{scenario.name:<20} {scenario.summary}" for scenario in chosen))
            return 0
        if arguments.markdown is not None and BEGIN not in arguments.markdown.read_text():
            parser.error(f"{arguments.markdown} has no line {BEGIN}")
        results = [_run(scenario, arguments.quiet) for scenario in chosen]
    except BadScenario as error:
        print(f"fdfo chaos: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    table = markdown(results)
    if len(results) > 1:
        print(table)
    if arguments.markdown is not None:
        arguments.markdown.write_text(_with_results(arguments.markdown.read_text(), table))
    return int(any(result.faults for result in results))


def _chosen(words: Sequence[str], short: bool) -> list[Scenario]:
    everything = [name for name in names() if name != "soak"]
    return [read(name, short=short) for word in words for name in (everything if word == "all" else [word])]


def _run(scenario: Scenario, quiet: bool) -> Result:
    started_at = time.monotonic()

    def say(line: str) -> None:
        if not quiet:
            print(f"{scenario.name} {time.monotonic() - started_at:6.1f} s  {line}", file=sys.stderr, flush=True)

    result = asyncio.run(run_scenario(scenario, say))
    print("\n".join(result.lines()), flush=True)
    return result


def markdown(results: Sequence[Result]) -> str:
    """The table of results."""
    lines = [
        f"{date.today().isoformat()}, {os.cpu_count()} cores, Python {platform.python_version()}:",
        "",
        "| scenario | what | result |",
        "|---|---|---|",
    ]
    for result in results:
        lines.append(f"| `{result.scenario.name}` | {result.scenario.summary} | {_in_a_cell(result)} |")
    return "\n".join(lines)


def _in_a_cell(result: Result) -> str:
    if result.faults:
        return f"**failed**: {result.faults[0]}".replace("|", "/")
    if result.skipped:
        return f"skipped: {result.skipped}"
    runs = []
    for run in result.runs:
        figures = {
            name: value for name, value in run.figures.items() if value or name.startswith(("failed", "recovery"))
        }
        told = [f"{name} {shown(value)}" for name, value in figures.items()] + [
            note for note in run.notes if note.startswith("refused")
        ]
        runs.append((f"{run.name}: " if run.name else "") + ", ".join(told))
    return "passed: " + "; ".join(runs)


def _with_results(page: str, table: str) -> str:
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{table}\n\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    sys.exit(main())
