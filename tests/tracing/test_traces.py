"""One trace from the client's span to the worker's forwards, over real gRPC, into an exporter in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
import structlog
from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import SpanKind, StatusCode

from common.tracing import Tracing
from fdfo.scheduler.v1 import scheduler_pb2 as api
from fdfo.scheduler.v1 import scheduler_pb2_grpc
from fdfo.worker.v1 import worker_pb2 as pb
from fdfo_client import AsyncClient, Client, InvalidRequest
from scheduler_svc.outbox import Outbox
from scheduler_svc.stream import Stream
from scheduler_svc.traces import RequestTraces, TracedCall
from scheduler_svc.workers import WorkerLost
from tests.security.services import Running, services
from tests.worker.scripted import Driver, effort, make_loop, start
from worker_svc.traces import TracedExecutor
from worker_svc.wire import decode_round

PROMPT = list(range(10, 15))


class Traced:
    """Three processes in one, each with a tracer of its own, and the spans that they export."""

    def __init__(self, sample_ratio: float = 1.0) -> None:
        self.exporter = InMemorySpanExporter()
        self.client = self._provider("client", 1.0)
        self.scheduler = Tracing(self._provider("scheduler", sample_ratio))
        self.worker = Tracing(self._provider("worker", 0.0))

    def _provider(self, name: str, sample_ratio: float) -> TracerProvider:
        provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(sample_ratio)),
            resource=Resource({"service.name": name}),
            shutdown_on_exit=False,
        )
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        return provider

    def run(self, scene: Callable[[Running], Awaitable[None]], **settings: object) -> list[ReadableSpan]:
        """The spans that a scene leaves."""

        async def play() -> None:
            made = services(None, settings, tracing=self.scheduler, worker_tracing=self.worker)
            async with made as running:
                await scene(running)

        asyncio.run(asyncio.wait_for(play(), 20))
        return list(self.exporter.get_finished_spans())


async def ask(target: str, **options: Any) -> None:
    async with AsyncClient(target) as client:
        await client.generate(prompt_ids=PROMPT, **{"max_new_tokens": 12, **options})


def service(span: ReadableSpan) -> object:
    return span.resource.attributes["service.name"]


def below(spans: list[ReadableSpan], parent: ReadableSpan) -> Iterator[ReadableSpan]:
    """The spans right below one."""
    assert parent.context is not None
    for span in spans:
        if span.parent is not None and span.parent.span_id == parent.context.span_id:
            yield span


def number(span: ReadableSpan, name: str) -> int:
    value = (span.attributes or {}).get(name)
    assert isinstance(value, int), f"{span.name} has no {name}"
    return value


def named(spans: list[ReadableSpan], name: str) -> list[ReadableSpan]:
    return [span for span in spans if span.name.endswith(name)]


def test_one_trace_from_the_client_to_the_forwards() -> None:
    """The client's span has the call below it, this the time in the queue and the rounds, a round the worker's, and
    that its forwards; times lie inside those above, and the counts are those of the answer."""
    traced = Traced()

    async def scene(running: Running) -> None:
        with traced.client.get_tracer("t").start_as_current_span("question"):
            await ask(running.target, request_id="r", n=2)

    spans = traced.run(scene)
    assert len({span.context.trace_id for span in spans if span.context}) == 1
    (question,) = named(spans, "question")
    (call,) = below(spans, question)
    assert (call.name, call.kind) == ("fdfo.scheduler.v1.SchedulerService/Generate", SpanKind.SERVER)
    assert call.attributes is not None
    assert call.attributes["fdfo.request_id"] == "r" and call.attributes["rpc.response.status_code"] == "OK"
    assert (call.attributes["gen_ai.usage.input_tokens"], call.attributes["gen_ai.usage.output_tokens"]) == (5, 24)
    inside = list(below(spans, call))
    waits, rounds = named(inside, "queue"), named(inside, "round")
    assert sorted(number(wait, "fdfo.sample_index") for wait in waits) == [0, 1]
    assert rounds and len(waits) + len(rounds) == len(inside)
    num_forwards = 0
    for each in rounds:
        (at_worker,) = below(spans, each)
        assert (service(each), service(at_worker)) == ("scheduler", "worker")
        assert at_worker.kind == SpanKind.SERVER
        forwards = list(below(spans, at_worker))
        assert {span.name for span in forwards} <= {"forward"}
        assert number(at_worker, "fdfo.forwards") == len(forwards)
        num_forwards += len(forwards)
    assert num_forwards >= 6
    assert len(spans) == 2 + len(inside) + len(rounds) + num_forwards
    for span in spans:
        for child in below(spans, span):
            slack_ns = 1_000_000 if child.name == "forward" else 0  # of one clock turned into another
            assert span.start_time and child.start_time and span.end_time and child.end_time
            assert span.start_time - slack_ns <= child.start_time <= min(child.end_time, span.end_time)
            if child.name != "round":  # one that was on its way when the last token came
                assert child.end_time <= span.end_time + slack_ns


@pytest.mark.parametrize("ratio", [0.0, 1.0])
def test_what_the_client_does_not_sample_is_not_exported(ratio: float) -> None:
    """A traceparent that is not sampled leaves nothing, whatever share is sampled here; without one the share decides,
    and the worker begins no trace."""
    traced = Traced(ratio)
    unsampled = trace.NonRecordingSpan(trace.SpanContext(1, 2, is_remote=False, trace_flags=trace.TraceFlags(0)))

    async def scene(running: Running) -> None:
        with trace.use_span(unsampled):
            await ask(running.target)
        assert not traced.exporter.get_finished_spans()
        await ask(running.target)

    spans = traced.run(scene)
    assert bool(spans) == (ratio == 1.0)
    roots = [span for span in spans if span.parent is None]
    assert [service(root) for root in roots] == ["scheduler"] * len(roots)


def test_the_blocking_client_sends_its_callers_span() -> None:
    """The span that is current in the calling thread is the parent, though the call runs in another thread."""
    traced = Traced()

    def in_thread(target: str) -> None:
        with Client(target) as client, traced.client.get_tracer("t").start_as_current_span("question"):
            client.generate(prompt_ids=PROMPT, max_new_tokens=4)

    async def scene(running: Running) -> None:
        await asyncio.to_thread(in_thread, running.target)

    spans = traced.run(scene)
    (question,) = named(spans, "question")
    (call,) = below(spans, question)
    assert call.name.endswith("Generate")


def test_a_trace_passes_an_api_key(tmp_path: Path) -> None:
    """A call that bears a key bears its traceparent too."""
    keys = tmp_path / "keys"
    keys.write_text("alice:a-key-of-sixteen-characters\n")
    keys.chmod(0o600)
    traced = Traced()

    async def scene(running: Running) -> None:
        with traced.client.get_tracer("t").start_as_current_span("question"):
            async with AsyncClient(running.target, api_key="a-key-of-sixteen-characters") as client:
                await client.generate(prompt_ids=PROMPT, max_new_tokens=4)

    spans = traced.run(scene, api_keys_file=keys)
    (question,) = named(spans, "question")
    (call,) = below(spans, question)
    assert named(list(below(spans, call)), "round"), "the request's name at the worker has the client in it"


def test_a_refused_call_has_its_status() -> None:
    """A request that is refused has a span with the status, and no error of ours."""
    traced = Traced()

    async def scene(running: Running) -> None:
        with pytest.raises(InvalidRequest):
            await ask(running.target, max_new_tokens=10**6)

    (call,) = traced.run(scene)
    assert call.attributes is not None and call.attributes["rpc.response.status_code"] == "INVALID_ARGUMENT"
    assert call.status.status_code == StatusCode.UNSET


def test_a_fault_of_ours_is_an_error_of_the_call() -> None:
    """A call that the scheduler cannot serve has its status, and is an error in the trace."""
    traced = Traced()

    async def scene(running: Running) -> None:
        await running.scheduler.close(0)
        async with grpc.aio.insecure_channel(running.target) as channel:
            with pytest.raises(grpc.aio.AioRpcError):
                await scheduler_pb2_grpc.SchedulerServiceStub(channel).Generate(api.GenerateRequest(text="x")).read()

    (call,) = traced.run(scene)
    assert call.attributes is not None and call.attributes["rpc.response.status_code"] == "UNAVAILABLE"
    assert call.status.status_code == StatusCode.ERROR


def test_log_lines_of_a_call_have_its_trace_id() -> None:
    """Sampled or not, the lines between request_queued and request_left carry the id that the client sent."""
    for flags in (0, 1):
        traced = Traced()
        span = trace.NonRecordingSpan(trace.SpanContext(0xABC, 2, is_remote=False, trace_flags=trace.TraceFlags(flags)))

        async def scene(running: Running, span: trace.Span = span) -> None:
            with trace.use_span(span):
                await ask(running.target)

        with structlog.testing.capture_logs(processors=[structlog.contextvars.merge_contextvars]) as lines:
            traced.run(scene)
        of_request = [line for line in lines if line["event"] in ("request_queued", "request_left")]
        assert len(of_request) == 2
        assert {line["trace_id"] for line in of_request} == {f"{0xABC:032x}"}


@pytest.mark.parametrize("traceparent", ["", "x", "00-0-0-01", f"00-{0:032x}-{1:016x}-01", f"ff-{1:032x}-{1:016x}-01"])
def test_a_traceparent_that_is_none_is_passed_over(traceparent: str) -> None:
    """The scheduler begins a trace of its own, and the worker makes no span."""
    traced = Traced()
    assert traced.scheduler.serve("Generate", {"traceparent": traceparent}).is_sampled
    assert not traced.worker.serve("RunRound", {"traceparent": traceparent}).is_sampled


class Sample(SimpleNamespace):
    """What traces read of a request's sample."""

    spec = SimpleNamespace(prompt_ids=[1, 2])


