"""The spans of a round at the worker: for each row that its scheduler traces one, and its forwards below it."""

from __future__ import annotations

import asyncio
import time

from common.tracing import Attributes, Span, Tracing
from fdfo.worker.v1 import worker_pb2 as pb
from worker_svc.denoise import DenoiseLoop
from worker_svc.executor import Executor
from worker_svc.rounds import RoundRequest

# Of all traced rows together, so that what a round costs has a bound; `fdfo.forwards` tells how many there were.
MAX_FORWARD_SPANS = 64


class TracedExecutor(Executor):
    """Spans are ended beside the device thread, when the reply is on its way; that thread only notes the times."""

    def __init__(self, loop: DenoiseLoop, tracing: Tracing) -> None:
        super().__init__(loop)
        self._tracing = tracing
        self._clock = loop.clock

    async def run_round(self, request: RoundRequest) -> pb.RunRoundResponse:
        spans = self._spans(request)
        if not spans:
            return await super().run_round(request)
        request.want_forward_times = True
        try:
            reply = await super().run_round(request)
        except BaseException as error:
            self._end_soon(spans, pb.RoundWork(), f"{type(error).__name__}: {error}")
            raise
        self._end_soon(spans, reply.work, None)
        return reply

    def _end_soon(self, spans: list[Span], work: pb.RoundWork, fault: str | None) -> None:
        clock_began_at_ns = time.time_ns() - round(self._clock() * 1e9)
        asyncio.get_running_loop().call_soon(_end, spans, work, clock_began_at_ns, fault)

    def _spans(self, request: RoundRequest) -> list[Span]:
        attributes: Attributes = {
            "rpc.system": "grpc",
            "rpc.service": "fdfo.worker.v1.WorkerService",
            "rpc.method": "RunRound",
            "fdfo.round_id": request.round_id,
            "fdfo.rows": len(request.starts) + len(request.continues),
        }
        spans = []
        for traceparent in request.traceparents:
            span = self._tracing.serve(
                "fdfo.worker.v1.WorkerService/RunRound", {"traceparent": traceparent}, attributes
            )
            if span.is_sampled:
                spans.append(span)
        return spans


def _end(spans: list[Span], work: pb.RoundWork, clock_began_at_ns: int, fault: str | None) -> None:
    """The forwards of `work` have times of a clock that was 0 at `clock_began_at_ns`."""
    times_ns = [
        (clock_began_at_ns + 1000 * begin_us, clock_began_at_ns + 1000 * end_us)
        for begin_us, end_us in zip(work.forward_begins_us, work.forward_ends_us, strict=True)
    ][: MAX_FORWARD_SPANS // len(spans)]
    for span in spans:
        for begun_at_ns, ended_at_ns in times_ns:
            span.begin("forward", begun_at_ns=begun_at_ns).end(ended_at_ns=ended_at_ns)
        span.set({"fdfo.forwards": work.forwards})
        span.end(error=fault)
