"""`python -m common.health_probe`: status 0 where a service is SERVING, else 1 and one line that says why.

For probes of Kubernetes where the services speak TLS, which its own gRPC probes do not.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from common.connection import Tls
from common.errors import ServiceError
from common.settings import build_parser, setting, settings_from


@dataclass(frozen=True, kw_only=True)
class ProbeSettings:
    """What to ask whom."""

    target: str = setting("127.0.0.1:50051", help="the server", metavar="HOST:PORT")
    service: str = setting("", help="name of the service; none: whether the process answers", metavar="NAME")
    timeout_s: float = setting(5.0, help="seconds to wait for the answer", metavar="SECONDS", minimum=0.1)
    tls_ca_file: Path | None = setting(
        None, help="connect with TLS, to a certificate of this authority (PEM)", metavar="FILE"
    )
    tls_cert_file: Path | None = setting(None, help="own certificate (PEM)", metavar="FILE")
    tls_key_file: Path | None = setting(None, help="its private key (PEM)", metavar="FILE")
    tls_server_name: str | None = setting(
        None, help="name in the server's certificate (default: the target's host)", metavar="NAME"
    )


def probe(settings: ProbeSettings) -> str:
    """What the server says: SERVING, NOT_SERVING, ...

    Raises grpc.RpcError; ServiceError or ValueError for files that cannot be used.
    """
    options = [("grpc.ssl_target_name_override", settings.tls_server_name)] if settings.tls_server_name else []
    if settings.tls_ca_file is None:
        channel = grpc.insecure_channel(settings.target, options)
    else:
        tls = Tls(settings.tls_ca_file, settings.tls_cert_file, settings.tls_key_file)
        channel = grpc.secure_channel(settings.target, tls.credentials(), options)
    with channel:
        request = health_pb2.HealthCheckRequest(service=settings.service)
        check: Any = health_pb2_grpc.HealthStub(channel)
        status: int = check.Check(request, timeout=settings.timeout_s).status
    return health_pb2.HealthCheckResponse.ServingStatus.Name(status)


def main(argv: Sequence[str] | None = None) -> int:
    parser = build_parser(ProbeSettings, "python -m common.health_probe", "Ask a service for its health.")
    settings = settings_from(ProbeSettings, parser.parse_args(argv))
    try:
        status = probe(settings)
    except grpc.RpcError as error:
        status = f"{error.code().name}: {error.details()}"
    except (ServiceError, ValueError) as error:
        status = str(error)
    if status != "SERVING":
        print(f"{settings.target} {settings.service or '(process)'}: {status}", file=sys.stderr)
    return 0 if status == "SERVING" else 1


if __name__ == "__main__":
    sys.exit(main())
