"""Slots: a request's place in the pool, with its map from position to page.

    position      0 ........ page_size ........ 2 * page_size ...
    page_table    [slot, 0]  [slot, 1]          [slot, 2]          0 = null page

The map lives on the device (`KVStore.page_table`) and is written when a page is taken, never per forward.
"""

from __future__ import annotations

import torch

from worker_svc.kv.pages import PagePool
from worker_svc.kv.store import KVStore


class SlotTable:
    """Opens, grows and closes slots. `close` is the only place where pages go back, and is idempotent."""

    def __init__(self, kv: KVStore, pool: PagePool) -> None:
        self.kv = kv
        self.pool = pool
        self.num_slots, self.max_pages_per_slot = kv.page_table.shape
        self.page_size = kv.k.shape[2]
        self._free = list(range(self.num_slots - 1, -1, -1))
        self._pages: dict[int, list[int]] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    def open(self, num_positions: int) -> int | None:
        """A slot with pages for `num_positions`, or None (and nothing taken) if there is no slot or no page."""
        if not self._free:
            return None
        pages = self.pool.take(-(-num_positions // self.page_size))
        if pages is None:
            return None
        slot = self._free.pop()
        self._pages[slot] = pages
        self.kv.page_table[slot, : len(pages)] = torch.tensor(pages, device=self.kv.page_table.device)
        return slot

    def grow(self, slot: int, num_positions: int) -> bool:
        """Make room for `num_positions`; False (and nothing taken) if no page is free."""
        pages = self._pages[slot]
        missing = -(-num_positions // self.page_size) - len(pages)
        if missing <= 0:
            return True
        taken = self.pool.take(missing)
        if taken is None:
            return False
        first = len(pages)
        pages.extend(taken)
        self.kv.page_table[slot, first : len(pages)] = torch.tensor(taken, device=self.kv.page_table.device)
        return True

    def close(self, slot: int) -> None:
        pages = self._pages.pop(slot, None)
        if pages is None:
            return
        self.kv.page_table[slot, : len(pages)] = 0
        self.pool.give_back(pages)
        self._free.append(slot)

    def num_pages(self, slot: int) -> int:
        return len(self._pages[slot])
