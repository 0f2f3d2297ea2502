"""Who is next: higher classes first, first in first out within a class, bounded.

Requests that lost their place go back to the front of their class. Those under suspicion (`Request.is_suspect`) wait
beside all others until they can run alone, one after the other. Every operation takes a time that depends on the
number of classes, not on the number of requests.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from common.errors import QueueFull

if TYPE_CHECKING:
    from scheduler_svc.request import Request

RETRY_AFTER_S = 1.0


class RequestQueue:
    """Waiting requests, each sample one, in the order in which they start. `on_put` is called when some were added."""

    def __init__(self, max_queued: int, on_put: Callable[[], None] = lambda: None) -> None:
        self._classes: dict[int, OrderedDict[Request, None]] = {}  # priority to its requests; never an empty one
        self._suspects: OrderedDict[Request, None] = OrderedDict()
        self._num_waiting = 0
        self._max_queued = max_queued
        self._on_put = on_put

    def __len__(self) -> int:
        return self._num_waiting

    def push(self, samples: Sequence[Request], *, at_front: bool = False) -> int:
        """Add the samples of a new request at the end of their class, or at its front one that ran elsewhere; returns
        how many are before them. Raises QueueFull; the last request that finds a place brings all its samples."""
        if self._num_waiting >= self._max_queued:
            raise QueueFull(RETRY_AFTER_S)
        lowest = samples[0].priority + at_front
        position = sum(len(waiting) for priority, waiting in self._classes.items() if priority >= lowest)
        if at_front:
            self.push_front(samples)
        else:
            for sample in samples:
                self._put(sample)
            self._on_put()
        return position

    def push_front(self, requests: Sequence[Request]) -> None:
        """Put requests before all others of their class, in their order. Never refused: they were admitted once."""
        for request in reversed(requests):
            self._put(request)
            waiting = self._suspects if request.is_suspect else self._classes[request.priority]
            waiting.move_to_end(request, last=False)
        if requests:
            self._on_put()

    def _put(self, request: Request) -> None:
        if request.is_suspect:
            self._suspects[request] = None
        else:
            self._classes.setdefault(request.priority, OrderedDict())[request] = None
        self._num_waiting += 1

    def first_suspect(self) -> Request | None:
        """The one that runs alone next."""
        return next(iter(self._suspects), None)

    def first(self) -> Request | None:
        """The one that starts next of those that may run with others."""
        return next(iter(self._classes[max(self._classes)])) if self._classes else None

    def pop(self) -> Request:
        """Take the first one, which must be there."""
        request = self.first()
        assert request is not None
        self.remove(request)
        return request

    def remove(self, request: Request) -> None:
        """Forget a waiting request; nothing happens if it does not wait."""
        if request in self._suspects:
            del self._suspects[request]
            self._num_waiting -= 1
            return
        waiting = self._classes.get(request.priority)
        if waiting is not None and request in waiting:
            del waiting[request]
            self._num_waiting -= 1
            if not waiting:
                del self._classes[request.priority]
