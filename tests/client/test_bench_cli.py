"""`fdfo bench` and `fdfo replay` against scripted schedulers: what they send, print, write and return."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import re
import signal
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest

from fdfo.scheduler.v1 import scheduler_pb2 as pb
from fdfo_client import cli
from fdfo_client.testing import HOLD, FakeScheduler, Step, committed, failure, finished, serving, started


def info(**counters: float) -> pb.GetServerInfoResponse:
    """A scheduler with one worker and blocks of 4."""
    named: dict[str, Any] = counters
    return pb.GetServerInfoResponse(
        served_model_name="tiny",
        fingerprint="abc",
        block_size=4,
        num_tokens=100,
        context_length=512,
        algorithm="LowConfidence",
        fdfo=True,
        workers=[pb.WorkerState(target="w:1", ready=True, max_rows=8)],
        counters=pb.SchedulerCounters(**named),
    )


def blocks(request: pb.GenerateRequest) -> list[Step]:
    """Two blocks of 4 and the end."""
    usage = pb.Usage(prompt_tokens=8, completion_tokens=8, forwards=6)
    return [
        started("r", request.sampling.seed, prompt_tokens=8),
        committed("abcd", [1, 2, 3, 4], forwards=4),
        committed("efgh", [5, 6, 7, 8], forwards=6),
        finished(usage=usage),
    ]


def every_second_fails(request: pb.GenerateRequest) -> list[Step]:
    """Requests with an odd seed fail."""
    if request.sampling.seed % 2:
        return [failure(grpc.StatusCode.INTERNAL, "why")]
    return blocks(request)


def fake(
    script: Callable[[pb.GenerateRequest], Sequence[Step]] = blocks, *infos: pb.GetServerInfoResponse
) -> FakeScheduler:
    return FakeScheduler(script, infos=infos or [info()])


def run(scheduler: FakeScheduler, *argv: str) -> int:
    """The exit status of the command against a scripted scheduler."""
    with serving(scheduler) as target:
        return cli.main([argv[0], "--target", target, *argv[1:]])


def report_of(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """What --json - printed."""
    out: dict[str, Any] = json.loads(capsys.readouterr().out)
    return out


def test_bench_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    """By default the figures stand on stdout, by their names."""
    assert run(fake(), "bench", "--requests", "3") == 0
    out, err = capsys.readouterr()
    assert out.startswith("fdfo bench: tiny, LowConfidence, FDFO, blocks of 4 tokens\n")
    assert re.search(r"^requests_ok +3$", out, re.MULTILINE)
    assert re.search(r"^ttft_ms( +[\d.]+){4}$", out, re.MULTILINE)
    assert err == ""


def test_bench_sends_what_the_flags_say(capsys: pytest.CaptureFixture[str]) -> None:
    """Prompt lengths, output lengths, algorithm, parameters and temperature reach each request; warm-up ones too."""
    scheduler = fake()
    flags = (
        "--requests 3 --warmup 2 --prompt-tokens 5 --output-tokens 7:9 --algorithm JointThreshold "
        "--param threshold=0.5 --temperature 0.25 --timeout 60 --json -"
    )
    assert run(scheduler, "bench", *flags.split()) == 0
    assert len(scheduler.requests) == 5
    for request in scheduler.requests:
        assert len(request.prompt_ids.ids) == 5 and max(request.prompt_ids.ids) < 100
        assert 7 <= request.max_new_tokens <= 9
        assert request.ignore_eos
        assert request.algorithm == "JointThreshold" and request.algorithm_params == {"threshold": 0.5}
        assert request.sampling.temperature == 0.25
    assert report_of(capsys)["summary"]["requests_ok"] == 3


def test_the_same_seed_sends_the_same_requests() -> None:
    """--seed draws everything; closed or open loop send the same, another seed something else."""
    schedulers = [fake() for _ in range(3)]
    for scheduler, flags in zip(
        schedulers, ["--concurrency 1", "--rate 10000", "--concurrency 1 --seed 1"], strict=True
    ):
        assert run(scheduler, "bench", "--requests", "3", "--prompt-tokens", "2:9", *flags.split()) == 0
    sent = [sorted(request.SerializeToString() for request in scheduler.requests) for scheduler in schedulers]
    assert sent[0] == sent[1] != sent[2]


def test_figures_of_the_server_are_what_its_counters_grew_by(capsys: pytest.CaptureFixture[str]) -> None:
    """Counters are read after the warm-up and after the load, and their difference is reported."""
    infos = [info(), info(rounds=10, forwards=20), info(rounds=14, forwards=28, device_ms=4.0, round_trip_ms=12.0)]
    assert run(fake(blocks, *infos), "bench", "--requests", "1", "--warmup", "1", "--json", "-") == 0
    server = report_of(capsys)["summary"]["server"]
    assert (server["rounds"], server["forwards"]) == (4, 8)
    assert server["host_ms_per_round"] == 2.0


def test_several_schedulers(capsys: pytest.CaptureFixture[str]) -> None:
    """Requests go to all targets, their counters are added, and each is in the report."""
    one, two = fake(blocks, info(), info(), info(forwards=3)), fake(blocks, info(), info(), info(forwards=4))
    with serving(one) as first, serving(two) as second:
        assert cli.main(["bench", "--target", f"{first},{second}", "--requests", "4", "--json", "-"]) == 0
        report = report_of(capsys)
        assert [server["target"] for server in report["servers"]] == [first, second]
    assert len(one.requests) == len(two.requests) == 2
    assert report["summary"]["server"]["forwards"] == 7


def test_different_models_are_not_one_measurement(capsys: pytest.CaptureFixture[str]) -> None:
    """Targets that serve different models are refused."""
    other = info()
    other.fingerprint = "def"
    with serving(fake()) as first, serving(fake(blocks, other)) as second:
        assert cli.main(["bench", "--target", f"{first},{second}"]) == 1
    assert "different models" in capsys.readouterr().err


def test_failed_requests_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    """A failed request stands in the counts and among the errors, and the status is 1."""
    scheduler = fake(every_second_fails)
    assert run(scheduler, "bench", "--requests", "20", "--json", "-") == 1
    report = report_of(capsys)
    num_failed = sum(request.sampling.seed % 2 for request in scheduler.requests)
    assert 0 < num_failed < 20
    assert report["summary"]["requests_failed"] == num_failed
    assert report["summary"]["requests_ok"] == 20 - num_failed
    assert sum(report["summary"]["errors"].values()) == num_failed
    assert sum(request["error"] is not None for request in report["requests"]) == num_failed
    assert run(fake(every_second_fails), "bench", "--requests", "20") == 1
    out = capsys.readouterr().out
    assert f"! {num_failed} requests failed" in out and f"{num_failed} x " in out


def test_a_failed_warm_up_ends_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    """Then nothing is measured; the error says why."""
    scheduler = fake(lambda request: [failure(grpc.StatusCode.INTERNAL, "why")])
    assert run(scheduler, "bench", "--warmup", "1") == 1
    assert len(scheduler.requests) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1 and "warm-up" in err and "why" in err


def test_the_json_has_these_names(capsys: pytest.CaptureFixture[str]) -> None:
    """The names in the JSON are a promise: one that goes or is added changes this test."""
    assert run(fake(), "bench", "--requests", "2", "--rate", "10000", "--json", "-") == 0
    report = report_of(capsys)
    assert list(report) == [
        "fdfo_report", "command", "settings", "servers", "cut_short", "counters_error", "summary", "requests"
    ]  # fmt: skip
    assert (report["fdfo_report"], report["command"], report["cut_short"]) == (1, "bench", False)
    assert sorted(report["settings"]) == sorted(
        ["algorithm", "concurrency", "dataset", "duration", "html", "json", "output_tokens", "param", "prompt_tokens",
         "rate", "record", "requests", "seed", "target", "temperature", "timeout", "warmup"]
    )  # fmt: skip
    summary = report["summary"]
    assert list(summary) == [
        "requests_ok", "requests_failed", "requests_unfinished", "wall_s", "requests_per_s", "prompt_tokens",
        "output_tokens", "output_tokens_per_s", "ttft_ms", "time_per_block_ms", "end_to_end_ms", "send_lag_ms",
        "server", "errors",
    ]  # fmt: skip
    for name in ("ttft_ms", "time_per_block_ms", "end_to_end_ms", "send_lag_ms"):
        assert list(summary[name]) == ["count", "mean", "p50", "p95", "p99"]
    assert list(summary["server"]) == [
        "rounds", "forwards", "blocks_done", "denoise_row_forwards", "waiting_row_forwards", "prefill_tokens",
        "published_tokens", "restarts", "preemptions", "allocator_calls", "forwards_per_block", "tokens_per_forward",
        "denoise_rows_per_forward", "waiting_rows_per_forward", "prefill_tokens_per_forward", "forwards_per_round",
        "device_ms_per_forward", "device_busy_share", "host_ms_per_round", "scheduler_host_ms_per_round",
    ]  # fmt: skip
    assert list(report["requests"][0]) == [
        "due_at_s", "sent_at_s", "ttft_ms", "end_to_end_ms", "prompt_tokens", "output_tokens", "forwards",
        "finish_reason", "error",
    ]  # fmt: skip


def test_the_page_stands_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The page has all plots and definitions, names nothing outside itself, and shows foreign text as text."""
    page = tmp_path / "report.html"
    scheduler = fake(lambda request: blocks(request)[:2] if request.sampling.seed % 2 else blocks(request))
    scheduler.infos[0].served_model_name = "<b>tiny</b>"
    assert run(scheduler, "bench", "--requests", "9", "--html", str(page), "--json", str(tmp_path / "x.json")) == 1
    html = page.read_text()
    captions = re.findall(r"<figcaption><b>(.*?)</b>", html)
    assert captions == [
        "Time to first tokens", "Time per block", "End to end", "Output tokens per second over time",
        "Requests in flight over time", "Forwards per block",
    ]  # fmt: skip
    assert html.count("<svg") == html.count("</svg>") == len(captions)
    assert "no data" not in html
    assert "://" not in html and "<script" not in html and "<link" not in html and "@import" not in html
    assert set(re.findall(r'href="([^"]*)"', html)) == set(re.findall(r'href="(#\w+)"', html))
    assert "<b>tiny" not in html and "&lt;b&gt;tiny" in html
    assert "denoise_row_forwards / blocks_done" in html and "requests failed" in html
    ids = re.findall(r'\sid="([^"]*)"', html)
    assert len(ids) == len(set(ids))
    assert json.loads((tmp_path / "x.json").read_text())["summary"]["requests_failed"] > 0
    assert "ttft_ms" in capsys.readouterr().out


