"""TLS and mutual TLS between client, scheduler and worker, with real connections."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

import grpc
import pytest

from common.connection import Connection
from common.errors import ServiceError
from common.grpc_server import GrpcService
from common.security_settings import SecuritySettings
from fdfo.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc
from fdfo_client import AsyncClient, ServerUnavailable, Tls
from fdfo_client._channel import CHANNEL_OPTIONS
from fdfo_client.testing import FakeScheduler, stall
from scheduler_svc.server import SERVICE_NAME
from tests.security.certificates import Authority
from tests.security.services import scheduler_and_worker


def security(authority: Authority, pair: tuple[Path, Path], mutual: bool = False) -> SecuritySettings:
    return SecuritySettings(
        tls_cert_file=pair[0], tls_key_file=pair[1], tls_client_ca_file=authority.ca_file if mutual else None
    )


def with_server(
    settings: SecuritySettings, use: Callable[[str], Awaitable[None]], fake: FakeScheduler | None = None
) -> None:
    """A scheduler that only answers, behind the real server frame."""

    async def run() -> None:
        service = GrpcService("127.0.0.1", 0, [SERVICE_NAME], security=settings)
        scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(fake or FakeScheduler(), service.server)
        port = await service.start()
        try:
            await use(f"127.0.0.1:{port}")
        finally:
            await service.stop(0)

    asyncio.run(run())


async def ask(target: str, tls: Tls | None) -> str:
    """ "ok", or what the client was told."""
    async with AsyncClient(target, tls=tls) as client:
        try:
            await client.server_info(timeout=10)
        except ServerUnavailable as error:
            return str(error)
    return "ok"


def test_who_may_connect_with_tls(tmp_path: Path) -> None:
    """A client that trusts the server's authority gets through; each other one is told what is wrong and what to do."""
    ours, theirs = Authority(tmp_path), Authority(tmp_path, "stranger")

    async def use(target: str) -> None:
        assert await ask(target, ours.tls()) == "ok"
        assert "if it has TLS, give the file of its CA" in await ask(target, None)
        assert "not signed by the given CA" in await ask(target, theirs.tls())
        assert "not signed by the given CA" in await ask(target, Tls())
        assert "for another name" in await ask(target, Tls(ours.ca_file, server_name="other.example"))

    with_server(security(ours, ours.issue("server")), use)


def test_a_name_can_be_expected_that_is_not_the_targets_host(tmp_path: Path) -> None:
    """Servers reached by address are known by the name in their certificate."""
    ours = Authority(tmp_path)

    async def use(target: str) -> None:
        assert "for another name" in await ask(target, ours.tls())
        assert await ask(target, Tls(ours.ca_file, server_name="workers.example")) == "ok"

    with_server(security(ours, ours.issue("server", host="workers.example")), use)


def test_tls_to_a_server_without(tmp_path: Path) -> None:
    """The client is told to leave TLS out."""
    ours = Authority(tmp_path)

    async def use(target: str) -> None:
        assert "the server has no TLS; leave the TLS options out" in await ask(target, ours.tls())

    with_server(SecuritySettings(), use)


def test_who_may_connect_with_mutual_tls(tmp_path: Path) -> None:
    """Only a valid certificate of the named authority gets through."""
    ours, theirs = Authority(tmp_path), Authority(tmp_path, "stranger")
    good, stranger, expired = ours.issue("client"), theirs.issue("client2"), ours.issue("expired", days=-1)

    async def use(target: str) -> None:
        assert await ask(target, ours.tls(good)) == "ok"
        for tls in (ours.tls(), ours.tls(stranger), ours.tls(expired)):
            assert "if it asks for client certificates, give one of its CA" in await ask(target, tls)

    with_server(security(ours, ours.issue("server"), mutual=True), use)


def test_an_expired_certificate_is_replaced_without_a_restart(tmp_path: Path) -> None:
    """New connections get the certificate that is in the files now; half a replacement changes nothing."""
    ours = Authority(tmp_path)
    pair = ours.issue("server", days=-1)

    async def use(target: str) -> None:
        assert "certificate has expired" in await ask(target, ours.tls())
        ours.issue("server")
        assert await ask(target, ours.tls()) == "ok"
        pair[1].write_bytes(ours.issue("other")[1].read_bytes())  # the certificate's key is another one now
        assert await ask(target, ours.tls()) == "ok"
        ours.issue("server", days=-1)
        assert "certificate has expired" in await ask(target, ours.tls())

    with_server(security(ours, pair), use)


def test_a_replaced_authority_of_clients_counts_for_new_connections(tmp_path: Path) -> None:
    """Who was let in is refused, and the other way round, once the file has another authority."""
    ours, theirs = Authority(tmp_path), Authority(tmp_path, "stranger")
    mine, other = ours.issue("client"), theirs.issue("client2")
    settings = security(ours, ours.issue("server"), mutual=True)

    async def use(target: str) -> None:
        assert await ask(target, ours.tls(mine)) == "ok"
        ours.ca_file.rename(tmp_path / "kept.crt")
        ours.ca_file.write_bytes(theirs.ca_file.read_bytes())
        trusting = Tls(tmp_path / "kept.crt", *mine)
        assert "client certificates" in await ask(target, trusting)
        assert await ask(target, Tls(tmp_path / "kept.crt", *other)) == "ok"

    with_server(settings, use)


