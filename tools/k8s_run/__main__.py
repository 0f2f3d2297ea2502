"""`make k8s-run`: the pods of deploy/k8s/overlays/dev-cpu run under podman, under load, and are stopped and added."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from common import __version__
from fdfo_client import AsyncClient, FdfoError, Message, ServerInfo
from tools.k8s_run.podman import ROOT, Podman, PodmanError, check_programs
from tools.k8s_run.pods import Workload, kustomize, workloads

OVERLAY = "overlays/dev-cpu"
CLIENTS = 12  # requests at a time, for 2 or 3 workers of 16 rows
LOAD_BEFORE_S = 3.0
LOAD_AFTER_S = 6.0
NUM_PROMPTS = 24
START_S = 120.0
REQUEST_TIMEOUT_S = 120.0
SERVING = health_pb2.HealthCheckResponse.SERVING


class CheckFailed(Exception):
    """What does not hold."""


def check(holds: bool, what: str) -> None:
    if not holds:
        raise CheckFailed(what)


@dataclass
class Pod:
    """A pod that was started. `name`: of the pod; `workload`: what it is one of."""

    name: str
    workload: Workload
    address: str

    @property
    def target(self) -> str:
        return f"{self.address}:{self.workload.port}"


@dataclass
class Load:
    """What clients got while something happened."""

    answers: int = 0
    resumes: int = 0
    wrong: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    longest_s: float = 0.0

    def check(self) -> str:
        """What to say of it, or CheckFailed: every request has its whole and right answer."""
        check(not self.failed, f"{len(self.failed)} requests failed, first: {self.failed[:1]}")
        check(not self.wrong, f"{len(self.wrong)} answers differ from the calm ones, first: {self.wrong[:1]}")
        check(self.answers > 0, "no request ended")
        resumed = f", {self.resumes} went on at the other scheduler" if self.resumes else ""
        return f"{self.answers} requests, 0 lost{resumed}, longest {self.longest_s:.1f} s"


class Cluster:
    """The pods, and what a kubelet would do for them."""

    def __init__(self, podman: Podman) -> None:
        self._podman = podman
        self.workloads = workloads(kustomize(OVERLAY))
        self.pods: list[Pod] = []
        self._started: dict[str, int] = {}
        self.expected: dict[str, str] = {}

    def of(self, name: str) -> list[Pod]:
        return [pod for pod in self.pods if pod.workload.name == name]

    async def start(self, name: str) -> Pod:
        """One more pod of a Deployment."""
        workload, number = self.workloads[name], self._started.get(name, 0)
        self._started[name] = number + 1
        pod_name = f"{name}-{number}"
        await asyncio.to_thread(self._podman.play, workload.pod(pod_name), workload.names)
        pod = Pod(pod_name, workload, await asyncio.to_thread(self._podman.address, pod_name))
        self.pods.append(pod)
        return pod

    async def stop(self, pod: Pod) -> tuple[float, int]:
        """SIGTERM, and SIGKILL after the grace time; returns seconds to the end and the exit status. The pod's network
        goes after its container, as with a kubelet."""
        self.pods.remove(pod)
        container, began_at = f"{pod.name}-{pod.workload.name}", time.monotonic()
        await asyncio.to_thread(self._podman, "stop", "--time", str(pod.workload.grace_s), container)
        seconds = time.monotonic() - began_at
        await asyncio.to_thread(self._podman, "pod", "stop", pod.name)
        return seconds, int(await asyncio.to_thread(self._podman, "wait", container))

    async def probe(self, pod: Pod, kind: str) -> bool:
        """As the kubelet asks: the probe's own service name, at the pod's address."""
        async with grpc.aio.insecure_channel(pod.target) as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            request = health_pb2.HealthCheckRequest(service=pod.workload.probes[kind])
            try:
                return bool((await stub.Check(request, timeout=5)).status == SERVING)
            except grpc.aio.AioRpcError:
                return False

    async def wait_until_ready(self, *pods: Pod) -> float:
        """Seconds until the readiness probe of all of them holds; CheckFailed with a log when one does not."""
        began_at = time.monotonic()
        for pod in pods:
            while not await self.probe(pod, "readinessProbe"):
                if time.monotonic() - began_at > START_S:
                    log = self._podman.logs(pod.name, pod.workload.name)
                    raise CheckFailed(f"{pod.name} is not ready after {START_S:g} s: {log[-2000:]}")
                await asyncio.sleep(0.1)
        return time.monotonic() - began_at

    async def info(self, pod: Pod) -> ServerInfo:
        async with AsyncClient(pod.target) as client:
            return await client.server_info()

    @contextlib.asynccontextmanager
    async def load(self) -> AsyncIterator[Load]:
        """Requests of CLIENTS clients, some time before, during and after the body."""
        load, over = Load(), asyncio.Event()
        prompts = list(self.expected)

        async def one_client(number: int) -> None:
            turn = number
            async with AsyncClient(targets) as client:
                while not over.is_set():
                    prompt = prompts[turn % len(prompts)]
                    turn += 1
                    began_at = time.monotonic()
                    try:
                        answer = await client.generate(messages=user_turn(prompt), timeout=REQUEST_TIMEOUT_S)
                    except FdfoError as error:
                        load.failed.append(f"{prompt!r}: {error}")
                        continue
                    load.answers += 1
                    load.resumes += answer.resumes
                    load.longest_s = max(load.longest_s, time.monotonic() - began_at)
                    if answer.text != self.expected[prompt]:
                        load.wrong.append(f"{prompt!r}: {answer.text!r} instead of {self.expected[prompt]!r}")

        targets = [pod.target for pod in self.of("scheduler")]
        async with asyncio.TaskGroup() as group:
            for number in range(CLIENTS):
                group.create_task(one_client(number))
            try:
                await asyncio.sleep(LOAD_BEFORE_S)
                yield load
                await asyncio.sleep(LOAD_AFTER_S)
            finally:
                over.set()


def user_turn(prompt: str) -> list[Message]:
    return [{"role": "user", "content": prompt}]


# What is shown ----------------------------------------------------------------------------------------------------


async def pods_start(cluster: Cluster, podman: Podman) -> str:
    """As many pods as the overlay says get ready, workers first or not."""
    for name in ("scheduler", "worker"):
        for _ in range(cluster.workloads[name].replicas):
            await cluster.start(name)
    seconds = await cluster.wait_until_ready(*cluster.pods)
    began_at = time.monotonic()
    for pod in cluster.of("scheduler"):
        while sum(worker.ready for worker in (await cluster.info(pod)).workers) < 2:
            check(time.monotonic() - began_at < START_S, f"{pod.name} does not see 2 ready workers")
            await asyncio.sleep(0.2)
    return f"{len(cluster.pods)} pods ready after {seconds:.1f} s, each scheduler sees 2 workers"


async def pods_are_restricted(cluster: Cluster, podman: Podman) -> str:
    """The user, the rights and the file system are those of the manifests, seen from inside."""
    script = (
        "import os;print(os.getuid());print(open('/proc/1/status').read().split('CapEff:')[1].split()[0]);"
        "\ntry: open('/opt/fdfo/x','w')\nexcept OSError as e: print(e.strerror)\nopen('/tmp/x','w')"
    )
    for pod in cluster.pods:
        words = ["exec", f"{pod.name}-{pod.workload.name}", "python3", "-c", script]
        seen = (await asyncio.to_thread(podman, *words)).splitlines()
        check(seen == ["65532", "0" * 16, "Read-only file system"], f"{pod.name}: {seen}")
    return "user 65532, no capability, read-only but for /tmp, in each pod"


async def a_request_goes_through(cluster: Cluster, podman: Podman) -> str:
    """The smoke test's own job: fdfo generate, by the name of the headless Service."""
    job = workloads(kustomize("jobs/smoke-test"))["smoke-test"]
    await asyncio.to_thread(podman.play, job.pod("smoke-test"), ("smoke-test",))
    status = await asyncio.to_thread(podman, "wait", "smoke-test-smoke-test")
    output = podman.logs("smoke-test", "smoke-test").strip()
    check(status.strip() == "0" and "3" in output, f"status {status.strip()}: {output}")
    return f"the smoke test's job: {output.splitlines()[0]}"


