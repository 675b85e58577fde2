# SPDX-License-Identifier: Apache-2.0
"""Answers of conductors about credentials of hosts: token states, identities, certificates, keys.

The requests of ``kilonova join`` are sealed with the key of the join token, which is valid for no
other request. The request for the next certificate is sealed with the host's own key, and proved
with the key of its present certificate. So neither a removed host nor a stolen key file gets a
certificate. The answer with new keys is sealed for a fresh key pair of the host, so that the old
keys open no recorded answer.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from common.domain.json_types import JsonObject
from common.domain.wire import from_wire, to_wire
from common.rpc.host_link import HostSide, Method
from common.security.broker_names import REPORTS
from common.security.host_joins import Envelope
from common.security.host_keys import AllKeys, OwnKeys

ANSWER_SECONDS = 10.0
#: Shorter, because the agent sends no heartbeat meanwhile.
SECRETS_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class TokenState:
    """The state of a join token, for the machine that has the token."""

    #: The time of the control plane in microseconds.
    now: int
    #: The reason why the token is void. Empty for a valid token.
    refusal: str
    #: The host's address that the operator has set. May be empty.
    address: str
    #: True if the identity comes with a certificate.
    signs: bool
    #: True if the host is up.
    is_heard: bool


@dataclass(frozen=True, slots=True)
class Identity:
    """The credentials of a host."""

    generation: int
    #: Purpose -> key in hexadecimal digits.
    keys: Mapping[str, str] = field(repr=False)
    #: The host's password at the broker.
    password: str = field(repr=False)
    #: The certificate for the key of the request (PEM), or empty.
    certificate: str = ""


class HostJoinsApi(Protocol):
    """The answers of a conductor to ``kilonova join``."""

    def look(self, host: str, generation: int) -> TokenState:
        """Return the state of a host's join token. A used or expired token is no error.

        Args:
            host: Name of the host.
            generation: Generation of the token's key, which identifies the token.

        Raises:
            NotFound: A newer token replaced this one, or the host was removed or has other keys.
        """

    def join(self, host: str, generation: int, public: str, request: str) -> JsonObject:
        """Use a host's join token, and return the ``Identity`` as JSON, sealed for ``public``.

        Args:
            host: Name of the host.
            generation: Generation of the token's key.
            public: Public key of the machine's ``Envelope``. The same key may use the token again
                until the token expires.
            request: Request for a certificate (PEM), or "" for no certificate. The request is
                ignored if the conductor signs no certificates for this host.

        Raises:
            NotFound: A newer token replaced this one, or the host was removed or has other keys.
            BadRequest: ``public`` or ``request`` is not valid.
            Conflict: Another machine has used the token, or the token has expired.
            Unavailable: The conductor lacks a secret, or the database does not answer.
        """


def join_methods(joins: HostJoinsApi) -> dict[str, Method]:
    """Return the methods for ``ControlSide.serve`` that requests with a token's key may call."""
    return {
        "join_look": lambda host, generation: to_wire(joins.look(host, generation)),
        "join": joins.join,
    }


class HostJoinsClient:
    """Sends the requests of ``kilonova join`` to the conductors."""

    def __init__(self, link: HostSide) -> None:
        self._link, self._own = link, Envelope()

    def look(self) -> TokenState:
        """Return the state of this machine's join token.

        Raises:
            Unavailable: No conductor answered in time, or the database does not answer.
            NotFound: A newer token replaced this one, or the host was removed or has other keys.
        """
        return from_wire(TokenState, self._link.ask(REPORTS, "join_look", {}, ANSWER_SECONDS))

    def join(self, request: str = "") -> Identity:
        """Use the join token, and return the identity.

        If the answer was lost, only this object can repeat the call, because another object has
        another key pair.

        Args:
            request: Request for a certificate (PEM), or "" for no certificate.

        Raises:
            Unavailable: No answer, so that the token may have been used. Or the conductor lacks a
                secret, or the database does not answer.
            NotFound: A newer token replaced this one, or the host was removed or has other keys.
            BadRequest: ``request`` is not valid.
            Conflict: Another machine has used the token, or the token has expired.
            NotGenuine: The answer was not sealed for this machine.
        """
        sealed: JsonObject = self._link.ask(
            REPORTS, "join", {"public": self._own.public, "request": request}, ANSWER_SECONDS
        )
        return from_wire(Identity, self._own.open(sealed))


