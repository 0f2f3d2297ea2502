"""`fdfo doctor`: what each check says of what it is shown."""

from __future__ import annotations

import json
import os
import shutil
import socket
import time
import warnings
from pathlib import Path
from typing import Any

import grpc
import pytest
from packaging.requirements import Requirement

from fdfo.scheduler.v1 import scheduler_pb2 as pb
from fdfo.worker.v1 import worker_pb2
from fdfo_client import cli
from fdfo_client._access import OPEN
from fdfo_client._types import server_info_from_proto
from fdfo_client.commands import doctor
from fdfo_client.doctor import device, installation, model, ports, services
from fdfo_client.doctor.finding import Finding
from fdfo_client.serve import default_model_path
from fdfo_client.testing import FakeScheduler, serving

MODEL = default_model_path()
GIB = 2**30
REQUIREMENTS = [
    Requirement(line)
    for line in (
        "grpcio>=1.76",
        "torch<3,>=2.11; extra == 'worker'",
        "rich>=13.9; extra == 'cli'",
        "buf; extra == 'dev'",
    )
]


def levels(findings: list[Finding]) -> dict[str, str]:
    """By what was looked at. Each that is not OK says what to do."""
    assert all(finding.found and (finding.level == "OK" or finding.advice) for finding in findings)
    return {finding.what: finding.level for finding in findings}


def packages(**versions: str) -> list[Finding]:
    return list(installation.check_packages(REQUIREMENTS, ["worker", "cli", "dev"], versions.get))


def test_an_old_python_is_found() -> None:
    """The version is compared as a version, not as text."""
    assert installation.check_python(">=3.11", "3.9.1").level == "FAIL"
    assert installation.check_python(">=3.11", "3.12.0rc1").level == "OK"


def test_packages_are_compared_with_their_ranges() -> None:
    """Local and pre-release versions count by their numbers; one out of range fails, with the command that mends it."""
    assert levels(packages(grpcio="1.76.0", torch="2.13.0+cpu", rich="14.0")) == {
        "packages": "OK",
        "extra worker": "OK",
        "extra cli": "OK",
    }
    old, *_ = packages(grpcio="1.8.1", torch="2.13.0", rich="14.0")
    assert (old.level, old.advice) == ("FAIL", "pip install 'grpcio>=1.76'")
    assert levels(packages(grpcio="1.80", torch="3.0.1", rich="14.0"))["extra worker"] == "FAIL"


def test_a_missing_extra_matters_where_it_is_needed_to_serve() -> None:
    """Without a base package nothing works; without the worker's one cannot serve; without others little is missed."""
    findings = packages()
    assert levels(findings) == {"packages": "FAIL", "extra worker": "WARN", "extra cli": "OK"}
    assert "torch not installed" in findings[1].found and "pip install 'fdfo[worker]'" in findings[1].advice


def test_this_environment_is_whole() -> None:
    """What the tests run in fits what the distribution asks for, in all but the extras that are left out."""
    assert "FAIL" not in levels(list(installation.check())).values()


