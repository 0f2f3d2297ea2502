"""Bytes that are not the message of their method are refused with INVALID_ARGUMENT; gRPC would say UNKNOWN."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from functools import lru_cache
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from common.errors import InvalidField, abort_with


class RefuseUndecodable(grpc.aio.ServerInterceptor):
    """For all methods that take one message. What a method needs for it is made once, not for each call."""

    def __init__(self) -> None:
        self._checked = lru_cache(maxsize=64)(_checked)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        return handler if handler is None else self._checked(handler)


def _checked(handler: Any) -> Any:
    """The handler of a method, which refuses what is no message of it."""
    if handler.request_streaming or handler.request_deserializer is None:
        return handler
    name = "unary_stream" if handler.response_streaming else "unary_unary"
    serve = getattr(handler, name)
    if not inspect.iscoroutinefunction(serve):  # a generator of replies; none of ours is one
        return handler

    def decode(wire: bytes) -> Any:
        try:
            return handler.request_deserializer(wire)
        except DecodeError as error:
            return error

    async def checked(message: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        if isinstance(message, DecodeError):
            await abort_with(context, InvalidField("request", f"cannot be decoded: {message}"))
        return await serve(message, context)

    return handler._replace(request_deserializer=decode, **{name: checked})
