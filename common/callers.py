"""Who calls: the name of the API key in the metadata `authorization: Bearer KEY`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from contextvars import ContextVar
from typing import Any

import grpc
import grpc.aio
import structlog

from common.api_keys import ApiKeys
from common.errors import Unauthenticated, abort_with

_OPEN_METHODS = "/grpc.health.v1.Health/"  # probes have no key

_caller: ContextVar[str] = ContextVar("caller", default="")
log = structlog.get_logger()


def current_caller() -> str:
    """The name of the key that the call being served bears; "" where no keys are asked for."""
    return _caller.get()


class ApiKeyInterceptor(grpc.aio.ServerInterceptor):
    """Answers calls without a known key with UNAUTHENTICATED, before their message is read; health is open."""

    def __init__(self, keys: ApiKeys) -> None:
        self._keys = keys

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        if handler_call_details.method.startswith(_OPEN_METHODS):
            return await continuation(handler_call_details)
        key = _bearer(handler_call_details.invocation_metadata or ())
        name = self._keys.name_of(key) if key else None
        if name is None:
            return _refusal("unknown API key" if key else "no API key; send the metadata 'authorization: Bearer KEY'")
        _caller.set(name)  # of the task that serves the call
        structlog.contextvars.bind_contextvars(caller=name)
        return await continuation(handler_call_details)


def _refusal(message: str) -> grpc.RpcMethodHandler[Any, Any]:
    async def refuse(requests: object, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        log.info("unauthenticated", peer=context.peer(), reason=message)
        await abort_with(context, Unauthenticated(message))

    return grpc.stream_unary_rpc_method_handler(refuse)  # one that need not read what was sent


def _bearer(metadata: Iterable[tuple[str, str | bytes]]) -> str:
    """The key that was sent; "" for none."""
    for name, value in metadata:
        if name == "authorization" and isinstance(value, str):
            scheme, _, key = value.partition(" ")
            return key.strip() if scheme.lower() == "bearer" else ""
    return ""