@pytest.mark.parametrize(
    ("environment", "level"),
    [
        ({}, "OK"),
        ({"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "PASSIVE"}, "OK"),
        ({"OMP_WAIT_POLICY": "active"}, "WARN"),
        ({"KMP_BLOCKTIME": "infinite"}, "WARN"),
        ({"OMP_NUM_THREADS": "3"}, "WARN"),
    ],
)
def test_threads_that_spin_are_found(environment: dict[str, str], level: str) -> None:
    """OpenMP threads that spin, or are more than the processors, cost all others; the line names the variable."""
    cpu, threads = device.check_cpu(environment, 2)
    assert (cpu.level, threads.level) == ("OK", level)
    assert level == "OK" or any(name in threads.found for name in environment)


H200 = device.CudaDevice("H200", 100 * GIB, 139 * GIB)


@pytest.mark.parametrize(
    ("torch", "name", "level"),
    [
        (None, "cpu", "OK"),
        (None, "cuda", "WARN"),
        (device.Torch("2.13", None), "cpu", "OK"),
        (device.Torch("2.13", None), "cuda", "FAIL"),
        (device.Torch("2.13", "13.0"), "cuda", "FAIL"),
        (device.Torch("2.13", "13.0", (H200,)), "cuda", "OK"),
        (device.Torch("2.13", "13.0", (H200,)), "cuda:1", "FAIL"),
        (device.Torch(error="ImportError: libtorch.so"), "cpu", "FAIL"),
    ],
)
def test_the_device_that_is_wanted_must_be_there(torch: device.Torch | None, name: str, level: str) -> None:
    """A worker's device is looked for among those that torch sees."""
    found = levels(list(device.check_torch(torch, name)))
    assert max(found.values(), key=("OK", "WARN", "FAIL").index) == level
    assert (device.cuda_device(torch, "cuda:0") == H200) == (torch is not None and bool(torch.devices))


def test_free_memory_is_the_smaller_of_machine_and_control_group(tmp_path: Path) -> None:
    """A container's limit counts; none, or a system that tells nothing, does not."""
    assert device.free_memory_bytes(tmp_path) is None
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9 kB\nMemAvailable:    2048 kB\n")
    assert device.free_memory_bytes(tmp_path) == 2**21
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "memory.max").write_text("max\n")
    (group / "memory.current").write_text("1000\n")
    assert device.free_memory_bytes(tmp_path) == 2**21
    (group / "memory.max").write_text("5000\n")
    assert device.free_memory_bytes(tmp_path) == 4000


@pytest.mark.parametrize(("free_bytes", "level"), [(GIB, "OK"), (140 * 2**20, "WARN"), (2**20, "FAIL"), (None, "WARN")])
def test_a_model_is_weighed(free_bytes: int | None, level: str) -> None:
    """The shipped model takes 4.4 MiB and 128 MiB of KV; that is compared with what is free."""
    findings, fingerprint = model.check(MODEL, free_bytes, "cpu")
    assert fingerprint is not None
    assert levels(findings) == {
        f"model {MODEL}": "OK", "tokenizer": "OK", "weights": "OK", "memory": level,
    }  # fmt: skip
    assert findings[-1].found.startswith("4.4 MiB of weights and 128.0 MiB of KV (65536 tokens) in float32")


def test_what_is_wrong_with_a_folder_is_said(tmp_path: Path) -> None:
    """No folder, a file that was cut off, no chat template: each is found, and said with what to do."""
    findings, fingerprint = model.check(tmp_path / "none", GIB, "cpu")
    assert (fingerprint, levels(findings)) == (None, {f"model {tmp_path / 'none'}": "FAIL"})
    folder = tmp_path / "model"
    shutil.copytree(MODEL, folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": None}))
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(os.path.getsize(folder / "model.safetensors") - 100)
    found = levels(model.check(folder, GIB, "cpu")[0])
    assert (found["chat template"], found["weights"]) == ("WARN", "FAIL")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "gone.safetensors"}}))
    finding = model.check(folder, GIB, "cpu")[0][-1]
    assert (finding.what, finding.level) == ("weights", "FAIL") and "gone.safetensors" in finding.found


@pytest.mark.parametrize(
    ("file", "fields", "what", "found", "advice"),
    [
        ("config.json", {"hidden_size": "x"}, "memory", "hidden_size must be an integer", "correct config.json"),
        (
            "config.json",
            {"mask_token_id": "x"},
            "mask token",
            "config.json says 'x', the tokenizer 1",
            "--mask-token-id",
        ),
        ("config.json", {"vocab_size": -1}, "model", "vocab_size must be", "correct the file"),
        ("config.json", None, "model", "not valid JSON", "fetch the file again"),
        ("tokenizer.json", None, "model", "the tokenizer cannot be read", "fetch the file again"),
    ],
)
def test_a_broken_file_is_a_finding(
    tmp_path: Path, file: str, fields: dict[str, Any] | None, what: str, found: str, advice: str
) -> None:
    """A value that does not fit and a file that is none are said, with what to do about just that."""
    folder = tmp_path / "model"
    shutil.copytree(MODEL, folder)
    text = json.dumps(json.loads((folder / file).read_text()) | fields) if fields else "{ broken"
    (folder / file).write_text(text)
    findings = model.check(folder, GIB, "cpu")[0]
    (bad,) = [finding for finding in findings if finding.level != "OK"]
    assert bad.what.startswith(what) and found in bad.found and advice in bad.advice


