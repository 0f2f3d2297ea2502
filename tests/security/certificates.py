"""Authorities and certificates made for a test."""

from __future__ import annotations

import datetime
import ipaddress
import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from fdfo_client import Tls


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


@dataclass
class Authority:
    """Signs certificates; everything it makes is a file in `folder`."""

    folder: Path
    name: str = "authority"
    _key: ec.EllipticCurvePrivateKey = field(default_factory=lambda: ec.generate_private_key(ec.SECP256R1()))
    _writes: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def __post_init__(self) -> None:
        certificate = self._sign(self.name, self._key, 1, x509.BasicConstraints(ca=True, path_length=None))
        self.ca_file.write_bytes(certificate)

    @property
    def ca_file(self) -> Path:
        return self.folder / f"{self.name}.crt"

    def issue(self, name: str, days: int = 1, host: str = "localhost") -> tuple[Path, Path]:
        """Certificate and key of `name`, for localhost and 127.0.0.1 or for another host, valid for so many days from
        now. A second call with the same name replaces the files."""
        key = ec.generate_private_key(ec.SECP256R1())
        address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
        names = x509.SubjectAlternativeName(
            [x509.DNSName(host), address] if host == "localhost" else [x509.DNSName(host)]
        )
        cert_file, key_file = self.folder / f"{name}.crt", self.folder / f"{name}.key"
        cert_file.write_bytes(self._sign(name, key, days, names))
        key_file.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        for file in (cert_file, key_file):  # the clock of a file system may tick slower than a test writes
            os.utime(file, ns=(0, next(self._writes)))
        return cert_file, key_file

    def tls(self, pair: tuple[Path, Path] | None = None) -> Tls:
        """A client that trusts this authority, with a certificate of its own or without."""
        return Tls(self.ca_file, *pair) if pair else Tls(self.ca_file)

    def _sign(self, name: str, key: ec.EllipticCurvePrivateKey, days: int, extension: x509.ExtensionType) -> bytes:
        now = datetime.datetime.now(datetime.UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(_name(name))
            .issuer_name(_name(self.name))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=2))
            .not_valid_after(now + datetime.timedelta(days=days))
            .add_extension(extension, critical=isinstance(extension, x509.BasicConstraints))
        )
        return builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
