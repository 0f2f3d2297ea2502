"""Which rows go into the next round of a worker."""

from __future__ import annotations

from dataclasses import dataclass

from scheduler_svc.queue import RequestQueue
from scheduler_svc.request import Request


@dataclass
class Room:
    """What the worker has free for us, as of its last reply less what was sent since."""

    rows: int
    pages: int
    page_size: int

    def pages_for(self, request: Request) -> int:
        return -(-request.num_positions // self.page_size)


def admit(queue: RequestQueue, room: Room, num_running: int) -> list[Request]:
    """Take from the queue, in order, the requests that start now.

    A request starts when its prefix, its block, and a page for every running row fit: rows that run must be able to
    go on. The first that does not fit holds back those behind it, so that a long prompt is never starved.
    """
    admitted: list[Request] = []
    while (request := queue.first()) is not None:
        num_pages = room.pages_for(request)
        others = num_running + len(admitted)
        if room.rows < 1 or room.pages < num_pages + others:
            break
        room.rows -= 1
        room.pages -= num_pages
        admitted.append(queue.pop())
    return admitted
