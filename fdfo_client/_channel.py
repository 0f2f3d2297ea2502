"""Targets, the options of the channels to them, and who may use these."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

from common.api_keys import read_api_key
from common.connection import Connection, Tls, check_not_forked
from common.errors import ServiceError

__all__ = ["CHANNEL_OPTIONS", "Connection", "Tls", "check_access", "check_not_forked", "parse_targets"]

MAX_MESSAGE_BYTES = 64 * 2**20

# A name with a scheme that gRPC resolves itself, such as dns:///schedulers:50051 or unix:/run/fdfo.sock.
_HAS_SCHEME = re.compile(r"(dns|ipv4|ipv6|unix|unix-abstract|xds):")
_HOST = re.compile(r"[^\s:/\[\]]+|\[[^\s/\[\]]+\]")

CHANNEL_OPTIONS: list[tuple[str, str | int]] = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # A name with several addresses (dns:///) is used in turn; gRPC would otherwise stay with the first.
    ("grpc.service_config", json.dumps({"loadBalancingConfig": [{"round_robin": {}}]})),
    # A stream is silent while its request is queued: pings find a lost server then, within 16 s. Servers refuse them
    # faster than every 10 s. gRPC's other pings, which those of keepalive wait for, have a time-out of their own: 60 s.
    ("grpc.keepalive_time_ms", 11_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # When a connection is lost its name is resolved again: there may be new schedulers. gRPC would wait 30 s.
    ("grpc.dns_min_time_between_resolutions_ms", 1_000),
    # A scheduler that was restarted is found again within seconds, not minutes.
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 3_000),
    # Clients do not share connections, so a new client does not wait out the back-off of an older one.
    ("grpc.use_local_subchannel_pool", 1),
    # Schedulers are near; a web proxy named in the environment is not the way to them.
    ("grpc.enable_http_proxy", 0),
]


def parse_targets(target: str | Sequence[str]) -> tuple[str, ...]:
    """The targets of "host:port", "host:port,host:port", a gRPC name such as "dns:///name:port", or a list of these.

    Raises ValueError naming the part that is not a target.
    """
    if isinstance(target, str):
        target = [target] if _HAS_SCHEME.match(target) else target.split(",")
    targets = tuple(part.strip() for part in target)
    if not targets:
        raise ValueError("no target: give the scheduler's address as host:port")
    for part in targets:
        if not _HAS_SCHEME.match(part) and not _is_host_and_port(part):
            raise ValueError(
                f"not a target: {part!r}; give host:port, [host]:port for an IPv6 address, or a gRPC name such as "
                "dns:///host:port"
            )
    return targets


def check_access(tls: Tls | None, api_key: str | Path | None) -> None:
    """Raises ValueError, one line, for files that cannot be used and for a key that cannot be sent."""
    if isinstance(api_key, str) and not (api_key.isascii() and api_key.isprintable() and api_key.split() == [api_key]):
        raise ValueError("api_key: must be visible ASCII characters")
    try:
        if isinstance(api_key, Path):
            read_api_key(api_key)
        if tls is not None:
            tls.credentials()
    except ServiceError as error:
        raise ValueError(str(error)) from None


def _is_host_and_port(part: str) -> bool:
    host, colon, port = part.rpartition(":")
    return bool(colon and _HOST.fullmatch(host)) and port.isascii() and port.isdigit() and 0 < int(port) < 65536
