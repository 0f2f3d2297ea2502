"""The blocking client. Made by tools/generate_sync_client.py from `_async_client.py`: `make sync-client`."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Unpack

from fdfo_client._async_client import AsyncClient
from fdfo_client._blocking import Blocking
from fdfo_client._channel import Tls
from fdfo_client._options import GenerateOptions
from fdfo_client._retry import DEFAULT_RETRY, RetryPolicy
from fdfo_client._types import Completion, Event, ServerInfo


class Client(Blocking):
    """Talks to one or several schedulers. Any number of threads may use it at once. Close it when done, or use `with`.

    target: "host:port", several of them as a list or with commas, or a gRPC name such as "dns:///schedulers:50051".
        Of a list, requests go to each in turn, past those that do not answer. A name with several addresses is
        balanced by gRPC itself; `abort` then reaches only one of them, so give a list where you need it.
    retry: how long to go on when a scheduler is lost or full.

    tls: connect with TLS, see `Tls`; None is plaintext.
    api_key: the key that schedulers may ask for, or the path of a file that holds it.

    Nothing is connected before the first call. All methods raise the errors of `FdfoError`. A client that no scheduler
    has ever answered does not wait for one: its target may be wrong (`wait_ready` waits).
    """

    def __init__(
        self,
        target: str | Sequence[str] = "127.0.0.1:50051",
        *,
        retry: RetryPolicy = DEFAULT_RETRY,
        tls: Tls | None = None,
        api_key: str | Path | None = None,
    ) -> None:
        super().__init__(AsyncClient(target, retry=retry, tls=tls, api_key=api_key))

    @property
    def targets(self) -> tuple[str, ...]:
        """The schedulers, as they were named."""
        return self._client.targets

    def generate(self, prompt: str | None = None, **options: Unpack[GenerateOptions]) -> Completion:
        """The whole answer to `prompt` (plain text), `prompt_ids=` or `messages=`; exactly one of them.

        See `GenerateOptions` for the rest. A cancelled task, or an exception such as Ctrl-C, aborts the request.
        """
        return self._run(self._client.generate(prompt, **options))

    def stream(self, prompt: str | None = None, **options: Unpack[GenerateOptions]) -> Generator[Event, None, None]:
        """The same, event by event: one `Started`, a `Committed` per group of done blocks, one `Finished` a sample;
        with `provisional_every_forwards`, a `Provisional` now and then while a block is incomplete.

        When a scheduler is lost in between, another one goes on: each token comes once (`Finished.resumes`).
        Leaving the loop early aborts the request; of an async generator, when it is closed (`contextlib.aclosing`).
        """
        return self._iterate(self._client.stream(prompt, **options))

    def abort(self, request_id: str, *, timeout: float | None = 10.0) -> bool:
        """End a request, of this client or another; its stream finishes with reason "abort".

        Returns whether it was live. All targets are asked, as a request may be at any.
        """
        return self._run(self._client.abort(request_id, timeout=timeout))

    def server_info(self, *, timeout: float | None = 10.0) -> ServerInfo:
        """What the server runs and how busy it is; all targets are asked, and the first that answers is taken."""
        return self._run(self._client.server_info(timeout=timeout))

    def wait_ready(self, timeout: float = 60.0) -> ServerInfo:
        """Wait until a scheduler answers and has a ready worker. Raises ServerUnavailable after `timeout` seconds."""
        return self._run(self._client.wait_ready(timeout))
