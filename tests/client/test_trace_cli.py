"""`fdfo trace`: one run at a server, both modes on services of its own, and what it refuses."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from fdfo.scheduler.v1 import scheduler_pb2 as pb
from fdfo_client.cli import build_parser, main
from fdfo_client.commands import trace as trace_cli
from fdfo_client.testing import FakeScheduler, serving
from fdfo_client.trace.timeline import shown_prompt
from tests.security.services import scheduler_and_worker
from tests.worker.scripted import effort


def files(folder: Path) -> list[str]:
    return ["--html", str(folder / "run.html"), "--trace-events", str(folder / "run.json")]


def at_a_server(*flags: str) -> int:
    """The exit status of `fdfo trace` at a scheduler of this process."""

    async def run() -> int:
        async with scheduler_and_worker() as running:
            return await asyncio.to_thread(main, ["trace", "--target", running.target, *flags])

    return asyncio.run(run())


def data_of(page: Path) -> Any:
    """What the page draws."""
    text = page.read_text().partition('id="data">')[2].partition("</script>")[0]
    return json.loads(text)


def test_the_default_prompts_are_mixed() -> None:
    """Sixteen different ones, short and long."""
    arguments = build_parser(["trace"]).parse_args(["trace"])
    shown = [shown_prompt(options) for options in trace_cli.prompts_of(arguments)]
    assert len(set(shown)) == len(shown) == 16
    assert min(map(len, shown)) < 30 and max(map(len, shown)) > 100


def test_a_run_at_a_server_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The page and the trace events hold the prompts that were sent; the totals are printed."""
    dataset = tmp_path / "prompts.jsonl"
    dataset.write_text("".join(json.dumps({"prompt_ids": effort(forwards)}) + "\n" for forwards in (3, 6, 4, 9)))
    flags = ("--dataset", str(dataset), "--first", "3", "--max-new-tokens", "40", "--model-path", "models/tiny-llada2")
    assert at_a_server(*files(tmp_path), *flags) == 0
    (run,) = data_of(tmp_path / "run.html")["runs"]
    assert [lane["tokens"] for lane in run["lanes"]] == [40] * 3
    token = run["lanes"][0]["blocks"][0]["tokens"][0]
    assert isinstance(token[2], str) and not token[2].isdecimal()  # the tokenizer's text, not the id
    events = json.loads((tmp_path / "run.json").read_text())["traceEvents"]
    assert sum(event.get("cat") == "end" for event in events) == 3
    said = capsys.readouterr().out
    assert "wasted" in said and str(tmp_path / "run.html") in said


def test_both_modes_are_compared_on_services_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a target: a worker with the rows asked for, first with FDFO, then in lockstep, with the same prompts."""
    started: list[Sequence[str]] = []

    @contextlib.asynccontextmanager
    async def services(*flags: str) -> AsyncIterator[str]:
        started.append(flags)
        async with scheduler_and_worker(dllm_fdfo="--dllm-fdfo" in flags) as running:
            yield running.target

    monkeypatch.setattr(trace_cli, "local_services", services)
    dataset = tmp_path / "prompts.jsonl"
    dataset.write_text(
        '{"prompt_ids": [7]}\n{"prompt_ids": [7, 8], "max_new_tokens": 5, "first_unmask_steps": false}\n'
    )
    assert main(["trace", *files(tmp_path), "--dataset", str(dataset), "--max-running-requests", "2"]) == 0
    assert [flags[-1] for flags in started] == ["--dllm-fdfo", "--no-dllm-fdfo"]
    assert all("--max-running-requests 2" in " ".join(flags) for flags in started)
    fdfo, sync = data_of(tmp_path / "run.html")["runs"]
    assert (fdfo["facts"]["mode"], sync["facts"]["mode"]) == ("FDFO", "sync")
    for run in (fdfo, sync):
        assert [lane["prompt"] for lane in run["lanes"]] == ["1 token ids", "2 token ids"]
        assert run["lanes"][1]["tokens"] == 5 and run["notes"] == []


def test_a_failed_request_is_in_the_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its lane says why, the others are drawn, and the status is 1."""
    dataset = tmp_path / "prompts.jsonl"
    dataset.write_text('{"prompt_ids": [7], "max_new_tokens": 5}\n{"prompt_ids": [7], "algorithm": "none such"}\n')
    assert at_a_server(*files(tmp_path), "--dataset", str(dataset)) == 1
    (run,) = data_of(tmp_path / "run.html")["runs"]
    assert [lane["failed"] for lane in run["lanes"]] == [False, True]
    assert "algorithm" in run["lanes"][1]["reason"]
    assert "1 requests failed; the first: algorithm" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--first", "99"], "--first 99: there are 16 prompts"),
        (["--target", "a:1", "--max-running-requests", "2"], "--max-running-requests: the worker behind --target"),
        (["--api-key-file", "x"], "give --target"),
        (["--target", "a:1,b:2"], "name one scheduler"),
        (["--html", "no-such-folder/x.html"], "cannot be written"),
    ],
)
def test_wrong_usage_is_refused(
    flags: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything is started, with status 2 and what to do."""
    try:
        status: object = main(["trace", *files(tmp_path), *flags])
    except SystemExit as error:
        status = error.code
    assert status == 2
    assert said in capsys.readouterr().err


def test_an_older_scheduler_is_said_to_be_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One that does not know WatchRounds cannot be recorded."""
    with serving(FakeScheduler(infos=[pb.GetServerInfoResponse(block_size=4)])) as target:
        assert main(["trace", "--target", target, *files(tmp_path)]) == 1
    assert "does not tell of its rounds: it is of an older version" in capsys.readouterr().err
