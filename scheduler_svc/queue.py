"""Who is next, and who is refused.

Higher classes first. Within a class come those that lost their place, in their order; then the clients share: next is
the first request of the client with the fewest rows, and of clients with as many rows the one that was served longest
ago. With one client that is first in, first out. Requests that may not start now (`Stream.may_start`), and those of a
client that has as many rows as it may, are passed over. Those under suspicion (`Request.is_suspect`) wait beside all
others until they can run alone, one after the other.

Every operation takes a time that depends on the number of classes, clients and rows, not on that of waiting requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from common.errors import QueueFull

if TYPE_CHECKING:
    from scheduler_svc.request import Request

MIN_RETRY_S, MAX_RETRY_S = 1.0, 60.0
RATE_OF_LAST = 64  # requests that left the queue


@dataclass
class _Class:
    """The waiting requests of one priority. `clients`: each with its own, in turn; never an empty one."""

    returned: OrderedDict[Request, None] = field(default_factory=OrderedDict)
    clients: OrderedDict[str, OrderedDict[Request, None]] = field(default_factory=OrderedDict)
    num_waiting: int = 0


class RequestQueue:
    """Waiting requests, each sample one. `on_put` is called when some were added; `clock` gives seconds.

    max_queued, max_queued_per_client: waiting requests after which new ones are refused.
    max_running_per_client: rows that a client may have. Of both limits of a client 0 is none.
    """

    def __init__(
        self,
        max_queued: int,
        on_put: Callable[[], None] = lambda: None,
        *,
        max_queued_per_client: int = 0,
        max_running_per_client: int = 0,
        clock: Callable[[], float] = lambda: asyncio.get_running_loop().time(),
    ) -> None:
        self.num_refused = 0
        self._classes: dict[int, _Class] = {}  # by priority; never an empty one
        self._suspects: OrderedDict[Request, None] = OrderedDict()
        self._num_waiting = 0
        self._waiting_of: Counter[str] = Counter()  # by client
        self._rows_of: dict[str, set[Request]] = {}  # by client; those that were taken and not put back or forgotten
        self._left_at: deque[float] = deque(maxlen=RATE_OF_LAST)
        self._max_queued = max_queued
        self._max_queued_per_client = max_queued_per_client or math.inf
        self._max_running_per_client = max_running_per_client or math.inf
        self._on_put = on_put
        self._clock = clock

    def __len__(self) -> int:
        return self._num_waiting

    def __iter__(self) -> Iterator[Request]:
        """All that wait, in no order. Calls that only have a place are none yet."""
        yield from self._suspects
        for waiting in self._classes.values():
            yield from waiting.returned
            yield from itertools.chain.from_iterable(waiting.clients.values())

    # In ---------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def place(self, client: str) -> Iterator[None]:
        """Counts as a waiting request of the client; raises QueueFull."""
        self._check(client)
        self._count(client, 1)
        try:
            yield
        finally:
            self._count(client, -1)

    def push(self, samples: Sequence[Request], *, at_front: bool = False) -> int:
        """Add the samples of a new request at the end of its client's, or at the front of their class one that ran
        elsewhere; returns how many wait before them in their class and higher ones. Raises QueueFull; the last request
        that finds a place brings all its samples."""
        self._check(samples[0].client)
        lowest = samples[0].priority + at_front
        position = sum(waiting.num_waiting for priority, waiting in self._classes.items() if priority >= lowest)
        if at_front:
            self.push_front(samples)
        else:
            for sample in samples:
                self._put(sample)
            self._on_put()
        return position

    def push_held(self, samples: Sequence[Request]) -> None:
        """Put samples of a request that has started before all others of its client. Never refused."""
        for sample in reversed(samples):
            self._put(sample)
            self._classes[sample.priority].clients[sample.client].move_to_end(sample, last=False)
        if samples:
            self._on_put()

    def push_front(self, requests: Sequence[Request]) -> None:
        """Put requests that lost their place before all others of their class, in their order. Never refused."""
        for request in reversed(requests):
            self._forget_row(request)
            if request.is_suspect:
                self._count(request.client, 1)
                waiting = self._suspects
            else:
                waiting = self._class_of(request).returned
            waiting[request] = None
            waiting.move_to_end(request, last=False)
        if requests:
            self._on_put()

    def _put(self, request: Request) -> None:
        self._class_of(request).clients.setdefault(request.client, OrderedDict())[request] = None

    def _class_of(self, request: Request) -> _Class:
        """The class that the request is about to be put into."""
        waiting = self._classes.setdefault(request.priority, _Class())
        waiting.num_waiting += 1
        self._count(request.client, 1)
        return waiting

    def _count(self, client: str, number: int) -> None:
        self._num_waiting += number
        self._waiting_of[client] += number
        if not self._waiting_of[client]:
            del self._waiting_of[client]

    def _check(self, client: str) -> None:
        of_client = self._waiting_of[client]
        if self._num_waiting >= self._max_queued:
            num_before, is_own = self._num_waiting, False
        elif of_client >= self._max_queued_per_client:
            num_before, is_own = of_client * len(self._waiting_of), True  # the others have their turns too
        else:
            return
        self.num_refused += 1
        raise QueueFull(self._retry_after_s(num_before), of_client=is_own)

    def _retry_after_s(self, num_before: int) -> float:
        """Whole seconds until so many have left, at the rate of the last ones."""
        if not self._left_at:
            return MIN_RETRY_S
        seconds_each = (self._clock() - self._left_at[0]) / len(self._left_at)
        return min(max(math.ceil(num_before * seconds_each), MIN_RETRY_S), MAX_RETRY_S)

    # Out --------------------------------------------------------------------------------------------------------

    def first_suspect(self) -> Request | None:
        """The one that runs alone next."""
        return next((request for request in self._suspects if request.may_start), None)

    def first(self) -> Request | None:
        """The one that starts next, if there is one that may."""
        for priority in sorted(self._classes, reverse=True):
            waiting = self._classes[priority]
            for request in waiting.returned:
                if request.may_start and self._num_rows(request.client) < self._max_running_per_client:
                    return request
            for client in sorted(waiting.clients, key=self._num_rows):  # of equals, in turn
                if self._num_rows(client) >= self._max_running_per_client:
                    break
                for request in waiting.clients[client]:
                    if request.may_start:
                        return request
        return None

    def _num_rows(self, client: str) -> int:
        return sum(not request.is_finished for request in self._rows_of.get(client, ()))

    def pop(self) -> Request:
        """Take the first one, which must be there."""
        request = self.first()
        assert request is not None
        self.take(request)
        return request

    def take(self, request: Request) -> None:
        """A waiting request starts; its client has one row more, until it is put back, finished or removed."""
        waiting = self._classes.get(request.priority, _Class())
        self.remove(request)
        if request.client in waiting.clients:
            waiting.clients.move_to_end(request.client)
        self._rows_of.setdefault(request.client, set()).add(request)

    def remove(self, request: Request) -> None:
        """Forget a request that waits or has started; nothing happens if it does not."""
        self._forget_row(request)
        if request in self._suspects:
            del self._suspects[request]
            self._count(request.client, -1)
            self._left_at.append(self._clock())
            return
        waiting = self._classes.get(request.priority)
        if waiting is None:
            return
        of_client = waiting.clients.get(request.client, OrderedDict())
        if request in of_client:
            del of_client[request]
            if not of_client:
                del waiting.clients[request.client]
        elif request in waiting.returned:
            del waiting.returned[request]
        else:
            return
        waiting.num_waiting -= 1
        if not waiting.num_waiting:
            del self._classes[request.priority]
        self._count(request.client, -1)
        self._left_at.append(self._clock())

    def _forget_row(self, request: Request) -> None:
        rows = self._rows_of.get(request.client)
        if rows is not None:
            rows.discard(request)
            if not rows:
                del self._rows_of[request.client]
