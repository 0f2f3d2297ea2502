"""Replays in virtual time: real scheduler, real loops, a simulated device; every time can be worked out beforehand."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import json
import logging
import random
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import structlog
from hypothesis import given, settings
from hypothesis import strategies as st

from common.model_folder import ModelFolder, read_model_folder
from fdfo_client import Committed, Event, cli
from fdfo_client.bench.load import Load, Record
from fdfo_client.bench.measure import Measurement, measure
from fdfo_client.bench.virtual import replay_virtually, virtual_world
from fdfo_client.bench.virtual_time import run_virtually
from fdfo_client.bench.workload import Item, write_trace
from scheduler_svc.settings import SchedulerSettings
from worker_svc.settings import WorkerSettings
from worker_svc.simulated import Profile

BLOCK = 32
MODELS = Path(__file__).parents[2] / "models"
SHIPPED = MODELS / "simulated-h200-llada2-mini"
PROFILE = Profile(
    floor_ms=7.0,
    denoise_row_ms=0.06,
    prefill_token_ms=0.002,
    forwards_shape=4.5,
    forwards_mean=5.0,
    forwards_min=2,
    forwards_max=9,
)
# Every block takes 3 forwards; the last of a request 2, as no one will read its KV.
ALWAYS_3 = dataclasses.replace(PROFILE, forwards_min=3, forwards_max=3)


def folder(profile: Profile) -> ModelFolder:
    """The shipped folder with another profile."""
    shipped = read_model_folder(SHIPPED)
    return dataclasses.replace(shipped, config={**shipped.config, "simulation": dataclasses.asdict(profile)})


def item(number: int, num_blocks: int, at_s: float | None = None) -> Item:
    """A prompt of one block, answered with whole blocks."""
    prompt_ids = random.Random(number).choices(range(16, 48), k=BLOCK)
    return Item(at_s, {"prompt_ids": prompt_ids, "max_new_tokens": num_blocks * BLOCK, "ignore_eos": True})


def services(values: dict[str, Any]) -> tuple[SchedulerSettings, WorkerSettings]:
    """The settings of both, each with those of these that it has."""
    scheduler, worker = (
        {name: value for name, value in values.items() if name in {field.name for field in dataclasses.fields(kind)}}
        for kind in (SchedulerSettings, WorkerSettings)
    )
    assert scheduler.keys() | worker.keys() == values.keys()
    return SchedulerSettings(model_path=SHIPPED, **scheduler), WorkerSettings(model_path=SHIPPED, **worker)


def play(
    items: Sequence[Item],
    profile: Profile = PROFILE,
    *,
    concurrency: int | None = None,
    num_workers: int = 1,
    network_delay_ms: float = 0.0,
    **values: Any,
) -> Measurement:
    """What a load brought, with one round in flight and plain commits unless said otherwise; all requests are well."""
    measurement = replay_virtually(
        items,
        folder(profile),
        *services({"rounds_in_flight": 1, "fused_commit": False} | values),
        concurrency=concurrency,
        num_workers=num_workers,
        network_delay_ms=network_delay_ms,
    )
    assert all(record.is_ok for record in measurement.records)
    return measurement


def ms_of(record: Record) -> tuple[list[float], float]:
    """When the request's blocks came and when it ended, from its sending."""
    assert record.ended_at_s is not None
    at_s = [commit.at_s for commit in record.commits] + [record.ended_at_s]
    *blocks, end = ((each - record.sent_at_s) * 1000 for each in at_s)
    return blocks, end


def about(value: Any) -> Any:
    """Equal but for the rounding of sums of seconds."""
    return pytest.approx(value, rel=1e-9)


def mixed_trace() -> list[Item]:
    """Requests of 1 to 4 blocks at random times."""
    generator = random.Random(7)
    return [item(number, 1 + number % 4, at_s=generator.random() / 4) for number in range(16)]


def test_a_trace_gives_the_same_records_every_time() -> None:
    """Nothing of a run depends on this machine or on chance, not even the last bit of a time."""
    setup: dict[str, Any] = {"num_workers": 2, "network_delay_ms": 0.7, "rounds_in_flight": 2}
    first, second = (play(mixed_trace(), **setup) for _ in range(2))
    assert first.records == second.records
    assert (first.wall_s, first.after) == (second.wall_s, second.after)


def tokens_and_time(items: Sequence[Item], *, fdfo: bool) -> tuple[dict[tuple[int, ...], list[int]], float]:
    """The token ids by prompt, and how long the load took."""
    tokens: dict[tuple[int, ...], list[int]] = {}

    async def run() -> float:
        async with virtual_world(folder(PROFILE), *services({"dllm_fdfo": fdfo})) as world:

            async def stream(options: dict[str, Any]) -> AsyncIterator[Event]:
                ids = tokens[tuple(options["prompt_ids"])] = []
                async for event in world.stream(options):
                    if isinstance(event, Committed):
                        ids.extend(event.token_ids)
                    yield event

            return (await measure(world, Load(stream), items, concurrency=None)).wall_s

    wall_s = run_virtually(run())
    return tokens, wall_s


