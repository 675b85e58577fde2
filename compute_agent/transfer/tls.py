# SPDX-License-Identifier: Apache-2.0
"""Both sides of a transfer proved by certificates: the PEM files of [migration], and the contexts made of them.

Used by ``service`` and ``client``. Contexts are made for each connection, so that new certificates count at once.
Must stay true: who was given files speaks TLS or not at all; the other side's chain ends at our authority, and the name
or address that was dialled stands in its certificate.
"""
from __future__ import annotations

import ssl
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tls:
    """Paths of PEM files: this host's certificate, its key, and the authority of all hosts."""

    cert: str
    key: str
    ca: str

    def for_server(self) -> ssl.SSLContext:
        """Raises OSError (ssl.SSLError is one) or ValueError when the files cannot be used."""
        return self._filled(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))

    def for_client(self) -> ssl.SSLContext:
        """Raises as ``for_server`` does."""
        return self._filled(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))    # which verifies names

    def _filled(self, context: ssl.SSLContext) -> ssl.SSLContext:
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.load_verify_locations(self.ca)
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_cert_chain(self.cert, self.key, password=_no_password)
        return context


def opened(cert: str, key: str, ca: str) -> Tls | None:
    """None when no file is named. ValueError, with what to do, unless all three are and can be used."""
    if not (cert or key or ca):
        return None
    if not (cert and key and ca):
        raise ValueError("[migration] transfer_cert, transfer_key and transfer_ca belong together: set all or none")
    made = Tls(cert, key, ca)
    try:
        made.for_server()
    except (OSError, ValueError) as problem:
        raise ValueError(f"[migration] transfer_cert {cert}, transfer_key {key}, transfer_ca {ca}: {problem}; give PEM "
                         "files that this process can read, the key without a password") from problem
    return made


def _no_password() -> str:
    raise ValueError("the key has a password")
