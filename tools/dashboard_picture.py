"""`make dashboard-picture`: the Grafana dashboard of deploy/k8s, evaluated by Prometheus on scrapes of a real load.

Two schedulers and two workers with the simulated device serve a little load, then more than they can, and then one
worker is killed. Each panel's own queries are asked over that time.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import yaml

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

ROOT = Path(__file__).resolve().parents[1]
DASHBOARD = ROOT / "deploy/k8s/components/monitoring/dashboard.json"
PICTURE = ROOT / "docs/pictures/dashboard.png"
MODEL = ROOT / "models/simulated-h200-llada2-mini"
ROWS = 8  # at each worker; few, so that a small load fills them
PHASE_S = 30.0
RATES = (6.0, 36.0)  # requests per second
KILL_AFTER_S = 20.0
SCRAPE_S = 1
RATE_INTERVAL = "8s"  # what Grafana puts in for $__rate_interval
START_S = 60.0
COLUMNS = 3

Line = tuple[str, list[tuple[float, float]]]  # name; times and values


def start(*words: str) -> tuple[subprocess.Popen[str], dict[str, Any]]:
    """A service, and its ready line."""
    command = [sys.executable, "-m", words[0], f"--model-path={MODEL}", "--port=0", "--metrics-port=0", *words[1:]]
    command += ["--log-level=warning"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stdout is not None
    return process, json.loads(process.stdout.readline())


@dataclass
class Measured:
    """Each panel with its lines, and what happened when; times are seconds since the load began."""

    panels: list[tuple[dict[str, Any], list[Line]]]
    marks: dict[str, float]


def bench(targets: list[str], rate: float) -> subprocess.Popen[bytes]:
    """Requests of many lengths, for one phase."""
    words = ["bench", "--target", ",".join(targets), "--rate", str(rate), "--duration", str(PHASE_S)]
    words += ["--output-tokens", "32:256", "--prompt-tokens", "32:200"]
    quiet = subprocess.DEVNULL
    return subprocess.Popen([sys.executable, "-m", "fdfo_client", *words], cwd=ROOT, stdout=quiet, stderr=quiet)


@contextlib.contextmanager
def prometheus(folder: Path, scraped: dict[str, str]) -> Iterator[str]:
    """A Prometheus that scrapes these addresses by the name of their pod; yields its own address."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    jobs = [{"targets": [one], "labels": {"namespace": "fdfo", "pod": pod}} for pod, one in scraped.items()]
    configuration = {
        "global": {"scrape_interval": f"{SCRAPE_S}s", "scrape_timeout": f"{SCRAPE_S}s"},
        "scrape_configs": [{"job_name": "fdfo", "static_configs": jobs}],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(configuration))
    command = ["prometheus", f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}"]
    command += [f"--web.listen-address={address}", "--log.level=error"]
    process = subprocess.Popen(command)
    try:
        deadline = time.monotonic() + START_S
        while True:
            try:
                urllib.request.urlopen(f"http://{address}/-/ready", timeout=5).close()
                break
            except OSError:
                if time.monotonic() > deadline or process.poll() is not None:
                    raise
                time.sleep(0.1)
        yield address
    finally:
        process.terminate()
        process.wait()


def ask(address: str, query: str, begin: float, end: float) -> list[tuple[dict[str, str], list[tuple[float, float]]]]:
    """The lines of a query over a time: labels, and pairs of time and value."""
    query = query.replace("$namespace", ".*").replace("$__rate_interval", RATE_INTERVAL)
    words = urllib.parse.urlencode({"query": query, "start": begin, "end": end, "step": SCRAPE_S})
    with urllib.request.urlopen(f"http://{address}/api/v1/query_range?{words}", timeout=30) as reply:
        result = json.load(reply)["data"]["result"]
    return [(line["metric"], [(at, float(value)) for at, value in line["values"]]) for line in result]


