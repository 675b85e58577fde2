# SPDX-License-Identifier: Apache-2.0
"""Renewal of the host's certificate by the agent.

Once an hour the agent checks [tls] cert_file. If the certificate ends within 30 days, the agent
makes a key, conductors sign a certificate for it, and the agent replaces the file with both. New
connections read the new file, so no process needs a restart.

Invariant: the file is complete at any moment, and a private key never leaves the host.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from oslo_config import cfg

from common.domain import errors
from common.domain.json_types import JsonObject
from common.rpc.host_credentials import HostCertificatesClient
from common.security import private_files
from common.security.certificates import SOON_SECONDS, Certificate, NewKey, ends_at, pem
from common.service.log import get_logger

log = get_logger(__name__)
PERIOD_SECONDS = 3600.0
BY_HAND = "install a certificate of the cloud's authority by hand (docs/encryption.md)"


@dataclass(frozen=True)
class CertificateFile:
    """[tls] cert_file of this host. ``has_key`` is True if the private key is in the same file."""

    host: str
    path: Path
    has_key: bool = True

    def renew(self, client: HostCertificatesClient) -> None:
        """Replace key and certificate: make a new key, and let a conductor sign its certificate.

        Raises:
            Problem: Conductors refuse or do not answer.
            OSError, ValueError: The file cannot be read or written, the key is in another file, or
                the new certificate is for another key or does not end later than the present one.
        """
        if not self.has_key:
            raise ValueError(
                "the private key is in another file ([tls] key_file), and two files cannot be replaced at once"
            )
        if not os.access(self.path.parent, os.W_OK):
            raise ValueError(
                f"the agent may not write to {self.path.parent}: move the certificate to state_dir"
            )
        present, key = Certificate.read(str(self.path)), NewKey()
        request = key.request(self.host)
        certificate = client.renew(pem(present.cert), request, present.proof(self.host, request))
        text = key.file(certificate)
        cert = x509.load_pem_x509_certificate(certificate.encode())
        if cert.not_valid_after_utc <= present.cert.not_valid_after_utc:
            raise ValueError(
                "a new certificate would not end later, because the certificate of the authority itself ends "
                "then: replace the authority"
            )
        private_files.replace(self.path, text)


class CertificateKeeper:
    """Renews a certificate before it ends. A thread of the agent calls ``look`` each hour."""

    def __init__(self, file: CertificateFile, client: HostCertificatesClient) -> None:
        self._file, self._client = file, client

    def look(self) -> None:
        """Renew the certificate if it ends within ``SOON_SECONDS``.

        A failure is logged with the remedy, and the next call retries.
        """
        try:
            if ends_at(str(self._file.path)) - time.time() > SOON_SECONDS:
                return
            self._file.renew(self._client)
            log.info("the certificate of this host was replaced", path=self._file.path)
        except (errors.Problem, OSError, ValueError) as problem:
            log.warning(
                "the certificate of this host is not renewed",
                path=self._file.path,
                problem=problem,
                remedy=BY_HAND,
            )


def keeper(conf: cfg.ConfigOpts, client: HostCertificatesClient) -> CertificateKeeper | None:
    """Return the object that renews [tls] cert_file, or None if no certificate is configured."""
    path = conf.tls.cert_file
    if not path:
        return None
    has_key = conf.tls.key_file in ("", path)
    return CertificateKeeper(CertificateFile(conf.host, Path(path), has_key), client)


def facts(conf: cfg.ConfigOpts) -> JsonObject:
    """Return the fact ``certificate_ends`` (seconds since 1970) for the host's inventory.

    Without a configured and readable certificate the result is empty.
    """
    try:
        return {"certificate_ends": ends_at(conf.tls.cert_file)} if conf.tls.cert_file else {}
    except (OSError, ValueError):
        return {}
