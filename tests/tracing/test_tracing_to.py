"""Where traces are sent: a collector that is there, one that is not, and packages that are not."""

from __future__ import annotations

import contextlib
import logging
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as otlp
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc

from common import tracing
from common.configuration import parse_settings
from common.errors import ServiceError
from common.tracing import tracing_to
from scheduler_svc.settings import ENV_PREFIX, SchedulerSettings

ROOT = Path(__file__).resolve().parents[2]


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self) -> None:
        self.requests: list[otlp.ExportTraceServiceRequest] = []

    def Export(self, request: otlp.ExportTraceServiceRequest, context: Any) -> otlp.ExportTraceServiceResponse:  # noqa: N802
        self.requests.append(request)
        return otlp.ExportTraceServiceResponse()


@contextlib.contextmanager
def collecting() -> Iterator[tuple[Collector, str]]:
    with ThreadPoolExecutor(1) as threads:
        server, collector = grpc.server(threads), Collector()
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        yield collector, f"http://127.0.0.1:{port}"
        server.stop(None).wait()


@pytest.mark.parametrize(("variable", "name"), [(None, "fdfo-x"), ("mine", "mine")])
def test_a_collector_gets_the_last_span(variable: str | None, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was ended just before the end arrives, under the service's name or the one that the environment gives."""
    if variable is not None:
        monkeypatch.setenv("OTEL_SERVICE_NAME", variable)
    with collecting() as (collector, endpoint), tracing_to(endpoint, "fdfo-x", 1.0) as tracer:
        assert tracer is not None
        tracer.serve("Generate", {}).end()
        tracer.serve("Generate", {"traceparent": f"00-{1:032x}-{1:016x}-00"}).end()
    (request,) = collector.requests
    (spans,) = request.resource_spans
    attributes = {each.key: each.value.string_value for each in spans.resource.attributes}
    assert attributes["service.name"] == name
    assert [span.name for span in spans.scope_spans[0].spans] == ["Generate"]


def test_a_collector_that_is_not_there_costs_log_lines(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A warning names the address that was tried, and the end waits for it no longer than it may."""
    monkeypatch.setattr(tracing, "CLOSE_TIMEOUT_S", 0.3)
    with caplog.at_level(logging.WARNING), tracing_to("http://127.0.0.1:1", "fdfo-x", 1.0) as tracer:
        assert tracer is not None
        tracer.serve("Generate", {}).end()
        ended_at = time.monotonic()
    assert time.monotonic() - ended_at < 3
    assert any("127.0.0.1:1" in line.getMessage() for line in caplog.records)


def test_without_the_extra_the_flag_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """One line names the flag, the package and the extra."""
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    said = r"^--otlp-traces-endpoint: needs the package opentelemetry.*pip install 'fdfo\[tracing\]'$"
    with pytest.raises(ServiceError, match=said), tracing_to("http://127.0.0.1:1", "x", 1.0):
        pass


def test_without_an_endpoint_nothing_is_imported() -> None:
    """A process that makes no traces has no module of OpenTelemetry, the client's border included."""
    code = """
import sys
from common.tracing import tracing_to
from fdfo_client._tracing import trace_metadata
with tracing_to(None, "x", 1.0) as tracer:
    assert tracer is None and trace_metadata() == ()
assert not [name for name in sys.modules if name.startswith("opentelemetry")]
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "text", ["127.0.0.1:4317", "grpc://a:1", "http://", "http://a:x", "http://a:4318/v1/traces", ""]
)
def test_an_endpoint_that_cannot_be_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    """What is no URL, or one for OTLP over HTTP, ends with a line that says what is."""
    argv = ["--model-path", "m", f"--otlp-traces-endpoint={text}"]
    with pytest.raises(SystemExit, match="2"):
        parse_settings(SchedulerSettings, argv, env_prefix=ENV_PREFIX, environment={})
    assert "--otlp-traces-endpoint" in (said := capsys.readouterr().err) and "must be http://host:port" in said


def test_an_endpoint_that_can_be_is_taken() -> None:
    """Plaintext, TLS, names and IPv6 addresses pass."""
    for text in ("http://127.0.0.1:4317", "https://otel.example:4317", "http://[::1]:4317/", "http://collector"):
        argv = ["--model-path", "m", f"--otlp-traces-endpoint={text}"]
        got = parse_settings(SchedulerSettings, argv, env_prefix=ENV_PREFIX, environment={})
        assert got.otlp_traces_endpoint == text
