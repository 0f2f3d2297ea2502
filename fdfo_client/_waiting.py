"""What a person sees on stderr while a command has nothing to say yet."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator

FIRST_S = 2.0
EVERY_S = 5.0


@contextlib.contextmanager
def waiting(
    what: Callable[[], str] | str, first_s: float = FIRST_S, every_s: float = EVERY_S
) -> Iterator[threading.Event]:
    """Say what is waited for after two seconds, and then every five, until the end or until the event is set."""
    over, started_at = threading.Event(), time.monotonic()

    def report() -> None:
        pause_s = first_s
        while not over.wait(pause_s):
            words = what if isinstance(what, str) else what()
            print(f"fdfo: {words} ... ({time.monotonic() - started_at:.0f} s)", file=sys.stderr, flush=True)
            pause_s = every_s

    thread = threading.Thread(target=report, name="waiting", daemon=True)
    thread.start()
    try:
        yield over
    finally:
        over.set()
        thread.join()
