"""The frame of both services: a gRPC server with health and reflection, its start, its end and its ready line.

service = GrpcService(host, port, ["fdfo.worker.v1.WorkerService"])
add_WorkerServiceServicer_to_server(servicer, service.server)
port = await service.start()          # health: NOT_SERVING
service.set_serving(True)
print_ready(f"{host}:{port}")
cause = await service.wait_for_stop(exit_with_parent=False)
service.set_serving(False)            # and drain; health still answers
await service.stop(grace_s=5)
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from typing import Any

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from common.api_keys import ApiKeys
from common.call_metrics import CallMetrics
from common.callers import ApiKeyInterceptor
from common.errors import ServiceError
from common.security_settings import SecuritySettings
from common.tls import server_credentials
from common.undecodable import RefuseUndecodable

# A start row carries its whole prompt at 4 bytes a token; gRPC's default of 4 MiB would be a million tokens a round.
MAX_MESSAGE_BYTES = 64 * 1024 * 1024
MAX_PENDING_CALLS = 32_768

_SERVER_OPTIONS = [
    # With it a second process would share the port in silence, and half of the calls.
    ("grpc.so_reuseport", 0),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # Clients may ping every 10 s, with no call open too; the defaults answer that with GOAWAY too_many_pings.
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # Calls that came and have no task yet. From 1000 on gRPC's default ends some of them, and from 3000 on all, with
    # CANCELLED, so that in a burst a client would not hear why. This many are answered in half a minute.
    ("grpc.server.max_pending_requests", MAX_PENDING_CALLS),
    ("grpc.server.max_pending_requests_hard_limit", MAX_PENDING_CALLS),
]


def _age_options(max_connection_age_s: float | None) -> list[tuple[str, int]]:
    """A connection of this age takes no new calls, so that clients look for servers again; its calls go on."""
    if max_connection_age_s is None:
        return []
    age_ms = round(max_connection_age_s * 1000)
    return [("grpc.max_connection_age_ms", age_ms), ("grpc.max_connection_age_grace_ms", 2**31 - 1)]


class GrpcService:
    """A server on one address. To be made and used in one running event loop.

    `server` takes the servicers of `service_names` before `start`; their generated modules must be imported by then
    (reflection reads the descriptors). `security` says who may connect and call; health needs no API key. Raises
    ServiceError, one line, for files of it that cannot be used. `call_metrics` counts the calls; `interceptors` see
    those that may be made.

    Health: the named services are readiness, "" is liveness.
    """

    def __init__(
        self,
        host: str,
        port: int,
        service_names: Sequence[str],
        *,
        security: SecuritySettings | None = None,
        max_receive_bytes: int = MAX_MESSAGE_BYTES,
        max_connection_age_s: float | None = None,
        call_metrics: CallMetrics | None = None,
        interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
    ) -> None:
        security = security or SecuritySettings()
        keys = [] if security.api_keys_file is None else [ApiKeyInterceptor(ApiKeys(security.api_keys_file))]
        self.server = grpc.aio.server(
            options=[
                *_SERVER_OPTIONS,
                ("grpc.max_receive_message_length", max_receive_bytes),
                *_age_options(max_connection_age_s),
            ],
            interceptors=[*([] if call_metrics is None else [call_metrics]), *keys, *interceptors, RefuseUndecodable()],
        )
        self._credentials = server_credentials(security)
        self._host = host
        self._port = port
        self._service_names = tuple(service_names)
        self._health = health.aio.HealthServicer()  # "" is SERVING from the start
        self._health_updates: set[asyncio.Task[None]] = set()
        self.is_serving = False
        self._stopping = asyncio.Event()
        self._stop_cause = ""
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.server)

    async def start(self) -> int:
        """Listen; returns the port (the free one that was taken for 0). The named services are NOT_SERVING.

        Raises ServiceError with one line when the address cannot be listened on.
        """
        reflection.enable_server_reflection(
            (*self._service_names, health.SERVICE_NAME, reflection.SERVICE_NAME), self.server
        )
        await self._set_health(self._service_names, False)
        host = f"[{self._host}]" if ":" in self._host else self._host
        try:
            address = f"{host}:{self._port}"
            if self._credentials is None:
                port = self.server.add_insecure_port(address)
            else:
                port = self.server.add_secure_port(address, self._credentials)
        except RuntimeError:
            raise ServiceError(f"cannot listen on {host}:{self._port}: {self._why_not()}") from None
        await self.server.start()
        if threading.current_thread() is threading.main_thread():  # elsewhere Python takes no handlers
            loop = asyncio.get_running_loop()
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, self._request_stop, number.name)
        return port

    def set_serving(self, serving: bool) -> None:
        """Set the health of the named services: whether they should be called now."""
        self.is_serving = serving
        self._update_health(self._service_names, serving)

    def set_alive(self, alive: bool) -> None:
        """Set the health of "": False for a process that only a restart can help."""
        self._update_health([""], alive)

    def _update_health(self, names: Sequence[str], serving: bool) -> None:
        update = asyncio.get_running_loop().create_task(self._set_health(names, serving))
        self._health_updates.add(update)  # the loop itself keeps no reference
        update.add_done_callback(self._health_updates.discard)

    async def wait_for_stop(self, exit_with_parent: bool) -> str:
        """Wait for SIGTERM, SIGINT or, when asked to, the end of standard input; returns which it was.

        Signals count from `start` on, so none is lost between the ready line and this call. Later ones change nothing:
        the drain that follows has its own limit.
        """
        if exit_with_parent:
            # A thread, since an event loop cannot watch every kind of standard input (a file, /dev/null).
            loop = asyncio.get_running_loop()
            watcher = threading.Thread(target=self._stop_at_stdin_eof, args=(loop,), name="stdin-eof", daemon=True)
            watcher.start()
        await self._stopping.wait()
        return self._stop_cause

    async def stop(self, grace_s: float) -> None:
        """Take no new call, give running ones `grace_s` seconds, then cancel them.

        A client that watches health keeps its call open to the end of the grace time: drain first, then stop shortly.
        """
        self.set_serving(False)
        await self.server.stop(grace_s)

    async def _set_health(self, names: Sequence[str], serving: bool) -> None:
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in names:
            await self._health.set(name, status)

    def _request_stop(self, cause: str) -> None:
        if not self._stopping.is_set():
            self._stop_cause = cause
            self._stopping.set()

    def _stop_at_stdin_eof(self, loop: asyncio.AbstractEventLoop) -> None:
        with contextlib.suppress(OSError):  # no standard input at all is an end too
            while os.read(0, 4096):
                pass
        with contextlib.suppress(RuntimeError):  # the loop is closed: stopped for another cause
            loop.call_soon_threadsafe(self._request_stop, "stdin closed")

    def _why_not(self) -> str:
        """What the system says to the address; gRPC does not tell."""
        try:
            for family, kind, protocol, _, address in socket.getaddrinfo(
                self._host, self._port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            ):
                with socket.socket(family, kind, protocol) as probe:
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    probe.bind(address)
                    probe.listen()
        except OSError as error:
            hint = "; choose another --port, or 0 for a free one" if error.errno == errno.EADDRINUSE else ""
            return f"{error.strerror}{hint}"
        return "gRPC could not bind to it"


def forget_garbage() -> None:
    """Once, when all is loaded: what is there now is there to stay, and the collector need not walk it again."""
    gc.collect()
    gc.freeze()


def print_ready(target: str, **fields: Any) -> None:
    """Say on stdout, in one JSON line, that requests can be sent to `target`. All else goes to stderr."""
    line = json.dumps({"event": "ready", "target": target, "pid": os.getpid(), **fields})
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