def test_a_folder_without_its_tokenizer(
    tmp_path: Path, recwarn: pytest.WarningsRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is one finding, whatever another package that is asked for it has to say."""

    def talk(path: Path) -> None:
        warnings.warn("long words", FutureWarning, stacklevel=2)
        raise ValueError("why " * 500)

    monkeypatch.setattr("common.tokenizer_files._tokenizer_of_transformers", talk)
    folder = tmp_path / "model"
    shutil.copytree(MODEL, folder)
    (folder / "tokenizer.json").unlink()
    (finding,) = model.check(folder, GIB, "cpu")[0]
    assert finding.level == "FAIL" and len(finding.found) < 250 and "fetch tokenizer.json" in finding.advice
    assert not recwarn.list


def test_a_port_is_free_ours_or_taken() -> None:
    """Who listens is named by program and process id."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        taken = ports.check_port(port, None)
        assert taken.level == "WARN" and f"(pid {os.getpid()})" in taken.found and taken.advice
        assert ports.check_port(port, "a scheduler") == Finding("OK", f"port {port}", "a scheduler answers")
    assert ports.check_port(port, None) == Finding("OK", f"port {port}", "free")


def scheduler_look(health: str | None = "SERVING", clock_ahead_s: float = 0.0, **fields: Any) -> services.Look:
    workers = [pb.WorkerState(target="w:1", ready=True)]
    named: dict[str, Any] = {"version": "1", "fingerprint": "f", "unix_time_s": 1.0, "workers": workers} | fields
    answer = pb.GetServerInfoResponse(**named)
    return services.Look("a:1", server_info_from_proto(answer), 0.001, health, clock_ahead_s)


@pytest.mark.parametrize(
    ("look", "words"),
    [
        (scheduler_look(health="NOT_SERVING"), "NOT_SERVING"),
        (scheduler_look(version="2"), "version 2, here it is 1"),
        (scheduler_look(fingerprint="other"), "not f"),
        (scheduler_look(clock_ahead_s=-7.0), "-7.0 s from ours"),
        (scheduler_look(workers=[pb.WorkerState(target="w:1", last_error="another model")]), "another model"),
        (scheduler_look(workers=[]), "knows no worker"),
        (services.Look("a:1", worker_pb2.GetWorkerInfoResponse()), "a worker answers there"),
        (services.Look("a:1", None, problem=("gone", "start it")), "gone"),
    ],
)
def test_what_is_wrong_with_a_scheduler_is_said(look: services.Look, words: str) -> None:
    """Health, version, model, clock, workers and what it is: one line each says so, with what to do; else all is OK."""
    findings = list(services.check_scheduler(look, "f", "1"))
    levels(findings)
    assert [finding for finding in findings if finding.level != "OK" and words in finding.found]
    assert set(levels(list(services.check_scheduler(scheduler_look(), "f", "1"))).values()) == {"OK"}


def test_what_is_wrong_with_a_worker_is_said() -> None:
    """Another model and a worker that drains are warned of; a scheduler at its address is a mistake."""
    info = worker_pb2.GetWorkerInfoResponse(version="1", fingerprint="f", draining=True)
    look = services.Look("w:1", info)
    assert [finding.level for finding in services.check_worker(look, "f", "1")] == ["OK", "OK", "WARN"]
    assert [finding.level for finding in services.check_worker(look, "g", "1")] == ["OK", "WARN", "WARN"]
    assert [finding.level for finding in services.check_worker(scheduler_look(), "f", "1")] == ["FAIL"]


class Refusing(FakeScheduler):
    """A scheduler that ends GetServerInfo with this status."""

    def __init__(self, code: grpc.StatusCode) -> None:
        super().__init__()
        self.code = code

    async def GetServerInfo(self, request: pb.GetServerInfoRequest, context: Any) -> Any:  # noqa: N802
        await context.abort(self.code, "why")


@pytest.mark.parametrize(
    ("code", "found", "advice"),
    [
        (grpc.StatusCode.UNAUTHENTICATED, "API key", "give api_key"),
        (grpc.StatusCode.UNIMPLEMENTED, "no service of ours", "give the address"),
        (grpc.StatusCode.INTERNAL, "INTERNAL: why", "see its log"),
    ],
)
def test_who_does_not_answer_well_is_asked_why(code: grpc.StatusCode, found: str, advice: str) -> None:
    """Each way not to answer says what it means and what to do."""
    with serving(Refusing(code)) as target:
        (look,) = services.look_at_all([target], OPEN, 5.0)
    assert look.info is None and found in look.problem[0] and advice in look.problem[1]


def test_a_scheduler_is_heard() -> None:
    """One that answers is known as what it is, with the difference of the clocks; nothing there is said as such."""
    infos = [pb.GetServerInfoResponse(served_model_name="tiny", unix_time_s=time.time() + 100)]
    with serving(FakeScheduler(infos=infos)) as target:
        there, gone = services.look_at_all([target, "127.0.0.1:1"], OPEN, 5.0)
    assert there.kind == "a scheduler" and 90 < there.clock_ahead_s < 110
    assert gone.kind is None and "Connection refused" in gone.problem[0] and gone.problem[1]


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command without its slow and its local parts: torch, and the two ports of this machine."""
    monkeypatch.setattr(device, "look_at_torch", lambda: device.Torch("2.13", None))
    monkeypatch.setattr(doctor, "PORTS", ())


@pytest.mark.usefixtures("elsewhere")
def test_the_command_prints_lines_and_judges(capsys: pytest.CaptureFixture[str]) -> None:
    """A line a finding, what to do under it; status 1 when one failed, and --json has them all in one line."""
    ready = pb.GetServerInfoResponse(version="x", workers=[pb.WorkerState(target="w:1", ready=True)])
    with serving(FakeScheduler(infos=[ready])) as target:
        assert cli.main(["doctor", "--target", target]) == 0
        assert cli.main(["doctor", "--target", f"{target},127.0.0.1:1"]) == 1
        lines = capsys.readouterr().out.splitlines()
        assert cli.main(["doctor", "--target", target, "--json"]) == 0
    assert f"WARN  scheduler {target}: version x, here it is {installation.installed_version('fdfo')}" in lines
    assert any(line.startswith("FAIL  scheduler 127.0.0.1:1: no answer") for line in lines)
    assert "      -> start it, or give its address" in lines
    out = json.loads(capsys.readouterr().out)
    assert out["ok"] is True and {"level", "what", "found", "advice"} == set(out["findings"][0])


@pytest.mark.usefixtures("elsewhere")
def test_a_fingerprint_is_compared_with_the_folder_that_was_named(capsys: pytest.CaptureFixture[str]) -> None:
    """With --model-path a scheduler of another model is warned of; the folder that ships is not held against it."""
    answer = pb.GetServerInfoResponse(fingerprint="other", workers=[pb.WorkerState(target="w:1", ready=True)])
    with serving(FakeScheduler(infos=[answer])) as target:
        assert cli.main(["doctor", "--target", target]) == 0
        assert "not 553f8253cdb8" not in capsys.readouterr().out
        assert cli.main(["doctor", "--target", target, "--model-path", str(MODEL)]) == 0
    assert "fingerprint other, not " in capsys.readouterr().out


def test_a_device_is_named_as_workers_name_it(capsys: pytest.CaptureFixture[str]) -> None:
    """Other names are wrong usage."""
    with pytest.raises(SystemExit) as caught:
        cli.main(["doctor", "--device", "tpu"])
    assert caught.value.code == 2 and "cuda:N" in capsys.readouterr().err