async def calm_answers(cluster: Cluster, podman: Podman) -> str:
    """What each prompt is answered while nothing else happens; the other checks compare with it."""
    with (ROOT / "models/tiny-llada2/problems.jsonl").open() as lines:
        prompts = [json.loads(line)["prompt"] for line, _ in zip(lines, range(NUM_PROMPTS), strict=False)]
    async with AsyncClient([pod.target for pod in cluster.of("scheduler")]) as client:
        for prompt in prompts:
            cluster.expected[prompt] = (await client.generate(messages=user_turn(prompt), timeout=60)).text
    return f"{len(prompts)} prompts answered one after the other"


async def a_third_worker_joins(cluster: Cluster, podman: Podman) -> str:
    """A worker that is started later gets work from schedulers that know nothing but the Service's name."""
    ids = [(await cluster.info(pod)).scheduler_id for pod in cluster.of("scheduler")]
    async with cluster.load() as load:
        began_at = time.monotonic()
        worker = await cluster.start("worker")
        await cluster.wait_until_ready(worker)
        ready_s = time.monotonic() - began_at
        while True:
            infos = [await cluster.info(pod) for pod in cluster.of("scheduler")]
            if any(one.target == worker.target and one.rows for info in infos for one in info.workers):
                break
            check(time.monotonic() - began_at < START_S, f"{worker.name} gets no work")
            await asyncio.sleep(0.05)
        work_s = time.monotonic() - began_at
    check([info.scheduler_id for info in infos] == ids, "a scheduler was restarted")
    return f"ready after {ready_s:.1f} s, first rows after {work_s:.1f} s; {load.check()}"


