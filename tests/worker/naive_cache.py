"""The prefix cache said plainly: token tuples to pages, and a time of last use. It follows a SlotTable call by call."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import takewhile

import numpy as np
from torch import Tensor

from worker_svc.kv.pages import PagePool
from worker_svc.kv.prefix_cache import ROOT, page_keys
from worker_svc.kv.slots import SlotTable
from worker_svc.kv.store import KVStore

Tokens = tuple[int, ...]


@cache
def key_of(tokens: Tokens, page_size: int) -> bytes:
    """The key of the last of these whole pages."""
    return page_keys(ROOT, np.array(tokens, dtype=np.int64).tobytes(), page_size * 8)[-1]


@dataclass
class NaiveSlot:
    pages: list[int]
    tokens: Tokens
    num_final: int
    num_entered: int  # what was forgotten since is not entered again before the slot closes


class CheckedSlots(SlotTable):
    """A SlotTable beside its naive version: after every call both must have the same pages in the same places."""

    def __init__(self, kv: KVStore, pool: PagePool, prefix_caching: bool) -> None:
        super().__init__(kv, pool, prefix_caching)
        self.slots: dict[int, NaiveSlot] = {}
        self.pages: dict[Tokens, int] = {}  # all tokens up to a page's end to the page
        self.last_use: dict[Tokens, tuple[int, int]] = {}  # when, and then the longest first
        self.now = 0

    # The calls --------------------------------------------------------------------------------------------------

    def open(self, num_positions: int, prefix: Tensor | None = None) -> int | None:
        assert prefix is not None
        tokens = tuple(prefix.flatten().tolist())
        whole = [tokens[:end] for end in range(self.page_size, len(tokens) + 1, self.page_size)]
        hits = list(takewhile(lambda part: part in self.pages, whole))
        pages = [self.pages[part] for part in hits]
        missing = -(-num_positions // self.page_size) - len(hits)
        fits = self.num_free > 0 and missing <= self.pool.total - len(self.held() | set(pages))
        has_slot = self.num_free > 0
        slot = super().open(num_positions, prefix)
        assert (slot is not None) == fits
        if slot is None:
            if has_slot:
                self.use(hits)
        else:
            taken = self.pages_of(slot)[len(hits) :]
            assert self.pages_of(slot)[: len(hits)] == pages and len(taken) == missing
            self.slots[slot] = NaiveSlot(pages, tokens, len(hits) * self.page_size, len(hits))
            self.take(slot, taken)
        self.compare()
        return slot

    def grow(self, slot: int, num_positions: int) -> bool:
        before = self.pages_of(slot)
        grown = super().grow(slot, num_positions)
        after = self.pages_of(slot)
        assert after[: len(before)] == before
        self.take(slot, after[len(before) :])
        self.compare()
        return grown

    def finish(self, slot: int, num_positions: int, ids: bytes = b"") -> None:
        super().finish(slot, num_positions, ids)
        this = self.slots.get(slot)
        if this is not None and self.prefix_caching:
            this.tokens += tuple(np.frombuffer(ids, dtype=np.int64).tolist())
            this.num_final = num_positions
            parts = self.full_parts(this)
            for place in range(this.num_entered, len(parts)):
                leads_here = place == 0 or self.pages.get(parts[place - 1]) == this.pages[place - 1]
                if not leads_here or parts[place] in self.pages:
                    break
                self.pages[parts[place]] = this.pages[place]
                this.num_entered += 1
        self.compare()

    def close(self, slot: int, is_sound: bool = True) -> None:
        super().close(slot, is_sound)
        this = self.slots.pop(slot, None)
        if this is not None:
            parts = self.full_parts(this)
            if is_sound:
                for place, part in enumerate(parts):
                    self.pages.setdefault(part, this.pages[place])
                self.use(parts)
            else:
                gone = [longer for longer in self.pages if any(longer[: len(part)] == part for part in parts)]
                for part in gone:
                    del self.pages[part]
        self.compare()

    # What they mean ---------------------------------------------------------------------------------------------

    def take(self, slot: int, pages: list[int]) -> None:
        """The pages were free, or the longest unused of the cache when nothing was."""
        num_evicted = len(pages) - (self.pool.total - len(self.held() | set(self.pages.values())))
        unused = [part for part, page in self.pages.items() if page not in self.held()]
        evicted = sorted(unused, key=lambda part: self.last_use[part])[: max(num_evicted, 0)]
        assert {self.pages[part] for part in evicted} <= set(pages)
        for part in evicted:
            del self.pages[part]
        assert not set(pages) & (self.held() | set(self.pages.values())), "a page in two places"
        self.slots[slot].pages = self.slots[slot].pages + pages

    def use(self, parts: list[Tokens]) -> None:
        self.now += 1
        for part in parts:
            self.last_use[part] = (self.now, -len(part))

    def full_parts(self, slot: NaiveSlot) -> list[Tokens]:
        return [slot.tokens[:end] for end in range(self.page_size, slot.num_final + 1, self.page_size)]

    def held(self) -> set[int]:
        return {page for slot in self.slots.values() for page in slot.pages}

    def pages_of(self, slot: int) -> list[int]:
        self.write_pages()
        return [page for page in self.kv.page_table[slot].tolist() if page]

    def compare(self) -> None:
        held, known = self.held(), set(self.pages.values())
        usage = self.pool.usage()
        assert len(known) == len(self.pages), "a page under two keys"
        assert (usage.held, usage.cached) == (len(held), len(known - held))
        assert usage.free + usage.cached + usage.held == usage.total
        assert {part: self.pool.cache.page_of(key_of(part, self.page_size)) for part in self.pages} == self.pages
        assert not any(page in self.pool.cache for page in set(range(usage.total + 1)) - known)
        for part in self.pages:
            assert len(part) == self.page_size or part[: -self.page_size] in self.pages, "a page that nothing leads to"
