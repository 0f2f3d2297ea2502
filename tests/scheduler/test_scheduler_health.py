"""What the scheduler says of itself while it has no worker, and the order in which it ends."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from common.errors import Unavailable
from fdfo_client.bench.virtual_time import run_virtually
from scheduler_svc.__main__ import WITHOUT_WORKER_GRACE_S, _watch_workers
from tests.scheduler.in_memory import Bench, play
from tests.worker.scripted import effort, make_loop


def test_serving_from_the_first_worker_until_the_grace_time_without_one() -> None:
    """NOT_SERVING before the first worker, SERVING for the grace time after the last; then not, and again
    with the next."""
    said: list[bool] = []
    scheduler: Any = SimpleNamespace(has_worker=False)
    service: Any = SimpleNamespace(set_serving=said.append)

    async def scene() -> None:
        watch = asyncio.create_task(_watch_workers(scheduler, [service]))
        await asyncio.sleep(1)
        assert not said, "health begins as NOT_SERVING"
        for has_worker, seconds, last_said in (
            (True, 1, [True]),
            (False, WITHOUT_WORKER_GRACE_S - 1, [True]),
            (False, 2, [True, False]),
            (True, 1, [True, False, True]),
        ):
            scheduler.has_worker = has_worker
            await asyncio.sleep(seconds)
            assert said == last_said
        watch.cancel()

    run_virtually(scene())


def test_a_stream_that_the_shutdown_ends_has_all_its_blocks_before() -> None:
    """What was committed is told first, then the stream ends with UNAVAILABLE, and the row is released."""
    loop = make_loop()
    bench = Bench(loop, max_forwards=1)

    async def scene() -> None:
        stream = await bench.submit("a", effort(3), 900)
        (sample,) = stream.samples
        while len(sample.committed_ids) < 100:
            await asyncio.sleep(0)
        await bench.scheduler.close(0)
        told: list[int] = []
        ended = False
        try:
            async for event in stream.read():
                assert not event.HasField("finished")
                told += event.committed.committed_ids
        except Unavailable:
            ended = True
        assert ended and told == sample.committed_ids
        assert not bench.scheduler.abort("a"), "it is over"
        bench.scheduler.leave(stream)
        while any(session.rows for session in loop.sessions.values()):
            await asyncio.sleep(0)

    play(bench, scene)
