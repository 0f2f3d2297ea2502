"""Events on their way to the streams that wait for them.

Applying a reply makes events and makes the next round possible. Writing the stream messages of a few blocks takes a
processor as long as a round's whole way to the worker; the round goes first, because the device may be waiting for it.
"""

from __future__ import annotations

import asyncio

from common.errors import ServiceError
from fdfo.scheduler.v1 import scheduler_pb2 as api

Event = api.GenerateResponse | ServiceError
HOLD_S = 0.001


class Outbox:
    """Hands events over in order, `hold_s` seconds after they were put in."""

    def __init__(self, hold_s: float = HOLD_S) -> None:
        self._hold_s = hold_s
        self._waiting: list[tuple[asyncio.Queue[Event], Event]] = []

    def put(self, stream: asyncio.Queue[Event], event: Event) -> None:
        if not self._waiting:
            asyncio.get_running_loop().call_later(self._hold_s, self._hand_over)
        self._waiting.append((stream, event))

    def _hand_over(self) -> None:
        waiting, self._waiting = self._waiting, []
        for stream, event in waiting:
            stream.put_nowait(event)
