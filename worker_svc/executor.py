"""The device thread: the one place that touches the model, the pool and the rows.

The gRPC side hands it calls and gets futures; it never waits for a forward with its event loop. Calls run between
forwards. If the loop raises (a bug, a device error), everything the worker held is void: `failed` is set and the
process ends, and schedulers go on elsewhere from what they hold.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import TypeVar

import structlog
import torch

from common.errors import ServiceError
from fdfo.worker.v1 import worker_pb2 as pb
from worker_svc.denoise import DenoiseLoop, LoopState
from worker_svc.rounds import RoundRequest

T = TypeVar("T")
IDLE_WAKE_S = 1.0  # to expire leases while nobody asks anything

log = structlog.get_logger()


class Executor:
    """Runs a DenoiseLoop on its own thread for an asyncio event loop."""

    def __init__(self, loop: DenoiseLoop) -> None:
        self._loop = loop
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._events = asyncio.get_running_loop()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="device", daemon=True)
        self.failed = asyncio.Event()
        self._thread.start()

    async def run_round(self, request: RoundRequest) -> pb.RunRoundResponse:
        """A round's reply; raises the ServiceError that refuses it. Cancelling it withdraws this call."""
        reply: asyncio.Future[pb.RunRoundResponse] = self._events.create_future()

        def deliver(result: pb.RunRoundResponse | ServiceError) -> None:
            self._events.call_soon_threadsafe(_set, reply, result)

        request.arrived_at = self._loop.clock()
        self._inbox.put(lambda: self._loop.submit(request, deliver))
        try:
            return await reply
        except asyncio.CancelledError:
            self._inbox.put(lambda: self._loop.withdraw(request, deliver))
            raise

    async def call(self, function: Callable[[DenoiseLoop], T]) -> T:
        """The result of `function`, run on the device thread at the next boundary; raises its ServiceError."""
        result: asyncio.Future[T] = self._events.create_future()

        def run() -> None:
            try:
                value: T | ServiceError = function(self._loop)
            except ServiceError as error:
                value = error
            self._events.call_soon_threadsafe(_set, result, value)

        self._inbox.put(run)
        return await result

    def post(self, function: Callable[[DenoiseLoop], None]) -> None:
        """Run `function` on the device thread at the next boundary, without an answer."""
        self._inbox.put(lambda: function(self._loop))

    @property
    def state(self) -> LoopState:
        """As of the last boundary."""
        return self._loop.state

    def stop(self) -> None:
        """End the thread at the next boundary and wait for it."""

        def end() -> None:
            self._stopping = True

        self._inbox.put(end)
        self._thread.join()

    def _run(self) -> None:
        try:
            if self._loop.runner.device.type == "cuda":
                torch.cuda.set_device(self._loop.runner.device)  # of this thread: kernels are launched on it
            while not self._stopping:
                busy = self._loop.tick()
                self._serve_inbox(wait=not busy)
        except BaseException:
            log.exception("device_thread_failed")
            self._events.call_soon_threadsafe(self.failed.set)

    def _serve_inbox(self, wait: bool) -> None:
        """Run the calls that wait; with `wait`, first wait for one."""
        try:
            if wait:
                self._inbox.get(timeout=IDLE_WAKE_S)()
            while True:
                self._inbox.get_nowait()()
        except queue.Empty:
            return


def _set(future: asyncio.Future[T], result: T | ServiceError) -> None:
    if future.done():
        return
    if isinstance(result, ServiceError):
        future.set_exception(result)
    else:
        future.set_result(result)
