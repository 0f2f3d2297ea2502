"""Flags and environment of the commands that talk to a scheduler: TLS and the API key."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import NamedTuple

from fdfo_client._channel import Tls, check_access
from fdfo_client._errors import InvalidRequest

ACCESS_ARGUMENTS = ("tls", "tls_ca_file", "tls_cert_file", "tls_key_file", "tls_server_name", "api_key_file")


class Access(NamedTuple):
    """How to reach a scheduler; see `AsyncClient`."""

    tls: Tls | None = None
    api_key: str | Path | None = None


OPEN = Access()


def add_access_arguments(parser: argparse.ArgumentParser) -> None:
    """No flag takes the key itself: other users see the command line of a process."""
    group = parser.add_argument_group(
        "who may connect", "Each file may also be named in the environment: FDFO_TLS_CA_FILE and so on."
    )
    group.add_argument("--tls", action="store_true", help="connect with TLS, to a certificate of a public authority")
    group.add_argument(
        "--tls-ca-file", metavar="FILE", help="connect with TLS, to a certificate of this authority (PEM)"
    )
    group.add_argument("--tls-cert-file", metavar="FILE", help="own certificate, for servers that ask for one (PEM)")
    group.add_argument("--tls-key-file", metavar="FILE", help="its private key (PEM)")
    group.add_argument("--tls-server-name", metavar="NAME", help="name in the server's certificate (the target's host)")
    group.add_argument("--api-key-file", metavar="FILE", help="file with the API key (the key itself: FDFO_API_KEY)")


def access_from(arguments: argparse.Namespace) -> Access:
    """What flags and environment say; flags go first. Raises InvalidRequest for what cannot be used."""

    def given(name: str) -> str | None:
        value: str | None = getattr(arguments, name)
        return value or os.environ.get(f"FDFO_{name.upper()}") or None

    values = {name.removeprefix("tls_"): given(name) for name in ACCESS_ARGUMENTS if name.startswith("tls_")}
    key_file = given("api_key_file")
    api_key = Path(key_file) if key_file else os.environ.get("FDFO_API_KEY") or None
    try:
        tls = Tls(**values) if arguments.tls or any(values.values()) else None
        check_access(tls, api_key)
    except ValueError as error:
        raise InvalidRequest(str(error)) from None
    return Access(tls, api_key)
