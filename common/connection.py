"""A client's way to one server: a channel with or without TLS, made anew when the TLS files change."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from common.api_keys import read_api_key
from common.reloaded import Reloaded
from common.tls import read_authorities, read_pair

_used_in: int | None = None  # the first process, of this one and those that it was forked from, which used gRPC


def check_not_forked() -> None:
    """Raises RuntimeError in a process that was forked from one which had used gRPC: the threads of gRPC and of event
    loops are not there, and calls would wait for them for ever."""
    global _used_in
    _used_in = _used_in or os.getpid()
    if _used_in != os.getpid():
        raise RuntimeError(
            f"fork: gRPC was in use in process {_used_in} when this one was forked from it, and would hang here; start "
            'processes by "spawn" or "forkserver", or use the first client after the fork'
        )


@dataclass(frozen=True)
class Tls:
    """How to connect with TLS; all files are PEM, and are read again when they change.

    ca_file: the authorities that may have signed the server's certificate; None = the public ones that gRPC ships.
    cert_file, key_file: the client's own certificate and key, for servers that ask for one.
    server_name: the name in the server's certificate, where it is not the host of the target.
    """

    ca_file: Path | str | None = None
    cert_file: Path | str | None = None
    key_file: Path | str | None = None
    server_name: str | None = None

    def __post_init__(self) -> None:
        if (self.cert_file is None) != (self.key_file is None):
            raise ValueError("a client certificate needs cert_file and key_file, both")

    def credentials(self) -> grpc.ChannelCredentials:
        """From the files as they are now. Raises ServiceError, one line naming the file."""
        authorities = None if self.ca_file is None else read_authorities(self.ca_file)
        if self.cert_file is None or self.key_file is None:
            return grpc.ssl_channel_credentials(authorities)
        certificate, key = read_pair(self.cert_file, self.key_file)
        return grpc.ssl_channel_credentials(authorities, key, certificate)


class Connection:
    """A channel to one target and a stub over it. Nothing is connected before it is used, in one event loop.

    tls: None = plaintext. api_key: a key that each call of the stub bears, or the file that holds it.

    When a file has changed, the next look at `channel` or `stub` gives new ones. Calls that run stay on theirs, whose
    connection ends with the last of them. Both raise ServiceError when the files cannot be used at first.
    """

    def __init__(
        self,
        target: str,
        make_stub: Callable[[grpc.aio.Channel], Any],
        options: Sequence[tuple[str, str | int]],
        *,
        tls: Tls | None = None,
        api_key: str | Path | None = None,
    ) -> None:
        self.target = target
        self._make_stub = make_stub
        self._options = list(options)
        self._tls = tls
        self._api_key = api_key
        self._current: Reloaded[tuple[grpc.aio.Channel, Any]] | None = None
        if tls is not None and tls.server_name is not None:
            self._options.append(("grpc.ssl_target_name_override", tls.server_name))

    @property
    def channel(self) -> grpc.aio.Channel:
        """As of now."""
        return self._now()[0]

    @property
    def stub(self) -> Any:
        """As of now."""
        return self._now()[1]

    async def close(self) -> None:
        """End the connection and all calls on it."""
        if self._current is not None:
            await self.channel.close()

    def explain(self, details: str) -> str:
        """gRPC's words for a failed call; before them, where TLS is the cause, what they mean and what to do."""
        if "last error" in details:  # of attempts to connect; a call that was cut off has no such words
            for words, had_tls, meaning in _MEANINGS:
                if words in details and had_tls == (self._tls is not None):
                    return f"{meaning} ({details})"
        return details

    def _now(self) -> tuple[grpc.aio.Channel, Any]:
        check_not_forked()
        if self._current is None:
            tls_files = () if self._tls is None else (self._tls.ca_file, self._tls.cert_file, self._tls.key_file)
            key_file = self._api_key if isinstance(self._api_key, Path) else None
            self._current = Reloaded((*tls_files, key_file), self._open)
        return self._current.value

    def _open(self) -> tuple[grpc.aio.Channel, Any]:
        key = read_api_key(self._api_key) if isinstance(self._api_key, Path) else self._api_key
        if self._tls is None:
            channel = grpc.aio.insecure_channel(self.target, options=self._options)
        else:
            channel = grpc.aio.secure_channel(self.target, self._tls.credentials(), options=self._options)
        stub = self._make_stub(channel)
        return channel, stub if key is None else _BearingStub(stub, key)


class _BearingStub:
    """A stub whose every call bears an API key."""

    def __init__(self, stub: Any, api_key: str) -> None:
        self._stub = stub
        self._metadata = (("authorization", f"Bearer {api_key}"),)

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._stub, name)

        def call(*args: Any, metadata: Sequence[tuple[str, str]] = (), **options: Any) -> Any:
            return method(*args, metadata=(*self._metadata, *metadata), **options)

        return call


# gRPC's words, whether TLS was tried, what it means.
_MEANINGS = (
    ("Socket closed", False, "the server ends plain connections; if it has TLS, give the file of its CA"),
    ("WRONG_VERSION_NUMBER", True, "the server has no TLS; leave the TLS options out"),
    ("certificate has expired", True, "the server's certificate has expired"),
    ("CERTIFICATE_VERIFY_FAILED", True, "the server's certificate is not signed by the given CA"),
    ("Hostname Verification", True, "the server's certificate is for another name; give it as the TLS server name"),
    ("Socket closed", True, "the server ends the connection; if it asks for client certificates, give one of its CA"),
)
