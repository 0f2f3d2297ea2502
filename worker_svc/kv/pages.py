"""The page allocator: which pages of the KV pool are free, and how many slots have each of the others.

Page ids run from 1; page 0 is the null page (see store.py) and is never given out. At every moment
free + cached + held = total: held by a slot or several, cached when only the prefix cache knows it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from worker_svc.kv.prefix_cache import ROOT, PrefixCache


@dataclass(frozen=True)
class PageUsage:
    """Pages by state; `held` counts a shared page once."""

    free: int
    cached: int
    held: int
    total: int


class PagePool:
    """Hands out pages all or nothing, and takes them back at one place. Cached pages are evicted when none is free."""

    def __init__(self, num_pages: int) -> None:
        self.total = num_pages
        self.cache = PrefixCache()
        self._free = list(range(num_pages, 0, -1))
        self._num_slots: dict[int, int] = {}  # by held page: how many slots have it
        self.num_calls = 0  # of take and give_back: a round of continuing rows makes none

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_available(self) -> int:
        """What `take` can give: free pages and cached ones."""
        return len(self._free) + self.cache.num_unused

    def take(self, num_pages: int) -> list[int] | None:
        """`num_pages` page ids, or None (and nothing taken) if fewer are available."""
        self.num_calls += 1
        if num_pages > self.num_available:
            return None
        pages = [self._free.pop() if self._free else self.cache.evict() for _ in range(num_pages)]
        self._num_slots.update(dict.fromkeys(pages, 1))
        return pages

    def share(self, pages: Sequence[int]) -> None:
        """One more slot has these pages of the cache."""
        for page in pages:
            if page not in self._num_slots:
                self.cache.use(page)
            self._num_slots[page] = self._num_slots.get(page, 0) + 1

    def give_back(self, pages: Sequence[int]) -> None:
        """One slot less has these pages; the last one's become cached or free. For a page not held: a bug, raises."""
        self.num_calls += 1
        for page in pages:
            self._num_slots[page] -= 1
            if self._num_slots[page]:
                continue
            del self._num_slots[page]
            if page in self.cache:
                self.cache.leave(page)
            else:
                self._free.append(page)

    def forget(self, keys: Sequence[bytes]) -> None:
        """Drop what the cache has under these keys or behind them."""
        self._free += self.cache.forget(keys)

    def forget_all(self) -> None:
        self.forget([ROOT])

    def usage(self) -> PageUsage:
        return PageUsage(
            free=len(self._free), cached=self.cache.num_unused, held=len(self._num_slots), total=self.total
        )
