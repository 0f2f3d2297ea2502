"""How long a request may take, part by part, and the watch over the parts that the server is not told."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, fields
from typing import Any, Self, TypeVar

from fdfo_client._errors import DeadlineExceeded, InvalidRequest, TimeoutPart
from fdfo_client._types import Committed, Event, Finished

T = TypeVar("T")

# gRPC counts nanoseconds in 64 bits; what does not fit it takes for a deadline that has passed.
MAX_TIMEOUT_S = 365 * 24 * 3600

_MEANINGS: dict[TimeoutPart, str] = {
    "connect": "no scheduler answered the call",
    "first_token": "no token came",
    "between_blocks": "nothing new came",
}


@dataclass(frozen=True)
class Timeout:
    """How long a request may take, in seconds; None is no limit. `DeadlineExceeded.part` is the part that ran out.

    connect: until the scheduler first answers the call (it does when it has read the prompt, before any wait in its
        queue), at each one that is tried; when it runs out the next one is tried.
    first_token: from the call to the first `Committed`, in the queue and at other schedulers too.
    between_blocks: from where the caller takes one `Committed` to the next, at other schedulers too.
    total: until the answer is complete. The scheduler is told and ends the work itself.
    """

    connect: float | None = None
    first_token: float | None = None
    between_blocks: float | None = None
    total: float | None = None

    def __post_init__(self) -> None:
        """Raises InvalidRequest that names the part."""
        for part in fields(self):
            _check(f"timeout.{part.name}", getattr(self, part.name))


def timeout_of(value: Timeout | float | None) -> Timeout:
    """The option `timeout`; a number is the total. Raises InvalidRequest."""
    if isinstance(value, Timeout):
        return value
    _check("timeout", value)
    return Timeout(total=value)


def _check(name: str, seconds: object) -> None:
    if seconds is not None and not (isinstance(seconds, int | float) and 0 < seconds <= MAX_TIMEOUT_S):
        raise InvalidRequest(
            f"{name}: must be a number of seconds above 0 and up to {MAX_TIMEOUT_S} (a year), not {seconds!r:.80}; "
            "leave it out for none",
            name,
        )


class Watch:
    """Ends the waits of one request when a part of its Timeout runs out. `sleep` makes what is done after some seconds,
    or is cancelled when nobody waits any more."""

    def __init__(self, timeout: Timeout, sleep: Callable[[float], asyncio.Future[object]]) -> None:
        self._timeout = timeout
        self._sleep = sleep
        self._timers: dict[TimeoutPart, asyncio.Future[object]] = {}

    def __enter__(self) -> Self:
        self._start("first_token")
        return self

    def __exit__(self, *error: object) -> None:
        self._stop(*self._timers)

    async def connect(self, call: Any) -> None:
        """Wait until a call of gRPC is answered: its first metadata come, or its end."""
        if self._timeout.connect is not None:
            self._start("connect")
            try:
                await self.wait(call.wait_for_connection())
            finally:
                self._stop("connect")

    def took(self, event: Event) -> None:
        """The caller has this event and wants the next one."""
        if isinstance(event, Committed | Finished):
            self._stop("first_token", "between_blocks")
            self._start("between_blocks")

    async def wait(self, work: Awaitable[T]) -> T:
        """What comes of `work`. Raises DeadlineExceeded and cancels it when a part that is counted runs out before."""
        if not self._timers:
            return await work
        task = asyncio.ensure_future(work)
        try:
            either: set[asyncio.Future[Any]] = {task, *self._timers.values()}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            for part, timer in self._timers.items():
                if timer.done() and not (timer.cancelled() or task.done()):
                    raise self._ran_out(part)
            return await task
        finally:
            task.cancel()

    def _ran_out(self, part: TimeoutPart) -> DeadlineExceeded:
        return DeadlineExceeded(
            f"timeout.{part}: {_MEANINGS[part]} within {getattr(self._timeout, part):g} s; give a longer one, or look "
            "with `fdfo info` at how busy the scheduler is",
            part,
        )

    def _start(self, part: TimeoutPart) -> None:
        seconds: float | None = getattr(self._timeout, part)
        if seconds is not None:
            self._timers[part] = self._sleep(seconds)

    def _stop(self, *parts: TimeoutPart) -> None:
        for part in parts:
            if timer := self._timers.pop(part, None):
                timer.cancel()