def traced_request(traced: Traced) -> RequestTraces:
    """The scheduler's traces, with one sampled request live."""
    traces = RequestTraces(traced.scheduler)
    stream = Stream("r", Outbox(0), "client/r", samples=[Sample(forwards=0)])  # type: ignore[list-item]
    traces.add(TracedCall(traced.scheduler.serve("Generate", {}), traces), stream)
    return traces


def test_rows_that_a_round_traces_have_a_bound() -> None:
    """The first 16 sampled rows have spans, and the worker takes no more of another scheduler."""
    traced = Traced()
    rows = [start("client/r", [1], sample_index=index) for index in range(20)]
    request = pb.RunRoundRequest(scheduler_id="s", mode=pb.MODE_FDFO, round_id=1, starts=rows)
    with traced_request(traced).round(request, "a:1"):
        pass
    spans = list(traced.exporter.get_finished_spans())
    assert [number(span, "fdfo.sample_index") for span in named(spans, "round")] == list(range(16))
    assert len(request.traceparents) == 16
    request.traceparents.append("x")
    assert len(decode_round(request, make_loop().start_rules).traceparents) == 16


def test_forwards_that_a_round_traces_have_a_bound() -> None:
    """The worker makes spans for 64 forwards of a round at most, over all its traced rows, and counts all."""
    traced = Traced()

    async def play() -> pb.RunRoundResponse:
        executor = TracedExecutor(loop := make_loop(), traced.worker)
        sampled = [f"00-{number:032x}-{1:016x}-01" for number in range(1, 17)]
        request = Driver(loop).request(starts=[start("a", effort(8))], traceparents=sampled)
        try:
            return await executor.run_round(request)
        finally:
            executor.stop()

    assert asyncio.run(asyncio.wait_for(play(), 20)).work.forwards == 8
    spans = list(traced.exporter.get_finished_spans())
    at_worker = named(spans, "RunRound")
    assert len(at_worker) == 16
    for span in at_worker:
        assert number(span, "fdfo.forwards") == 8 and len(list(below(spans, span))) == 4


