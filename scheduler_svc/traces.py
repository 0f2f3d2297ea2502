"""The traces of requests: of each that is sampled its call, its times in the queue and its rounds.

None of this is there without --otlp-traces-endpoint: the interceptor makes the call's span, `note_stream` tells it the
request, and a link of another type gives rounds their spans. What a round says of a request goes by the name that the
request has at workers.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Awaitable, Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import grpc
import grpc.aio
import structlog

from common.tracing import Attributes, Span, Tracing
from fdfo.worker.v1 import worker_pb2 as pb
from scheduler_svc.stream import Stream
from scheduler_svc.workers import WorkerLink

# A round has spans for so many of its rows at most, the first ones; each is one more at the worker, with its forwards.
MAX_TRACED_ROWS = 16

# Statuses that are the server's fault; the client's own do not make its span an error.
_OUR_FAULTS = {"UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS"}


@dataclass(eq=False)
class TracedCall:
    """A sampled call. `waiting_since_ns`: by sample, since when it is in no round."""

    span: Span
    traces: RequestTraces
    stream: Stream | None = None
    noted_at_ns: int = 0
    waiting_since_ns: dict[int, int] = field(default_factory=dict)

    def end_wait(self, sample_index: int, now_ns: int) -> None:
        """The sample starts on a worker."""
        since = self.waiting_since_ns.get(sample_index, self.noted_at_ns)
        waited = self.span.begin("queue", begun_at_ns=since, attributes={"fdfo.sample_index": sample_index})
        waited.end(ended_at_ns=now_ns)


_current: ContextVar[TracedCall | None] = ContextVar("traced_call", default=None)


def note_stream(stream: Stream) -> None:
    """In the task that serves a call: its request waits in the queue now. Nothing where the call is not traced."""
    if (call := _current.get()) is not None:
        call.traces.add(call, stream)


class RequestTraces:
    """The sampled requests that are live here, by their names at workers."""

    def __init__(self, tracing: Tracing) -> None:
        self.tracing = tracing
        self._calls: dict[str, TracedCall] = {}

    def add(self, call: TracedCall, stream: Stream) -> None:
        call.stream, call.noted_at_ns = stream, time.time_ns()
        self._calls[stream.name] = call
        call.span.set(
            {
                "fdfo.request_id": stream.request_id,
                "fdfo.samples": len(stream.samples),
                "gen_ai.usage.input_tokens": len(stream.samples[0].spec.prompt_ids),
            }
        )

    def remove(self, call: TracedCall) -> None:
        """The call has ended."""
        if call.stream is not None:
            cost = call.stream.cost()
            call.span.set(
                {
                    "gen_ai.usage.output_tokens": cost["published_tokens"],
                    "fdfo.forwards": cost["forwards"],
                    "fdfo.preemptions": cost["preemptions"],
                }
            )
            if self._calls.get(call.stream.name) is call:  # not one that took its place
                del self._calls[call.stream.name]

    @contextlib.contextmanager
    def round(self, request: pb.RunRoundRequest, target: str) -> Iterator[Callable[[pb.RunRoundResponse], None]]:
        """The time of a RunRound: a span for each sampled row, told to the worker in the request. Gives what takes the
        reply."""
        rows = self._rows_of(request) if self._calls else []
        now_ns = time.time_ns()
        attributes: Attributes = {"fdfo.round_id": request.round_id, "server.address": target}
        spans: list[Span] = []
        for call, sample_index, is_start in rows:
            if is_start:
                call.end_wait(sample_index, now_ns)
            about = {**attributes, "fdfo.sample_index": sample_index}
            spans.append(call.span.begin("round", kind="CLIENT", begun_at_ns=now_ns, attributes=about))
        request.traceparents.extend(span.traceparent for span in spans)

        def take(reply: pb.RunRoundResponse) -> None:
            for span in spans:
                span.set({"fdfo.forwards": reply.work.forwards})

        fault: str | None = None
        try:
            yield take
        except BaseException as error:
            fault = f"{type(error).__name__}: {error}"
            raise
        finally:
            now_ns = time.time_ns()
            for (call, sample_index, _), span in zip(rows, spans, strict=True):
                call.waiting_since_ns[sample_index] = now_ns
                span.end(ended_at_ns=now_ns, error=fault)

    def _rows_of(self, request: pb.RunRoundRequest) -> list[tuple[TracedCall, int, bool]]:
        """The first sampled rows, with their sample's index and whether they start."""
        starts = ((start.request_id, start.sample_index, True) for start in request.starts)
        names = request.continues
        continues = ((*name, False) for name in zip(names.request_ids, names.sample_indexes, strict=True))
        rows = []
        for name, sample_index, is_start in (*starts, *continues):
            call = self._calls.get(name)
            if call is not None:
                rows.append((call, sample_index, is_start))
                if len(rows) == MAX_TRACED_ROWS:
                    break
        return rows


class TracedLink(WorkerLink):
    """A link whose rounds have spans."""

    def __init__(self, target: str, scheduler_id: str, *, traces: RequestTraces, **options: Any) -> None:
        super().__init__(target, scheduler_id, **options)
        self._traces = traces

    async def run_round(self, request: pb.RunRoundRequest, timeout_s: float) -> pb.RunRoundResponse:
        with self._traces.round(request, self.target) as take:
            reply = await super().run_round(request, timeout_s)
            take(reply)
            return reply


class TraceCalls(grpc.aio.ServerInterceptor):
    """Each `Generate` has a span, which goes on the client's trace if it sent one; its id is in all log lines of the
    call, sampled or not."""

    def __init__(self, traces: RequestTraces) -> None:
        self._traces = traces
        self._traced = lru_cache(maxsize=8)(self._make_traced)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        return self._traced(method, handler) if handler is not None and method.endswith("/Generate") else handler

    def _make_traced(self, method: str, handler: Any) -> Any:
        service, _, name = method.strip("/").partition("/")
        attributes = {"rpc.system": "grpc", "rpc.service": service, "rpc.method": name}

        async def traced(message: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
            metadata = {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
            span = self._traces.tracing.serve(method.strip("/"), metadata, attributes)
            structlog.contextvars.bind_contextvars(trace_id=span.trace_id)
            if not span.is_sampled:
                return await handler.unary_stream(message, context)  # type: ignore[no-any-return]
            call = TracedCall(span, self._traces)
            _current.set(call)
            status = "CANCELLED"  # the client is gone, unless it ends otherwise
            try:
                await handler.unary_stream(message, context)
                status = "OK"
            except grpc.aio.AbortError:
                status = _status_name(context)
                raise
            except Exception:
                status = "UNKNOWN"  # what gRPC makes of it
                raise
            finally:
                self._traces.remove(call)
                span.set({"rpc.response.status_code": status})
                span.end(error=status if status in _OUR_FAULTS else None)

        return handler._replace(unary_stream=traced)


def _status_name(context: grpc.aio.ServicerContext[Any, Any]) -> str:
    """Of a call that was aborted."""
    code = context.code()  # a number
    return next(each.name for each in grpc.StatusCode if code in (each, each.value[0]))
