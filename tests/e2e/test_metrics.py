"""Metrics and health of both services as processes."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client.parser import text_string_to_metric_families

from fdfo.scheduler.v1 import scheduler_pb2 as api
from fdfo.scheduler.v1 import scheduler_pb2_grpc
from fdfo_client import Client
from scheduler_svc.server import SERVICE_NAME as SCHEDULER
from tests.e2e.served import MODEL, POLL_S, ROOT, service_ready
from worker_svc.fault_hook import HANG_TOKEN_ID
from worker_svc.server import SERVICE_NAME as WORKER

PAGE = (ROOT / "docs/metrics.md").read_text()
HANG_TOKEN = 299
STALL_TIMEOUT_S = 3.0
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING

Series = dict[str, tuple[str, frozenset[str]]]  # type and labels by name


@dataclass(frozen=True)
class Running:
    """Both services after a request. `idle`: processor seconds of the scheduler until it served, and its memory."""

    target: str
    worker_target: str
    worker: subprocess.Popen[bytes]
    metrics: dict[str, str]  # addresses
    idle: tuple[float, int]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("metrics")
    ports = ("--metrics-port", "0")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(HANG_TOKEN_ID, str(HANG_TOKEN))
        of_worker = service_ready(folder / "worker", "worker_svc", *ports, "--stall-timeout-s", f"{STALL_TIMEOUT_S:g}")
        with of_worker as (worker_process, worker):
            of_scheduler = service_ready(folder / "scheduler", "scheduler_svc", *ports, "--workers", worker["target"])
            with of_scheduler as (process, scheduler):
                idle = cpu_and_memory(process.pid)
                with Client(scheduler["target"]) as client:
                    client.wait_ready(20)
                    client.generate("Count from 3 to 7.", max_new_tokens=64, timeout=60)
                metrics = {"scheduler": scheduler["metrics"], "worker": worker["metrics"]}
                yield Running(scheduler["target"], worker["target"], worker_process, metrics, idle)


def cpu_and_memory(pid: int) -> tuple[float, int]:
    """Seconds of processor time, and resident bytes."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    ticks = int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK"), int(fields[21]) * os.sysconf("SC_PAGE_SIZE")


def scrape(running: Running, service: str) -> str:
    with urllib.request.urlopen(f"http://{running.metrics[service]}/metrics", timeout=20) as page:
        return str(page.read().decode())


def listed(*sections: str) -> Series:
    """What the tables of these sections of the page list."""
    found: Series = {}
    for section in sections:
        text = PAGE.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
        for name, kind, labels, unit, meaning in re.findall(
            r"^\| `(\w+)` \| (\w+) \| (.*) \| (.+) \| (.+) \|$", text, re.M
        ):
            assert name not in found and unit.strip() and meaning.strip(), name
            found[name] = kind, frozenset(re.findall(r"`(\w+)`", labels))
    return found


def seen(page: str) -> Series:
    """What a scrape has."""
    labels: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            labels.setdefault(family.name, set()).update(sample.labels)
    types = re.findall(r"^# TYPE (\S+) (\S+)$", page, re.MULTILINE)
    return {
        name: (kind, frozenset(labels.get(name.removesuffix("_total"), labels.get(name, set())) - {"le"}))
        for name, kind in types
    }


@pytest.mark.parametrize("service", ["scheduler", "worker"])
def test_the_page_lists_what_a_scrape_has(running: Running, service: str) -> None:
    """Each series of a live scrape is on docs/metrics.md with its type and labels, and the other way round."""
    on_page = listed("Both services", service.capitalize())
    assert len(on_page) > 25
    assert seen(scrape(running, service)) == on_page


def test_series_on_the_page_exist() -> None:
    """All names in its queries and mappings are those of series, and all of ours say which service they are of."""
    ours = listed("Both services", "Scheduler", "Worker")
    named = set(re.findall(r"fdfo_(?:scheduler|worker)_[a-z_]*[a-z]", PAGE))
    assert {name.removesuffix("_bucket") for name in named} <= set(ours)
    assert all(name.startswith(("fdfo_scheduler_", "fdfo_worker_", "grpc_", "process_")) for name in ours)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool here (Debian's package prometheus has it)")
@pytest.mark.parametrize("service", ["scheduler", "worker"])
def test_promtool_finds_nothing(running: Running, service: str) -> None:
    """Names, types and help texts are as Prometheus wants them."""
    page = scrape(running, service)
    done = subprocess.run(["promtool", "check", "metrics"], input=page, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_an_idle_scheduler_is_small_and_starts_quickly(running: Running) -> None:
    """Under 150 MB of memory, and under two seconds of a processor from its start until it serves."""
    cpu_s, resident_bytes = running.idle
    assert cpu_s < 2.0
    assert resident_bytes < 150e6


def test_a_worker_is_stopped_while_it_loads() -> None:
    """SIGTERM ends a real load at once with status 0, and nothing is said to be ready."""
    words = ["--model-path", str(MODEL), "--port", "0", "--exit-with-parent"]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-m", "worker_svc", *words], cwd=ROOT, stdin=pipe, stdout=pipe, stderr=pipe, text=True
    ) as process:
        try:
            assert process.stderr is not None
            assert any("loading" in line for line in iter(process.stderr.readline, ""))
            process.terminate()
            out, err = process.communicate(timeout=20)
        finally:
            process.kill()
    assert (process.returncode, out) == (0, ""), err


def health(target: str, name: str) -> int:
    with grpc.insecure_channel(target) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        return int(stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=20).status)


def test_a_hung_forward_ends_liveness_and_readiness(running: Running) -> None:
    """A request on which the device thread hangs: health and scrapes are answered all the time, and after the timeout
    they say so; SIGTERM ends the worker without a drain. The scheduler lives. (The last test here: it has no worker
    after it.)"""
    assert [health(running.worker_target, name) for name in ("", WORKER)] == [SERVING, SERVING]
    with grpc.insecure_channel(running.target) as channel:
        stub: Any = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        call = stub.Generate(api.GenerateRequest(prompt_ids=api.TokenIds(ids=[5, HANG_TOKEN, 7]), max_new_tokens=8))
        assert next(call).HasField("started")
        deadline = time.monotonic() + 10 * STALL_TIMEOUT_S
        while health(running.worker_target, "") == SERVING:
            assert time.monotonic() < deadline, "it never stalled"
            time.sleep(POLL_S)
        assert health(running.worker_target, WORKER) == NOT_SERVING
        assert "\nfdfo_worker_stalled 1.0\n" in scrape(running, "worker")
        assert [health(running.target, name) for name in ("", SCHEDULER)] == [SERVING, SERVING]
        call.cancel()
    running.worker.terminate()
    assert running.worker.wait(timeout=20) == 1
