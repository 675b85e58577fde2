# SPDX-License-Identifier: Apache-2.0
"""``kilonova host discard HOST SERVER``: lets a host remove a guest that has no record.

The command first checks that the host has the guest. If the database has the server on another
host, that host must have its guest. On storage that both hosts share, only the domain is removed.
The server's ports are bound to the recorded host. Without a record they are deleted, if no other
host has a guest of the server.
"""

from __future__ import annotations

import argparse
import uuid
from collections.abc import Mapping
from contextlib import closing

from common.domain import errors
from common.rpc import agent
from common.rpc.broker import opener
from common.rpc.host_link import ControlSide
from common.service import config
from common.store import cleanups, upgrades
from common.store.engine import Connection, Store
from common.store.hosts import host_keys, host_status
from common.store.servers import guests
from deploy.operator.hosts.facts import HostAnswers, Ports, ask_hosts, ports_of
from deploy.operator.store import adoption


def discard(options: argparse.Namespace) -> int:
    """Request the removal of a guest without a record, or of files without a guest, from a host.

    Returns:
        0 if the removal is requested. 1 without ``--yes``: only the effect is printed.

    Raises:
        BadRequest: The text is not a server's id.
        NotFound: There is no such host, or the host has no guest or files of the server.
        Conflict: The recorded host has no guest of the server, one of the two hosts is down, the
            guest has a record, or the server has an action or exists without a host.
        Unavailable: One of the two hosts or the network service does not answer.
    """
    try:
        server = str(uuid.UUID(options.server))
    except ValueError as problem:
        raise errors.BadRequest(
            f"{options.server!r} is not the id of a server; kilonova doctor shows the id"
        ) from problem
    conf = config.load(options.config)
    with (
        closing(Store.open(conf)) as store,
        closing(ControlSide(opener(conf), host_keys.of_all(store, conf))) as link,
    ):
        upgrades.check(store)
        hosts = agent.AgentClient(link)
        return carry_out(store, hosts, ports_of(conf), server, options.host, options.yes)


def carry_out(
    store: Store, hosts: HostAnswers, ports: Ports, server: str, host: str, is_confirmed: bool
) -> int:
    """Run the command with these clients. Results and errors are those of ``discard``.

    Args:
        store: The database.
        hosts: Queries the hosts.
        ports: Reads the server's ports from the network service.
        server: Id of the server.
        host: The host with the guest to remove.
        is_confirmed: True with ``--yes``.
    """
    record = store.read(lambda tx: guests.home(tx, server))
    if server not in _domains(store, hosts, host) and not _has_files(hosts, server, host):
        raise errors.NotFound(
            f"Host {host} has no guest of server {server} and no files of it. kilonova doctor shows the guests "
            "without a record, with their hosts."
        )
    if record is not None and record != host and server not in _domains(store, hosts, record):
        raise errors.Conflict(
            f"Server {server} is recorded on host {record}, which has no guest of it. The guest on host {host} may be "
            f"the only one. To keep it: kilonova host adopt {host} {server}"
        )
    has_ports = bool(ports(server)) and (record is not None or _is_last(store, hosts, server, host))
    keeps_files = record is not None and store.read(
        lambda tx: adoption.share_storage(tx, record, host)
    )

    def check(tx: Connection) -> None:
        if not host_status.host_state(tx, host, locked=True).answers:
            raise _no_answer(host)
        guests.check_discard(tx, server, host, record)

    def work(tx: Connection) -> None:
        check(tx)
        guests.discard(tx, server, host, elsewhere=record, keeps_files=keeps_files)
        if has_ports:
            cleanups.add(tx, [_cleanup(server, host)])

    if not is_confirmed:
        store.write(check)
        effect = (
            f"removed; its disk stays, because the guest on host {record} uses it too"
            if keeps_files
            else "removed for ever, with its disk"
        )
        if has_ports:
            effect += f"; its ports would be {f'bound to {record}' if record else 'deleted'}"
        print(
            f"the guest of server {server} on host {host} would be {effect}. To remove the guest, repeat the command "
            "with --yes"
        )
        return 1
    store.write(work)
    print(f"host {host} removes the guest within a minute; see: kilonova host removals {host}")
    return 0


def _domains(store: Store, hosts: HostAnswers, host: str) -> Mapping[str, int]:
    """Query a host, and return its guests (server -> power state).

    Raises:
        NotFound: There is no such host.
        Conflict: The host is down or silent.
        Unavailable: The host does not answer the query.
    """
    if not store.read(lambda tx: host_status.host_state(tx, host)).answers:
        raise _no_answer(host)
    domains: Mapping[str, int] = hosts.query(host, "domains", {})["domains"]
    return domains


def _has_files(hosts: HostAnswers, server: str, host: str) -> bool:
    """Return True if the host has files and no guest of this server.

    This includes files on shared storage of a server whose guest is on another host.

    Raises:
        Unavailable: The host does not answer.
    """
    return server in hosts.query(host, "files", {})["servers"]


def _no_answer(host: str) -> errors.Conflict:
    return errors.Conflict(f"Host {host} does not answer. Start its kilonova-agent first.")


def _is_last(store: Store, hosts: HostAnswers, server: str, host: str) -> bool:
    """Return True if all hosts answer, and no host except ``host`` has a guest of this server."""
    silent: list[str] = []
    domains_by_host = ask_hosts(store, hosts.query, silent)
    return not silent and not any(
        server in domains for name, domains in domains_by_host.items() if name != host
    )


def _cleanup(server: str, host: str) -> dict[str, object]:
    """Return the pending cleanup that binds the server's ports to the recorded host.

    Without a record the cleanup deletes the ports.

    Args:
        server: Id of the server.
        host: The host of the discarded guest, for the reason of the cleanup.
    """
    return {
        "kind": cleanups.PORTS,
        "target": server,
        "place": "",
        "args": {},
        "server_id": server,
        "project_id": "",
        "why": f"the server's guest on host {host} was discarded",
    }
