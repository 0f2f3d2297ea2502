"""Long work beside an event loop, on a thread that the end of the process does not wait for."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import sys
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def in_thread(work: Callable[[], T]) -> asyncio.Future[T]:
    """The result of `work`, or what it raises. Cancel it where nobody waits any more; the thread goes on."""
    result: concurrent.futures.Future[T] = concurrent.futures.Future()
    result.set_running_or_notify_cancel()

    def run() -> None:
        try:
            result.set_result(work())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, name="load", daemon=True).start()
    return asyncio.wrap_future(result)


def exit_beside_threads(status: int) -> None:
    """End the process at once if it still loads, or if the device thread is stuck: torch aborts a process whose
    interpreter goes away beneath it."""
    if any(thread.name in ("load", "device") for thread in threading.enumerate()):
        sys.stderr.flush()
        os._exit(status)
