"""The setting of both services that says where traces go."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from common.settings import setting


def _check_endpoint(text: str) -> None:
    try:
        parts = urlsplit(text)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_url = False
    if not is_url or parts.path.strip("/") or parts.query:
        raise ValueError("must be http://host:port (plaintext) or https://host:port (TLS), as OTLP over gRPC has it")


@dataclass(frozen=True, kw_only=True)
class TracingSettings:
    """Without an endpoint no trace is made, and nothing of OpenTelemetry is imported."""

    otlp_traces_endpoint: str | None = setting(
        None,
        help="collector that takes traces by OTLP over gRPC, such as http://127.0.0.1:4317; needs the extra tracing; "
        "default: none are made",
        metavar="URL",
        check=_check_endpoint,
    )