def test_a_lost_worker_is_an_error_of_the_round_and_a_second_time_in_the_queue() -> None:
    """A round that fails is an error in the trace; when the request starts again it has waited from there on."""
    traced = Traced()
    traces = traced_request(traced)
    row = start("client/r", [1])
    with pytest.raises(WorkerLost), traces.round(pb.RunRoundRequest(round_id=1, starts=[row]), "a:1"):
        raise WorkerLost("no answer")
    with traces.round(pb.RunRoundRequest(round_id=1, starts=[row]), "b:1") as take:
        take(pb.RunRoundResponse(work=pb.RoundWork(forwards=3)))
    waits, rounds = (named(list(traced.exporter.get_finished_spans()), name) for name in ("queue", "round"))
    assert [each.status.status_code for each in rounds] == [StatusCode.ERROR, StatusCode.UNSET]
    assert rounds[0].status.description == "WorkerLost: no answer"
    assert [each.start_time for each in waits][1] == rounds[0].end_time
    assert number(rounds[1], "fdfo.forwards") == 3


def test_a_round_without_traced_rows_says_nothing() -> None:
    """Rows of requests that nobody samples bring no span and no traceparent."""
    traced = Traced()
    request = pb.RunRoundRequest(starts=[pb.StartRow(request_id="r")])
    with RequestTraces(traced.scheduler).round(request, "a:1"):
        assert not request.traceparents
    assert not traced.exporter.get_finished_spans()
