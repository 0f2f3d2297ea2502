"""What fits into a worker, and who gives up its place there to whom."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from scheduler_svc.request import Request

MAX_PREEMPTIONS = 3  # of a request that is chosen while others can be


@dataclass
class Room:
    """What the worker has free for us, as of its last reply less what was sent since."""

    rows: int
    pages: int
    page_size: int

    def pages_for(self, request: Request) -> int:
        return -(-request.num_positions // self.page_size)

    def fits(self, request: Request, num_running: int) -> bool:
        """Whether a row is free, and pages for its prefix, its block, and one for every running row: rows that run
        must be able to go on."""
        return self.rows >= 1 and self.pages >= self.pages_for(request) + num_running

    def take(self, request: Request) -> None:
        """The request starts."""
        self.rows -= 1
        self.pages -= self.pages_for(request)

    def give_back(self, request: Request) -> None:
        """The request is released by the round that is planned, before its starts."""
        self.rows += 1
        self.pages += self.pages_for(request)


def choose_victim(rows: Iterable[Request]) -> Request:
    """The row that gives up its place when one of these must: one whose client must read first, else of the lowest
    class the one that started last, which loses least. One that was preempted three times is not chosen while others
    can be."""
    return min(rows, key=_victim_order)


def _victim_order(row: Request) -> tuple[bool, bool, int, int]:
    return (not row.is_parked, row.num_preemptions >= MAX_PREEMPTIONS, row.priority, -row.attempt)


def make_way(first: Request, room: Room, running: Iterable[Request], num_running: int) -> list[Request]:
    """The rows of lower classes that give up their places so that `first` fits; none if all of them would not do.

    Not one more than is needed: one given up in vain would fit again beside `first`, and only lose its KV.
    """
    short_rows, short_pages = 1 - room.rows, room.pages_for(first) + num_running - room.pages
    victims: list[Request] = []
    for row in sorted((row for row in running if row.priority < first.priority), key=_victim_order):
        if short_rows <= 0 and short_pages <= 0:
            break
        victims.append(row)
        short_rows -= 1
        short_pages -= room.pages_for(row) + 1  # and the page that was kept for it
    if short_rows > 0 or short_pages > 0:
        return []
    for row in list(victims):
        gain = room.pages_for(row) + 1
        if short_rows + 1 <= 0 and short_pages + gain <= 0:
            victims.remove(row)
            short_rows, short_pages = short_rows + 1, short_pages + gain
    return victims
