"""`fdfo top`: what is asked, what becomes of the answers, and the picture."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection
from typing import Any

import pytest
from rich.console import Console

from fdfo.scheduler.v1 import scheduler_pb2 as pb
from fdfo_client import cli
from fdfo_client._access import Access
from fdfo_client._channel import Tls
from fdfo_client._types import server_info_from_proto
from fdfo_client.testing import FakeScheduler, serving
from fdfo_client.top.rates import History, State
from fdfo_client.top.sampling import Sample, Sampler
from fdfo_client.top.view import render, sparkline


def info(
    scheduler_id: str = "s", workers: tuple[pb.WorkerState, ...] = (), **counters: int
) -> pb.GetServerInfoResponse:
    """A scheduler that has queued 3 and runs 2."""
    named: dict[str, Any] = counters
    return pb.GetServerInfoResponse(
        scheduler_id=scheduler_id,
        served_model_name="tiny",
        queued=3,
        running=2,
        max_queued_requests=9,
        uptime_s=125.0,
        workers=workers or (worker(),),
        counters=pb.SchedulerCounters(**named),
    )


def worker(epoch: str = "e", **fields: Any) -> pb.WorkerState:
    state = pb.WorkerState(
        target="w:1", worker_epoch=epoch, ready=True, rows=2, max_rows=4, device="cuda:0", dtype="bfloat16",
        pages_free=5, pages_cached=3, pages_held=2, pages_total=10,
    )  # fmt: skip
    state.MergeFrom(pb.WorkerState(**fields))
    return state


def sample(at_s: float, answer: pb.GetServerInfoResponse | None, target: str = "a:1") -> Sample:
    if answer is None:
        return Sample(target, at_s, None, "no answer")
    return Sample(target, at_s, server_info_from_proto(answer))


def text_of(state: State, tokens_per_s: tuple[float | None, ...] = (None,), width: int = 160) -> str:
    """What a console prints."""
    console = Console(width=width)
    with console.capture() as capture:
        console.print(render(state, tokens_per_s, 1.0, "12:00:00", width))
    return capture.get()


def test_rates_are_what_counters_grew_by() -> None:
    """The first answer has none; the next ones are divided by the seconds between the answers."""
    history = History()
    assert history.state([sample(10, info(forwards=5))]).schedulers[0].rates is None
    grown = info(forwards=25, published_tokens=64, blocks_done=2, denoise_row_forwards=30, waiting_row_forwards=10)
    rates = history.state([sample(12, grown)]).schedulers[0].rates
    assert rates is not None
    assert (rates.forwards_per_s, rates.tokens_per_s, rates.blocks_per_s, rates.rows_per_forward) == (10, 32, 1, 2)
    rates = history.state([sample(13, grown)]).schedulers[0].rates
    assert rates is not None and (rates.forwards_per_s, rates.rows_per_forward) == (0, None)


def test_another_life_of_a_scheduler_has_no_rates() -> None:
    """One that was started again counts from 0; that is no rate."""
    history = History()
    history.state([sample(0, info("one", forwards=500))])
    assert history.state([sample(1, info("two", forwards=3))]).schedulers[0].rates is None


def test_a_scheduler_that_is_gone_and_comes_back() -> None:
    """It is shown as gone since its last answer, and its rates are over the whole gap when it is there again."""
    history = History()
    history.state([sample(0, info(forwards=10))])
    state = history.state([sample(4, None)])
    assert state.schedulers[0].gone_s == 4 and state.totals.rates is None
    assert state.workers == () and "gone 4 s" in text_of(state) and "a:1: no answer" in text_of(state)
    state = history.state([sample(10, info(forwards=30))])
    assert state.schedulers[0].gone_s == 0
    assert state.schedulers[0].rates is not None and state.schedulers[0].rates.forwards_per_s == 2
    assert History().state([sample(7, None)]).schedulers[0].gone_s == 0, "never seen"


def test_a_worker_of_two_schedulers_is_there_once() -> None:
    """Its rows are both schedulers' rows, its pages those that the busier one knows; forwards that both count are not
    added up, all else is."""
    history, states = History(), []
    for at_s, number in ((0, 0), (1, 10)):
        one = info("one", (worker(rows=1, pages_held=1),), forwards=number, blocks_done=number)
        two = info("two", (worker(rows=3, pages_held=7),), forwards=number, blocks_done=number)
        states.append(history.state([sample(at_s, one), sample(at_s, two, "b:1")]))
    (shown,) = states[1].workers
    assert (shown.rows, shown.pages_held) == (4, 7)
    totals = states[1].totals
    assert (totals.queued, totals.running) == (6, 4)
    assert totals.rates is not None
    assert (totals.rates.blocks_per_s, totals.rates.forwards_per_s, totals.rates.rows_per_forward) == (20, None, None)


def test_forwards_of_schedulers_with_workers_of_their_own_add_up() -> None:
    """The rows per forward of all weigh each scheduler by its forwards."""
    history, states = History(), []
    for at_s, number in ((0, 0), (1, 1)):
        one = info("one", (worker("e1"),), forwards=30 * number, denoise_row_forwards=30 * number)
        two = info("two", (worker("e2"),), forwards=10 * number, denoise_row_forwards=50 * number)
        states.append(history.state([sample(at_s, one), sample(at_s, two, "b:1")]))
    rates = states[1].totals.rates
    assert rates is not None and (rates.forwards_per_s, rates.rows_per_forward) == (40, 2)
    assert len(states[1].workers) == 2


def test_the_picture_has_what_a_person_looks_for() -> None:
    """Queue, rows, rates, KV pages by kind, preemptions, restarts, a worker that is not ready with its error."""
    lost = pb.WorkerState(target="w:2", last_error="connection refused")
    history = History()
    history.state([sample(0, info(forwards=0))])
    now = info(
        "s", (worker(), lost), forwards=4, denoise_row_forwards=10, preemptions=6, restarts=1, published_tokens=99
    )
    picture = text_of(history.state([sample(1, now)]), (None, 0.0, 99.0))
    lines = [line.split() for line in picture.splitlines()]
    assert ["a:1", "up", "2", "min", "tiny", "3/9", "2", "2.5", "4.0", "99.0", "0.0", "0.0", "6", "1"] in lines
    assert ["w:1", "ready", "cuda:0", "bfloat16", "2/4", "2", "3", "5", "10", "20%"] in lines
    assert "w:2: connection refused" in picture
    assert "0 to 99, last 3 s" in picture


@pytest.mark.parametrize(("width", "left_out"), [(160, set()), (100, {"blocks/s", "reqs/s"}), (64, {"model"})])
def test_a_narrow_terminal_has_whole_numbers(width: int, left_out: set[str]) -> None:
    """Columns are left out, the least important first; headings and numbers that are there are whole."""
    answers = [info(f"s{number}", forwards=0) for number in range(3)]
    for answer in answers:
        answer.max_queued_requests = 1024
    samples = [sample(0, answer, f"10.0.0.{number}:50051") for number, answer in enumerate(answers)]
    picture = text_of(History().state(samples), width=width)
    heading = next(line for line in picture.splitlines() if line.startswith("scheduler "))
    assert not left_out & set(heading.split()) and {"queued", "running", "tokens/s"} <= set(heading.split())
    assert ("blocks/s" in heading) == (width == 160)
    assert picture.count(" 3/1024 ") == 3 and picture.count(" 20%") == 1 and "…" not in picture
    assert len(text_of(History().state(samples), width=46).split("3/1024")) == 4, "only targets are cut"


def test_a_sparkline_begins_at_zero() -> None:
    """Bars are shares of the largest value, zero is the lowest, and what is not known is blank."""
    assert sparkline([None, 0.0, 4.0, 8.0]) == " ▁▅█"
    assert sparkline([0.0, 0.0]) == "▁▁"


def test_one_that_is_gone_hides_no_other() -> None:
    """Each target is asked for itself."""

    async def run(target: str) -> list[Sample]:
        sampler = Sampler(["127.0.0.1:1", target])
        try:
            return await sampler.sample(5.0)
        finally:
            await sampler.close()

    with serving(FakeScheduler(infos=[info()])) as target:
        gone, there = asyncio.run(run(target))
    assert gone.info is None and "127.0.0.1:1" in gone.error
    assert there.info is not None and there.info.queued == 3


def test_every_scheduler_behind_a_name_is_asked() -> None:
    """Addresses come and go with the name; where it does not resolve, they stay; a name without any is one error."""
    addresses: list[Collection[str]] = []

    async def resolve(host: str, port: int) -> Collection[str]:
        assert (host, port) == ("schedulers", 50051)
        if not addresses:
            raise OSError(1, "the resolver is down")
        return addresses.pop(0)

    async def run(one: str, two: str) -> None:
        sampler = Sampler(["dns:///schedulers:50051"], resolve=resolve)
        try:
            addresses.append(set())
            assert [found.error for found in await sampler.sample(5.0)] == ["the name has no address"]
            addresses.extend([{one}, {one, two}, {two}])
            for expected in ([one], sorted([one, two]), [two], [two]):
                samples = await sampler.sample(5.0)
                assert [found.target for found in samples] == expected
                assert all(found.info is not None for found in samples)
        finally:
            await sampler.close()

    with serving(FakeScheduler()) as one, serving(FakeScheduler()) as two:
        asyncio.run(run(one, two))


def test_an_address_of_a_name_must_show_a_certificate_for_the_name() -> None:
    """With TLS the certificate behind dns:///name is compared with the name, not with the address."""
    seen: list[Access] = []

    class Asked(Sampler):
        async def _ask(self, target: str, access: Access, timeout_s: float) -> Sample:
            seen.append(access)
            return Sample(target, 0.0, None)

    async def resolve(host: str, port: int) -> set[str]:
        return {"10.0.0.1:1"}

    asyncio.run(Asked(["dns:///name:1", "dns:name:1"], Access(Tls()), resolve=resolve).sample(1.0))
    assert [access.tls for access in seen] == [Tls(server_name="name")] * 2