def test_a_page_of_nothing(tmp_path: Path) -> None:
    """When every request failed there is still a page; its plots say that there is no data."""
    page = tmp_path / "report.html"
    script: list[Step] = [failure(grpc.StatusCode.INTERNAL, "why")]
    assert run(fake(lambda request: script), "bench", "--requests", "2", "--html", str(page)) == 1
    assert page.read_text().count("no data") == 5  # requests were in flight


def test_a_recorded_load_is_replayed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--record writes what was sent, with the seeds; replay sends the same, at the recorded times over the speed."""
    trace = tmp_path / "trace.jsonl"
    first, second = fake(), fake()
    assert run(first, "bench", "--requests", "5", "--concurrency", "2", "--warmup", "1", "--record", str(trace)) == 0
    capsys.readouterr()
    assert run(second, "replay", str(trace), "--speed", "1000", "--json", "-") == 0
    report = report_of(capsys)
    assert report["command"] == "replay"
    sent, replayed = ({request.SerializeToString() for request in part.requests} for part in (first, second))
    assert replayed < sent and len(sent - replayed) == 1  # the warm-up is not recorded
    at_s = [json.loads(line)["at_s"] for line in trace.read_text().splitlines()[1:]]
    assert at_s == sorted(at_s)
    assert [request["due_at_s"] for request in report["requests"]] == [each / 1000 for each in at_s]


def test_a_dataset(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without --requests each line is sent once; what it says goes before the flags; other columns are told of."""
    path = tmp_path / "set.jsonl"
    path.write_text(
        '{"prompt": "a", "temperature": 1, "answer": 7}\n{"messages": [{"role": "user", "content": "b"}]}\n'
    )
    scheduler = fake()
    flags = ["--dataset", str(path), "--temperature", "0.5", "--output-tokens", "9", "--concurrency", "1"]
    assert run(scheduler, "bench", *flags) == 0
    assert [request.WhichOneof("prompt") for request in scheduler.requests] == ["text", "messages"]
    assert [request.sampling.temperature for request in scheduler.requests] == [1.0, 0.5]
    assert [request.max_new_tokens for request in scheduler.requests] == [9, 9]
    assert "left out: answer" in capsys.readouterr().err


