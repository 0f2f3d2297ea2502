"""Logging of both services: structlog and the standard library through one handler on stderr.

One event a thing, named in snake_case, with what it is about as fields:

    log.info("round_sent", rows=12)

Callers bind what many events share: `structlog.contextvars.bind_contextvars(request_id=..., round_id=...,
worker_epoch=...)`. Bound fields are in every event of that task or thread, those of other libraries too.
"""

from __future__ import annotations

import logging
import sys
from typing import Literal

import structlog
from structlog.typing import Processor


def configure_logging(format: Literal["json", "console"] | str, level: str) -> None:
    """Send all logging to stderr, one line an event in `json`, in colour on a terminal in `console`.

    `level` is "debug", "info", "warning" or "error". May be called again; the last call counts.
    """
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    render: list[Processor]
    if format == "json":
        render = [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    elif format == "console":
        colours = sys.stderr.isatty()
        render = [
            structlog.dev.ConsoleRenderer(colors=colours, exception_formatter=structlog.dev.plain_traceback),
        ]
    else:
        raise ValueError(f"format: {format!r} is neither json nor console")

    formatter = structlog.stdlib.ProcessorFormatter(
        # What another library logs also says which one it was.
        foreign_pre_chain=[*shared, structlog.stdlib.add_logger_name],
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *render],
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    logging.captureWarnings(True)

    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=False,  # so that a later call takes effect
    )
