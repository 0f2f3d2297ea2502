"""A gRPC proxy in this event loop that speaks WorkerService: calls get lost, late, doubled or overtaken by rules.

Bytes are passed on as they are, so it knows the names of the methods only. Every other service behind the target
(health, reflection) is passed on untouched.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio

from common.grpc_server import MAX_MESSAGE_BYTES
from tests.chaos.scenario import Rules

WORKER_SERVICE = "/fdfo.worker.v1.WorkerService/"
REORDER_WAIT_S = 0.3  # for the next call, which overtakes; there may be none
OPTIONS = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 500),
    ("grpc.use_local_subchannel_pool", 1),
]

Context = grpc.aio.ServicerContext[Any, Any]


class _AsItIs(grpc.GenericRpcHandler):
    """Every method of every service; messages stay bytes."""

    def __init__(self, proxy: GrpcProxy) -> None:
        self._proxy = proxy

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes]:
        method = handler_call_details.method

        if method.startswith(WORKER_SERVICE):

            async def call(request: bytes, context: Context) -> bytes:
                return await self._proxy.call(method, request, context)

            return grpc.unary_unary_rpc_method_handler(call)

        async def stream(requests: AsyncIterator[bytes], context: Context) -> AsyncIterator[bytes]:
            async for reply in self._proxy.pass_on(method, requests, context):
                yield reply

        return grpc.stream_stream_rpc_method_handler(stream)


class GrpcProxy:
    """In front of the worker at `to`. `rules` may be set at any time; `counts` says what was done."""

    def __init__(self, to: str, draws: random.Random) -> None:
        self.rules = Rules()
        self.counts: Counter[str] = Counter()
        self._draws = draws
        self._channel: Any = grpc.aio.insecure_channel(to, options=OPTIONS)  # its types know of messages only
        self._server = grpc.aio.server(options=OPTIONS)
        self._server.add_generic_rpc_handlers((_AsItIs(self),))
        self._arrivals = 0
        self._arrived = asyncio.Condition()

    async def start(self) -> str:
        """Listen on a free port; gives the target to use instead of `to`."""
        port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()
        return f"127.0.0.1:{port}"

    async def stop(self) -> None:
        await self._server.stop(0)
        await self._channel.close()

    async def call(self, method: str, request: bytes, context: Context) -> bytes:
        """One call of WorkerService, by the rules."""
        rules = self.rules
        self.counts["calls"] += 1
        await self._arrive()
        if self._happens("reorder", rules.reorder):
            await self._wait_for_the_next()
        if self._happens("delay", rules.delay):
            await asyncio.sleep(self._draws.uniform(0, rules.delay_ms) / 1000)
        if self._happens("drop_request", rules.drop_request):
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the proxy dropped the request")
        if self._happens("duplicate", rules.duplicate):
            twice = [asyncio.ensure_future(self._send(method, request, context)) for _ in range(2)]
            answers = await asyncio.gather(*twice, return_exceptions=True)
            answer = answers[0]
        else:
            (answer,) = await asyncio.gather(self._send(method, request, context), return_exceptions=True)
        if self._happens("drop_reply", rules.drop_reply):
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the proxy dropped the reply")
        if isinstance(answer, grpc.aio.AioRpcError):
            await _abort_as(answer, context)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    async def pass_on(self, method: str, requests: AsyncIterator[bytes], context: Context) -> AsyncIterator[bytes]:
        """Any other call, as it is."""
        call = self._channel.stream_stream(method)(requests, timeout=context.time_remaining())
        try:
            async for reply in call:
                yield reply
        except grpc.aio.AioRpcError as error:
            await _abort_as(error, context)
        finally:
            call.cancel()

    def _happens(self, what: str, probability: float) -> bool:
        happens = self._draws.random() < probability
        self.counts[what] += happens
        return happens

    async def _send(self, method: str, request: bytes, context: Context) -> bytes:
        metadata = [(key, value) for key, value in context.invocation_metadata() or () if not _is_own(key)]
        reply: bytes = await self._channel.unary_unary(method)(
            request, timeout=context.time_remaining(), metadata=metadata
        )
        return reply

    async def _arrive(self) -> None:
        async with self._arrived:
            self._arrivals += 1
            self._arrived.notify_all()

    async def _wait_for_the_next(self) -> None:
        number = self._arrivals
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(REORDER_WAIT_S), self._arrived:
                await self._arrived.wait_for(lambda: self._arrivals > number)
        await asyncio.sleep(0.005)  # so that the other is really ahead


def _is_own(key: str) -> bool:
    """Whether gRPC puts this metadata in itself."""
    return key.startswith((":", "grpc-")) or key in ("user-agent", "te", "content-type")


async def _abort_as(error: grpc.aio.AioRpcError, context: Context) -> None:
    trailing = [(key, value) for key, value in error.trailing_metadata() or () if not _is_own(key)]
    details = [
        (key, value) for key, value in error.trailing_metadata() or () if key == "grpc-status-details-bin"
    ]  # the refusal's reason travels in it
    await context.abort(error.code(), error.details() or "", tuple(trailing + details))
