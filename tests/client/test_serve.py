"""`fdfo serve`: which flag goes where, and the life of the child processes."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import http.server
import importlib.util
import itertools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from fdfo.scheduler.v1 import scheduler_pb2 as pb
from fdfo_client import InvalidRequest, child_process, listening, openai_gateway, serve
from fdfo_client.testing import FakeScheduler, serving

# A service that needs no start-up time: listens where it is told, says so, and stops when its standard input closes.
# Its behaviour is the second word of its command line; a third one is said again.
SERVICE = """
import json, os, signal, socket, sys
port, behaviour = int(sys.argv[1]), sys.argv[2]
if behaviour == "fails":
    print("no such model", file=sys.stderr)
    sys.exit(3)
if behaviour == "ignores SIGTERM":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
server = socket.create_server(("127.0.0.1", port))
print("a line that is not for us", flush=True)
target = "127.0.0.1:%d" % server.getsockname()[1]
print(json.dumps({"event": "ready", "target": target, "pid": os.getpid()}), flush=True)
if behaviour in ("falls over", "has lost its model"):
    sys.exit(4 if behaviour == "falls over" else 2)
if behaviour == "falls over when touched":
    print("began with", sys.argv[3], flush=True)
    server.accept()
    sys.exit(4)
while os.read(0, 100):
    pass
"""


def service(behaviour: str = "well") -> Callable[[int], list[str]]:
    return lambda port: [sys.executable, "-I", "-S", "-c", SERVICE, str(port), behaviour]


def plan(worker: str = "well", scheduler: str = "well", num_workers: int = 1, num_schedulers: int = 1) -> serve.Plan:
    return serve.Plan(
        model_path=Path("models/none"),
        num_workers=num_workers,
        scheduler_ports=(0,) * num_schedulers,
        worker_command=service(worker),
        scheduler_command=lambda port, targets, model_ports: [*service(scheduler)(port), ",".join(targets)],
        environment=os.environ,
    )


async def at_once(targets: Sequence[str], num_workers: int, progress: serve.Progress) -> None:
    """Stands for the wait for ready workers."""


def parse(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="fdfo serve", allow_abbrev=False)
    serve.add_arguments(parser)
    return parser.parse_args(argv)


def commands(*argv: str) -> tuple[list[str], list[str]]:
    """The flags that a worker at port 1 and a scheduler at port 2 are started with."""
    made = serve.plan_from(parse("--model-path", "m", *argv), {})
    worker, scheduler = made.worker_command(1), made.scheduler_command(2, ["w:1", "w:2"], [])
    assert worker[:3] == [sys.executable, "-m", "worker_svc"]
    assert scheduler[:3] == [sys.executable, "-m", "scheduler_svc"]
    return list(worker[3:]), list(scheduler[3:])


def test_what_every_service_is_given() -> None:
    """Both get the model, their port and the order to stop with us; the scheduler gets the workers' targets."""
    worker, scheduler = commands()
    assert worker == ["--model-path=m", "--port=1", "--exit-with-parent"]
    assert scheduler == ["--model-path=m", "--port=2", "--workers=w:1,w:2", "--exit-with-parent"]


