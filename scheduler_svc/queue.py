"""Who is next: first in, first out, bounded; requests that lost their place go back to the front."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from common.errors import QueueFull

if TYPE_CHECKING:
    from scheduler_svc.request import Request

RETRY_AFTER_S = 1.0


class RequestQueue:
    """Waiting requests in the order in which they start."""

    def __init__(self, max_queued: int) -> None:
        self._waiting: deque[Request] = deque()
        self._max_queued = max_queued

    def __len__(self) -> int:
        return len(self._waiting)

    def push(self, request: Request) -> int:
        """Add a new request at the end; returns how many are before it. Raises QueueFull."""
        if len(self._waiting) >= self._max_queued:
            raise QueueFull(RETRY_AFTER_S)
        self._waiting.append(request)
        return len(self._waiting) - 1

    def push_front(self, requests: list[Request]) -> None:
        """Put back requests that had started, in their order. Never refused: they were admitted once."""
        self._waiting.extendleft(reversed(requests))

    def first(self) -> Request | None:
        return self._waiting[0] if self._waiting else None

    def pop(self) -> Request:
        return self._waiting.popleft()

    def remove(self, request: Request) -> None:
        """Forget a waiting request; nothing happens if it does not wait."""
        if request in self._waiting:
            self._waiting.remove(request)
