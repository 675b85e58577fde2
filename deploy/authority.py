# SPDX-License-Identifier: Apache-2.0
"""A small certificate authority in a folder: certificates for the processes of a lab, and for
servers of the tests.

``Authority(folder)`` is made once and found again. ``issue`` gives a certificate for names and
addresses, the one that is there when it still fits. Must stay true: keys are readable to the owner
of their folder only.
"""

from __future__ import annotations

import datetime
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from common.tls import Tls
from deploy.configuration import write_secret

DAY = datetime.timedelta(days=1)
YEARS = 3650 * DAY
RENEW = 30 * DAY  #: before it expires
Key = ec.EllipticCurvePrivateKey


class Authority:
    """``name`` stands in what it signs."""

    def __init__(self, folder: Path, name: str = "kilonova") -> None:
        self.folder, self.path = folder, folder / "ca.pem"
        folder.mkdir(parents=True, exist_ok=True)
        if not self.path.exists():
            key, subject = ec.generate_private_key(ec.SECP256R1()), _named(name)
            made = (
                _builder(subject, subject, key, YEARS)
                .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
                .add_extension(_usage(signs_others=True), critical=True)
                .add_extension(
                    x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False
                )
            )
            write_secret(folder / "ca-key.pem", _pem(key))
            _write(self.path, made.sign(key, hashes.SHA256()))
        self._own = x509.load_pem_x509_certificate(self.path.read_bytes())

    def issue(self, name: str, *reached_at: str, valid: datetime.timedelta = YEARS) -> Tls:
        """The files of who is reached at these names and addresses; clients too show it."""
        files = Tls(
            str(self.folder / f"{name}.pem"), str(self.folder / f"{name}-key.pem"), str(self.path)
        )
        if not self._fits(Path(files.cert), reached_at):
            key = ec.generate_private_key(ec.SECP256R1())
            cert = (
                _builder(self._own.subject, _named(name), key, valid)
                .add_extension(
                    x509.SubjectAlternativeName([_reached(one) for one in reached_at]),
                    critical=False,
                )
                .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
                .add_extension(_usage(signs_others=False), critical=False)
                .add_extension(
                    x509.ExtendedKeyUsage(
                        [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
                    ),
                    critical=False,
                )
                .add_extension(
                    x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key().public_key()),
                    critical=False,
                )
            )
            write_secret(Path(files.key), _pem(key))
            _write(Path(files.cert), cert.sign(self._key(), hashes.SHA256()))
        return files

    def _key(self) -> Key:
        key = serialization.load_pem_private_key((self.folder / "ca-key.pem").read_bytes(), None)
        assert isinstance(key, Key)
        return key

    def _fits(self, path: Path, reached_at: tuple[str, ...]) -> bool:
        if not path.exists() or not path.with_name(f"{path.stem}-key.pem").exists():
            return False
        cert = x509.load_pem_x509_certificate(path.read_bytes())
        known = cert.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        return list(known) == [
            _reached(one) for one in reached_at
        ] and cert.not_valid_after_utc - RENEW > datetime.datetime.now(datetime.UTC)


def _reached(where: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(where))
    except ValueError:
        return x509.DNSName(where)


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _usage(*, signs_others: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_others,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_others,
        crl_sign=signs_others,
        encipher_only=False,
        decipher_only=False,
    )


def _builder(
    issuer: x509.Name, subject: x509.Name, key: Key, valid: datetime.timedelta
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return x509.CertificateBuilder(
        issuer, subject, key.public_key(), x509.random_serial_number(), now - 2 * DAY, now + valid
    )


def _pem(key: Key) -> str:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    ).decode()


def _write(path: Path, cert: x509.Certificate) -> None:
    part = path.with_name(path.name + ".new")
    part.write_bytes(cert.public_bytes(serialization.Encoding.PEM))
    part.replace(path)
