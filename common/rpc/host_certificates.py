# SPDX-License-Identifier: Apache-2.0
"""What conductors answer a host whose certificate ends soon: the next one.

The question is sealed with the host's own key, as its reports are, and proved with the key of the
certificate that it has; so neither a host that was removed nor the key file alone gets one.
"""

from __future__ import annotations

from typing import Protocol

from common.broker_identities import REPORTS
from common.rpc.host_link import HostSide, Method

ANSWER_SECONDS = 10.0


class HostCertificatesApi(Protocol):
    """The interface that a conductor serves."""

    def renew(self, host: str, certificate: str, request: str, proof: str) -> str:
        """The next certificate for what the present one is for (all PEM).

        Raises:
            Conflict: this conductor signs none. BadRequest: the present one is not this host's, or
            who asks has not its key.
        """


def methods(certificates: HostCertificatesApi) -> dict[str, Method]:
    """For ``ControlSide.serve``."""
    return {"renew_certificate": certificates.renew}


class HostCertificatesClient:
    """For agents."""

    def __init__(self, link: HostSide) -> None:
        self._link = link

    def renew(self, certificate: str, request: str, proof: str) -> str:
        """Raises Problem: none came, and why."""
        content = {"certificate": certificate, "request": request, "proof": proof}
        return str(self._link.ask(REPORTS, "renew_certificate", content, ANSWER_SECONDS))
