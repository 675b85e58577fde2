# SPDX-License-Identifier: Apache-2.0
"""A small certificate authority in a folder, for the processes of a cloud and for servers of tests.

``Authority(folder)`` creates the authority once and then uses the existing one. Invariant: only the
owner of the folder can read the keys.
"""

from __future__ import annotations

import datetime
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec

from common.security import private_files
from common.security.certificates import (
    DAY,
    YEARS,
    Signer,
    general_name,
    new_authority,
    pem,
    private_pem,
)
from common.security.tls import Tls

#: A certificate is replaced this long before the expiry.
RENEW = 30 * DAY


class Authority:
    """A certificate authority. The constructor makes a new authority if the folder has none.

    Args:
        folder: The folder of the authority and of all issued certificates.
        name: The subject of a new authority.
    """

    def __init__(self, folder: Path, name: str = "kilonova") -> None:
        self.folder, self.path = folder, folder / "ca.pem"
        self.key_path = folder / "ca-key.pem"
        folder.mkdir(parents=True, exist_ok=True)
        if not self.path.exists():
            key = ec.generate_private_key(ec.SECP256R1())
            private_files.replace(self.key_path, private_pem(key))
            _write(self.path, new_authority(name, key))

    def issue(self, name: str, *reached_at: str, valid: datetime.timedelta = YEARS) -> Tls:
        """Return the files of the certificate ``name``, and issue a new certificate if necessary.

        This is necessary if a file is missing, if the present certificate is for other names and
        addresses or for these in another order, or if it expires within ``RENEW``. Servers and
        clients can use the certificate.

        Args:
            name: The subject, and the name of the files.
            reached_at: The names and addresses of the holder.
            valid: How long a new certificate is valid, at most until the authority's own expires.
        """
        files = Tls(
            str(self.folder / f"{name}.pem"), str(self.folder / f"{name}-key.pem"), str(self.path)
        )
        if not self._fits(Path(files.cert), reached_at):
            key = ec.generate_private_key(ec.SECP256R1())
            signer = Signer.read(files.ca, str(self.key_path))
            private_files.replace(Path(files.key), private_pem(key))
            _write(Path(files.cert), signer.sign(key.public_key(), name, reached_at, valid))
        return files

    def _fits(self, path: Path, reached_at: tuple[str, ...]) -> bool:
        if not path.exists() or not path.with_name(f"{path.stem}-key.pem").exists():
            return False
        cert = x509.load_pem_x509_certificate(path.read_bytes())
        names = cert.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        return list(names) == [
            general_name(text) for text in reached_at
        ] and cert.not_valid_after_utc - RENEW > datetime.datetime.now(datetime.UTC)


def _write(path: Path, cert: x509.Certificate) -> None:
    part = path.with_name(path.name + ".new")
    part.write_text(pem(cert))
    part.replace(path)
