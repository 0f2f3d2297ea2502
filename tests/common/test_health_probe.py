"""The probe of pods whose services speak TLS, against a real server."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from common.grpc_server import GrpcService
from common.health_probe import main
from common.security_settings import SecuritySettings
from tests.security.certificates import Authority

NAME = "fdfo.worker.v1.WorkerService"


def test_the_probe_follows_health_over_mutual_tls(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Status 0 for a process that answers and a service that is SERVING, 1 with a reason for one that is not, for a
    name that nobody knows and for a probe without a certificate."""
    ours = Authority(tmp_path)
    cert, key = ours.issue("worker", host="worker")
    security = SecuritySettings(tls_cert_file=cert, tls_key_file=key, tls_client_ca_file=ours.ca_file)

    async def run() -> list[int]:
        service = GrpcService("127.0.0.1", 0, [NAME], security=security)
        target = f"--target=127.0.0.1:{await service.start()}"
        words = [target, f"--tls-ca-file={ours.ca_file}", "--tls-server-name=worker"]
        own = [f"--tls-cert-file={cert}", f"--tls-key-file={key}"]

        async def probe(*more: str) -> int:
            return await asyncio.to_thread(main, [*words, "--timeout-s=5", *more])

        statuses = [await probe(*own), await probe(*own, f"--service={NAME}")]
        service.set_serving(True)
        statuses += [await probe(*own, f"--service={NAME}"), await probe(*own, "--service=other"), await probe()]
        await service.stop(0)
        return statuses

    assert asyncio.run(run()) == [0, 1, 0, 1, 1]
    reasons = capsys.readouterr().err.splitlines()
    for word, line in zip(("NOT_SERVING", "NOT_FOUND", "UNAVAILABLE"), reasons, strict=True):
        assert word in line


def test_a_file_that_is_missing_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A probe that is set up wrong says so, instead of looking like a service that is down."""
    assert main(["--target=127.0.0.1:1", f"--tls-ca-file={tmp_path / 'none.crt'}"]) == 1
    assert "none.crt" in capsys.readouterr().err
