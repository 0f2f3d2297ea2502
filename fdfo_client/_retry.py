"""Whether and when a call that failed is made again."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from fdfo_client._errors import DeadlineExceeded, FdfoError, Overloaded, RequestExists, ServerUnavailable
from fdfo_client._progress import Progress


@dataclass(frozen=True)
class RetryPolicy:
    """How long a client goes on when schedulers are lost or full.

    max_retries: how often in a row all targets may fail without anything new of the answer. 0: nothing is resumed, and
        a full queue is an error at once.
    first_delay_s, max_delay_s: the wait after all targets failed, doubled each time, and its bound. A half of it is
        drawn, so that clients which lost the same scheduler do not come back together.
    draw, sleep: a number from 0 to 1, and how time passes, in waits and for the parts of a `Timeout`; for tests.
    """

    max_retries: int = 8
    first_delay_s: float = 0.1
    max_delay_s: float = 2.0
    draw: Callable[[], float] = random.random
    sleep: Callable[[float], Awaitable[object]] = asyncio.sleep


DEFAULT_RETRY = RetryPolicy()


class Attempts:
    """The failures of one request. The next target is tried at once; when all have failed in turn, after a wait."""

    def __init__(self, policy: RetryPolicy, num_targets: int, deadline: float | None) -> None:
        """`deadline`: by time.monotonic()."""
        self._policy = policy
        self._num_targets = num_targets
        self._deadline = deadline
        self._num_news = 0
        self._failed_turns = 0
        self._failed_in_turn = 0
        self._hint_s: float | None = None  # the least of this turn
        self._was_lost = False

    def delay_s(self, error: FdfoError, progress: Progress, *, may_wait: bool) -> float:
        """Seconds until the next attempt; raises `error` when there is to be none.

        may_wait: a scheduler of this client has answered before, so it is worth while to wait for one.
        """
        if not self._may_go_on(error, progress):
            raise error
        self._was_lost |= isinstance(error, ServerUnavailable | DeadlineExceeded)
        if progress.num_news > self._num_news:
            self._num_news, self._failed_turns, self._failed_in_turn, self._hint_s = progress.num_news, 0, 0, None
        if isinstance(error, Overloaded) and error.retry_after_s is not None:
            self._hint_s = min(error.retry_after_s, self._hint_s if self._hint_s is not None else error.retry_after_s)
        self._failed_in_turn += 1
        if self._failed_in_turn < self._num_targets:
            return 0.0
        hint_s, self._failed_in_turn, self._hint_s = self._hint_s, 0, None
        # A full queue that says when to come back is no failure to one who was admitted before.
        if hint_s is None or progress.started is None:
            self._failed_turns += 1
        if self._failed_turns > self._policy.max_retries or (hint_s is None and not may_wait):
            raise error
        delay_s = self._backoff_s() if hint_s is None else hint_s * (1 + self._policy.draw() / 4)
        if self._deadline is not None and time.monotonic() + delay_s >= self._deadline:
            raise error
        return delay_s

    def _may_go_on(self, error: FdfoError, progress: Progress) -> bool:
        if progress.started is not None and not (self._policy.max_retries and progress.can_resume):
            return False
        if isinstance(error, RequestExists):
            return self._was_lost  # it may be our own, whose scheduler has not seen yet that the connection is gone
        if isinstance(error, DeadlineExceeded):
            return error.part == "connect"
        return isinstance(error, ServerUnavailable | Overloaded)

    def _backoff_s(self) -> float:
        policy = self._policy
        longest_s = min(policy.first_delay_s * 2.0 ** (self._failed_turns - 1), policy.max_delay_s)
        return longest_s * (1 + policy.draw()) / 2