def test_once_shows_one_view_with_rates(capsys: pytest.CaptureFixture[str]) -> None:
    """--once waits one interval; with --json it prints one line with schedulers, workers and totals."""
    infos = [info(), info(blocks_done=10)]
    with serving(FakeScheduler(infos=infos)) as target:
        assert cli.main(["top", "--once", "--json", "--interval", "0.05", "--target", target]) == 0
        line = json.loads(capsys.readouterr().out)
        assert cli.main(["top", "--once", "--interval", "0.05", "--target", f"{target},127.0.0.1:1"]) == 1
    (scheduler,) = line["schedulers"]
    assert scheduler["target"] == target and scheduler["info"]["queued"] == 3
    assert scheduler["rates"]["blocks_per_s"] > 10 and line["totals"]["rates"] == scheduler["rates"]
    assert line["workers"][0]["pages_cached"] == 3
    out = capsys.readouterr().out
    assert "2 schedulers (1 gone)" in out and "\x1b" not in out, "no terminal, no control characters"


def test_without_rich_only_json_works(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Where the picture's package is missing, the line says how to install it, and --json does without."""
    find_spec = importlib.util.find_spec
    without: Callable[..., Any] = lambda name, *rest: None if name == "rich" else find_spec(name, *rest)  # noqa: E731
    monkeypatch.setattr(importlib.util, "find_spec", without)
    with serving(FakeScheduler()) as target:
        assert cli.main(["top", "--once", "--target", target]) == 1
        assert "pip install 'fdfo[cli]'" in capsys.readouterr().err
        assert cli.main(["top", "--once", "--json", "--interval", "0.05", "--target", target]) == 0


def test_on_a_terminal_it_is_live_until_ctrl_c() -> None:
    """It takes the whole screen, changes with what the scheduler says, and gives the screen back: status 130."""
    infos = [info(), *(info(published_tokens=1000 * number) for number in range(1, 500))]
    with serving(FakeScheduler(infos=infos)) as target:
        ours, theirs = pty.openpty()
        process = subprocess.Popen(
            [sys.executable, "-m", "fdfo_client", "top", "--interval", "0.1", "--target", target],
            stdin=theirs, stdout=theirs, stderr=theirs, env={**os.environ, "TERM": "xterm", "COLUMNS": "150"},
        )  # fmt: skip
        os.close(theirs)
        try:
            seen = _read(ours, until="0 to ")
            assert "\x1b[?1049h" in seen and "tiny" in seen and "w:1" in seen
            process.send_signal(signal.SIGINT)
            assert "\x1b[?1049l" in _read(ours, until="\x1b[?1049l")
            assert process.wait(timeout=10) == 130
        finally:
            process.kill()
            process.wait()
            os.close(ours)


def _read(terminal: int, until: str, limit_s: float = 20.0) -> str:
    """What a terminal shows, up to these characters."""
    deadline, seen = time.monotonic() + limit_s, b""
    while until.encode() not in seen and time.monotonic() < deadline:
        if select.select([terminal], [], [], 0.1)[0]:
            with contextlib.suppress(OSError):  # the other end is closed
                seen += os.read(terminal, 65536)
    return seen.decode(errors="replace")
