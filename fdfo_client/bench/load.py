"""Sends requests in a closed or an open loop and keeps a record of each.

All times are those of the running event loop, so a loop with a clock of its own runs a load in that time.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from fdfo_client._types import Committed, Event, Finished, FinishReason, Started, Usage
from fdfo_client.bench.workload import Item

# From the options of `AsyncClient.stream`, the prompt among them, to the events of one request.
Stream: TypeAlias = Callable[[dict[str, Any]], AsyncIterator[Event]]


@dataclass(frozen=True)
class Commit:
    """A Committed event: when it came, the token ids it brought, and the forwards of its request so far."""

    at_s: float
    num_tokens: int
    forwards: int


@dataclass
class Record:
    """What became of one request. Times are seconds from the load's start.

    due_at_s: when an open loop was to send it. ended_at_s: when its stream ended, well or not; None: it was cut short.
    finish_reason and usage: of a request that finished. error: one line, of one that failed.
    """

    options: dict[str, Any]
    due_at_s: float | None
    sent_at_s: float
    started_at_s: float | None = None
    ended_at_s: float | None = None
    prompt_tokens: int = 0
    seed: int | None = None
    commits: list[Commit] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    error: str | None = None

    @property
    def is_ok(self) -> bool:
        """It finished, and nothing failed."""
        return self.finish_reason is not None and self.error is None

    @property
    def output_tokens(self) -> int:
        """Token ids that came."""
        return sum(commit.num_tokens for commit in self.commits)


class Load:
    """Requests to one stream of events each. `records` grows by one with every request sent.

    on_progress is called when a request was sent, when it brought something and when it ended.
    """

    def __init__(self, stream: Stream, on_progress: Callable[[Load], None] = lambda load: None) -> None:
        self.records: list[Record] = []
        self.num_ended = 0
        self.num_failed = 0
        self.num_tokens = 0
        self.wall_s = 0.0
        self.was_cut_short = False
        self._stream = stream
        self._on_progress = on_progress
        self._started_at = 0.0
        self._task: asyncio.Task[None] | None = None

    @property
    def num_in_flight(self) -> int:
        """Requests that were sent and have not ended."""
        return len(self.records) - self.num_ended

    async def run(self, items: Iterable[Item], *, concurrency: int | None, duration_s: float | None = None) -> None:
        """Send all items and wait for their ends; once only.

        concurrency: a closed loop, so many requests at a time, the next sent when one ended. None: an open loop, each
            item sent at its `at_s`, however many are under way.
        duration_s: nothing is sent after so many seconds; what is under way ends.

        Afterwards `wall_s` is the time this took.
        """
        self._started_at = asyncio.get_running_loop().time()
        until_s = float("inf") if duration_s is None else duration_s
        sending = self._open(items, until_s) if concurrency is None else self._closed(items, until_s, concurrency)
        self._task = asyncio.create_task(sending)
        try:
            await self._task
        except asyncio.CancelledError:
            if not self.was_cut_short:
                raise
        finally:
            self.wall_s = self._now_s()

    def cut_short(self) -> None:
        """Stop sending and leave what is under way; `run` then returns."""
        if self._task is not None and not self._task.done():
            self.was_cut_short = True
            self._task.cancel()

    async def _closed(self, items: Iterable[Item], until_s: float, concurrency: int) -> None:
        waiting = iter(items)

        async def one_after_the_other() -> None:
            for item in waiting:
                await self._send(item)
                if self._now_s() >= until_s:
                    break

        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(one_after_the_other())

    async def _open(self, items: Iterable[Item], until_s: float) -> None:
        async with asyncio.TaskGroup() as group:
            for item in items:
                assert item.at_s is not None, "an open loop sends at given times"
                if item.at_s >= until_s or self._now_s() >= until_s:
                    break
                await asyncio.sleep(max(0.0, item.at_s - self._now_s()))
                group.create_task(self._send(item))

    async def _send(self, item: Item) -> None:
        record = Record(item.options, item.at_s, self._now_s())
        self.records.append(record)
        self._on_progress(self)
        try:
            async for event in self._stream(item.options):
                self._note(record, event)
        except Exception as error:
            record.error = " ".join(str(error).split()) or type(error).__name__
        else:
            if record.finish_reason is None:
                record.error = "the stream ended before Finished"
        record.ended_at_s = self._now_s()
        self.num_ended += 1
        self.num_failed += not record.is_ok
        self._on_progress(self)

    def _note(self, record: Record, event: Event) -> None:
        match event:
            case Started():
                record.started_at_s = self._now_s()
                record.prompt_tokens, record.seed = event.prompt_tokens, event.seed
            case Committed():
                record.commits.append(Commit(self._now_s(), len(event.token_ids), event.forwards))
                self.num_tokens += len(event.token_ids)
                self._on_progress(self)
            case Finished():
                record.finish_reason, record.usage = event.reason, event.usage
                if event.reason == "abort":
                    record.error = "the request was aborted at the server"

    def _now_s(self) -> float:
        return asyncio.get_running_loop().time() - self._started_at
