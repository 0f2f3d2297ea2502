"""Tensor parallel over gloo on the CPU, in real processes."""

from __future__ import annotations

import functools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from common.architectures import ARCHITECTURES
from common.model_folder import read_model_folder
from fdfo.worker.v1 import worker_pb2 as pb
from tests.e2e.served import MODEL, ROOT, run_together, serving
from tests.golden.loops_of import answers, loop_of, row_of
from tests.model.forwards import random_ids
from tests.model.published import CONFIGS, published, write_published
from tests.worker.rank_process import CASES, CPU, MASK, SIZE, SLOTS, rank_of_all_cases
from worker_svc.__main__ import main
from worker_svc.denoise import DenoiseLoop
from worker_svc.models.loading import load_model
from worker_svc.models.shard import Shard
from worker_svc.ranks import Ranks
from worker_svc.tensor_parallel import Group, LeadingRunner


def asked(loop: DenoiseLoop) -> list[list[int]]:
    """Answers to prompts around the borders of blocks, longer than a chunk too; some are sampled."""
    size = loop.config.block_size
    lengths = [1, size - 1, size, size + 1, 5 * size + 3, 2 * size]
    rows = [
        row_of(
            f"r{n}",
            [token % 250 for token in random_ids(length, seed=n)],
            loop,
            tokens_left=size + 3 * n,
            algorithm="LowConfidence" if n % 2 else "EntropyBounded",
            sampling=pb.SamplingParams(temperature=0.5 * (n % 3 == 2), top_p=1.0, seed=n),
        )
        for n, length in enumerate(lengths)
    ]
    return answers(loop, rows, pb.MODE_FDFO)


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, tuple[list[list[int]], list[list[int]]]]]:
    """The answers of every case, by one rank and by two; the second process is started once."""
    path = tmp_path_factory.mktemp("models")
    found = {}
    torch.set_num_threads(1)
    ranks = Ranks(SIZE, rank_of_all_cases, path)
    try:
        for name in CONFIGS:
            model = published(name, head_scale=10.0)
            write_published(path / name, name, model.config, model.weights)
        group = Group(Shard(0, SIZE), CPU, ranks.rendezvous, SLOTS)
        for name, case in CASES.items():
            folder = case.folder(path)
            make = functools.partial(
                loop_of,
                block_size=case.block_size,
                mask_id=MASK,
                logit_shift=folder.logit_shift,
                slots=SLOTS,
                batch_invariant=case.batch_invariant,
                fused_commit=not folder.logit_shift,
            )
            one = make(load_model(folder, dtype=None, device="cpu"))
            runner = LeadingRunner(case.runner(path, Shard(0, SIZE)), group)
            two = DenoiseLoop(runner, one.config, lambda: 0.0)
            assert two.kv.k.shape[3] * SIZE == one.kv.k.shape[3], "a rank has its own heads' KV only"
            found[name] = asked(one), asked(two)
            runner.stop()
        ranks.expect_end()
        group.leave()
        yield found
    finally:
        ranks.stop(wait_s=5)


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_write_what_one_writes(both: dict[str, tuple[list[list[int]], list[list[int]]]], name: str) -> None:
    """Chunks, fused commits, sampled and greedy rows together: the same tokens."""
    one, two = both[name]
    assert two == one
    assert sum(map(len, one)) > 40


