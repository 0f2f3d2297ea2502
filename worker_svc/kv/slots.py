"""Slots: a request's place in the pool, with its map from position to page.

    position      0 ........ page_size ........ 2 * page_size ...
    page_table    [slot, 0]  [slot, 1]          [slot, 2]          0 = null page

The map lives on the device (`KVStore.page_table`). What changed in it is written at once, by `write_pages` before the
forward that needs it; a forward without a new page writes nothing.

With prefix caching a slot opens with the pages that the cache has of its prefix, and its own pages enter the cache when
they are full of final KV: at once where they follow pages that are the cache's too, else when the slot closes (another
request computed the same tokens at the same time, and the cache has that one's pages).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from worker_svc.host_copies import upload
from worker_svc.kv.pages import PagePool
from worker_svc.kv.prefix_cache import ROOT, page_keys
from worker_svc.kv.store import KVStore

ID_BYTES = 8  # int64, as the tensors have them


@dataclass
class _Slot:
    """What is known of an open slot. Without prefix caching only its pages."""

    pages: list[int]
    keys: list[bytes]  # of its full pages as far as the tokens are known; those of the prefix from the beginning
    tail: bytes  # known ids behind them
    num_final: int  # first positions whose KV is final
    num_entered: int  # first pages that are in the cache

    def page_is_final(self, place: int, page_size: int) -> bool:
        return (place + 1) * page_size <= self.num_final


class SlotTable:
    """Opens, grows and closes slots. `close` is the only place where pages go back, and is idempotent."""

    def __init__(self, kv: KVStore, pool: PagePool, prefix_caching: bool = False) -> None:
        self.kv = kv
        self.pool = pool
        self.prefix_caching = prefix_caching
        self.num_slots, self.max_pages_per_slot = kv.page_table.shape
        self.page_size = kv.k.shape[2]
        self._free = list(range(self.num_slots - 1, -1, -1))
        self._open: dict[int, _Slot] = {}
        self._unwritten: dict[tuple[int, int], int] = {}  # pages by slot and place; 0 = none

    @property
    def num_free(self) -> int:
        return len(self._free)

    def open(self, num_positions: int, prefix: Tensor | None = None) -> int | None:
        """A slot with pages for `num_positions`, or None (and nothing taken) if there is no slot or no page.

        `prefix`: int64 [...] on the host, the token ids of the first positions; `num_final` tells how many of them the
        cache gave.
        """
        if not self._free:
            return None
        ids = prefix.numpy().tobytes() if self.prefix_caching and prefix is not None else b""
        keys = page_keys(ROOT, ids, self.page_size * ID_BYTES)
        shared = self.pool.cache.find(keys)
        self.pool.share(shared)
        taken = self.pool.take(-(-num_positions // self.page_size) - len(shared))
        if taken is None:
            self.pool.give_back(shared)
            self.pool.cache.touch(keys[: len(shared)])
            return None
        slot = self._free.pop()
        pages = shared + taken
        tail = ids[len(keys) * self.page_size * ID_BYTES :]
        self._open[slot] = _Slot(pages, keys, tail, len(shared) * self.page_size, len(shared))
        self._set_pages(slot, 0, pages)
        return slot

    def grow(self, slot: int, num_positions: int) -> bool:
        """Make room for `num_positions`; False (and nothing taken) if no page is available."""
        pages = self._open[slot].pages
        missing = -(-num_positions // self.page_size) - len(pages)
        if missing <= 0:
            return True
        taken = self.pool.take(missing)
        if taken is None:
            return False
        self._set_pages(slot, len(pages), taken)
        pages.extend(taken)
        return True

    def _set_pages(self, slot: int, first: int, pages: Sequence[int]) -> None:
        self._unwritten.update(((slot, place), page) for place, page in enumerate(pages, first))

    def write_pages(self) -> None:
        """Bring the map on the device up to date."""
        if self._unwritten:
            places = [(*key, page) for key, page in self._unwritten.items()]
            slots, columns, pages = upload(places, self.kv.page_table.device).unbind(dim=1)
            self.kv.page_table[slots, columns] = pages
            self._unwritten.clear()

    def finish(self, slot: int, num_positions: int, ids: bytes = b"") -> None:
        """The KV of the first `num_positions` is final and will not be written again; a closed slot is ignored.

        `ids`: the token ids among them that the slot was not told before (int64 each).
        """
        this = self._open.get(slot)
        if this is None or not self.prefix_caching:
            return
        this.num_final = num_positions
        page_bytes = self.page_size * ID_BYTES
        this.tail += ids
        if len(this.tail) >= page_bytes:
            this.keys += page_keys(this.keys[-1] if this.keys else ROOT, this.tail, page_bytes)
            this.tail = this.tail[len(this.tail) // page_bytes * page_bytes :]
        cache, keys = self.pool.cache, this.keys
        while this.page_is_final(this.num_entered, self.page_size):
            place = this.num_entered
            follows_own = place == 0 or cache.page_of(keys[place - 1]) == this.pages[place - 1]
            if not follows_own or cache.page_of(keys[place]) is not None:
                return
            cache.enter(keys, place, this.pages[place])
            this.num_entered += 1

    def close(self, slot: int, is_sound: bool = True) -> None:
        """Give the pages back; the full ones go to the cache. Not sound: what they hold is not to be used again."""
        this = self._open.pop(slot, None)
        if this is None:
            return
        keys = this.keys[: this.num_final // self.page_size]
        if not is_sound:
            self.pool.forget(keys)
            keys = []
        for place, key in enumerate(keys):
            if self.pool.cache.page_of(key) is None:
                self.pool.cache.enter(keys, place, this.pages[place])
        self._set_pages(slot, 0, [0] * len(this.pages))
        self.pool.give_back(this.pages)
        self.pool.cache.touch(keys)
        self._free.append(slot)

    def num_pages(self, slot: int) -> int:
        return len(self._open[slot].pages)

    def num_final(self, slot: int) -> int:
        """First positions whose KV is final, as far as `open` and `finish` said."""
        return self._open[slot].num_final
