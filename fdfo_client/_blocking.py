"""How the blocking client runs: an AsyncClient on an event loop in a thread of its own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import weakref
from collections.abc import AsyncGenerator, Coroutine, Generator
from types import TracebackType
from typing import Any, Self, TypeVar

from fdfo_client._async_client import AsyncClient
from fdfo_client._channel import check_not_forked
from fdfo_client._types import Event

T = TypeVar("T")


class Blocking:
    """What `Client` is without its methods. A client that is forgotten is closed with the process."""

    def __init__(self, client: AsyncClient) -> None:
        check_not_forked()
        self._client = client
        self._process = os.getpid()
        self._loop = asyncio.new_event_loop()
        thread = threading.Thread(target=self._loop.run_forever, name="fdfo-client", daemon=True)
        thread.start()
        self._close = weakref.finalize(self, _close, client, self._loop, thread, self._process)

    def close(self) -> None:
        """End what is running and close the connections. May be called twice."""
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            check_not_forked()
            if not self._close.alive:
                raise RuntimeError("this client is closed")
        except RuntimeError:
            work.close()
            raise
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # the wait was interrupted: do not leave the call running. Nothing, when it ended itself
            raise

    def _iterate(self, events: AsyncGenerator[Event, None]) -> Generator[Event, None, None]:
        try:
            while (event := self._run(_next_or_none(events))) is not None:
                yield event
        finally:
            # Without waiting: a generator may be closed by the garbage collector, in the loop's own thread.
            if self._close.alive and self._process == os.getpid():
                asyncio.run_coroutine_threadsafe(_aclose(events), self._loop)


async def _next_or_none(events: AsyncGenerator[Event, None]) -> Event | None:
    return await anext(events, None)


async def _aclose(events: AsyncGenerator[Event, None]) -> None:
    with contextlib.suppress(RuntimeError):  # it runs still, because it is just being cancelled: it closes itself
        await events.aclose()


def _close(client: AsyncClient, loop: asyncio.AbstractEventLoop, thread: threading.Thread, process: int) -> None:
    if process != os.getpid():  # the loop runs in the process that this one was forked from
        return

    async def finish() -> None:
        await client.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        # What was running fails with "the client was closed"; its threads must hear of it before the loop stops.
        await asyncio.gather(*others, return_exceptions=True)
        loop.stop()

    asyncio.run_coroutine_threadsafe(finish(), loop)
    if thread is not threading.current_thread():  # as when the garbage collector closes it there
        thread.join()
        loop.close()
