"""Ports of this machine: one that is free, and whether chosen ones are."""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Iterable


def free_port(host: str) -> int:
    """A port that nobody listens on."""
    with _listening(host, 0) as probe:
        return int(probe.getsockname()[1])


def why_taken(host: str, ports: Iterable[tuple[int, str]]) -> str:
    """What keeps services from listening at all of these ports together, in one line; "" for nothing.

    ports: each with the flag that chooses it; 0 stands for any free one. Other faults, as of the host, are not looked
    for: a service says them itself.
    """
    with contextlib.ExitStack() as probes:
        for port, flag in ports:
            try:
                probes.enter_context(_listening(host, port))
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    return f"port {port} is taken; choose another with {flag}"
                if error.errno == errno.EACCES:
                    return f"port {port} is not for this user; choose another with {flag}"
    return ""


def _listening(host: str, port: int) -> socket.socket:
    return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
