"""API keys: who may call, and that one client's requests are its own."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2_grpc

from common.api_keys import ApiKeys, read_api_key
from common.errors import ServiceError
from common.security_settings import SecuritySettings
from fdfo.scheduler.v1 import scheduler_pb2 as api
from fdfo.scheduler.v1 import scheduler_pb2_grpc
from fdfo_client import AsyncClient, Committed, Finished, RequestExists, Started, Unauthenticated
from tests.security.services import Running, scheduler_and_worker

ANNA, BERT, CARL = "anna-0123456789abcdef", "bert-0123456789abcdef", "carl-0123456789abcdef"
LONG: dict[str, Any] = {"prompt_ids": [30], "max_new_tokens": 900, "ignore_eos": True, "timeout": 30}


def keys_file(folder: Path, *lines: str) -> Path:
    path = folder / "keys"
    path.write_text("\n".join(lines))
    return path


@asynccontextmanager
async def two_clients(tmp_path: Path) -> AsyncIterator[tuple[Running, AsyncClient, AsyncClient]]:
    """A scheduler that knows Anna and Bert, and both as clients."""
    path = keys_file(tmp_path, "# who may call", "", f"anna:{ANNA}", f"bert:{BERT}")
    async with (
        scheduler_and_worker(api_keys_file=path) as running,
        AsyncClient(running.target, api_key=ANNA) as anna,
        AsyncClient(running.target, api_key=BERT) as bert,
    ):
        yield running, anna, bert


def test_calls_need_a_known_key(tmp_path: Path) -> None:
    """Each method refuses no key, an unknown key and another scheme, before it reads what was sent."""

    async def run() -> None:
        async with two_clients(tmp_path) as (running, anna, _):
            assert (await anna.generate(prompt_ids=[5], max_new_tokens=3)).token_ids
            for api_key in (None, CARL, ANNA[:-1], ANNA + "x"):
                async with AsyncClient(running.target, api_key=api_key) as client:
                    with pytest.raises(Unauthenticated, match="--api-key-file or FDFO_API_KEY"):
                        await client.generate(prompt_ids=[5], max_new_tokens=3)
                    with pytest.raises(Unauthenticated, match="unknown API key" if api_key else "no API key"):
                        await client.server_info()
                    with pytest.raises(Unauthenticated):
                        await client.abort("r")
            async with grpc.aio.insecure_channel(running.target) as channel:
                stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
                for value in (ANNA, f"Basic {ANNA}", "Bearer", ""):
                    with pytest.raises(grpc.aio.AioRpcError, match="no API key"):
                        await stub.GetServerInfo(api.GetServerInfoRequest(), metadata=(("authorization", value),))
                assert await stub.GetServerInfo(
                    api.GetServerInfoRequest(), metadata=(("authorization", f"bearer {ANNA}"),)
                )
            assert not running.scheduler.live

    asyncio.run(run())


def test_health_needs_no_key_and_reflection_does(tmp_path: Path) -> None:
    """Probes go on; what the server offers is told to known callers only."""

    async def run() -> None:
        async with two_clients(tmp_path) as (running, _, _), grpc.aio.insecure_channel(running.target) as channel:
            health: Any = health_pb2_grpc.HealthStub(channel)
            assert (
                await health.Check(health_pb2.HealthCheckRequest())
            ).status == health_pb2.HealthCheckResponse.SERVING
            make_stub: Any = reflection_pb2_grpc.ServerReflectionStub
            call = make_stub(channel).ServerReflectionInfo()
            await call.done_writing()
            with pytest.raises(grpc.aio.AioRpcError, match="no API key"):
                await call.read()

    asyncio.run(run())


def test_two_clients_may_use_one_request_id(tmp_path: Path) -> None:
    """Both run side by side and get their own id back; the same client cannot use it twice."""

    async def run() -> None:
        async with two_clients(tmp_path) as (running, anna, bert):
            of_anna = anna.stream(request_id="r", **LONG)
            of_bert = bert.stream(request_id="r", **LONG)
            for stream in (of_anna, of_bert):
                started = await anext(stream)
                assert isinstance(started, Started) and started.request_id == "r"
                assert isinstance(await anext(stream), Committed)
            with pytest.raises(RequestExists, match="request id 'r' is live"):
                await anna.generate(request_id="r", **LONG)
            assert len(running.scheduler.live) == 2
            rows = [key.request_id for session in running.loop.sessions.values() for key in list(session.rows)]
            assert sorted(rows) == ["anna/r", "bert/r"]
            await of_anna.aclose()
            await of_bert.aclose()

    asyncio.run(run())


def test_a_client_aborts_only_its_own(tmp_path: Path) -> None:
    """Another client's abort of the same id finds nothing, whatever it writes before the id; the owner's ends it."""

    async def run() -> None:
        async with two_clients(tmp_path) as (running, anna, bert):
            stream = anna.stream(request_id="r", **LONG)
            assert isinstance(await anext(stream), Started)
            for request_id in ("r", "anna/r", "/r"):
                assert await bert.abort(request_id) is False
            assert isinstance(await anext(stream), Committed)
            assert await anna.abort("r") is True
            end = [event async for event in stream][-1]
            assert isinstance(end, Finished) and end.reason == "abort"
            assert running.scheduler.counters.requests_aborted == 1

    asyncio.run(run())


def test_without_keys_all_are_one_client() -> None:
    """As everywhere where no keys are asked for: an id is live once, and anyone aborts it."""

    async def run() -> None:
        async with (
            scheduler_and_worker() as running,
            AsyncClient(running.target) as one,
            AsyncClient(running.target) as two,
        ):
            stream = one.stream(request_id="r", **LONG)
            assert isinstance(await anext(stream), Started)
            with pytest.raises(RequestExists):
                await two.generate(request_id="r", **LONG)
            assert await two.abort("r") is True
            await stream.aclose()

    asyncio.run(run())


def test_the_worker_asks_the_scheduler_for_a_key(tmp_path: Path) -> None:
    """A scheduler without the key is told so, and serves as soon as its file has it: no restart."""
    security = SecuritySettings(api_keys_file=keys_file(tmp_path, f"scheduler:{ANNA}"))
    own = tmp_path / "own"
    own.write_text(BERT)

    async def run() -> None:
        async with (
            scheduler_and_worker(security, worker_api_key_file=own) as running,
            AsyncClient(running.target) as client,
            asyncio.timeout(10),
        ):
            while "unknown API key" not in (await client.server_info()).workers[0].last_error:
                await asyncio.sleep(0.01)
            own.write_text(ANNA + "\n")
            assert (await client.generate(prompt_ids=[5], max_new_tokens=3)).token_ids

    asyncio.run(run())


def test_a_changed_file_counts_at_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """New keys are known and old ones are not, without a restart; an unusable file changes nothing and is logged."""
    path = keys_file(tmp_path, f"anna:{ANNA}")
    keys = ApiKeys(path)
    assert (keys.name_of(ANNA), keys.name_of(BERT)) == ("anna", None)
    path.write_text(f"anna:{CARL}\nbert:{BERT}\nanna:{ANNA}")
    assert (keys.name_of(ANNA), keys.name_of(BERT), keys.name_of(CARL)) == ("anna", "bert", "anna")
    path.write_text(f"bert:{BERT}")
    assert (keys.name_of(ANNA), keys.name_of(BERT)) == (None, "bert")
    with caplog.at_level(logging.ERROR):
        path.write_text(f"bert{BERT}")
        assert keys.name_of(BERT) == "bert"
        path.unlink()
        assert keys.name_of(BERT) == "bert"
    assert "a line is not name:key" in caplog.text and "No such file" in caplog.text
    assert BERT not in caplog.text


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("", "there is no key in it"),
        ("# a comment", "there is no key in it"),
        ("secret-without-a-name", "a line is not name:key"),
        ("a/b:0123456789abcdef", "a line is not name:key"),
        (":0123456789abcdef", "a line is not name:key"),
        ("anna:short-secret", "the key of anna must have 16 to 1024"),
        ("anna:secret with spaces in it", "the key of anna must have"),
        (f"anna:{ANNA}\nbert:{ANNA}", "bert and anna have the same key"),
    ],
)
def test_a_file_of_keys_that_cannot_be_used(tmp_path: Path, line: str, words: str) -> None:
    """One line names the file and what is wrong, and shows no key."""
    with pytest.raises(ServiceError) as caught:
        ApiKeys(keys_file(tmp_path, line))
    assert words in str(caught.value)
    assert str(tmp_path) in str(caught.value)
    assert "secret" not in str(caught.value) and ANNA not in str(caught.value)


def test_a_callers_own_file(tmp_path: Path) -> None:
    """It holds one key; a missing file and one with more are refused."""
    assert read_api_key(keys_file(tmp_path, "# mine", ANNA)) == ANNA
    for lines in ((), (ANNA, BERT), (f"anna {ANNA}",)):
        with pytest.raises(ServiceError, match="must hold one API key"):
            read_api_key(keys_file(tmp_path, *lines))
    with pytest.raises(ValueError, match="No such file"):
        AsyncClient(api_key=tmp_path / "absent")
