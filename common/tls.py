"""TLS from PEM files that may be replaced while a service runs.

Files are checked as they are read: gRPC takes any bytes, and then fails at each handshake and in its own log only.
"""

from __future__ import annotations

import ssl
from pathlib import Path

import grpc

from common.errors import ServiceError
from common.reloaded import Reloaded
from common.security_settings import SecuritySettings


def server_credentials(settings: SecuritySettings) -> grpc.ServerCredentials | None:
    """What the --tls flags ask for; None = plaintext. Raises ServiceError, one line that names the flag or the file.

    gRPC asks before each handshake for the files of now; connections that stand go on. Files that cannot be used are
    logged, and what was there before stays.
    """
    cert_file, key_file, client_ca_file = settings.tls_cert_file, settings.tls_key_file, settings.tls_client_ca_file
    if cert_file is None and key_file is None and client_ca_file is None:
        return None
    if cert_file is None or key_file is None:
        missing = "--tls-cert-file" if cert_file is None else "--tls-key-file"
        raise ServiceError(f"{missing} is missing; TLS needs the certificate and its key")

    def read() -> grpc.ServerCertificateConfiguration:
        certificate, key = read_pair(cert_file, key_file)
        authorities = None if client_ca_file is None else read_authorities(client_ca_file)
        return grpc.ssl_server_certificate_configuration([(key, certificate)], authorities)

    files = Reloaded((cert_file, key_file, client_ca_file), read)
    return grpc.dynamic_ssl_server_credentials(
        files.value,
        files.if_changed,  # type: ignore[arg-type]  # None means no change; called in threads of gRPC's
        require_client_authentication=client_ca_file is not None,
    )


def read_pair(cert_file: Path | str, key_file: Path | str) -> tuple[bytes, bytes]:
    """A certificate (with its intermediates) and its private key. Raises ServiceError, one line naming the file."""
    certificate, key = _read(cert_file), _read(key_file)
    try:
        # A password, so that an encrypted key is refused instead of asked about on the terminal.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert_file, key_file, password="")
    except (OSError, ValueError) as error:  # an SSLError is an OSError
        raise ServiceError(
            f"{cert_file}, {key_file}: must be a certificate and its unencrypted key in PEM, and belong together: "
            f"{_one_line(error)}"
        ) from None
    return certificate, key


def read_authorities(ca_file: Path | str) -> bytes:
    """Certificates of authorities. Raises ServiceError, one line naming the file."""
    content = _read(ca_file)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(ca_file)
    except (OSError, ValueError) as error:
        raise ServiceError(f"{ca_file}: must have certificates of authorities in PEM: {_one_line(error)}") from None
    return content


def _read(path: Path | str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ServiceError(f"{path}: {error.strerror}") from None


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
