# SPDX-License-Identifier: Apache-2.0
"""Conductors' answers about the credentials of hosts: a token's state, an identity, a certificate.

The questions of ``kilonova join`` are sealed with the token's key, which opens nothing else. The
question for the next certificate is sealed with the host's own key and proved with the key of its
present certificate. So neither a removed host nor a stolen key file gets a certificate.
"""

from __future__ import annotations

from typing import Protocol

from common.broker_identities import REPORTS
from common.host_joins import Envelope
from common.json_types import JsonObject
from common.rpc.host_link import HostSide, Method

ANSWER_SECONDS = 10.0


class HostJoinsApi(Protocol):
    """The interface that a conductor serves."""

    def look(self, host: str, generation: int) -> JsonObject:
        """``now`` (microseconds), ``state`` (``store.hosts.host_joins.JoinState``), ``refusal``:
        why it opens nothing, empty while it does; ``address`` as the operator gave it, ``signs``:
        a certificate comes with the identity, ``is_heard``: the host is up.

        Raises NotFound: the token was replaced by a newer one.
        """

    def join(self, host: str, generation: int, public: str, request: str) -> JsonObject:
        """The identity, sealed for the envelope with this public key: ``key_file``, ``password`` at
        the broker, ``certificate`` for the request (PEM) or empty.

        Raises Conflict: the token was used by somebody else, or is over.
        """


def join_methods(joins: HostJoinsApi) -> dict[str, Method]:
    """For ``ControlSide.serve``."""
    return {"join_look": joins.look, "join": joins.join}


class HostJoinsClient:
    """For ``kilonova join``."""

    def __init__(self, link: HostSide) -> None:
        self._link, self._own = link, Envelope()

    def look(self) -> JsonObject:
        """Raises NoAnswer, NotFound."""
        found: JsonObject = self._link.ask(REPORTS, "join_look", {}, ANSWER_SECONDS)
        return found

    def join(self, request: str = "") -> JsonObject:
        """Use the token. Whoever was not answered may ask again: it is the same asker's.

        Raises:
            Unavailable: perhaps it was used all the same. Conflict: it was, or is over.
            NotGenuine: what came was not sealed for us.
        """
        sealed: JsonObject = self._link.ask(
            REPORTS, "join", {"public": self._own.public, "request": request}, ANSWER_SECONDS
        )
        return self._own.open(sealed)


class HostCertificatesApi(Protocol):
    """The interface that a conductor serves."""

    def renew(self, host: str, certificate: str, request: str, proof: str) -> str:
        """The next certificate for what the present one is for (all PEM).

        Raises:
            Conflict: this conductor signs none. BadRequest: the present one is not this host's, or
            who asks has not its key.
        """


def certificate_methods(certificates: HostCertificatesApi) -> dict[str, Method]:
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
