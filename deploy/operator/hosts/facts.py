# SPDX-License-Identifier: Apache-2.0
"""Facts that hosts and the network service report about guests, for the doctor, adopt and discard.

Parameters named ``query`` are ``agent.AgentClient.query``. A host that is down or does not answer
is missing from the results.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from typing import Protocol

from oslo_config import cfg

from common.domain import errors
from common.domain.json_types import JsonObject
from common.domain.models import Interface
from common.domain.service_binaries import Binary
from common.store.engine import Store
from common.store.hosts import services

#: Host -> server -> power state of its guest.
Domains = Mapping[str, Mapping[str, int]]
#: Host -> server -> ids of the volumes that its guest runs with.
Disks = Mapping[str, Mapping[str, Collection[str]]]
#: Host -> servers that have files and no guest there.
Files = Mapping[str, Collection[str]]
#: Server -> its interfaces in the network service, or None if the cloud has no network service.
Ports = Callable[[str], list[Interface] | None]


class HostAnswers(Protocol):
    """A client that queries hosts, as ``agent.AgentClient`` does."""

    def query(self, host: str, verb: str, arguments: JsonObject, timeout: float = 10) -> JsonObject:
        """Send a query to a host, and return the answer.

        Args:
            host: Name of the host.
            verb: Name of the query, for example "domains".
            arguments: The arguments of the query.
            timeout: Seconds to wait for the answer.

        Raises:
            Unavailable: The host does not answer.
            Problem: The host's answer is this error.
        """


def ask_hosts(
    store: Store,
    query: Callable[[str, str, dict[str, object]], dict[str, Mapping[str, int]]],
    silent: list[str],
) -> Domains:
    """Return the guests of all hosts that answer: host -> server -> power state.

    Args:
        store: The database with the list of hosts.
        query: Queries a host.
        silent: Receives "host NAME" for each host that is down or does not answer.

    Raises:
        Problem: A host answers with this error.
    """
    answers = {}
    for row in store.read(lambda tx: services.list_all(tx, binary=Binary.COMPUTE)):
        if not row.up:
            silent.append(f"host {row.host}")
            continue
        try:
            answers[row.host] = query(row.host, "domains", {})["domains"]
        except errors.Unavailable:
            silent.append(f"host {row.host}")
    return answers


def ask_disks(
    store: Store,
    query: Callable[[str, str, dict[str, object]], dict[str, Mapping[str, Collection[str]]]],
) -> Disks:
    """Return the volumes of running guests of all hosts that answer: host -> server -> volume ids.

    Hosts that are down or do not answer are left out.

    Raises:
        Problem: A host answers with this error.
    """
    answers = {}
    for host in _running_hosts(store):
        with suppress(errors.Unavailable):
            answers[host] = query(host, "guests_volumes", {})["volumes"]
    return answers


def ask_files(
    store: Store, query: Callable[[str, str, dict[str, object]], dict[str, Collection[str]]]
) -> Files:
    """Return host -> ids of the servers of which the host has files and no guest.

    Hosts that are down or do not answer are left out.

    Raises:
        Problem: A host answers with this error.
    """
    answers = {}
    for host in _running_hosts(store):
        with suppress(errors.Unavailable):
            answers[host] = query(host, "files", {})["servers"]
    return answers


def _running_hosts(store: Store) -> Iterator[str]:
    rows = store.read(lambda tx: services.list_all(tx, binary=Binary.COMPUTE))
    return (row.host for row in rows if row.up)


def ports_of(conf: cfg.ConfigOpts) -> Ports:
    """Return a function that reads a server's interfaces from the network service.

    The function returns None in a cloud without a network service.
    """
    from common.clients.identity import READ, IdentityClient
    from common.clients.network import NetworkClient

    identity = IdentityClient(conf, READ)
    client = NetworkClient(identity.network_url, conf.network.timeout)

    def ask(server: str) -> list[Interface] | None:
        return client.interfaces(identity.token(), server) if client.has_service() else None

    return ask
