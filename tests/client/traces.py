"""Recordings for the tests of `fdfo trace`: made by hand, or of a real scheduler under a clock that jumps."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from common import __version__
from fdfo.scheduler.v1 import scheduler_pb2 as pb
from fdfo_client._types import ServerInfo, server_info_from_proto
from fdfo_client.bench.virtual import _stream
from fdfo_client.trace.record import Answer, Recorder, Recording, Sent
from tests.scheduler.in_memory import Bench, TimedLink, play_timed
from tests.worker.scripted import BLOCK, Clock, effort, make_loop

START_S = 5000.0  # of the clock, when the first request is sent


class LoopClock(Clock):
    """The worker's clock is that of the event loop, which jumps."""

    def __call__(self) -> float:
        return asyncio.get_running_loop().time()


def prompts(efforts: Sequence[int], blocks: int = 2) -> list[dict[str, Any]]:
    """Requests whose blocks need so many forwards; the first block has one position of prompt."""
    return [
        {
            "prompt_ids": effort(forwards),
            "max_new_tokens": blocks * BLOCK - 1,
            "ignore_eos": True,
            "request_id": f"r{n}",
        }
        for n, forwards in enumerate(efforts)
    ]


def recorded(
    fdfo: bool, requests: Sequence[dict[str, Any]], num_slots: int = 3, **loop: Any
) -> tuple[Recording, Bench]:
    """What `fdfo trace` records of them, all sent at once."""
    bench = Bench(make_loop(num_slots=num_slots, clock=LoopClock(), **loop), link_type=TimedLink, dllm_fdfo=fdfo)
    recordings: list[Recording] = []

    async def scene() -> None:
        recorder = Recorder(lambda options: _stream(bench.scheduler, options), clock=asyncio.get_running_loop().time)
        with bench.scheduler.watches.watch("") as watcher:

            async def read() -> None:
                async for round_ in watcher.read():
                    recorder.rounds.append(round_)

            reading = asyncio.create_task(read())
            is_complete = await recorder.run(requests)
            reading.cancel()
        info = bench.scheduler.info()
        info.version = __version__
        name = "FDFO" if fdfo else "sync"
        server = server_info_from_proto(info)
        recordings.append(Recording(name, server, recorder.requests, recorder.rounds, is_complete))

    play_timed(bench, scene)
    return recordings[0], bench


def server(block_size: int = 4, max_rows: int = 4) -> ServerInfo:
    worker = pb.WorkerState(target="w:1", ready=True, max_rows=max_rows)
    return server_info_from_proto(
        pb.GetServerInfoResponse(block_size=block_size, served_model_name="m", version="1", workers=[worker])
    )


def sent(request_id: str, sent_s: float, ended_s: float, tokens: Sequence[tuple[int, int]], **fields: Any) -> Sent:
    """A request with one answer of these tokens: id and step; times count from START_S."""
    ids, steps = [token for token, _ in tokens], [step for _, step in tokens]
    forwards = fields.pop("forwards", 0)
    answer = Answer("text", ids, steps, START_S + ended_s, START_S + ended_s, "stop", forwards)
    options = {"prompt": f"prompt of {request_id}"}
    return Sent(options, START_S + sent_s, request_id, 1, START_S + ended_s, samples={0: answer}, **fields)


def told(
    round_id: int, sent_s: float, forwards: Sequence[tuple[float, float]], rows: Sequence[pb.WatchedRow], **fields: Any
) -> pb.WatchRoundsResponse:
    """A round whose forwards ran at these times, which count from START_S as all do; `worker_s`: what the worker's
    clock is ahead."""
    ahead_s = fields.pop("worker_s", 0.0)
    waiting = fields.pop("waiting", 0)
    return pb.WatchRoundsResponse(
        worker="w:1",
        generation=1,
        round_id=round_id,
        sent_at_us=round((START_S + sent_s) * 1e6),
        replied_at_us=round((START_S + forwards[-1][1] + 0.001) * 1e6),
        forward_begins_us=[round((START_S + begin + ahead_s) * 1e6) for begin, _ in forwards],
        forward_ends_us=[round((START_S + end + ahead_s) * 1e6) for _, end in forwards],
        forwards=len(forwards),
        waiting_row_forwards=waiting,
        denoise_row_forwards=sum(row.forwards for row in rows),
        rows=rows,
        **fields,
    )


def row(request_id: str, block: int, forwards: int, done: bool, **fields: Any) -> pb.WatchedRow:
    return pb.WatchedRow(
        request_id=request_id,
        status=pb.WATCHED_STATUS_RUNNING,
        block_index=block,
        accept_length=4 if done else 0,
        forwards=forwards,
        **fields,
    )
