# SPDX-License-Identifier: Apache-2.0
"""Signs the next certificate of a host that has the present one (``common.rpc.host_certificates``).

Whose it is, the key of the message says, and what for, the present certificate; the request brings
a key and nothing else. Nothing is kept: a host whose answer was lost asks again.
"""

from __future__ import annotations

import logging

from cryptography import x509

from common import errors
from common.authority import Signer

log = logging.getLogger(__name__)


class HostCertificates:
    """``signer``: the authority of this cloud's certificates, where conductors have its key."""

    def __init__(self, signer: Signer | None) -> None:
        self._signer = signer

    def renew(self, host: str, certificate: str, request: str, proof: str) -> str:
        if self._signer is None:
            raise errors.Conflict(
                f"Conductors sign no certificates: set [tls] ca_key_file there, or bring host {host} one of the "
                "cloud's authority."
            )
        try:
            made = self._signer.renew(host, certificate, request, proof)
        except (ValueError, x509.ExtensionNotFound) as problem:
            log.warning("host %s asked for a certificate in vain: %s", host, problem)
            raise errors.BadRequest(f"No certificate is signed: {problem}.") from problem
        log.info("host %s has its next certificate", host)
        return made
