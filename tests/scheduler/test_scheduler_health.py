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


def test_not_serving_after_the_grace_time_without_a_worker() -> None:
    """SERVING for the grace time, then NOT_SERVING, and SERVING again with the first worker."""
    said: list[bool] = []
    scheduler: Any = SimpleNamespace(has_worker=False)
    service: Any = SimpleNamespace(set_serving=said.append)

    async def scene() -> None:
        watch = asyncio.create_task(_watch_workers(scheduler, [service]))
        await asyncio.sleep(WITHOUT_WORKER_GRACE_S - 1.5)
        assert all(said)
        await asyncio.sleep(2)
        assert said.pop() is False
        scheduler.has_worker = True
        await asyncio.sleep(1)
        assert said.pop() is True
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