def test_ctrl_c_cuts_a_run_short(capsys: pytest.CaptureFixture[str]) -> None:
    """The first SIGINT ends the sending; the summary of what finished is printed, marked, and the status is 130."""
    turns = itertools.count()
    scheduler = fake(lambda request: [started(), HOLD] if next(turns) == 2 else blocks(request))

    def interrupt_when_held() -> None:
        scheduler.held.get(timeout=10)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt_when_held)
    thread.start()
    assert run(scheduler, "bench", "--requests", "9", "--concurrency", "1") == 130
    thread.join()
    scheduler.cancelled.get(timeout=10)
    out = capsys.readouterr().out
    assert "! cut short: 1 requests were under way" in out
    assert re.search(r"^requests_ok +2$", out, re.MULTILINE)
    assert len(scheduler.requests) == 3


def test_a_server_that_is_gone_at_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    """The client's own figures are reported all the same, with a note that those of the server are missing."""
    restarted = fake(blocks, info(), info(forwards=9), info(forwards=2))
    assert run(restarted, "bench", "--requests", "1") == 0
    out = capsys.readouterr().out
    assert "! no figures of the server" in out and "requests_ok" in out and "forwards" not in out


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["bench", "--concurrency", "0"], "--concurrency"),
        (["bench", "--concurrency", "4", "--rate", "4"], "--rate"),
        (["bench", "--rate", "0"], "--rate"),
        (["bench", "--rate", "nan"], "--rate"),
        (["bench", "--requests", "1.5"], "--requests"),
        (["bench", "--duration", "-1"], "--duration"),
        (["bench", "--warmup", "x"], "--warmup"),
        (["bench", "--prompt-tokens", "9:1"], "LOW:HIGH"),
        (["bench", "--output-tokens", "gamma:1"], "--output-tokens"),
        (["bench", "--prompt-tokens", "1", "--dataset", "x.jsonl"], "--dataset"),
        (["bench", "--param", "threshold"], "NAME=NUMBER"),
        (["bench", "--json", "/no/such/folder/x.json"], "--json"),
        (["bench", "--html", "/no/such/folder/x.html"], "--html"),
        (["bench", "--target", "localhost"], "host:port"),
        (["replay"], "FILE"),
        (["replay", "x.jsonl", "--speed", "0"], "--speed"),
    ],
)
def test_wrong_usage(argv: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    """What is wrong on the command line is named, with status 2, and nothing is sent."""
    with pytest.raises(SystemExit) as caught:
        cli.main(argv)
    assert caught.value.code == 2
    assert named in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["bench", "--dataset", "no-such.jsonl"], "no-such.jsonl: No such file"),
        (["replay", "no-such.jsonl"], "no-such.jsonl: No such file"),
        (["bench", "--prompt-tokens", "500", "--output-tokens", "1:99"], "--prompt-tokens 500, --output-tokens 1:99"),
    ],
)
def test_what_cannot_be_sent_is_wrong_usage(argv: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A missing file, and lengths that do not fit the context, are one line and status 2."""
    assert run(fake(), *argv) == 2
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1


def test_no_scheduler(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a scheduler the status is 1 and the line says how to start one."""
    assert cli.main(["bench", "--target", "127.0.0.1:1"]) == 1
    assert "fdfo serve" in capsys.readouterr().err


@pytest.mark.parametrize("argv", [["bench"], ["replay", "x.jsonl"]])
def test_without_the_extra(
    argv: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """When what the extra brings is missing the error says how to install it."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert cli.main(argv) == 1
    assert "pip install 'fdfo[bench]'" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["bench", "replay"])
def test_help_has_examples(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """--help ends well and shows examples."""
    with pytest.raises(SystemExit) as caught:
        cli.main([command, "--help"])
    assert caught.value.code == 0
    assert "examples:" in capsys.readouterr().out
