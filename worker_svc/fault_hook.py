"""A fault that tests inject into a real worker: a request that ends every worker it starts on.

Off unless the environment of the worker's process sets FDFO_TEST_KILL_TOKEN_ID, which no flag and no request can do.
The log says at start that it is set.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import structlog

from worker_svc.denoise import DenoiseLoop
from worker_svc.rounds import RoundRow, Session
from worker_svc.rows import Start
from worker_svc.starts import BadStart

KILL_TOKEN_ID = "FDFO_TEST_KILL_TOKEN_ID"
EXIT_STATUS = 86

log = structlog.get_logger()


def loop_type(environment: Mapping[str, str]) -> type[DenoiseLoop]:
    """The loop to run: the real one, or one that ends the process at a start whose prefix or block has the token."""
    if KILL_TOKEN_ID not in environment:
        return DenoiseLoop
    token = int(environment[KILL_TOKEN_ID])
    log.warning("test_hook", hint=f"{KILL_TOKEN_ID} is set: token {token} in a request ends this worker", token=token)

    class EndingLoop(DenoiseLoop):
        def _start(self, session: Session, start: Start | BadStart) -> RoundRow:
            if isinstance(start, Start) and bool((start.prefix == token).any() or (start.block_ids == token).any()):
                os._exit(EXIT_STATUS)
            return super()._start(session, start)

    return EndingLoop
