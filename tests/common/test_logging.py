"""What a log line holds, and that all logging of a process takes one way."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import warnings
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import structlog

from common.logging import configure_logging


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    """Leave the process's logging as it was."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.captureWarnings(False)
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()


def _events(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    out, err = capsys.readouterr()
    assert out == ""
    return [json.loads(line) for line in err.splitlines()]


def test_json_is_one_object_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    """An event has its name, level, fields and an ISO time in UTC; stdout stays free."""
    configure_logging("json", "info")
    structlog.get_logger().info("round_sent", rows=12, note="é\n")
    (event,) = _events(capsys)
    at = datetime.fromisoformat(event.pop("timestamp"))
    assert at.utcoffset() == timedelta(0)
    assert abs(datetime.now(UTC) - at) < timedelta(minutes=1)
    assert event == {"event": "round_sent", "level": "info", "rows": 12, "note": "é\n"}


def test_bound_fields_are_in_every_event_of_the_task(capsys: pytest.CaptureFixture[str]) -> None:
    """What a task binds is in its own events, those of other libraries too, and not in another task's."""
    configure_logging("json", "info")
    log = structlog.get_logger()

    async def handle(request_id: str) -> None:
        structlog.contextvars.bind_contextvars(request_id=request_id, round_id=7, worker_epoch="e1")
        await asyncio.sleep(0)
        log.info("from_us")
        logging.getLogger("library").warning("from %s", "a library")

    async def run() -> None:
        await asyncio.gather(handle("a"), handle("b"))

    asyncio.run(run())
    log.info("outside")
    events = _events(capsys)
    assert [(e["event"], e.get("request_id")) for e in events] == [
        ("from_us", "a"),
        ("from a library", "a"),
        ("from_us", "b"),
        ("from a library", "b"),
        ("outside", None),
    ]
    assert all(e["round_id"] == 7 and e["worker_epoch"] == "e1" for e in events[:4])
    assert events[1]["logger"] == "library"


def test_level_holds_for_all_loggers(capsys: pytest.CaptureFixture[str]) -> None:
    """Below the level nothing is written, be it from structlog or from the standard library."""
    configure_logging("json", "warning")
    structlog.get_logger().info("quiet")
    logging.getLogger("library").info("quiet")
    structlog.get_logger().warning("loud")
    logging.getLogger("library").error("loud")
    assert [event["event"] for event in _events(capsys)] == ["loud", "loud"]


@pytest.mark.parametrize("logger", [structlog.get_logger(), logging.getLogger("library")])
def test_exceptions_are_rendered(logger: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """The traceback of an exception stands in its event as one field, whoever logs it."""
    configure_logging("json", "info")
    try:
        raise LookupError("no such slot")
    except LookupError:
        logger.exception("round_failed")
    (event,) = _events(capsys)
    assert event["level"] == "error"
    assert event["exception"].startswith("Traceback")
    assert event["exception"].endswith("LookupError: no such slot")


def test_console_is_for_reading(capsys: pytest.CaptureFixture[str]) -> None:
    """The console form has time, level, event and fields on one line, the traceback below, no colour off a terminal."""
    configure_logging("console", "debug")
    log = structlog.get_logger()
    log.debug("round_sent", rows=12)
    try:
        raise LookupError("no such slot")
    except LookupError:
        log.exception("round_failed")
    first, second, *traceback = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT[\d:.]+Z \[debug +\] round_sent +rows=12", first)
    assert "round_failed" in second
    assert traceback[0].startswith("Traceback")
    assert traceback[-1] == "LookupError: no such slot"


def test_last_configuration_counts(capsys: pytest.CaptureFixture[str]) -> None:
    """Configuring again replaces the handler, also for loggers that were used before."""
    log = structlog.get_logger()
    configure_logging("console", "error")
    log.error("first")
    capsys.readouterr()
    configure_logging("json", "info")
    log.info("second")
    assert [event["event"] for event in _events(capsys)] == ["second"]


def test_warnings_are_logged(capsys: pytest.CaptureFixture[str]) -> None:
    """A Python warning is an event like any other."""
    configure_logging("json", "info")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(True)
        warnings.warn("old flag", UserWarning, stacklevel=1)
    (event,) = _events(capsys)
    assert event["level"] == "warning"
    assert "old flag" in event["event"]


def test_an_unknown_format_is_refused() -> None:
    """Only the two forms are taken."""
    with pytest.raises(ValueError, match="neither json nor console"):
        configure_logging("xml", "info")
