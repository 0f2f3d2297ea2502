"""A run for a person, as a table, and for machines, as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from fdfo_client._types import ServerInfo
from fdfo_client.bench.load import Record
from fdfo_client.bench.measure import Measurement, World
from fdfo_client.bench.metrics import ServerFigures, Spread, Summary, summarize, ttft_ms

JSON_VERSION = 1
MOST_ERRORS = 10  # shown in the table; the JSON has all
_LABEL = 30


@dataclass(frozen=True)
class Report:
    """A run with its figures. command: "bench" or "replay". settings: its flags, as JSON has them."""

    command: str
    settings: Mapping[str, Any]
    servers: Mapping[str, ServerInfo]
    measurement: Measurement
    summary: Summary

    @property
    def server(self) -> ServerInfo:
        """One of the servers; all serve the same model."""
        return next(iter(self.servers.values()))


def make_report(command: str, settings: Mapping[str, Any], world: World, measurement: Measurement) -> Report:
    """Sum a measurement up."""
    summary = summarize(
        measurement.records,
        measurement.before,
        measurement.after,
        measurement.wall_s,
        world.num_workers,
        world.server.block_size,
    )
    return Report(command, settings, world.servers, measurement, summary)


def to_json(report: Report) -> dict[str, Any]:
    """What --json writes: the figures by name, and a line for each request in the order of sending."""
    return {
        "fdfo_report": JSON_VERSION,
        "command": report.command,
        "settings": dict(report.settings),
        "servers": [{"target": target, **dataclasses.asdict(info)} for target, info in report.servers.items()],
        "cut_short": report.measurement.was_cut_short,
        "counters_error": report.measurement.counters_error,
        "summary": dataclasses.asdict(report.summary),
        "requests": [_request_json(record) for record in report.measurement.records],
    }


def headline(report: Report) -> str:
    """What was measured, in a line."""
    server = report.server
    mode = "FDFO" if server.fdfo else "sync"
    return f"{server.served_model_name}, {server.algorithm}, {mode}, blocks of {server.block_size} tokens"


def notes(report: Report) -> Iterator[str]:
    """What a reader must know before believing the figures."""
    if report.measurement.was_cut_short:
        yield f"cut short: {report.summary.requests_unfinished} requests were under way; they are not in the latencies"
    if report.summary.requests_failed:
        yield f"{report.summary.requests_failed} requests failed; latencies are of those that did not"
    if report.measurement.counters_error is not None:
        yield f"no figures of the server: {report.measurement.counters_error}"
    elif report.summary.server is None:
        yield "no figures of the server: its counters fell, so it started again meanwhile"


def table(report: Report) -> list[str]:
    """The lines for a terminal."""
    values = {field.name: getattr(report.summary, field.name) for field in dataclasses.fields(report.summary)}
    spreads = {name: value for name, value in values.items() if isinstance(value, Spread)}
    lines = [f"fdfo {report.command}: {headline(report)}", *(f"  ! {note}" for note in notes(report)), ""]
    lines += [_row(name, value) for name, value in values.items() if isinstance(value, int | float)]
    if spreads:
        lines += ["", " " * _LABEL + "".join(f"{name:>12}" for name in ("mean", "p50", "p95", "p99"))]
        lines += [_row(name, each.mean, each.p50, each.p95, each.p99) for name, each in spreads.items()]
    if report.summary.server is not None:
        lines += ["", *_server_rows(report.summary.server)]
    if report.summary.errors:
        errors = list(report.summary.errors.items())
        lines += ["", *(f"{count} x {error}" for error, count in errors[:MOST_ERRORS])]
        if len(errors) > MOST_ERRORS:
            lines.append(f"and {len(errors) - MOST_ERRORS} other errors")
    return lines


def number(value: float | None) -> str:
    """A figure for a person."""
    if value is None:
        return "-"
    return f"{value:d}" if isinstance(value, int) else f"{value:z.3f}" if abs(value) < 10 else f"{value:.1f}"


def _server_rows(server: ServerFigures) -> list[str]:
    return [_row(field.name, getattr(server, field.name)) for field in dataclasses.fields(server)]


def _row(name: str, *values: float | None) -> str:
    return f"{name:<{_LABEL}}" + "".join(f"{number(value):>12}" for value in values)


def _request_json(record: Record) -> dict[str, Any]:
    """One request; None where it did not come so far."""
    ended = record.ended_at_s
    return {
        "due_at_s": record.due_at_s,
        "sent_at_s": record.sent_at_s,
        "ttft_ms": next(ttft_ms([record]), None),
        "end_to_end_ms": None if ended is None else (ended - record.sent_at_s) * 1000,
        "prompt_tokens": record.prompt_tokens,
        "output_tokens": record.output_tokens,
        "forwards": None if record.usage is None else record.usage.forwards,
        "finish_reason": record.finish_reason,
        "error": record.error,
    }
