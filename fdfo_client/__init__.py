"""Client library for FDFO's scheduler: `Client` (blocking) and `AsyncClient` (asyncio), the same methods on both.

from fdfo_client import Client

with Client("127.0.0.1:50051") as client:
    print(client.generate(messages=[{"role": "user", "content": "Count from 3 to 7."}]).text)
"""

from __future__ import annotations

from fdfo_client._async_client import AsyncClient
from fdfo_client._channel import Tls
from fdfo_client._errors import (
    DeadlineExceeded,
    FdfoError,
    InvalidRequest,
    Overloaded,
    RequestExists,
    RequestFailed,
    ServerUnavailable,
    Unauthenticated,
    UnexpectedServer,
)
from fdfo_client._options import GenerateOptions, Message
from fdfo_client._retry import RetryPolicy
from fdfo_client._sync_client import Client
from fdfo_client._timeout import Timeout
from fdfo_client._types import (
    Committed,
    Completion,
    Event,
    Finished,
    FinishReason,
    Piece,
    Provisional,
    ServerCounters,
    ServerInfo,
    Started,
    Usage,
    WorkerInfo,
)

__all__ = [
    "AsyncClient",
    "Client",
    "Committed",
    "Completion",
    "DeadlineExceeded",
    "Event",
    "FdfoError",
    "FinishReason",
    "Finished",
    "GenerateOptions",
    "InvalidRequest",
    "Message",
    "Overloaded",
    "Piece",
    "Provisional",
    "RequestExists",
    "RequestFailed",
    "RetryPolicy",
    "ServerCounters",
    "ServerInfo",
    "ServerUnavailable",
    "Started",
    "Timeout",
    "Tls",
    "Unauthenticated",
    "UnexpectedServer",
    "Usage",
    "WorkerInfo",
]
