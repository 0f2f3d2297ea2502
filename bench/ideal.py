"""What a mode could do at best: the device's time for the drawn forwards, with nothing lost between them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from worker_svc.simulated import Profile

# Forwards of each block of a request, in order.
Draws = Sequence[int]


def fdfo_ms(requests: Sequence[Draws], num_rows: int, prompt_tokens: int, profile: Profile) -> float:
    """`num_rows` places, the next request in the place of one that ended; every block leaves when it is done."""
    waiting, total_ms = deque(requests), 0.0
    places: list[int] = []  # forwards left
    while waiting or places:
        num_new = min(num_rows - len(places), len(waiting))
        places += [sum(waiting.popleft()) for _ in range(num_new)]
        total_ms += profile.forward_ms(len(places), num_new * prompt_tokens)
        places = [left - 1 for left in places if left > 1]
    return total_ms


def sync_ms(requests: Sequence[Draws], num_rows: int, prompt_tokens: int, profile: Profile) -> float:
    """The same places in lockstep: all blocks of a round wait for the slowest, at the cost of a row each."""
    waiting, total_ms = deque(requests), 0.0
    places: list[deque[int]] = []  # blocks left
    while waiting or places:
        num_new = min(num_rows - len(places), len(waiting))
        places += [deque(waiting.popleft()) for _ in range(num_new)]
        num_forwards = max(blocks.popleft() for blocks in places)
        total_ms += num_forwards * profile.forward_ms(len(places), 0)
        total_ms += profile.prefill_token_ms * num_new * prompt_tokens
        places = [blocks for blocks in places if blocks]
    return total_ms
