"""What a client reads: the events of all samples of its request, in the order in which they happened.

What is not read yet is bounded: past `max_buffer_bytes` the request is parked, which keeps its rows out of rounds, and
goes on when less than half is left. Rounds that are on their way then still add what they bring. Provisional events
do not count: of each sample one waits at most.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from common.errors import ServiceError
from fdfo.scheduler.v1 import scheduler_pb2 as api
from scheduler_svc.outbox import Event, Outbox

if TYPE_CHECKING:
    from scheduler_svc.request import Request


def live_name(client: str, request_id: str) -> str:
    """A client's request among those of all: two clients may use one id. `client` has no slash; "" where clients are
    not told apart."""
    return f"{client}/{request_id}" if client else request_id


@dataclass(eq=False)
class Stream:
    """One live call of a client. `held`: samples that start when the first one has put the prompt into the cache.

    `name`: what tells the request from all others of this scheduler, also at the workers; see `live_name`.
    `request_part`: what every resume value begins with, serialised. `on_park`: called when it is parked and when it
    goes on. `timer`: ends it before the client's deadline. `counters`: tokens that are published are added to them.
    """

    request_id: str
    outbox: Outbox
    name: str
    request_part: bytes = b""
    client: str = ""
    max_buffer_bytes: int = 2**63
    on_park: Callable[[Stream], None] = lambda stream: None
    samples: list[Request] = field(default_factory=list)
    held: list[Request] = field(default_factory=list)
    events: asyncio.Queue[Event] = field(default_factory=asyncio.Queue)
    timer: asyncio.TimerHandle | None = None
    counters: api.SchedulerCounters = field(default_factory=api.SchedulerCounters)
    unread_provisional: dict[int, api.GenerateResponse] = field(default_factory=dict)  # by sample
    buffered_bytes: int = 0
    is_parked: bool = False
    called_at: float = 0.0  # this and the next two: see metrics.py
    has_started: bool = False
    has_published: bool = False

    @property
    def is_finished(self) -> bool:
        """Whether every sample has its terminal event."""
        return all(sample.is_finished for sample in self.samples)

    @property
    def may_start(self) -> bool:
        """Not while its client must read first, nor when its deadline is here."""
        is_late = self.timer is not None and self.timer.when() <= asyncio.get_running_loop().time()
        return not (self.is_parked or is_late)

    def cost(self) -> dict[str, int]:
        """What all samples together took and gave, for the log."""
        return {
            "forwards": sum(sample.forwards for sample in self.samples),
            "published_tokens": sum(sample.published_tokens - sample.published_before for sample in self.samples),
            "preemptions": sum(sample.num_preemptions for sample in self.samples),
        }

    def start(self, queue_position: int) -> None:
        """The first event, and the Finished of samples that had ended when another call was cut off."""
        first = self.samples[0]
        started = api.Started(
            request_id=self.request_id,
            seed=first.seed,
            queue_position=queue_position,
            prompt_tokens=len(first.spec.prompt_ids),
            resume=first.resume_value(),
        )
        self.put(api.GenerateResponse(started=started))
        for sample in self.samples:
            sample.finish_if_over()

    def put(self, response: api.GenerateResponse) -> None:
        """One more event."""
        self.outbox.put(self.events, response)
        self.counters.published_tokens += len(response.committed.token_ids)
        self._buffer(response.ByteSize())

    def show(self, event: api.GenerateResponse) -> None:
        """A provisional event. It takes the place of one of its block that is not read yet."""
        index, block_index = event.provisional.sample_index, event.provisional.block_index
        unread = self.unread_provisional.get(index)
        if unread is not None and unread.provisional.block_index == block_index:
            unread.CopyFrom(event)
        else:
            self.unread_provisional[index] = event
            self.outbox.put(self.events, event)

    def _take_provisional(self, event: api.GenerateResponse) -> bool:
        """Whether the event, which is read now, is still so: its block is not done, and no newer one came."""
        index = event.provisional.sample_index
        if self.unread_provisional.get(index) is not event:
            return False
        del self.unread_provisional[index]
        sample = self.samples[index]
        return not sample.is_finished and sample.block_index == event.provisional.block_index

    def _buffer(self, num_bytes: int) -> None:
        """So many bytes more or, below 0, less are not read yet."""
        self.buffered_bytes += num_bytes
        limit = self.max_buffer_bytes // 2 if self.is_parked else self.max_buffer_bytes
        if (self.buffered_bytes > limit) != self.is_parked:
            self.is_parked = not self.is_parked
            self.on_park(self)

    def fail(self, error: ServiceError) -> None:
        """End all samples that have not ended with an error instead of their Finished."""
        if not self.is_finished:
            for sample in self.samples:
                sample.is_finished = True
            self.outbox.put(self.events, error)

    def interrupt(self, error: ServiceError) -> None:
        """The same, but tell first what each of them had cost and how to go on with it elsewhere."""
        for sample in self.samples:
            if not sample.is_finished:
                self.put(api.GenerateResponse(interrupted=sample.interrupted()))
        self.fail(error)

    def take_held(self) -> list[Request]:
        """The held samples, in order, held no more."""
        held, self.held = self.held, []
        return held

    async def read(self) -> AsyncIterator[api.GenerateResponse]:
        """All events up to the Finished of the last sample. Raises the ServiceError that ended them."""
        num_open = len(self.samples)
        while num_open:
            event = await self.events.get()
            if isinstance(event, ServiceError):
                raise event
            if event.HasField("provisional"):
                if self._take_provisional(event):
                    yield event
                continue
            num_open -= event.HasField("finished")
            yield event
            self._buffer(-event.ByteSize())