def test_fdfo_writes_what_sync_writes_in_less_time() -> None:
    """The mode changes when a block is done and not what stands in it."""
    (fdfo, fdfo_s), (sync, sync_s) = (tokens_and_time(mixed_trace(), fdfo=fdfo) for fdfo in (True, False))
    assert fdfo == sync
    assert sum(map(len, fdfo.values())) == sum(each.options["max_new_tokens"] for each in mixed_trace())
    assert fdfo_s < 0.9 * sync_s


def test_the_device_is_always_busy_when_the_host_takes_no_time() -> None:
    """With one round in flight too, a closed loop leaves no time between two forwards."""
    measurement = play([item(number, 2) for number in range(12)], concurrency=4)
    assert measurement.after is not None
    device_ms = measurement.after.device_ms - measurement.before.device_ms
    assert device_ms / 1000 / measurement.wall_s == pytest.approx(1, abs=1e-6)
    assert measurement.after.host_ms == 0


def test_two_requests_by_hand() -> None:
    """The second comes in the second forward of the first one and joins at its end.

    forward   ends at ms         what it computes
    1         7 + 0.06 + 0.064   a prompt of 32 tokens and the first block of A
    2         14.184             A; B comes at 10 ms
    3         + 7.12 + 0.064     A and B with its prompt; A's first block is done
    4, 5      35.608             A and B; A's last block and B's first are done
    6, 7      49.728             B's last
    """
    first, second = play([item(0, 2, at_s=0.0), item(1, 2, at_s=0.010)], ALWAYS_3).records
    assert ms_of(first) == (about([21.368, 35.608]), about(35.608))
    assert ms_of(second) == (about([25.608, 39.728]), about(39.728))


@pytest.mark.parametrize(("rounds_in_flight", "times_there_and_back"), [(1, [1, 2, 3]), (2, [1, 1, 1])])
def test_what_a_network_delay_costs(rounds_in_flight: int, times_there_and_back: list[int]) -> None:
    """With one round in flight the way there and back comes on top of every round; with two, of the first one only."""
    measurement = play([item(0, 3, at_s=0.0)], ALWAYS_3, network_delay_ms=2.5, rounds_in_flight=rounds_in_flight)
    device_ms = [3 * 7.06 + 0.064, 6 * 7.06 + 0.064, 8 * 7.06 + 0.064]
    blocks_ms, end_ms = ms_of(measurement.records[0])
    assert blocks_ms == about([at + 5.0 * ways for at, ways in zip(device_ms, times_there_and_back, strict=True)])
    assert end_ms == blocks_ms[-1] == about(measurement.wall_s * 1000)


def test_workers_work_side_by_side() -> None:
    """Each of two requests has a worker of its own and takes no longer than alone."""
    records = play(
        [item(0, 2, at_s=0.0), item(1, 2, at_s=0.0)], ALWAYS_3, num_workers=2, max_running_requests=1
    ).records
    assert [ms_of(record)[1] for record in records] == [about(5 * 7.06 + 0.064)] * 2


def test_a_timeout_is_one_in_virtual_time() -> None:
    """A request fails when its time is over, and the others go on."""
    late = item(0, 9)
    late.options["timeout"] = 0.05
    measurement = replay_virtually([late, item(1, 1)], folder(ALWAYS_3), *services({}), concurrency=2)
    first, second = measurement.records
    assert first.error is not None and "timeout" in first.error
    assert first.ended_at_s == about(0.05)
    assert second.is_ok


ITEMS = [item(number, 1 + number % 3) for number in range(9)]
Draws = Sequence[int]  # forwards of each block of a request


@pytest.fixture(scope="module")
def draws() -> list[Draws]:
    """What each request of ITEMS takes when it runs alone."""
    taken: list[Draws] = []
    for record in play(ITEMS, concurrency=1).records:
        so_far = [0] + [commit.forwards for commit in record.commits]
        taken.append([after - before for before, after in itertools.pairwise(so_far)])
    assert [len(of_request) for of_request in taken] == [1 + number % 3 for number in range(9)]
    return taken


def naive_ms(requests: Sequence[Draws], num_rows: int, *, fdfo: bool, from_queue: bool) -> float:
    """The device's time for the requests, `num_rows` together.

    A turn is a forward with FDFO, and in lockstep as many as the slowest block has left. When a request ends, the next
    one takes its place: from the queue at once; from a client that only then sends it a turn later, since the round for
    the other rows is on its way by then, if there are any.
    """
    waiting = deque(list(draws) for draws in requests)
    rows: list[list[int]] = []  # forwards left of each block left
    coming = [waiting.popleft() for _ in range(min(num_rows, len(waiting)))]
    sent: list[list[int]] = []
    total_ms = 0.0
    while rows or coming:
        rows, num_new = rows + coming, len(coming)
        turn = 1 if fdfo else max(blocks[0] for blocks in rows)
        total_ms += turn * PROFILE.forward_ms(len(rows), 0) + PROFILE.prefill_token_ms * BLOCK * num_new
        for blocks in rows:
            blocks[0] -= min(turn, blocks[0])
            if blocks[0] == 0:
                del blocks[0]
        num_before = len(rows)
        rows = [blocks for blocks in rows if blocks]
        following = [waiting.popleft() for _ in range(min(num_before - len(rows), len(waiting)))]
        coming, sent = (following, []) if from_queue else (sent, following)
        if not rows and not coming:
            coming, sent = sent, []
    return total_ms


