"""Flags of both services that say who may connect and call."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from common.settings import setting


@dataclass(frozen=True, kw_only=True)
class SecuritySettings:
    """None of them: plaintext, and anyone may call. All files are read again when they change."""

    tls_cert_file: Path | None = setting(
        None, help="PEM file with the server's certificate and its intermediates; turns TLS on", metavar="FILE"
    )
    tls_key_file: Path | None = setting(None, help="PEM file with the private key of --tls-cert-file", metavar="FILE")
    tls_client_ca_file: Path | None = setting(
        None,
        help="PEM file with authorities; who connects must show a certificate that one of them signed",
        metavar="FILE",
    )
    api_keys_file: Path | None = setting(
        None, help="file with a line name:key for each key; calls must bear one of them", metavar="FILE"
    )
