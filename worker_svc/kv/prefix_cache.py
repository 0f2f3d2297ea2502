"""The prefix cache: which pages hold the final KV of which tokens, and which of them no slot uses.

    tokens   | page 0 of the prompt | page 1           | page 2           |
    keys     | k0 = hash(ROOT, ids) | k1 = hash(k0, ids) | k2 = hash(k1, ids) |

A key names all tokens up to the end of its page, and KV depends on nothing else, so equal keys may share a page.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

KEY_BYTES = 16
ROOT = bytes(KEY_BYTES)  # the key before the first page


def page_keys(before: bytes, ids: bytes, page_bytes: int) -> list[bytes]:
    """The keys of the whole pages in `ids` (packed token ids) that follow the page with key `before`."""
    keys = []
    for end in range(page_bytes, len(ids) + 1, page_bytes):
        before = blake2b(before + ids[end - page_bytes : end], digest_size=KEY_BYTES).digest()
        keys.append(before)
    return keys


class PrefixCache:
    """Pages by key, and the unused ones (no slot has them) in the order in which they may be evicted.

    The first to go is the one whose last slot closed first; a page goes before the page it follows. Nothing searches
    for that: a slot that has a page has all pages before it, and when it closes, `touch` puts its pages at the end of
    the order, the last page first.
    """

    def __init__(self) -> None:
        self._entries: dict[bytes, tuple[int, bytes]] = {}  # key to page and key before; parents stand before children
        self._keys: dict[int, bytes] = {}  # page to key
        self._unused: OrderedDict[int, None] = OrderedDict()

    @property
    def num_unused(self) -> int:
        return len(self._unused)

    def __contains__(self, page: int) -> bool:
        return page in self._keys

    def page_of(self, key: bytes) -> int | None:
        entry = self._entries.get(key)
        return entry[0] if entry is not None else None

    def find(self, keys: Sequence[bytes]) -> list[int]:
        """The pages of the first keys, up to the first that is not here."""
        pages: list[int] = []
        for key in keys:
            entry = self._entries.get(key)
            if entry is None:
                break
            pages.append(entry[0])
        return pages

    def enter(self, keys: Sequence[bytes], place: int, page: int) -> None:
        """A page that a slot has becomes that of `keys[place]`, which is not here; the key before it is."""
        self._entries[keys[place]] = (page, keys[place - 1] if place else ROOT)
        self._keys[page] = keys[place]

    def use(self, page: int) -> None:
        """A slot takes an unused page."""
        del self._unused[page]

    def leave(self, page: int) -> None:
        """The last slot that had the page gave it back."""
        self._unused[page] = None

    def touch(self, keys: Sequence[bytes]) -> None:
        """A slot with these pages closed: those now unused are the last to be evicted, the last page first of them."""
        for key in reversed(keys):
            page = self.page_of(key)
            if page is not None and page in self._unused:
                self._unused.move_to_end(page)

    def evict(self) -> int:
        """The next unused page; it is no longer here."""
        page, _ = self._unused.popitem(last=False)
        del self._entries[self._keys.pop(page)]
        return page

    def forget(self, keys: Sequence[bytes]) -> list[int]:
        """What a failed row had read is not trusted: these keys go, and all that follow them. O(all pages here).

        Returns the unused pages among them, which are free now.
        """
        gone = set(keys)
        for key, (page, before) in list(self._entries.items()):
            if key in gone or before in gone:
                gone.add(key)
                del self._entries[key], self._keys[page]
        free = [page for page in self._unused if page not in self._keys]
        for page in free:
            del self._unused[page]
        return free
