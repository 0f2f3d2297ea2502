"""Faults that tests inject into a real worker: a request that ends every worker it starts on, and one on which the
device thread hangs for ever.

Off unless the environment of the worker's process sets FDFO_TEST_KILL_TOKEN_ID or FDFO_TEST_HANG_TOKEN_ID, which no
flag and no request can do. The log says at start that one is set.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping

import structlog

from worker_svc.denoise import DenoiseLoop
from worker_svc.rounds import RoundRow, Session
from worker_svc.rows import Start
from worker_svc.starts import BadStart

KILL_TOKEN_ID = "FDFO_TEST_KILL_TOKEN_ID"
HANG_TOKEN_ID = "FDFO_TEST_HANG_TOKEN_ID"
EXIT_STATUS = 86

log = structlog.get_logger()


def loop_type(environment: Mapping[str, str]) -> type[DenoiseLoop]:
    """The loop to run: the real one, or one with a fault at a start whose prefix or block has the token."""
    tokens = {name: int(environment[name]) for name in (KILL_TOKEN_ID, HANG_TOKEN_ID) if name in environment}
    if not tokens:
        return DenoiseLoop
    for name, token in tokens.items():
        does = "ends" if name == KILL_TOKEN_ID else "hangs"
        log.warning("test_hook", hint=f"{name} is set: token {token} in a request {does} this worker", token=token)

    class FaultyLoop(DenoiseLoop):
        def _start(self, session: Session, start: Start | BadStart) -> RoundRow:
            for name, token in tokens.items():
                if isinstance(start, Start) and bool((start.prefix == token).any() or (start.block_ids == token).any()):
                    if name == KILL_TOKEN_ID:
                        os._exit(EXIT_STATUS)
                    threading.Event().wait()
            return super()._start(session, start)

    return FaultyLoop
