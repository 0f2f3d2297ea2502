"""Whether the device thread gets on, looked at once a second."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from worker_svc.executor import Executor

LOOK_EVERY_S = 1.0

log = structlog.get_logger()


async def watch_device(executor: Executor, stall_timeout_s: float, on_change: Callable[[bool], None]) -> None:
    """Look for ever. `on_change` hears True when the thread has been at one boundary, forward or call for the time
    given, and False when it gets on again.

    Looks are counted, not a clock: a process that was stopped and goes on has stalled for no look of its own.
    """
    num_turns, seconds, was_stalled = -1, 0.0, False
    while True:
        if executor.is_idle or executor.num_turns != num_turns:
            num_turns, seconds = executor.num_turns, 0.0
        is_stalled = seconds >= stall_timeout_s
        if is_stalled != was_stalled:
            was_stalled = is_stalled
            if is_stalled:
                log.error("device_stalled", seconds=stall_timeout_s, hint="longer forwards? raise --stall-timeout-s")
            else:
                log.warning("device_goes_on")
            on_change(is_stalled)
        await asyncio.sleep(LOOK_EVERY_S)
        seconds += LOOK_EVERY_S