def measure(folder: Path) -> Measured:
    """The load, and what Prometheus saw of it."""
    workers = [start("worker_svc", f"--max-running-requests={ROWS}") for _ in range(2)]
    addresses = ",".join(ready["target"] for _, ready in workers)
    schedulers = [start("scheduler_svc", f"--workers={addresses}", "--max-queued-requests=128") for _ in range(2)]
    targets = [ready["target"] for _, ready in schedulers]
    pods = {f"worker-{number}": ready["metrics"] for number, (_, ready) in enumerate(workers)}
    pods |= {f"scheduler-{number}": ready["metrics"] for number, (_, ready) in enumerate(schedulers)}
    try:
        with prometheus(folder, pods) as address:
            time.sleep(3 * SCRAPE_S)
            begin = time.time()
            bench(targets, RATES[0]).wait()
            marks = {"more than fits": time.time() - begin}
            load = bench(targets, RATES[1])
            time.sleep(KILL_AFTER_S)
            workers[1][0].kill()
            marks["a worker dies"] = time.time() - begin
            load.wait()
            time.sleep(KILL_AFTER_S / 2)
            end = time.time()
            panels = json.loads(DASHBOARD.read_text())["panels"]
            return Measured([(panel, lines_of(panel, address, begin, end)) for panel in panels], marks)
    finally:
        for process, _ in workers + schedulers:
            process.terminate()
        for process, _ in workers + schedulers:
            process.wait()


def lines_of(panel: dict[str, Any], address: str, begin: float, end: float) -> list[Line]:
    """A panel's lines with the names that Grafana would show."""
    lines = []
    for target in panel["targets"]:
        for labels, points in ask(address, target["expr"], begin, end):
            name = target["legendFormat"]
            for label, value in labels.items():
                name = name.replace("{{" + label + "}}", value)
            lines.append((name, [(at - begin, value) for at, value in points if not math.isnan(value)]))
    return lines


def tick(unit: str) -> FuncFormatter:
    """Numbers on an axis, as Grafana's unit has them."""
    if unit == "percentunit":
        return FuncFormatter(lambda value, _: f"{100 * value:.0f} %")
    if unit == "bytes":
        return FuncFormatter(lambda value, _: f"{value / 2**20:.0f} MiB")
    if unit == "s":
        return FuncFormatter(lambda value, _: f"{value:g} s" if value >= 1 or not value else f"{1000 * value:g} ms")
    return FuncFormatter(lambda value, _: f"{value:g}")


def draw_panel(axes: Axes, panel: dict[str, Any], lines: list[Line], marks: dict[str, float]) -> None:
    for name, points in lines:
        axes.plot([at for at, _ in points], [value for _, value in points], label=name, linewidth=1)
    for at in marks.values():
        axes.axvline(at, color="0.8", linewidth=0.8, zorder=0)
    axes.set_title(panel["title"], fontsize=9, loc="left")
    axes.set_ylim(0, axes.get_ylim()[1] * (1.2 + 0.1 * (len(lines) > 2)))  # room for the legend
    axes.yaxis.set_major_formatter(tick(panel["fieldConfig"]["defaults"]["unit"]))
    axes.tick_params(labelsize=7)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=6, frameon=False, loc="upper left", ncols=2)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.dashboard_picture", description=__doc__)
    parser.add_argument("--out", type=Path, default=PICTURE, metavar="FILE", help="default: %(default)s")
    arguments = parser.parse_args()
    if shutil.which("prometheus") is None:
        print("prometheus is missing; on Debian: apt-get install prometheus", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as folder:
        measured = measure(Path(folder))
    panels = measured.panels
    rows = -(-len(panels) // COLUMNS)
    figure, grid = plt.subplots(rows, COLUMNS, figsize=(13, 2.1 * rows), sharex=True, constrained_layout=True)
    for axes, (panel, lines) in zip(grid.flat, panels, strict=False):
        draw_panel(axes, panel, lines, measured.marks)
    for axes in grid[-1]:
        axes.set_xlabel("seconds", fontsize=8)
    for axes in grid[0]:
        for words, at in measured.marks.items():
            axes.text(at, axes.get_ylim()[1], f" {words}", fontsize=6, color="0.4", va="bottom")
    figure.savefig(arguments.out, dpi=90)
    empty = [panel["title"] for panel, lines in panels if not any(points for _, points in lines)]
    if empty:
        print(f"panels without data: {', '.join(empty)}", file=sys.stderr)
    return 1 if empty else 0


if __name__ == "__main__":
    sys.exit(main())
