# SPDX-License-Identifier: Apache-2.0
"""Fingerprints of public keys, and generation of new keys (before 2.92).

``cryptography`` is imported at first use. Invariant: a private key is in one response only, and is
not stored.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from common.domain import errors

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey

RSA_BITS = 2048
_DAYS = 3650


@dataclass(frozen=True, slots=True)
class NewKey:
    """A generated key pair with its fingerprint."""

    public: str
    fingerprint: str
    private: str = field(repr=False)


def fingerprint(kind: str, public: str) -> str:
    """Return the fingerprint of a public key, with colons.

    Args:
        kind: "x509" for a certificate in PEM, with a SHA-1 fingerprint. Otherwise an SSH key, with
            MD5.
        public: The public key.

    Raises:
        BadRequest: The text is not a public key of this kind.
    """
    return _compute_x509_fingerprint(public) if kind == "x509" else _compute_ssh_fingerprint(public)


def generate(kind: str, name: str) -> NewKey:
    """Generate an RSA key pair, and return it with the fingerprint of the public part.

    Args:
        kind: "x509" makes the public part a self-signed certificate in PEM, otherwise an SSH key.
        name: Common name of the certificate. An SSH key does not contain the name.
    """
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import rsa

    key = rsa.generate_private_key(65537, RSA_BITS)
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.TraditionalOpenSSL,
        serialization.NoEncryption(),
    ).decode()
    if kind == "x509":
        public = _make_certificate(key, name)
    else:
        public = (
            key.public_key()
            .public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
            .decode()
            + " Generated-by-Kilonova\n"
        )
    return NewKey(public, fingerprint(kind, public), private)


def _insert_colons(digest: str) -> str:
    return ":".join(digest[index : index + 2] for index in range(0, len(digest), 2))


def _compute_ssh_fingerprint(public: str) -> str:
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives import serialization

    parts = public.split()
    try:
        if len(parts) < 2 or "\n" in public.strip():
            raise ValueError("an SSH key must be one line with type and key")
        serialization.load_ssh_public_key(" ".join(parts[:2]).encode())
        blob = base64.b64decode(parts[1], validate=True)
    except (ValueError, UnsupportedAlgorithm, binascii.Error, UnicodeError) as problem:
        raise errors.BadRequest(
            "Keypair data is invalid: failed to generate fingerprint"
        ) from problem
    return _insert_colons(hashlib.md5(blob, usedforsecurity=False).hexdigest())


def _compute_x509_fingerprint(public: str) -> str:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes

    try:
        certificate = x509.load_pem_x509_certificate(public.encode())
    except ValueError as problem:
        raise errors.BadRequest(
            "Keypair data is invalid: failed to generate X509 fingerprint"
        ) from problem
    return _insert_colons(certificate.fingerprint(hashes.SHA1()).hex())  # noqa: S303 - the API's form


def _make_certificate(key: RSAPrivateKey, name: str) -> str:
    """Return a self-signed certificate for client authentication, in PEM."""
    from datetime import UTC, datetime, timedelta

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization

    subject = x509.Name([x509.NameAttribute(x509.oid.NameOID.COMMON_NAME, name[:64])])
    now = datetime.now(UTC)
    use = x509.ExtendedKeyUsage([x509.oid.ExtendedKeyUsageOID.CLIENT_AUTH])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now)
        .not_valid_after(now + timedelta(days=_DAYS))
        .add_extension(use, critical=False)
        .sign(key, hashes.SHA256())
    )
    return certificate.public_bytes(serialization.Encoding.PEM).decode()