@settings(max_examples=40)
@given(num_rows=st.integers(1, 10), num_items=st.integers(1, len(ITEMS)), fdfo=st.booleans(), from_queue=st.booleans())
def test_a_closed_loop_takes_the_time_of_its_forwards(
    draws: list[Draws], num_rows: int, num_items: int, fdfo: bool, from_queue: bool
) -> None:
    """For any number of rows, in both modes, whether the next request waits at the server or at the client."""
    measurement = play(
        ITEMS[:num_items],
        concurrency=num_items if from_queue else num_rows,
        max_running_requests=num_rows,
        dllm_fdfo=fdfo,
    )
    expected_ms = naive_ms(draws[:num_items], num_rows, fdfo=fdfo, from_queue=from_queue)
    assert measurement.wall_s * 1000 == about(expected_ms)


@pytest.fixture
def trace(tmp_path: Path) -> Iterator[str]:
    """A trace of two requests; afterwards the process logs as before."""
    path = tmp_path / "trace.jsonl"
    write_trace(path, [item(0, 1, at_s=0.0), item(1, 2, at_s=0.5)])
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield str(path)
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.captureWarnings(False)
    structlog.reset_defaults()


def test_the_command(trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command reports what it sent, in which setup, in the forms of any replay, and says nothing else."""
    page = tmp_path / "page.html"
    flags = "--virtual-time --no-dllm-fdfo --workers 2 --network-delay-ms 1.5 --max-running-requests 3 --speed 2"
    assert cli.main(["replay", trace, *flags.split(), "--json", "-", "--html", str(page)]) == 0
    out, err = capsys.readouterr()
    report = json.loads(out)
    assert [line for line in err.splitlines() if " ... (" not in line] == [], "but what takes long on a busy machine"
    assert report["summary"]["requests_ok"] == 2
    assert [request["due_at_s"] for request in report["requests"]] == [0.0, 0.25]
    assert 0.25 < report["summary"]["wall_s"] < 1
    [server] = report["servers"]
    assert (server["fdfo"], [worker["max_rows"] for worker in server["workers"]]) == (False, [3, 3])
    shown = {"dllm_fdfo": False, "num_workers": 2, "network_delay_ms": 1.5, "rounds_in_flight": 2, "target": []}
    assert report["settings"].items() >= shown.items() and "virtual_flags" not in report["settings"]
    assert "sync" in page.read_text()
    assert cli.main(["replay", trace, "--virtual-time"]) == 0
    assert "device_busy_share" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--workers 2", "--workers: goes with --virtual-time"),
        ("--network-delay-ms 1", "--network-delay-ms: goes with --virtual-time"),
        ("--dllm-fdfo", "--dllm-fdfo/--no-dllm-fdfo: goes with --virtual-time"),
        (
            f"--virtual-time --model-path {MODELS / 'tiny-llada2'}",
            "tiny-llada2: LLaDA2MoeModelLM computes in real time",
        ),
        ("--virtual-time --model-path no-such-folder", "--model-path no-such-folder: there is no such folder"),
        ("--virtual-time --page-size 33", "--page-size 33 must be"),
        ("--virtual-time --dllm-algorithm Nope", "--dllm-algorithm"),
        ("--virtual-time --dllm-algorithm-config no-such.yaml", "--dllm-algorithm-config no-such.yaml"),
    ],
)
def test_what_does_not_fit_is_one_line(trace: str, flags: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Flags that need --virtual-time, and settings that do not fit, are named in one line with status 2."""
    assert cli.main(["replay", trace, *flags.split()]) == 2
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1


def test_a_trace_of_another_model_is_one_line(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Token ids that the simulated model has not are said once and before the load, with the flag for another model."""
    write_trace(Path(trace), [Item(0.0, {"prompt_ids": [5, 700], "max_new_tokens": 3})])
    assert cli.main(["replay", trace, "--virtual-time"]) == 2
    err = capsys.readouterr().err
    assert "recorded with another model, has token id 700" in err and "--model-path" in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--virtual-time --target 127.0.0.1:50051", "--virtual-time"),
        ("--virtual-time --network-delay-ms -1", "--network-delay-ms"),
        ("--virtual-time --workers 0", "--workers"),
    ],
)
def test_wrong_usage(flags: str, named: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A server beside --virtual-time, and values that are none, are wrong usage."""
    with pytest.raises(SystemExit) as caught:
        cli.main(["replay", "x.jsonl", *flags.split()])
    assert caught.value.code == 2
    assert named in capsys.readouterr().err


def test_without_the_extras(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """All extras of which something is missing are named."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in ("torch", "tokenizers") else name)
    assert cli.main(["replay", "x.jsonl", "--virtual-time"]) == 1
    assert "pip install 'fdfo[scheduler,worker]'" in capsys.readouterr().err
