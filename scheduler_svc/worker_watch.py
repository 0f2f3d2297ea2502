"""Whether a worker is still there, asked once a second: an idle one that is gone must not look ready for long."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from fdfo.worker.v1 import worker_pb2 as pb
from scheduler_svc.workers import Link, WorkerLost

PROBE_EVERY_S = 1.0


async def watch_worker(
    link: Link,
    epoch: str,
    owes_reply: Callable[[], bool],
    on_pages: Callable[[pb.PageUsage], None],
    patience_s: float,
) -> None:
    """Probe the worker for ever. Raises WorkerLost when it is dead or has another epoch, and when it drains or does not
    answer a probe. One that owes us a reply may drain, since the reply brings more, and be silent for `patience_s`;
    `on_pages` hears of the pages of one that owes none."""
    clock = asyncio.get_running_loop().time
    answered_at = clock()
    while True:
        await asyncio.sleep(PROBE_EVERY_S)
        try:
            info = await link.probe()
        except WorkerLost as lost:
            if lost.is_death or not owes_reply() or clock() - answered_at > patience_s:
                raise
            continue
        answered_at = clock()
        if info.worker_epoch != epoch:
            raise WorkerLost(f"restarted: its epoch is {info.worker_epoch}", is_death=True)
        if info.draining and not owes_reply():
            raise WorkerLost("the worker is draining", refusal="DRAINING")
        if not owes_reply():
            on_pages(info.pages)