async def a_worker_is_stopped(cluster: Cluster, podman: Podman) -> str:
    """SIGTERM to a worker pod under load: its requests go on elsewhere in mid-block."""
    pod = cluster.of("worker")[0]
    async with cluster.load() as load:
        seconds, status = await cluster.stop(pod)
    check(status == 0, f"{pod.name} ended with status {status}: {podman.logs(pod.name, 'worker')[-500:]}")
    return f"exit status 0 after {seconds:.1f} s; {load.check()}"


async def a_worker_is_killed(cluster: Cluster, podman: Podman) -> str:
    """SIGKILL to a worker pod under load; then a new one takes its place."""
    pod = cluster.of("worker")[0]
    async with cluster.load() as load:
        cluster.pods.remove(pod)
        await asyncio.to_thread(podman, "pod", "kill", "--signal", "KILL", pod.name)
        await cluster.wait_until_ready(await cluster.start("worker"))
    return load.check()


async def a_scheduler_drains(cluster: Cluster, podman: Podman) -> str:
    """SIGTERM to a scheduler pod under load: running requests end there or go on at the other, new ones go there."""
    pod = cluster.of("scheduler")[0]
    async with cluster.load() as load:
        stop = asyncio.create_task(cluster.stop(pod))
        while await cluster.probe(pod, "readinessProbe"):
            await asyncio.sleep(0.02)
        seconds, status = await stop
    check(status == 0, f"{pod.name} ended with status {status}: {podman.logs(pod.name, 'scheduler')[-500:]}")
    return f"exit status 0 after {seconds:.1f} s; {load.check()}"


CHECKS: dict[str, Callable[[Cluster, Podman], Awaitable[str]]] = {
    "2 schedulers and 2 workers start": pods_start,
    "pods have the rights of the manifests": pods_are_restricted,
    "a request goes through": a_request_goes_through,
    "calm answers": calm_answers,
    "a third worker joins under load": a_third_worker_joins,
    "a worker pod is stopped under load": a_worker_is_stopped,
    "a worker pod is killed under load": a_worker_is_killed,
    "a scheduler pod drains under load": a_scheduler_drains,
}


async def run(podman: Podman) -> int:
    """All checks, one after the other; returns how many failed."""
    cluster, failed = Cluster(podman), 0
    print("| what | | |\n|---|---|---|", flush=True)
    for what, shown in CHECKS.items():
        try:
            verdict, details = "yes", await shown(cluster, podman)
        except (CheckFailed, PodmanError, FdfoError) as error:
            verdict, details, failed = "NO", str(error), failed + 1
        print(f"| {what} | {verdict} | {details} |", flush=True)
        if not cluster.expected and failed:
            break  # without pods the rest says nothing
    return failed


def prepare(podman: Podman, torch: str) -> None:
    """The images, from the Dockerfiles as they are."""
    print("base image (a minute or two, once)", flush=True)
    podman.make_base_image()
    print("wheels (once)", flush=True)
    podman.fetch_wheels(torch)
    for name, *words in (("scheduler",), ("worker-cpu", "--target=cpu")):
        image = f"fdfo-{name}:{__version__}"
        began_at = time.monotonic()
        podman.build(image, f"{name.removesuffix('-cpu')}.Dockerfile", *words)
        print(
            f"{image}: {podman.image_size_bytes(image) / 1e6:.0f} MB, {time.monotonic() - began_at:.0f} s", flush=True
        )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.k8s_run", description=__doc__)
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "fdfo-k8s-run"
    parser.add_argument(
        "--cache", type=Path, default=cache, metavar="DIR", help="images and wheels (default: %(default)s)"
    )
    parser.add_argument("--torch", required=True, metavar="REQUIREMENT", help="the torch of the worker's image")
    parser.add_argument("--keep", action="store_true", help="leave the pods running at the end")
    arguments = parser.parse_args()
    try:
        check_programs()
        podman = Podman(arguments.cache.resolve())
        prepare(podman, arguments.torch)
        podman.clean()
        podman.make_network()
        try:
            return 1 if asyncio.run(run(podman)) else 0
        finally:
            if not arguments.keep:
                podman.clean()
    except PodmanError as error:
        print(f"k8s-run: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