class HostCertificatesApi(Protocol):
    """The answer of a conductor to a host whose certificate ends soon."""

    def renew(self, host: str, certificate: str, request: str, proof: str) -> str:
        """Return the next certificate (PEM), for the addresses of the present one.

        Args:
            host: Name of the host.
            certificate: The present certificate (PEM).
            request: Request for the next certificate (PEM), with the new key.
            proof: Signature with the key of the present certificate (``Certificate.proof``).

        Raises:
            Conflict: This conductor signs no certificates.
            BadRequest: The present certificate, the request or the proof is not valid.
        """


def certificate_methods(certificates: HostCertificatesApi) -> dict[str, Method]:
    """Return the methods for ``ControlSide.serve`` that requests with a host's key may call."""
    return {"renew_certificate": certificates.renew}


class HostCertificatesClient:
    """Requests the next certificate of a host from the conductors, before the present one ends."""

    def __init__(self, link: HostSide) -> None:
        self._link = link

    def renew(self, certificate: str, request: str, proof: str) -> str:
        """Return the next certificate (PEM). See ``HostCertificatesApi.renew``.

        Raises:
            NoAnswer: No conductor answered in time, or the request could not be sent.
            Conflict, BadRequest: The conductor refuses. The text contains the reason.
        """
        content = {"certificate": certificate, "request": request, "proof": proof}
        return str(self._link.ask(REPORTS, "renew_certificate", content, ANSWER_SECONDS))


@dataclass(frozen=True, slots=True)
class HostSecrets:
    """What a host must know today to talk to conductors."""

    generation: int
    #: Purpose -> keys in hexadecimal digits. The first key seals, and all open.
    keys: Mapping[str, Sequence[str]] = field(repr=False)
    #: Passwords that the host's user at the broker may have, the newest first.
    passwords: Sequence[str] = field(repr=False)
    #: The broker's nodes for hosts, each HOST or HOST:PORT. Empty: as the host knows them.
    brokers: Sequence[str] = ()

    def digest(self) -> str:
        """Return a text that differs for other secrets, and reveals none."""
        text = json.dumps(to_wire(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def secrets_of(keys: AllKeys, host: str, brokers: Sequence[str]) -> HostSecrets:
    """Return the secrets of a host that follow from today's configuration and database.

    Args:
        keys: The keys of all hosts.
        host: Name of the host.
        brokers: [host_keys] broker_addresses.

    Raises:
        Unavailable: This process lacks a secret, the host has no key, or the database does not
            answer.
    """
    own = keys.for_host(host)
    return HostSecrets(
        own.generation,
        {purpose: [key, *own.others.get(purpose, ())] for purpose, key in own.secrets.items()},
        keys.broker_passwords(host),
        list(brokers),
    )


def key_file_of(keys: AllKeys, host: str, transport_url: str, brokers: Sequence[str]) -> OwnKeys:
    """Return the content of a host's key file, with the digest of the host's secrets of today.

    Arguments and errors are those of ``secrets_of``. ``transport_url`` is as in ``OwnKeys``.
    """
    digest = secrets_of(keys, host, brokers).digest()
    return replace(keys.for_host(host, transport_url), fetched=digest)


class HostSecretsApi(Protocol):
    """The answer of a conductor to a host whose secrets are not today's."""

    def fetch(self, host: str, public: str) -> JsonObject:
        """Return the host's ``HostSecrets`` as JSON, sealed for ``public``.

        Args:
            host: Name of the host.
            public: Public key of the host's ``Envelope``.

        Raises:
            BadRequest: ``public`` is not valid.
            Unavailable: The conductor lacks a secret, or the database does not answer.
        """


def secrets_methods(secrets: HostSecretsApi) -> dict[str, Method]:
    """Return the methods for ``ControlSide.serve`` that requests with a host's key may call."""
    return {"fetch_secrets": secrets.fetch}


class HostSecretsClient:
    """Fetches a host's keys, and its passwords and addresses of the broker, from conductors."""

    def __init__(self, link: HostSide) -> None:
        self._link = link

    def fetch(self) -> HostSecrets:
        """Return the host's secrets of today.

        Raises:
            NoAnswer: No conductor answered in time, or the request could not be sent.
            Unavailable: The conductor lacks a secret, or the database does not answer.
            NotGenuine: The answer was not sealed for this host.
        """
        own = Envelope()
        sealed: JsonObject = self._link.ask(
            REPORTS, "fetch_secrets", {"public": own.public}, SECRETS_SECONDS
        )
        return from_wire(HostSecrets, own.open(sealed))
