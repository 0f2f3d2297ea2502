"""Where a request starts.

The rule: the first request of the queue starts at the worker that has room for it and where half the share of its
prompt that is probably cached, less the share of the worker's rows or pages in use, is greatest; where none has room,
it waits and all behind it wait.

So a prompt that is cached as a whole is worth half a worker's load, and no more: a prefix that all prompts share does
not fill one worker while others idle. Order is that of the queue, so nothing starves.

A request under suspicion (`Request.is_suspect`) has a rule of its own: it starts alone, on the worker with the fewest
rows, whose rows make way for it; one such request at a time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from common.packing import pack_ids

if TYPE_CHECKING:
    from scheduler_svc.queue import RequestQueue
    from scheduler_svc.request import Request
    from scheduler_svc.round_loop import RoundLoop

CACHED_SHARE_WEIGHT = 0.5


def place(queue: RequestQueue, loops: Sequence[RoundLoop]) -> None:
    """Give the requests that can start now, in their order, to the loops of the workers where they fit best."""
    _isolate(queue, loops)
    while (request := queue.first()) is not None:
        takers = [loop for loop in loops if loop.has_room_for(request)]
        if not takers:
            return
        best = takers[0] if len(takers) == 1 else max(takers, key=lambda loop: _fit(loop, request))
        if len(loops) > 1:
            best.prefixes.note(prefix_keys(request))
        best.start(queue.pop())


def _fit(loop: RoundLoop, request: Request) -> float:
    return CACHED_SHARE_WEIGHT * loop.prefixes.known_share(prefix_keys(request)) - loop.rows.load


def _isolate(queue: RequestQueue, loops: Sequence[RoundLoop]) -> None:
    """Start the first request under suspicion, if it can be alone."""
    suspect = queue.first_suspect()
    if suspect is None or any(loop.rows.is_isolating for loop in loops):
        return
    takers = [loop for loop in loops if loop.takes_new and loop.rows.would_fit_alone(suspect)]
    if takers:
        queue.take(suspect)
        min(takers, key=lambda loop: loop.rows.num_rows).isolate(suspect)


def prefix_keys(request: Request) -> tuple[int, ...]:
    """One key per whole block of the prompt; equal keys have equal tokens up to there, but for a collision, which only
    leads to the wrong worker. They mean something in this process only."""
    if request.prefix_keys is None:
        block_bytes = 4 * request.block_size
        ids = pack_ids(request.spec.prompt_ids)
        keys: list[int] = []
        for start in range(0, len(ids) - block_bytes + 1, block_bytes):
            keys.append(hash((keys[-1] if keys else 0, ids[start : start + block_bytes])))
        request.prefix_keys = tuple(keys)
    return request.prefix_keys


class PrefixMemory:
    """Which prefixes a worker was sent in its present life: as many blocks as its pool holds, the latest."""

    def __init__(self, max_blocks: int = 0) -> None:
        self._max_blocks = max_blocks
        self._keys: OrderedDict[int, None] = OrderedDict()  # a prefix always stands behind what it begins

    def note(self, keys: Sequence[int]) -> None:
        """A request with these keys starts there."""
        for key in reversed(keys):
            self._keys[key] = None
            self._keys.move_to_end(key)
        while len(self._keys) > self._max_blocks:
            self._keys.popitem(last=False)

    def known_share(self, keys: Sequence[int]) -> float:
        """The share of the blocks with these keys that is known, from the first on; 0 when there are none."""
        low, high = 0, len(keys)  # what is forgotten first is the end of a prefix, so it can be searched
        while low < high:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if keys[middle] in self._keys else (low, middle)
        return low / len(keys) if keys else 0.0
