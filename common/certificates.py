# SPDX-License-Identifier: Apache-2.0
"""How long certificates last, and how a host that asks for the next one proves that the present
one is its own.

Pure: files are read, nothing is written. ``compute_agent.certificate`` asks, conductors answer
(``common.authority.Signer.renew``); metrics and the doctor tell what ends soon.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa

DAY_SECONDS = 24 * 3600
SOON_SECONDS = 30 * DAY_SECONDS  #: before its end somebody is told, and a host asks for the next
ALGORITHM = hashes.SHA256()
PrivateKey = ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey


@dataclass(frozen=True, slots=True)
class Certificate:
    """What a file of [tls] cert_file holds: PEM texts of the certificate and of its key."""

    cert: x509.Certificate
    key: PrivateKey

    @classmethod
    def read(cls, path: str) -> Certificate:
        """Both, of one file.

        Raises:
            OSError, ValueError: the file cannot be read, or lacks one of them.
        """
        text = Path(path).read_bytes()
        key = serialization.load_pem_private_key(text, None)
        if not isinstance(key, PrivateKey):
            raise ValueError("its key is neither EC nor RSA")
        return cls(x509.load_pem_x509_certificate(text), key)

    def proof(self, host: str, request: str) -> str:
        """That who has this certificate's key asks for the next one, with this request (PEM)."""
        said = _asked(host, request)
        if isinstance(self.key, rsa.RSAPrivateKey):
            return self.key.sign(said, padding.PKCS1v15(), ALGORITHM).hex()
        return self.key.sign(said, ec.ECDSA(ALGORITHM)).hex()


def check_proof(cert: x509.Certificate, host: str, request: str, proof: str) -> None:
    """Raises ValueError: it was not made with this certificate's key, for this request."""
    public, said = cert.public_key(), _asked(host, request)
    try:
        if isinstance(public, rsa.RSAPublicKey):
            public.verify(bytes.fromhex(proof), said, padding.PKCS1v15(), ALGORITHM)
        elif isinstance(public, ec.EllipticCurvePublicKey):
            public.verify(bytes.fromhex(proof), said, ec.ECDSA(ALGORITHM))
        else:
            raise ValueError("its key is neither EC nor RSA")
    except InvalidSignature as problem:
        raise ValueError("it was not asked with the present certificate's key") from problem


def _asked(host: str, request: str) -> bytes:
    return json.dumps(["next certificate", host, request]).encode()


def ends_at(path: str) -> int:
    """When the certificate in a file ends, in seconds since 1970.

    Raises:
        OSError, ValueError: there is none.
    """
    cert = x509.load_pem_x509_certificate(Path(path).read_bytes())
    return int(cert.not_valid_after_utc.timestamp())
