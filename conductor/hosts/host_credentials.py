# SPDX-License-Identifier: Apache-2.0
"""Give hosts their credentials: an identity for a join token, renewed certificates, newest keys.

Conductors store no identities. A host's identity follows from the conductors' secret, so a host
that lost the response can send the request again (``common.rpc.host_credentials``).
"""

from __future__ import annotations

from collections.abc import Sequence

from cryptography import x509
from oslo_config import cfg

from common.domain import errors
from common.domain.clock import iso
from common.domain.json_types import JsonObject
from common.domain.wire import to_wire
from common.rpc.host_credentials import Identity, TokenState, secrets_of
from common.security.certificates import Signer
from common.security.host_joins import seal_for
from common.security.host_keys import AllKeys, Generations
from common.service.log import get_logger
from common.store.engine import Connection, Store
from common.store.hosts import host_joins
from common.store.hosts.host_joins import HostJoin, JoinState

log = get_logger(__name__)
_PUBLIC_DIGITS = 64


class HostJoins:
    """Serve the requests of ``kilonova join``.

    Args:
        signer: The authority of hosts' certificates. None if conductors do not have its key.
    """

    def __init__(self, store: Store, keys: AllKeys, signer: Signer | None = None) -> None:
        self._store, self._keys, self._signer = store, keys, signer

    def look(self, host: str, generation: int) -> TokenState:
        join = self._store.read(lambda tx: host_joins.look(tx, host, generation))
        return TokenState(
            now=join.at,
            refusal="" if join.state == JoinState.OPEN else refusal(host, join),
            address=join.address,
            signs=self._signer is not None and bool(join.address),
            is_heard=join.is_heard,
        )

    def join(self, host: str, generation: int, public: str, request: str) -> JsonObject:
        if len(public) != _PUBLIC_DIGITS:
            raise errors.BadRequest(
                f"The public key in the join request of host {host} must have {_PUBLIC_DIGITS} hexadecimal digits."
            )
        join = self._store.read(lambda tx: host_joins.look(tx, host, generation))
        try:
            identity = self._identity(host, generation, join.address, request)
            sealed = seal_for(public, to_wire(identity))
        except ValueError as problem:
            raise errors.BadRequest(
                f"The join request of host {host} is invalid: {problem}."
            ) from problem

        def use(tx: Connection) -> HostJoin | None:
            is_used = host_joins.use(tx, host, generation, public)
            return None if is_used else host_joins.look(tx, host, generation)

        if (other := self._store.write(use)) is not None:
            log.warning("a join token of a host is refused", host=host, state=other.state)
            raise errors.Conflict(refusal(host, other))
        log.info("a host has joined with new keys", host=host, generation=generation)
        return sealed

    def _identity(self, host: str, generation: int, address: str, request: str) -> Identity:
        keys = self._keys.for_host(host, generation=generation).secrets
        password, certificate = self._keys.broker_password(host, generation), ""
        if request and self._signer is not None and address:
            certificate = self._signer.answer(request, host, address)
        return Identity(generation, keys, password, certificate)


class HostCertificates:
    """Sign renewed certificates of hosts. ``signer`` is as in ``HostJoins``."""

    def __init__(self, signer: Signer | None) -> None:
        self._signer = signer

    def renew(self, host: str, certificate: str, request: str, proof: str) -> str:
        if self._signer is None:
            raise errors.Conflict(
                f"This conductor cannot sign the certificate of host {host}: set [tls] ca_key_file on the "
                "conductors, or copy a certificate of the cloud's authority to the host."
            )
        try:
            renewed = self._signer.renew(host, certificate, request, proof)
        except (ValueError, x509.ExtensionNotFound) as problem:
            log.warning("the certificate request of a host is refused", host=host, problem=problem)
            raise errors.BadRequest(
                f"No certificate is signed for host {host}: {problem}."
            ) from problem
        log.info("a new certificate of a host was signed", host=host)
        return renewed


class HostSecretsSource:
    """Give hosts the keys, passwords and addresses that follow from today's configuration.

    Answers to hosts contain ``digest``, so that a host notices that its secrets are old.

    Args:
        keys: The keys of all hosts.
        brokers: The broker's nodes for hosts, each HOST or HOST:PORT. Empty: as each host knows
            them.
    """

    def __init__(self, keys: AllKeys, brokers: Sequence[str] = ()) -> None:
        self._keys, self._brokers = keys, brokers
        #: Host -> valid generations of its keys, and the digest of its secrets.
        self._digests: dict[str, tuple[Generations, str]] = {}

    def digest(self, host: str) -> str:
        """Return ``HostSecrets.digest`` of a host, or "" without a key or a secret for queries.

        Raises:
            Unavailable: The database does not answer.
        """
        generations = self._keys.generations(host)
        if generations is None or not self._keys.has_all_purposes:
            return ""
        known = self._digests.get(host)
        if known is None or known[0] != generations:
            known = self._digests[host] = (
                generations,
                secrets_of(self._keys, host, self._brokers).digest(),
            )
        return known[1]

    def fetch(self, host: str, public: str) -> JsonObject:
        try:
            sealed = seal_for(public, to_wire(secrets_of(self._keys, host, self._brokers)))
        except ValueError as problem:
            raise errors.BadRequest(
                f"The public key in the request of host {host} is invalid: {problem}."
            ) from problem
        log.info("a host fetches its secrets of today", host=host)
        return sealed


def refusal(host: str, join: HostJoin) -> str:
    """Return why a used or expired join token is refused, and the command that helps."""
    again = f"kilonova host remove {host}, then kilonova host add {host}"
    if join.state == JoinState.USED:
        return (
            f"The join token of host {host} was used at {iso(join.used_at)}. If you did not use it, another machine "
            f"has the identity of this host. Then run: {again}. If your join was interrupted, get a new token: "
            f"kilonova host add {host}"
        )
    return (
        f"The join token of host {host} expired at {iso(join.until)}. Get a new token: "
        f"kilonova host add {host}"
    )


def signer(conf: cfg.ConfigOpts) -> Signer | None:
    """Return the authority that signs hosts' certificates, or None without [tls] ca_key_file.

    Raises:
        ConfigError: [tls] ca_key_file or ca_file cannot be used.
    """
    signs = conf.tls.ca_key_file
    return Signer.read(conf.tls.ca_file, signs) if signs else None