@pytest.mark.parametrize(
    ("flags", "to_worker", "to_scheduler"),
    [
        (["--page-size", "64"], {"--page-size=64"}, set()),
        (["--batch-invariant"], {"--batch-invariant"}, set()),
        (["--no-dllm-fdfo"], set(), {"--no-dllm-fdfo"}),
        (["--max-queued-requests=5"], set(), {"--max-queued-requests=5"}),
        (["--hang-timeout", "3"], set(), {"--hang-timeout=3.0"}),
        (["--context-length", "256"], {"--context-length=256"}, {"--context-length=256"}),
        (["--log-format", "json"], {"--log-format=json"}, {"--log-format=json"}),
    ],
)
def test_flags_go_where_they_are_known(flags: list[str], to_worker: set[str], to_scheduler: set[str]) -> None:
    """A worker's flag goes to the workers, a scheduler's to the schedulers, a common one to both."""
    plain, given = commands(), commands(*flags)
    assert set(given[0]) - set(plain[0]) == to_worker
    assert set(given[1]) - set(plain[1]) == to_scheduler


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["--colour", "red"], "--colour"),
        (["--page", "64"], "--page"),
        (["--page-size", "0"], "--page-size"),
        (["--dtype", "float8"], "float8"),
        (["--workers", "127.0.0.1:50052"], "python -m scheduler_svc"),
        (["--workers", "0"], "--workers"),
        (["--schedulers", "-1"], "--schedulers"),
        (["--port", "65536"], "--port"),
    ],
)
def test_a_wrong_flag_is_refused_by_name(argv: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Before anything is started an unknown flag or a wrong value gives status 2 and its name."""
    with pytest.raises(SystemExit) as caught:
        parse(*argv)
    assert caught.value.code == 2
    assert named in capsys.readouterr().err


def test_variables_go_where_flags_go() -> None:
    """A service's variable is passed on as its flag, a flag comes before it, also one with the default, and the
    services do not see the variables."""
    environment = {"FDFO_WORKER_PAGE_SIZE": "64", "FDFO_SCHEDULER_LOG_LEVEL": "debug", "FDFO_WORKER_PORT": "tcp://a:1"}
    environment |= {"FDFO_WORKER_NUM_THREADS": "2", "FDFO_API_KEY": "k", "FDFO_SCHEDULER_MAX_ROUND_MS": "5"}
    made = serve.plan_from(parse("--model-path", "m", "--max-round-ms", "1000"), environment)
    worker, scheduler = made.worker_command(1), made.scheduler_command(2, ["w:1"], [])
    assert worker[3:] == ["--model-path=m", "--port=1", "--page-size=64", "--num-threads=2", "--exit-with-parent"]
    assert scheduler[3:] == [
        *("--model-path=m", "--port=2", "--workers=w:1", "--log-level=debug"),
        "--exit-with-parent",
    ]
    assert made.environment == {"OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": "2", "FDFO_API_KEY": "k"}


@pytest.mark.parametrize(
    ("variable", "said"),
    [
        ("FDFO_WORKER_PAGE_SIZ", "FDFO_WORKER_PAGE_SIZ: no such setting; did you mean FDFO_WORKER_PAGE_SIZE?"),
        ("FDFO_WORKER_PAGE_SIZE", "FDFO_WORKER_PAGE_SIZE: 'x' is not a whole number of at least 1"),
        ("FDFO_SCHEDULER_MODEL_PATH", "FDFO_SCHEDULER_MODEL_PATH: `fdfo serve` sets this itself"),
    ],
)
def test_a_wrong_variable_is_refused_by_name(variable: str, said: str) -> None:
    """What would end each service at its start is refused before anything is started."""
    with pytest.raises(InvalidRequest, match=f"^{said}"):
        serve.plan_from(parse(), {variable: "x"})


def test_ports_of_the_schedulers() -> None:
    """The schedulers take P, P+1, ...; port 0 leaves all of them to the system."""
    assert serve.plan_from(parse("--port", "7000", "--schedulers", "3"), {}).scheduler_ports == (7000, 7001, 7002)
    assert serve.plan_from(parse("--port", "0", "--schedulers", "2"), {}).scheduler_ports == (0, 0)


def test_services_of_one_machine_do_not_share_a_metrics_port() -> None:
    """0 goes to all of them, and any other port is refused."""
    for command in commands("--metrics-port", "0"):
        assert "--metrics-port=0" in command
    with pytest.raises(InvalidRequest, match=r"--metrics-port: .*0 gives each a free one"):
        commands("--metrics-port", "9100")


def test_a_gateway_is_planned_when_asked_for() -> None:
    """With --openai-port schedulers serve the gateway's protocol, at ports that they keep, and it is told of them."""
    plain, made = (serve.plan_from(parse("--model-path", "m", *argv), {}) for argv in ([], ["--openai-port", "8000"]))
    assert plain.gateway_command is None
    assert "--vllm-grpc" not in plain.scheduler_command(2, ["w:1"], [])
    assert {"--vllm-grpc", "--served-model-ports=7,8"} <= set(made.scheduler_command(2, ["w:1"], [7, 8]))
    assert made.gateway_port == 8000 and made.gateway_command is not None
    assert list(made.gateway_command(["s:1", "s:2"], 9))[3:] == [
        *("--host", "127.0.0.1", "--port", "9"),
        *("--schedulers", "s:1", "s:2"),
    ]


@pytest.mark.parametrize("flags", [["--tls-cert-file=c", "--worker-tls-ca-file=a"], ["--api-keys-file=k"]])
def test_a_gateway_cannot_reach_what_asks_for_a_certificate_or_key(flags: list[str]) -> None:
    """It is refused before anything is started."""
    with pytest.raises(InvalidRequest, match=r"--openai-port: .*leave out --tls-cert-file and --api-keys-file"):
        serve.plan_from(parse("--openai-port", "0", *flags), {})


def test_a_missing_gateway_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything is started, with the command to type."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "smg" else object())
    assert serve.main(parse("--openai-port", "0")) == 1
    assert "--openai-port needs the package smg: pip install 'fdfo[gateway]' smg" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--openai-port=0", "--served-models"], "--served-models .*, line 2: a is there twice"),
        (["--served-models"], "--served-models: these names are for gateways"),
        (["--dllm-algorithm-config"], "--dllm-algorithm-config .*, line 2: a is there twice"),
    ],
)
def test_a_wrong_file_is_said_before_a_model_loads(
    flags: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files that the scheduler reads are read before anything is started."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    file = tmp_path / "file.yaml"
    file.write_text("a: {}\na: {}\n")
    with pytest.raises(InvalidRequest, match=said):
        serve.plan_from(parse(*flags, str(file)), {})


def test_a_taken_port_is_said_before_anything_is_started(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A port of another process, and one that is given twice, end with status 1 and the flag for another one."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(serve, "run", lambda *args, **options: pytest.fail("it was started"))
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken, free = other.getsockname()[1], listening.free_port("127.0.0.1")
        for argv, port, flag in [
            (["--port", "0", "--openai-port", str(taken)], taken, "--openai-port"),
            (["--port", str(taken)], taken, "--port"),
            (["--port", str(free), "--openai-port", str(free)], free, "--openai-port"),
        ]:
            assert serve.main(parse(*argv)) == 1
            assert capsys.readouterr().err == f"fdfo serve: port {port} is taken; choose another with {flag}\n"
    assert listening.why_taken("127.0.0.1", [(taken, "--port"), (free, "--openai-port")]) == ""


def test_a_gateway_of_others_is_not_ours() -> None:
    """What answers at the gateway's port counts as ready when it is for our schedulers and knows their models."""
    answers: dict[str, Any] = {
        "/workers": {
            "workers": [{"url": "grpc://s:1", "is_healthy": True}, {"url": "grpc://s:2", "is_healthy": False}]
        },
        "/v1/models": {"data": [{"id": "m"}]},
        "/v1/tokenizers": {"tokenizers": [{"name": "m"}]},
    }

    class Answer(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(answers[self.path]).encode())

        def log_message(self, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        ready = functools.partial(openai_gateway.is_ready, "127.0.0.1", server.server_port)
        assert ready(["grpc://s:1"])
        assert not ready(["grpc://s:2"]), "not healthy"
        assert not ready(["grpc://s:1", "grpc://s:3"]), "a scheduler that it does not have"
        answers["/v1/tokenizers"] = {"tokenizers": []}
        assert not ready(["grpc://s:1"])
        answers["/workers"] = {"error": "what is this?"}
        assert not ready(["grpc://s:1"])
        server.shutdown()


def test_the_command_to_type_is_the_one_that_was_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A path stays a path, what was found on PATH its name, and a module is a module."""
    program = tmp_path / "fdfo"
    program.touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert serve.typed_command(".venv/bin/fdfo") == ".venv/bin/fdfo"
    assert serve.typed_command(str(program)) == "fdfo"
    assert serve.typed_command("my tools/fdfo") == "'my tools/fdfo'"
    assert serve.typed_command("/x/fdfo_client/__main__.py") == f"{sys.executable} -m fdfo_client"


def test_threads_do_not_spin() -> None:
    """Children wait passively with as many threads as --num-threads says, unless the user's environment says more."""
    assert serve.plan_from(parse("--num-threads", "3"), {"HOME": "/"}).environment == {
        "HOME": "/",
        "OMP_WAIT_POLICY": "PASSIVE",
        "OMP_NUM_THREADS": "3",
    }
    users = {"OMP_WAIT_POLICY": "ACTIVE", "OMP_NUM_THREADS": "8"}
    assert serve.plan_from(parse(), users).environment == users


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--tls-cert-file", "a", "--tls-key-file", "b"], "add --worker-tls-ca-file"),
        (["--api-keys-file", "a"], "add --worker-api-key-file"),
        (["--worker-api-key-file", "absent"], "absent: No such file"),
        (["--worker-tls-ca-file", "a", "--worker-tls-key-file", "b"], "both"),
    ],
)
def test_services_that_would_not_reach_each_other_are_not_started(argv: list[str], words: str) -> None:
    """Certificates and keys go to both services, so the scheduler's way to its workers must fit them."""
    with pytest.raises(InvalidRequest, match=words):
        serve.plan_from(parse(*argv), {})


def test_the_default_model_is_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outside a checkout's root the model beside the package is taken; a folder's own comes first."""
    monkeypatch.chdir(tmp_path)
    assert (serve.default_model_path() / "config.json").is_file()
    (tmp_path / serve.MODEL_PATH).mkdir(parents=True)
    assert serve.default_model_path() == serve.MODEL_PATH


@contextlib.contextmanager
def serve_process(*words: str) -> Iterator[subprocess.Popen[str]]:
    """`serve.run` with scripted services in a process of its own; `words` is Python that makes the plan."""
    program = (
        "import asyncio, sys; from fdfo_client import serve; from tests.client.test_serve import at_once, plan;"
        f"sys.exit(asyncio.run(serve.run({words[0]}, as_json=True, stop_at_eof=True, workers_ready=at_once)))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    with process.stdin, process.stdout, process.stderr:
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def read_ready(process: subprocess.Popen[str]) -> Any:
    assert process.stdout is not None
    return json.loads(process.stdout.readline())


def wait_for_end(pidfd: int) -> None:
    """Wait for the end of a process that need not be a child of ours."""
    assert select.select([pidfd], [], [], 10.0)[0], "the process lives on"
    os.close(pidfd)


def listens(target: str) -> bool:
    host, _, port = target.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except ConnectionRefusedError:
        return False
    return True


@pytest.mark.parametrize("how", ["SIGTERM", "SIGINT", "SIGKILL", "end of stdin"])
def test_nothing_is_left(how: str) -> None:
    """However serve ends, SIGKILL too, its children end; a signal or the end of stdin gives status 0."""
    with serve_process("plan(num_workers=2, num_schedulers=2)") as process:
        ready = read_ready(process)
        assert list(ready) == ["event", "targets", "workers"]
        assert len(ready["targets"]) == 2
        assert all(listens(target) for target in ready["targets"])
        assert all(listens(worker["target"]) for worker in ready["workers"])
        pidfds = [os.pidfd_open(worker["pid"]) for worker in ready["workers"]]
        if how == "end of stdin":
            assert process.stdin is not None
            process.stdin.close()
        else:
            process.send_signal(getattr(signal, how))
        status = process.wait(timeout=10)
        assert status == (-signal.SIGKILL if how == "SIGKILL" else 0)
        for pidfd in pidfds:
            wait_for_end(pidfd)
        assert process.stdout is not None
        assert process.stdout.read() == "", "one line and no more"


def test_a_second_signal_does_not_wait() -> None:
    """A child that does not stop on SIGTERM is killed at once when the user insists."""
    with serve_process("plan(worker='ignores SIGTERM')") as process:
        ready = read_ready(process)
        pidfd = os.pidfd_open(ready["workers"][0]["pid"])
        host, _, port = ready["targets"][0].rpartition(":")
        with socket.create_connection((host, int(port)), timeout=5) as connection:
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(ConnectionResetError):
                connection.recv(1)  # until the scheduler has gone; then serve waits for the worker
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=5) == 0
        wait_for_end(pidfd)


@pytest.mark.parametrize("broken", ["worker", "scheduler"])
def test_a_failed_first_start_ends_serve(broken: str) -> None:
    """A service that cannot start ends everything with status 1; its own error stands above ours."""
    with serve_process(f"plan({broken}='fails', num_workers=2)") as process:
        assert process.wait(timeout=10) == 1
        assert process.stdout is not None
        assert process.stderr is not None
        out, err = process.stdout.read(), process.stderr.read()
    assert out == ""
    assert f"fdfo serve: {broken} " in err
    assert "ended with status 3 before it was ready" in err
    assert err.index("no such model") < err.index("fdfo serve:")


def test_a_scheduler_that_is_started_again_gets_its_workers() -> None:
    """Its second life is given the same workers as its first."""
    with serve_process("plan(scheduler='falls over when touched', num_workers=2)") as process:
        ready = read_ready(process)
        assert listens(ready["targets"][0])
        assert process.stderr is not None
        begun = itertools.islice((line.split()[2] for line in process.stderr if line.startswith("began with")), 2)
        assert list(begun) == [",".join(worker["target"] for worker in ready["workers"])] * 2


def test_other_output_of_a_child_goes_to_stderr() -> None:
    """stdout is for our one line; what a service prints beside its ready line is passed on to stderr."""
    with serve_process("plan()") as process:
        read_ready(process)
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=10)
    assert out == ""
    assert err.count("a line that is not for us\n") == 2


class Keeper:
    """A child under test: each back-off waits until the test lets it go on; the clock steps when it is read."""

    def __init__(self, behaviour: str = "well") -> None:
        self.now_s = 0.0
        self.clock_step_s = 0.0
        self.delays_s: asyncio.Queue[float] = asyncio.Queue()
        self.go_on = asyncio.Semaphore(0)
        self.behaviour = behaviour
        self.child = child_process.Child(
            "worker 0",
            lambda port: service(self.behaviour)(port),
            0,
            os.environ,
            sleep=self._sleep,
            clock=self._clock,
        )

    def _clock(self) -> float:
        self.now_s += self.clock_step_s
        return self.now_s

    async def _sleep(self, delay_s: float) -> None:
        self.delays_s.put_nowait(delay_s)
        await self.go_on.acquire()

    async def next_delay_s(self) -> float:
        """Let it start again, and wait until it has died again: the delay after that."""
        self.go_on.release()
        return await asyncio.wait_for(self.delays_s.get(), 10)


def test_a_child_that_dies_is_started_again_at_its_port(capsys: pytest.CaptureFixture[str]) -> None:
    """After SIGKILL another process serves the same target, and one line says what happened."""

    async def scenario() -> None:
        keeper = Keeper()
        child = keeper.child
        await child.start()
        target, pid = child.target, child.pid
        os.kill(pid, signal.SIGKILL)
        assert await asyncio.wait_for(keeper.delays_s.get(), 10) == 0.5
        assert not listens(target)
        keeper.behaviour = "falls over"  # the next one gets ready and ends: the second delay tells us that it ran
        assert await keeper.next_delay_s() == 1.0
        assert child.target == target
        assert child.pid != pid
        await child.stop(asyncio.Event())
        said = capsys.readouterr().err
        assert f"worker 0 (pid {pid}) was ended by SIGKILL; starting it again in 0.5 s\n" in said
        assert "ended with status 4; starting it again in 1 s" in said
        assert said.count("starting it again") == 2

    asyncio.run(scenario())


def test_the_back_off_doubles_and_starts_over() -> None:
    """Delays double up to 10 s, whether the child got ready or not, and begin anew after 30 s of service."""

    async def scenario() -> None:
        keeper = Keeper("falls over")
        await keeper.child.start()
        delays_s = [await asyncio.wait_for(keeper.delays_s.get(), 10)]
        for behaviour in ("falls over", "fails", "falls over", "fails", "fails"):
            keeper.behaviour = behaviour
            delays_s.append(await keeper.next_delay_s())
        assert delays_s == [0.5, 1.0, 2.0, 4.0, 8.0, 10.0]

        keeper.behaviour, keeper.clock_step_s = "falls over", 29.0
        assert await keeper.next_delay_s() == 10.0
        keeper.clock_step_s = 30.0
        assert await keeper.next_delay_s() == 0.5
        assert await keeper.next_delay_s() == 0.5
        await keeper.child.stop(asyncio.Event())

    asyncio.run(scenario())


def test_a_child_with_a_wrong_configuration_is_not_started_again(capsys: pytest.CaptureFixture[str]) -> None:
    """Status 2 is that of flags and files that will not do another time either: `fdfo serve` ends with the reason."""

    async def scenario() -> None:
        keeper = Keeper("has lost its model")
        await keeper.child.start()
        assert keeper.child.keeper is not None
        with pytest.raises(child_process.ServeError, match="worker 0 ended with status 2, a wrong configuration"):
            await asyncio.wait_for(keeper.child.keeper, 10)
        assert "starting it again" not in capsys.readouterr().err
        await keeper.child.stop(asyncio.Event())

    asyncio.run(scenario())


def test_a_stopped_child_is_not_started_again() -> None:
    """Stopping in the middle of a back-off, or before the first start, leaves nothing and raises nothing."""

    async def scenario() -> None:
        keeper = Keeper("falls over")
        await keeper.child.stop(asyncio.Event())
        await keeper.child.start()
        await asyncio.wait_for(keeper.delays_s.get(), 10)
        await keeper.child.stop(asyncio.Event())
        keeper.go_on.release()
        assert keeper.child.keeper is not None
        assert keeper.child.keeper.cancelled()

    asyncio.run(scenario())


def test_ready_means_that_every_scheduler_has_every_worker() -> None:
    """The wait ends when all workers are ready at all schedulers, and tells meanwhile what keeps them."""

    def workers(*ready: bool) -> pb.GetServerInfoResponse:
        states = [
            pb.WorkerState(target=f"w:{i}", ready=r, last_error="" if r else "refused") for i, r in enumerate(ready)
        ]
        return pb.GetServerInfoResponse(workers=states)

    quick = FakeScheduler(infos=[workers(True, True)])
    slow = FakeScheduler(infos=[workers(), workers(True), workers(True, False), workers(True, True)])
    with serving(quick) as one, serving(slow) as two:
        progress = serve.Progress("loading")
        asyncio.run(serve.wait_for_workers([one, two], 2, progress))
    assert len(slow.infos) == 1
    assert progress.what == "waiting for workers: w:1: refused"


def test_a_person_is_told_what_to_type(capsys: pytest.CaptureFixture[str]) -> None:
    """Without --json the ready text names every address and ends with a command to paste."""

    async def stop_when_ready(targets: Sequence[str], num_workers: int, progress: serve.Progress) -> None:
        asyncio.get_running_loop().call_later(0, os.kill, os.getpid(), signal.SIGTERM)
        seen.extend(targets)

    seen: list[str] = []
    assert asyncio.run(serve.run(plan(), as_json=False, stop_at_eof=False, workers_ready=stop_when_ready)) == 0
    out = capsys.readouterr().out
    assert f"generate --target {seen[0]} " in out
    assert "worker 0" in out
