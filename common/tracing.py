"""Spans by OpenTelemetry, whose packages are an extra: nothing here imports them before `tracing_to` has an endpoint.

Sampling is decided where a trace begins: one that comes with a request (`traceparent`, W3C Trace Context) is gone on
with if it is sampled, and is not otherwise.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from common import __version__
from common.errors import ServiceError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span as OtelSpan

EXPORT_TIMEOUT_S = 5.0
CLOSE_TIMEOUT_S = 5.0  # for the last spans of a process

Attributes = Mapping[str, str | int | float]


class Span:
    """A span that has begun. Times are nanoseconds since 1970; None = now. Nothing is exported of one that is not
    sampled, nor of those below it."""

    def __init__(self, tracing: Tracing, span: OtelSpan) -> None:
        self._tracing = tracing
        self._span = span

    @property
    def is_sampled(self) -> bool:
        return self._span.is_recording()

    @property
    def trace_id(self) -> str:
        """32 hex digits."""
        return format(self._span.get_span_context().trace_id, "032x")

    @property
    def traceparent(self) -> str:
        """What another process goes on with."""
        context = self._span.get_span_context()
        return f"00-{self.trace_id}-{context.span_id:016x}-{context.trace_flags:02x}"

    def begin(
        self, name: str, *, kind: str = "INTERNAL", begun_at_ns: int | None = None, attributes: Attributes | None = None
    ) -> Span:
        """A span below this one. `kind`: INTERNAL, or CLIENT for what another process does."""
        return self._tracing.begin(name, self._span, kind, begun_at_ns, attributes)

    def set(self, attributes: Attributes) -> None:
        self._span.set_attributes(attributes)

    def end(self, *, ended_at_ns: int | None = None, error: str | None = None) -> None:
        """`error`: one line, for one that failed."""
        if error is not None:
            from opentelemetry.trace import StatusCode

            self._span.set_status(StatusCode.ERROR, error)
        self._span.end(ended_at_ns)


class Tracing:
    """Makes the spans of a process; what becomes of them is the provider's."""

    def __init__(self, provider: TracerProvider) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._tracer = provider.get_tracer("fdfo", __version__)
        self._propagator = TraceContextTextMapPropagator()

    def serve(self, name: str, metadata: Mapping[str, str], attributes: Attributes | None = None) -> Span:
        """The span of a call that came with this metadata (or any mapping that may have a `traceparent`)."""
        from opentelemetry.trace import get_current_span

        caller = get_current_span(self._propagator.extract(metadata))
        return self.begin(name, caller, "SERVER", None, attributes)

    def begin(
        self, name: str, parent: OtelSpan, kind: str, begun_at_ns: int | None, attributes: Attributes | None
    ) -> Span:
        from opentelemetry.context import Context
        from opentelemetry.trace import SpanKind, set_span_in_context

        above = set_span_in_context(parent, Context())
        span = self._tracer.start_span(name, above, SpanKind[kind], attributes, start_time=begun_at_ns)
        return Span(self, span)


@contextlib.contextmanager
def tracing_to(endpoint: str | None, service_name: str, sample_ratio: float) -> Iterator[Tracing | None]:
    """Traces for as long as this lasts, sent in the background; None where there is no endpoint. A collector that does
    not answer costs spans and log lines, never a request. Raises ServiceError where the extra is not installed.

    sample_ratio: the share of traces to sample of those that begin here.
    """
    if endpoint is None:
        yield None
        return
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
    except ModuleNotFoundError as error:
        raise ServiceError(
            f"--otlp-traces-endpoint: needs the package {error.name}; install the extra: pip install 'fdfo[tracing]'"
        ) from None
    own_name: dict[str, Any] = {} if "OTEL_SERVICE_NAME" in os.environ else {"service.name": service_name}
    provider = TracerProvider(
        sampler=ParentBased(TraceIdRatioBased(sample_ratio)),
        resource=Resource.create({**own_name, "service.version": __version__}),
        shutdown_on_exit=False,
    )
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint, timeout=EXPORT_TIMEOUT_S)))
    try:
        yield Tracing(provider)
    finally:
        # In a thread, since it waits for a collector as often as there are batches.
        closing = threading.Thread(target=provider.shutdown, name="last-spans", daemon=True)
        closing.start()
        closing.join(CLOSE_TIMEOUT_S)
