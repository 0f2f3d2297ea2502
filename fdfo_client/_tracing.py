"""The caller's trace, sent along so that servers can go on with it. Needs no package: one that has no tracer sends
nothing."""

from __future__ import annotations

import sys


def trace_metadata() -> tuple[tuple[str, str], ...]:
    """gRPC metadata for the span that is current, as the process's propagators write it (`traceparent`); empty where
    the process has not imported OpenTelemetry or no span is current."""
    if "opentelemetry.trace" not in sys.modules:
        return ()
    from opentelemetry.propagate import inject

    carrier: dict[str, str] = {}
    inject(carrier)
    return tuple((name.lower(), value) for name, value in carrier.items())
