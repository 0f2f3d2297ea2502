"""The page allocator: which pages of the KV pool are free.

Page ids run from 1; page 0 is the null page (see store.py) and is never given out. At every moment
free + cached + held = total. Nothing is cached yet: every page that is not free is held by one slot.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PageUsage:
    """Pages by state; `held` counts a shared page once."""

    free: int
    cached: int
    held: int
    total: int


class PagePool:
    """Hands out pages all or nothing, and takes them back at one place."""

    def __init__(self, num_pages: int) -> None:
        self.total = num_pages
        self._free = list(range(num_pages, 0, -1))
        self._held: set[int] = set()
        self.num_calls = 0  # of take and give_back: a round of continuing rows makes none

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, num_pages: int) -> list[int] | None:
        """`num_pages` page ids, or None (and nothing taken) if fewer are free."""
        self.num_calls += 1
        if num_pages > len(self._free):
            return None
        pages = [self._free.pop() for _ in range(num_pages)]
        self._held.update(pages)
        return pages

    def give_back(self, pages: list[int]) -> None:
        """Free held pages. Giving back a page that is not held is a bug and raises."""
        self.num_calls += 1
        for page in pages:
            self._held.remove(page)
            self._free.append(page)

    def usage(self) -> PageUsage:
        return PageUsage(free=len(self._free), cached=0, held=len(self._held), total=self.total)