def test_a_client_shows_its_new_certificate_and_running_streams_stay(tmp_path: Path) -> None:
    """A client's replaced certificate is used by its next call; a stream of before is not disturbed."""
    ours = Authority(tmp_path)
    mine = ours.issue("client")
    tls = ours.tls(mine)

    async def use(target: str) -> None:
        connection = Connection(target, scheduler_pb2_grpc.SchedulerServiceStub, CHANNEL_OPTIONS, tls=tls)
        call = connection.stub.Generate(scheduler_pb2.GenerateRequest(request_id="r"))
        assert (await call.read()).HasField("started")
        ours.issue("client", days=-1)
        with pytest.raises(grpc.aio.AioRpcError, match="Socket closed"):
            await connection.stub.GetServerInfo(scheduler_pb2.GetServerInfoRequest(), timeout=10)
        ours.issue("client")
        abort = scheduler_pb2.AbortRequest(request_ids=["r"])
        assert (await connection.stub.Abort(abort, timeout=10)).aborted == 1
        assert (await call.read()).HasField("committed")
        assert (await call.read()).HasField("finished")
        assert await call.read() is grpc.aio.EOF
        await connection.close()

    with_server(security(ours, ours.issue("server"), mutual=True), use, FakeScheduler(faults=[stall(after_blocks=1)]))


def test_files_of_a_client_that_became_unusable_are_logged_and_the_ones_before_stay(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A client in the middle of a replacement goes on with what it had."""
    ours = Authority(tmp_path)
    mine = ours.issue("client")

    async def use(target: str) -> None:
        async with AsyncClient(target, tls=ours.tls(mine)) as client:
            await client.server_info()
            mine[1].write_text("half a k")
            with caplog.at_level(logging.ERROR):
                await client.server_info()
            assert "belong together" in caplog.text
            assert "half a k" not in caplog.text

    with_server(security(ours, ours.issue("server"), mutual=True), use)


def test_scheduler_and_worker_speak_mutual_tls(tmp_path: Path) -> None:
    """A request runs when all three ways are TLS with certificates on both sides."""
    ours = Authority(tmp_path)
    server, client = ours.issue("server"), ours.issue("client")

    async def run() -> None:
        async with (
            scheduler_and_worker(
                security(ours, server, mutual=True),
                tls_cert_file=server[0],
                tls_key_file=server[1],
                tls_client_ca_file=ours.ca_file,
                worker_tls_ca_file=ours.ca_file,
                worker_tls_cert_file=client[0],
                worker_tls_key_file=client[1],
            ) as running,
            AsyncClient(running.target, tls=ours.tls(client)) as user,
        ):
            answer = await user.generate(prompt_ids=[5], max_new_tokens=40, timeout=20)
            assert len(answer.token_ids) == 40

    asyncio.run(run())


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({}, "if it has TLS, give the file of its CA"),
        ({"worker_tls_ca_file": "stranger"}, "not signed by the given CA"),
        ({"worker_tls_ca_file": "authority"}, "give one of its CA"),
    ],
)
def test_a_worker_that_refuses_the_scheduler_is_told(tmp_path: Path, flags: dict[str, str], words: str) -> None:
    """GetServerInfo says of the worker what is wrong with the connection."""
    ours, _ = Authority(tmp_path), Authority(tmp_path, "stranger")
    files = {name: tmp_path / f"{value}.crt" for name, value in flags.items()}

    async def run() -> None:
        async with (
            scheduler_and_worker(security(ours, ours.issue("server"), mutual=True), **files) as running,
            AsyncClient(running.target) as client,
            asyncio.timeout(10),
        ):
            while words not in (await client.server_info()).workers[0].last_error:
                await asyncio.sleep(0.01)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tls_key_file": None}, "--tls-key-file is missing"),
        ({"tls_cert_file": None}, "--tls-cert-file is missing"),
        ({"tls_cert_file": None, "tls_key_file": None}, "--tls-cert-file is missing"),
        ({"tls_cert_file": "absent.crt"}, "absent.crt: No such file"),
        ({"tls_key_file": "other.key"}, "belong together"),
        ({"tls_cert_file": "junk"}, "must be a certificate and its unencrypted key in PEM"),
        ({"tls_client_ca_file": "junk"}, "junk: must have certificates of authorities"),
    ],
)
def test_files_that_cannot_be_used_end_the_start(tmp_path: Path, change: dict[str, str | None], words: str) -> None:
    """One line names the flag or the file, before the address is listened on."""
    ours = Authority(tmp_path)
    cert_file, key_file = ours.issue("server")
    ours.issue("other")
    (tmp_path / "junk").write_text("junk")
    files = {"tls_cert_file": cert_file, "tls_key_file": key_file, "tls_client_ca_file": ours.ca_file}
    files |= {name: tmp_path / value if value else None for name, value in change.items()}  # type: ignore[misc]

    async def run() -> None:
        GrpcService("127.0.0.1", 0, [SERVICE_NAME], security=SecuritySettings(**files))

    with pytest.raises(ServiceError) as caught:
        asyncio.run(run())
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_a_client_cannot_use_is_refused_when_it_is_made(tmp_path: Path) -> None:
    """Half a pair, an absent file and junk are ValueErrors that say so."""
    (tmp_path / "junk").write_text("junk")
    with pytest.raises(ValueError, match="both"):
        Tls(cert_file="a.crt")
    with pytest.raises(ValueError, match=r"absent\.crt: No such file"):
        AsyncClient(tls=Tls(tmp_path / "absent.crt"))
    with pytest.raises(ValueError, match="junk: must have certificates"):
        AsyncClient(tls=Tls(tmp_path / "junk"))
    with pytest.raises(ValueError, match="visible ASCII"):
        AsyncClient(api_key="two words")
