"""The processes of the other ranks: started by rank 0, watched by it, and gone when it is gone."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Callable
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import structlog

STATUS_WAIT_S = 1.0
# All ranks are on this machine: their sockets need no other interface. The name is Linux's.
LOOPBACK = "lo"

log = structlog.get_logger()


def missing_interface() -> str:
    """Of those that GLOO_SOCKET_IFNAME names, one that this machine has not; empty = none."""
    names = filter(None, os.environ.get("GLOO_SOCKET_IFNAME", "").split(","))
    there = {name for _, name in socket.if_nameindex()}
    return next((name for name in names if name not in there), "")


class Ranks:
    """Ranks 1 to size - 1. When one ends before `stop`, the whole worker ends at once: its schedulers go on elsewhere,
    and no collective waits for what will not come."""

    def __init__(self, size: int, run: Callable[..., None], *arguments: Any) -> None:
        """Starts a process for each, which runs `run(rank, rendezvous, *arguments)`. The file `rendezvous` is where
        they meet."""
        if any(name == LOOPBACK for _, name in socket.if_nameindex()):
            for library in ("GLOO", "NCCL"):
                os.environ.setdefault(f"{library}_SOCKET_IFNAME", LOOPBACK)
        self._folder = Path(tempfile.mkdtemp(prefix="fdfo-ranks-"))
        self.rendezvous = self._folder / "rendezvous"
        self._stopping = False
        context = multiprocessing.get_context("spawn")
        self._processes: list[SpawnProcess] = [
            context.Process(
                target=_run, args=(run, rank, self.rendezvous, *arguments), name=f"rank-{rank}", daemon=True
            )
            for rank in range(1, size)
        ]
        for process in self._processes:
            process.start()
        threading.Thread(target=self._watch, name="rank-watch", daemon=True).start()

    @property
    def pids(self) -> list[int | None]:
        return [process.pid for process in self._processes]

    def expect_end(self) -> None:
        """From now on a rank may end: call it before they are told to stop."""
        self._stopping = True

    def stop(self, wait_s: float) -> None:
        """Wait for all to end; those that have not within `wait_s` are killed."""
        self.expect_end()
        for process in self._processes:
            process.join(wait_s)
            if process.exitcode is None:
                process.kill()
                process.join()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _watch(self) -> None:
        ended = multiprocessing.connection.wait([process.sentinel for process in self._processes])
        if self._stopping:
            return
        for rank, process in enumerate(self._processes, 1):
            if process.sentinel in ended:
                process.join(STATUS_WAIT_S)  # its pipe closes a moment before its status is there
                hint = "a rank of --tp-size is lost, and the worker ends with it; start it again"
                log.error("rank_lost", rank=rank, rank_pid=process.pid, exit_status=process.exitcode, hint=hint)
        shutil.rmtree(self._folder, ignore_errors=True)
        sys.stderr.flush()
        for process in self._processes:
            process.kill()
        os._exit(1)


def _run(run: Callable[..., None], rank: int, rendezvous: Path, *arguments: Any) -> None:
    """In the process of a rank. Signals may reach all processes of a terminal or a unit; rank 0 decides when this one
    ends, as it needs it to finish."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, name="parent-watch", daemon=True).start()
    run(rank, rendezvous, *arguments)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