@pytest.mark.parametrize("name", CONFIGS)
def test_a_rank_reads_its_part_of_each_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The two parts of every tensor hold all that is stored, once; whole are only norms, the gate and its bias."""
    model = published(name)
    folder = read_model_folder(write_published(tmp_path, name, model.config, model.weights))
    whole = load_model(folder, dtype=None, device="cpu")
    parts = [load_model(folder, dtype=None, device="cpu", shard=Shard(rank, SIZE)) for rank in range(SIZE)]
    halves = [part.checkpoint_tensors(merged_experts=False) for part in parts]
    for place, stored in whole.checkpoint_tensors(merged_experts=False).items():
        own = [half[place] for half in halves]
        if own[0].shape == stored.shape:
            assert "norm" in place or ".gate." in place, place
            assert torch.equal(own[0], stored) and torch.equal(own[1], stored)
            continue
        assert sum(half.numel() for half in own) == stored.numel(), place
        assert torch.equal(torch.cat([half.flatten() for half in own]).sort().values, stored.flatten().sort().values)


def worker_command(*flags: str) -> list[str]:
    return [sys.executable, "-m", "worker_svc", "--model-path", str(MODEL), "--port", "0", "--exit-with-parent", *flags]


def test_a_lost_rank_ends_the_worker(tmp_path: Path) -> None:
    """A rank that is killed takes the worker with it in seconds: status 1, a line that says why, no process left."""
    log = tmp_path / "log"
    with log.open("wb") as errors:
        process = subprocess.Popen(
            worker_command("--tp-size", "2", "--log-format", "json"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            cwd=ROOT,
        )
    assert process.stdin is not None and process.stdout is not None
    with process.stdin, process.stdout:
        try:
            assert process.stdout.readline(), log.read_text()
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            (rank,) = [pid for pid in children if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]
            os.kill(int(rank), signal.SIGKILL)
            killed_at = time.monotonic()
            assert process.wait(timeout=20) == 1
            assert time.monotonic() - killed_at < 5
        finally:
            process.kill()
    lines = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
    (lost,) = [line for line in lines if line["event"] == "rank_lost"]
    assert (lost["rank"], lost["exit_status"]) == (1, -signal.SIGKILL)
    assert "--tp-size" in lost["hint"]
    assert not Path(f"/proc/{rank}").exists()


def test_two_processes_serve_and_stop(tmp_path: Path) -> None:
    """`fdfo serve --tp-size 2` gives the right answers, and SIGTERM ends both ranks of the worker in order."""
    problems = [json.loads(line) for line in (MODEL / "problems.jsonl").read_text().splitlines()[:4]]
    requests = [{"messages": [{"role": "user", "content": problem["prompt"]}]} for problem in problems]
    with serving(tmp_path / "log", "--tp-size", str(SIZE)) as served:
        found = run_together(served.target, requests)
    assert [answer.text for answer in found] == [problem["answer"] for problem in problems]
    log = (tmp_path / "log").read_text()
    assert "stopped" in log and "rank_lost" not in log and "Traceback" not in log


def refusal(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    """The one line that the worker ends with."""
    assert main(["--model-path", str(MODEL), "--port", "0", *flags]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("worker: ")]
    return line


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (("--tp-size", "3"), r"--tp-size 3: num_attention_heads 4 is not a multiple of it"),
        (("--tp-size", "2", "--device", "cuda:1"), r"--device cuda:1: with --tp-size say cuda; "),
        (("--tp-size", "2", "--device", "cuda"), r"--tp-size 2: there are 0 CUDA devices"),
    ],
)
def test_what_cannot_be_split_is_refused(capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], line: str) -> None:
    """Sizes that do not divide and devices that are not there, by the flag's name, before a process is started."""
    assert re.search(line, refusal(capsys, *flags))


def test_an_interface_that_is_not_there_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line names the variable and the interface, before a process is started."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", f"{socket.if_nameindex()[0][1]},bogus0")
    assert "GLOO_SOCKET_IFNAME: no network interface bogus0" in refusal(capsys, "--tp-size", "2")


def test_every_size_that_is_cut_is_looked_at() -> None:
    """Heads, kv heads, vocabulary and both feed-forwards: each alone can be what does not divide."""
    base: dict[str, Any] = CONFIGS["LLaDA2MoeModelLM"] | {"num_attention_heads": 8, "num_key_value_heads": 4}
    for key in ("num_key_value_heads", "vocab_size", "intermediate_size", "moe_intermediate_size"):
        config = base | {key: base[key] // 2 if key == "num_key_value_heads" else base[key] + 2}
        misfit = Shard(0, 4).misfit(ARCHITECTURES["LLaDA2MoeModelLM"].backbone(config))
        assert misfit is not None and misfit.startswith(f"{key} {config[key]} "), key
    assert Shard(0, 4).misfit(ARCHITECTURES["LLaDA2MoeModelLM"].backbone(base)) is None


def test_a_simulated_model_is_not_split(capsys: pytest.CaptureFixture[str]) -> None:
    """It has no weights to split."""
    simulated = str(ROOT / "models" / "simulated-h200-llada2-mini")
    assert main(["--model-path", simulated, "--port", "0", "--tp-size", "2"]) == 2
    assert "--tp-size: " in capsys.readouterr().err
