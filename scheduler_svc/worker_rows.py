"""Our rows on one worker: the books of what is free there for more, and who gives up its place."""

from __future__ import annotations

from dataclasses import dataclass, field

import structlog

from fdfo.scheduler.v1 import scheduler_pb2 as api
from fdfo.worker.v1 import worker_pb2 as pb
from scheduler_svc.planner import Room, choose_victim, make_way
from scheduler_svc.queue import RequestQueue
from scheduler_svc.request import Request, RowName

log = structlog.get_logger()


@dataclass
class WorkerRows:
    """`max_rows` is what the worker runs in all. `room` is as of its last word, less what was placed and sent since."""

    queue: RequestQueue
    counters: api.SchedulerCounters
    room: Room = field(default_factory=lambda: Room(0, 0, 1))
    max_rows: int = 0
    pages: pb.PageUsage = field(default_factory=pb.PageUsage)
    allowance: pb.Allowance = field(default_factory=pb.Allowance)
    running: dict[RowName, Request] = field(default_factory=dict)
    placed: list[Request] = field(default_factory=list)  # start with the next round
    releases: list[tuple[RowName, int]] = field(default_factory=list)  # with their attempts, with the next round
    num_planned_pages: int = 0  # that the starts of the next round take, less those that it gives back for them
    num_sent_pages: int = 0  # likewise of the rounds on their way
    last_round_id: int = 0  # that was sent
    _preempting_round_id: int = 0  # the last one that releases a preempted row

    def connect(self, info: pb.GetWorkerInfoResponse) -> None:
        """A new generation: nothing of ours is there."""
        self.room = Room(info.max_running_requests, info.pages.free, info.page_size)
        self.max_rows, self.pages = info.max_running_requests, info.pages
        self.last_round_id = self._preempting_round_id = 0

    @property
    def num_rows(self) -> int:
        return len(self.running) + len(self.placed)

    @property
    def load(self) -> float:
        """The share of the rows or of the pages that is in use, whichever is greater, by us or by others."""
        free_rows = self.room.rows / max(self.max_rows, 1)
        free_pages = self.room.pages / max(self.pages.total, 1)
        return 1.0 - min(free_rows, free_pages)

    @property
    def own_pages(self) -> int:
        """Pages that our rows hold; a page that several share is counted for each, but never more than are held."""
        return min(self.pages.held, sum(map(self.room.pages_for, self.running.values())))

    @property
    def free_pages(self) -> int:
        return self.pages.free + self.pages.cached - self.num_planned_pages - self.num_sent_pages

    @property
    def others_hold_more(self) -> bool:
        """Whether other schedulers hold more than we do of what the next row would need."""
        if self.room.rows < 1:
            return self.num_rows < self.max_rows - self.allowance.rows
        return self.own_pages < self.pages.total - self.allowance.pages

    @property
    def is_isolating(self) -> bool:
        """Whether a request under suspicion is here, alone."""
        return self.num_rows == 1 and next(iter(self.placed or self.running.values())).is_suspect

    def fits(self, request: Request) -> bool:
        return self.room.fits(request, self.num_rows)

    def would_fit_alone(self, request: Request) -> bool:
        """Whether it would fit if we had no other row here."""
        room = Room(self.room.rows + self.num_rows, self.room.pages + self.own_pages, self.room.page_size)
        return room.fits(request, 0)

    def place(self, request: Request) -> None:
        """It starts with the next round."""
        self.placed.append(request)
        self.room.take(request)
        self.num_planned_pages += self.room.pages_for(request)

    def withdraw(self, request: Request) -> None:
        """It does not start after all."""
        self.placed.remove(request)
        self.room.give_back(request)
        self.num_planned_pages -= self.room.pages_for(request)

    def send(self) -> int:
        """The next round takes along what was placed and the releases; returns the pages that it takes."""
        self.running.update((row.name, row) for row in self.placed)
        num_pages, self.num_planned_pages = self.num_planned_pages, 0
        self.num_sent_pages += num_pages
        self.last_round_id += 1
        self.placed.clear()
        self.releases.clear()
        return num_pages

    def update(self, pages: pb.PageUsage, allowance: pb.Allowance) -> None:
        """What is free for us now."""
        self.pages, self.allowance = pages, allowance
        self.room = Room(
            rows=allowance.rows - self.num_rows,
            pages=min(self.free_pages, allowance.pages - self.own_pages - sum(map(self.room.pages_for, self.placed))),
            page_size=self.room.page_size,
        )

    def see_pages(self, pages: pb.PageUsage) -> None:
        """How they are used now, of a worker that owes us no reply; what is free for us, its next word tells."""
        self.pages = pages

    def take_all(self) -> list[Request]:
        """The worker is lost: all its rows, those first that ran there."""
        rows = [*self.running.values(), *self.placed]
        self.running.clear()
        self.placed.clear()
        self.releases.clear()
        self.num_planned_pages = self.num_sent_pages = 0
        return rows

    # Who makes way ----------------------------------------------------------------------------------------------

    def release(self, request: Request) -> bool:
        """Free the request's row with the next round; False if it has none here."""
        if self.running.get(request.name) is request:  # not a later one of the same name
            del self.running[request.name]
            self.releases.append((request.name, request.attempt))
        elif request in self.placed:
            self.withdraw(request)
        else:
            return False
        return True

    def preempt(self, request: Request) -> None:
        """Release a running row with the next round; it goes on later, from its last snapshot."""
        self.release(request)
        self._preempting_round_id = self.last_round_id + 1
        request.num_preemptions += 1
        self.counters.preemptions += 1
        self.queue.push_front([request])
        log.debug("request_preempted", request_id=request.name[0], sample_index=request.name[1])

    def isolate(self, suspect: Request) -> None:
        """Place it alone: all other rows make way."""
        for request in reversed(self.placed[:]):
            self.withdraw(request)
            self.queue.push_front([request])
        self._clear_for(list(reversed(self.running.values())))
        self.place(suspect)

    def make_way(self, first: Request) -> bool:
        """Preempt rows of lower classes so that it fits; False if that would not do."""
        victims = make_way(first, self.room, self.running.values(), self.num_rows)
        self._clear_for(victims)
        return bool(victims)

    def _clear_for(self, victims: list[Request]) -> None:
        """Their places are free for the starts of the round that releases them."""
        for victim in victims:
            self.room.give_back(victim)
            self.num_planned_pages -= self.room.pages_for(victim)
            self.preempt(victim)

    def find_pages(self, stuck: list[Request], round_id: int) -> None:
        """For each row that found no page for its next block, and for which none became free: a row of its class or a
        lower one is preempted, perhaps itself. Where it stays, the next round tries again.

        What a round says that was sent before the last preempted row was released is no longer so.
        """
        if round_id < self._preempting_round_id:
            return
        free = self.free_pages
        for row in sorted(stuck, key=lambda row: -row.priority):
            if row.name not in self.running:
                continue
            if free < 1:
                victim = choose_victim(other for other in self.running.values() if other.priority <= row.priority)
                self.preempt(victim)
                if victim is row:
                    continue
                free += self.room.pages_for(victim)
            free -= 1

    def keep_to_allowance(self) -> None:
        """Preempt down to it, but for one row. Each may be without the last page that we count for it."""
        while (num_rows := len(self.running)) > 1 and (
            num_rows > self.allowance.rows or self.own_pages - num_rows > self.allowance.pages
        ):
            self.preempt(choose_victim(self.running.values()))


def row_names(rows: list[tuple[RowName, int]]) -> pb.RowNames:
    """Columns for rows with their attempts."""
    return pb.RowNames(
        request_ids=[request_id for (request_id, _), _ in rows],
        sample_indexes=[sample_index for (_, sample_index), _ in rows],
        attempts=[attempt for _, attempt in rows],
    )
