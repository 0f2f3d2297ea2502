"""The usual Prometheus series of a gRPC server, under the names that dashboards expect."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import grpc
import grpc.aio
from google.protobuf import descriptor_pool
from prometheus_client import CollectorRegistry, Counter, Histogram

# From a health check to a generation of minutes.
BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500)
METHOD_LABELS = ("grpc_type", "grpc_service", "grpc_method")
_CODE_NAMES = {code.value[0]: "".join(map(str.capitalize, code.name.split("_"))) for code in grpc.StatusCode}
_CODE_NAMES |= {0: "OK", 1: "Canceled"}

MethodLabels = tuple[str, str, str]


class CallMetrics(grpc.aio.ServerInterceptor):
    """Counts and times the calls of all methods whose descriptors are known here; others are no method of ours, and
    their names would be labels without a bound. One for all servers of a process; to be their first interceptor."""

    def __init__(self, registry: CollectorRegistry, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._labels = lru_cache(maxsize=256)(_method_labels)
        started = Counter("grpc_server_started_total", "Calls that came in.", METHOD_LABELS, registry=registry)
        handled = Counter(
            "grpc_server_handled_total",
            "Calls that ended, by status.",
            (*METHOD_LABELS, "grpc_code"),
            registry=registry,
        )
        seconds = Histogram(
            "grpc_server_handling_seconds",
            "Time from the start of a call's handler to its end.",
            METHOD_LABELS,
            buckets=BUCKETS_S,
            registry=registry,
        )
        # Finding a series by its labels takes longer than counting in it.
        self._started, self._seconds = lru_cache(maxsize=256)(started.labels), lru_cache(maxsize=256)(seconds.labels)
        self._handled = lru_cache(maxsize=4096)(handled.labels)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        labels = self._labels(handler_call_details.method) if handler is not None else None
        return handler if labels is None else self._counted(handler, labels)

    def _counted(self, handler: Any, labels: MethodLabels) -> Any:
        name = f"{_kind(handler.request_streaming)}_{_kind(handler.response_streaming)}"
        serve = getattr(handler, name)

        async def call(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            with self._counting(labels, context):
                return await serve(request, context)

        async def stream(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
            with self._counting(labels, context):
                async for reply in serve(request, context):
                    yield reply

        return handler._replace(**{name: stream if inspect.isasyncgenfunction(serve) else call})

    @contextmanager
    def _counting(self, labels: MethodLabels, context: grpc.aio.ServicerContext[Any, Any]) -> Iterator[None]:
        """The time in which a call is served."""
        self._started(*labels).inc()
        started_at = self._clock()
        code = "Unknown"  # what gRPC makes of any other exception
        try:
            yield
            code = _code_of(context)
        except grpc.aio.AbortError:
            code = _code_of(context)
            raise
        except (asyncio.CancelledError, GeneratorExit):
            code = "Canceled"
            raise
        finally:
            self._seconds(*labels).observe(self._clock() - started_at)
            self._handled(*labels, code).inc()


def _kind(is_streaming: bool) -> str:
    return "stream" if is_streaming else "unary"


def _code_of(context: grpc.aio.ServicerContext[Any, Any]) -> str:
    """The call's status in the spelling of these series: "OK", "NotFound", "Canceled"."""
    code: Any = context.code()  # a number, or a StatusCode where a servicer set one
    return _CODE_NAMES.get(code.value[0] if isinstance(code, grpc.StatusCode) else code or 0, "Unknown")


def _method_labels(path: str) -> MethodLabels | None:
    """Kind, service and method of /service/method; None for one that has no descriptor."""
    service, _, method = path.removeprefix("/").rpartition("/")
    try:
        found = descriptor_pool.Default().FindServiceByName(service).methods_by_name[method]
    except KeyError:
        return None
    streams = (bool(found.client_streaming), bool(found.server_streaming))
    kinds = {(False, False): "unary", (True, False): "client_stream", (False, True): "server_stream"}
    return kinds.get(streams, "bidi_stream"), service, method
