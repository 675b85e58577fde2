# SPDX-License-Identifier: Apache-2.0
"""The invariants of a cloud, checked read-only on a live database.

``check`` returns the findings that ``kilonova doctor`` prints and that tests assert on. A finding
normally means a defect of Kilonova, not a mistake of an operator. The exceptions are:

* CPUs, pages or devices that were removed from a host's configuration while guests have them
* work that only an operator can continue
* notifications that no broker accepts
* required services that are not registered
* certificates of hosts that expire soon
* guests that are missing or unknown, because the database was set back or an admin ended a live
  migration

``ages`` returns work that is only old (guests to remove, actions, pending cleanups). Run ``check``
in ``Store.snapshot``, which sees each transaction completely or not at all. Use ``read`` only if no
process writes. Hosts and network service are queried at another moment, so callers must confirm a
finding of a ``compare`` function by a second call.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from typing import NamedTuple

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from common.domain import states
from common.domain.clock import SECOND, iso
from common.domain.json_types import JsonMapping
from common.domain.statuses import (
    OPEN_MIGRATIONS,
    PORT_ACTIVE,
    ActionState,
    GuestState,
    MigrationStatus,
    MigrationType,
)
from common.store import cleanups
from common.store.engine import moment
from common.store.hosts import hosts as host_rows
from common.store.notifications import outbox
from common.store.rows import GuestRow, MigrationRow, ServerPlace, ServerRow
from common.store.schema import actions, guests, migrations, servers, share_mappings
from common.store.servers.actions import LIVE
from common.store.servers.guests import HERE
from deploy.operator.doctor import certificates, documents, hosts, placement, unattended, volumes
from deploy.operator.doctor.catalogue import compare_catalogue
from deploy.operator.doctor.files import compare_files
from deploy.operator.doctor.finding import Finding
from deploy.operator.doctor.images import compare_images
from deploy.operator.doctor.shares import compare_rules
from deploy.operator.doctor.volumes import compare_guests, compare_volumes
from deploy.operator.store.stuck_actions import overdue

__all__ = [
    "Finding",
    "ages",
    "check",
    "compare",
    "compare_catalogue",
    "compare_files",
    "compare_guests",
    "compare_images",
    "compare_ports",
    "compare_reported",
    "compare_rules",
    "compare_volumes",
    "wanderers",
]


# Queries are built once, because monitoring runs the checks often.
_LIVE = sa.select(servers).where(servers.c.deleted == 0)
_RECORDS = sa.select(guests)
_MOVES = sa.select(migrations).where(
    sa.or_(
        migrations.c.status.in_(OPEN_MIGRATIONS),
        migrations.c.uuid.in_(sa.bindparam("holders", expanding=True)),
    )
)
_RUNNING = sa.select(
    actions.c.id,
    actions.c.server_id,
    actions.c.fence,
    actions.c.state,
    actions.c.due_at,
    actions.c.workflow,
    actions.c.step,
    actions.c.cause,
    overdue().label("overdue"),
).where(actions.c.state.in_(LIVE))
_HOLDING = sa.select(servers.c.action).where(servers.c.action.is_not(None))
_HELD = sa.select(servers.c.id).where(servers.c.deleted == 0, servers.c.action.is_not(None))
_SHARED = sa.select(share_mappings.c.server_id, sa.func.count().label("number")).group_by(
    share_mappings.c.server_id
)
_OWED = sa.select(guests).where(guests.c.wanted == GuestState.ABSENT).order_by(guests.c.changed_at)
_IN_HAND = sa.select(actions).where(actions.c.state.in_(LIVE)).order_by(actions.c.created_at)


def check(tx: Connection) -> list[Finding]:
    """Return all findings of the checks that need only the database, sorted.

    An empty list means that no invariant of the database is broken.
    """
    live = {row.id: row for row in tx.execute(_LIVE)}
    records: list[GuestRow] = list(tx.execute(_RECORDS))
    moves = list(
        tx.execute(_MOVES, {"holders": sorted({row.holder for row in records if row.holder})})
    )
    damaged = list(
        documents.check(tx, {servers: live.values(), guests: records, migrations: moves})
    )
    parts: dict[str, Iterator[Finding]] = {
        "guests": _guests(live, records),
        "moves": _moves(live, records, moves),
        "quotas": _quotas(live, moves),
        "actions": _actions(tx, live),
        "shares": _shares(tx, live),
        "times and leases": unattended.check(tx, live, records),
        "hosts": hosts.check(tx),
        "volumes": volumes.check(tx, live),
        "placement": placement.check(tx, live, records, moves),
        "notifications": _notifications(tx),
        "certificates": certificates.check(tx),
    }
    findings = (
        finding
        for name, part in parts.items()
        for finding in documents.until_damaged(name, part, damaged)
    )
    return sorted([*damaged, *findings])


def _guests(live: Mapping[str, ServerRow], records: list[GuestRow]) -> Iterator[Finding]:
    """Check the places of guests.

    At most one guest of a server may run. A running or stopped guest belongs to an existing server
    on the same host. A server on a host has such a guest there, except while it is being deleted.
    """
    running = Counter(
        row.server_id for row in records if row.may_run and row.wanted != GuestState.ABSENT
    )
    for server, number in running.items():
        if number > 1:
            yield Finding("one-guest", server, f"{number} guests may run")
    places = {(row.server_id, row.host) for row in records if row.wanted in HERE}
    for server, host in places:
        if server not in live:
            yield Finding(
                "guest-of-server",
                server,
                f"host {host} keeps a guest of this server, which is deleted",
                "guest-of-gone-server",
                (host,),
            )
        elif live[server].host != host:
            yield Finding(
                "guest-of-server",
                server,
                f"its guest is on {host}, the server on {live[server].host}",
                "guest-elsewhere",
                (host,),
            )
    for row in live.values():
        if row.host and (row.id, row.host) not in places and row.task_state != states.DELETING:
            yield Finding(
                "guest-of-server",
                row.id,
                f"it is on host {row.host} without a guest record",
                "no-guest-record",
                (row.host,),
            )


def _moves(
    live: Mapping[str, ServerRow], records: Sequence[GuestRow], moves: Sequence[MigrationRow]
) -> Iterator[Finding]:
    """Check guests and migrations of servers that move.

    A guest that is kept or arriving belongs to an open migration from or to its host, and may not
    run. Only a migration from a guest's host may hold the guest's allocation. A server has at most
    one open migration, and a deleted server has no open migration. If the server has no action, the
    open migration is finished and the server is in VERIFY_RESIZE. A server in VERIFY_RESIZE has an
    open migration.

    Args:
        live: The servers that are not deleted, by id.
        records: The guests.
        moves: The migrations that are open or hold resources.
    """
    open_moves = {row.server_id: row for row in moves if row.status in OPEN_MIGRATIONS}
    moves_by_id = {row.uuid: row for row in moves}
    for row in records:
        move = open_moves.get(row.server_id)
        if row.wanted in (GuestState.KEPT, GuestState.ARRIVING) and (
            move is None or row.host not in (move.source_host, move.dest_host)
        ):
            yield Finding(
                "guest-of-move",
                row.server_id,
                f"its guest on {row.host} is {row.wanted}, and no open "
                "migration goes from there or to there",
                "guest-of-no-move",
                (row.host,),
            )
        if row.wanted in (GuestState.KEPT, GuestState.ARRIVING) and row.may_run:
            yield Finding(
                "guest-of-move",
                row.server_id,
                f"its guest on {row.host} is {row.wanted} and may run",
                "kept-may-run",
                (row.host,),
            )
        if row.holder is not None and (
            row.holder not in moves_by_id or moves_by_id[row.holder].source_host != row.host
        ):
            yield Finding(
                "guest-of-move",
                row.server_id,
                f"the allocation of its guest on {row.host} is held by {row.holder}, which is not a "
                "migration from this host",
                "held-by-no-migration",
                (row.host,),
            )
    for server, number in Counter(
        row.server_id for row in moves if row.status in OPEN_MIGRATIONS
    ).items():
        if number > 1:
            yield Finding("one-move", server, f"has {number} open migrations")
    for server, move in open_moves.items():
        moving = live.get(server)
        if moving is None or (
            moving.action is None
            and (move.status != MigrationStatus.FINISHED or moving.vm_state != states.RESIZED)
        ):
            yield Finding(
                "move-of-server",
                server,
                f"migration {move.id} is {move.status}, but the server is "
                f"{moving.vm_state if moving is not None else 'deleted'} and has no action",
                "move-without-action",
                (str(move.id),),
            )
    for server_row in live.values():
        if server_row.vm_state == states.RESIZED and server_row.id not in open_moves:
            yield Finding(
                "move-of-server",
                server_row.id,
                "is in VERIFY_RESIZE, but has no open migration",
                "resized-without-move",
            )


def _quotas(live: Mapping[str, ServerRow], moves: Sequence[MigrationRow]) -> Iterator[Finding]:
    """Check the VCPUs and the memory that the quota counts for each server.

    These are the amounts of the server's flavor. With an open migration each is the larger amount
    of both flavors. During a revert the amounts of the server's flavor are accepted too.
    """
    open_moves = {row.server_id: row for row in moves if row.status in OPEN_MIGRATIONS}
    for row in live.values():
        move = open_moves.get(row.id)
        flavors = [row.flavor] if move is None else [move.old_flavor, move.new_flavor]
        counted = {"vcpus": row.vcpus, "memory_mb": row.memory_mb}
        expected = {name: max(flavor[name] for flavor in flavors) for name in counted}
        if counted != expected and not (
            move is not None
            and move.status == MigrationStatus.REVERTING
            and counted == {name: row.flavor[name] for name in counted}
        ):
            yield Finding(
                "counted",
                row.id,
                f"{counted} are counted for the quota, but the server has or may get {expected}",
            )


def _shares(tx: Connection, live: Mapping[str, ServerRow]) -> Iterator[Finding]:
    """Check the number of shares in each server's row, and that deleted servers have no shares."""
    numbers = {row.server_id: row.number for row in tx.execute(_SHARED)}
    for row in live.values():
        if row.shares != numbers.get(row.id, 0):
            yield Finding(
                "shares", row.id, f"counts {row.shares} shares and has {numbers.get(row.id, 0)}"
            )
    for server in numbers.keys() - live.keys():
        yield Finding("shares", server, "is deleted, but has shares", "shares-of-gone")


def _actions(tx: Connection, live: Mapping[str, ServerRow]) -> Iterator[Finding]:
    """Check that servers and running actions refer to each other, with the same fence.

    Also report a task_state without an action, stuck and overdue actions, and due actions without a
    time.
    """
    running = {row.id: row for row in tx.execute(_RUNNING)}
    for row in live.values():
        head = running.get(row.action) if row.action else None
        if row.action and head is None:
            yield Finding(
                "held-by-action",
                row.id,
                f"is held by action {row.action}, which has ended or does not exist",
                "held-by-ended",
                (row.action,),
            )
        elif head is not None and head.fence != row.fence:
            yield Finding(
                "held-by-action",
                row.id,
                f"has fence {row.fence}, but its action has {head.fence}",
                "fence-of-action",
                (head.id,),
            )
        if row.task_state and not row.action:
            yield Finding("task-state", row.id, f"has task_state {row.task_state}, but no action")
    # A delete continues after its server is gone, until external services have removed the rest.
    held = set(tx.scalars(_HOLDING))
    for head in running.values():
        if head.id not in held:
            yield Finding(
                "held-by-action",
                head.server_id,
                f"action {head.id} of this server is {head.state}, but does not hold the server",
                "holds-nothing",
                (head.id,),
            )
        if head.state == ActionState.DUE and head.due_at is None:
            yield Finding(
                "due",
                head.server_id,
                f"action {head.id} is due without a time, so no conductor takes the action",
                facts=(head.id,),
            )
        if head.state == ActionState.STUCK:
            yield Finding(
                "stuck",
                head.server_id,
                f"{head.workflow} is stuck at {head.step or 'its beginning'}: "
                f"{head.cause} See: kilonova action show {head.id}",
                facts=(head.id,),
            )
        elif head.overdue:
            yield Finding(
                "overdue",
                head.server_id,
                f"{head.workflow} is due at {head.step or 'its beginning'}, but no conductor takes "
                "the action. Start a conductor of the action's release, or: kilonova action fail "
                f"{head.id}",
                facts=(head.id,),
            )


def _notifications(tx: Connection) -> Iterator[Finding]:
    """Check that the oldest notification has waited for at most ``outbox.LATE``.

    The finding's text has the time of the oldest notification. So a second check repeats the
    finding only if this notification still waits.
    """
    since = outbox.late(tx)
    if since is not None:
        yield Finding(
            "notifications-sent",
            "outbox",
            f"the oldest notification waits since {iso(since)}. The conductors' logs have the reason. "
            "Start the broker, or correct [oslo_messaging_notifications] transport_url. A conductor "
            "with [notifications] notification_format none sends no notifications. kilonova status "
            "shows the number of waiting notifications. Beyond [notifications] outbox_limit the "
            "oldest are dropped",
        )


def compare(domains: Mapping[str, Mapping[str, int]], tx: Connection) -> list[Finding]:
    """Compare the domains of hosts with the records.

    The findings are a server with active domains on several hosts, a domain without a guest record,
    and a server without an action and without a domain on its host, in a state that needs a domain.
    For the last finding, servers on other hosts than those of ``domains`` are not checked.

    Args:
        domains: Host -> server -> power state, of the hosts that answered.
        tx: The transaction.
    """
    records = {
        (row.server_id, row.host)
        for row in tx.execute(sa.select(guests.c.server_id, guests.c.host))
    }
    places: dict[str, list[str]] = defaultdict(list)
    findings = []
    for host, domains_of_host in domains.items():
        for server, power_state in domains_of_host.items():
            if power_state != states.SHUTDOWN:
                places[server].append(host)
            if (server, host) not in records:
                findings.append(_unknown_domain(server, host))
    query = sa.select(servers.c.id, servers.c.host).where(
        servers.c.deleted == 0,
        servers.c.action.is_(None),
        servers.c.host.in_(sorted(domains)),
        servers.c.vm_state.in_(unattended.WITH_DOMAIN),
    )
    findings += [
        Finding(
            "guest-there",
            row.id,
            f"host {row.host} has no domain of this server. If another finding reports a guest of the "
            "server on some host, adopt that guest. If not, the guest is lost: openstack server delete "
            f"{row.id}",
            facts=(row.host,),
        )
        for row in tx.execute(query)
        if row.id not in domains[row.host]
    ]
    findings += [
        Finding(
            "two-domains",
            server,
            f"runs on {', '.join(sorted(domains_of_host))}",
            facts=tuple(sorted(domains_of_host)),
        )
        for server, domains_of_host in places.items()
        if len(domains_of_host) > 1
    ]
    return sorted(findings)


def compare_reported(queried: Collection[str], tx: Connection) -> list[Finding]:
    """Return findings about guests without a record, from the stored reports of hosts.

    Args:
        queried: Hosts whose present answers were compared, and which are left out.
        tx: The transaction.
    """
    return [
        _unknown_domain(server, host)
        for server, host in host_rows.read_unclaimed(tx)
        if host not in queried
    ]


def _unknown_domain(server: str, host: str) -> Finding:
    return Finding(
        "domain-known",
        server,
        f"host {host} has a domain of this server without a record. To keep it: kilonova host adopt "
        f"{host} {server}. To remove it: kilonova host discard {host} {server}",
        facts=(host,),
    )


def compare_ports(ports: Sequence[JsonMapping], tx: Connection) -> list[Finding]:
    """Compare the servers' ports in the network service with the records.

    The findings are a port that no server's record has, an interface without a port, and a port
    with a wrong server, a wrong host or a binding to a second host. Servers with a running action
    are left out, and so are ports with a pending cleanup.

    Args:
        ports: Ports of the network service. Only those with a device_owner ``compute:…`` count. A
            port may have its list of bindings as ``bindings``.
        tx: The transaction.
    """
    query = sa.select(servers.c.id, servers.c.host, servers.c.interfaces).where(
        servers.c.deleted == 0, servers.c.action.is_(None)
    )
    resting = {row.id: row for row in tx.execute(query)}
    spared = _ignored_ids(tx)
    held = {
        str(port["id"]): port
        for port in ports
        if port.get("device_owner", "").startswith("compute:")
    }
    rows_by_port = {
        interface["port"]: row for row in resting.values() for interface in row.interfaces or ()
    }
    return sorted(
        [
            *_unknown_ports(held, rows_by_port, resting, spared),
            *_interfaces(held, rows_by_port, spared),
        ]
    )


def _unknown_ports(
    held: Mapping[str, JsonMapping],
    rows_by_port: Mapping[str, ServerPlace],
    resting: Mapping[str, ServerPlace],
    spared: Set[str],
) -> list[Finding]:
    """Return findings about ports that no server's record has.

    Args:
        held: The ports of servers in the network service, by id.
        rows_by_port: Port id -> the server whose record has the port.
        resting: The servers without an action, by id.
        spared: Ids of ports and servers that are not checked.
    """
    return [
        Finding(
            "port-of-server",
            port_id,
            f"has the device_id {port['device_id'] or 'of no server'}, but no server's record has this port. "
            f"{_port_remedy(port, resting)}",
            "port-unplugged"
            if port["device_id"] in resting or not port["device_id"]
            else "port-of-nobody",
            (port["device_id"],),
        )
        for port_id, port in held.items()
        if port_id not in rows_by_port and not spared & {port_id, port["device_id"]}
    ]


def _interfaces(
    held: Mapping[str, JsonMapping], rows_by_port: Mapping[str, ServerPlace], spared: Set[str]
) -> list[Finding]:
    """Return findings about interfaces whose port is missing or has a wrong server or host.

    A port that is also bound to a second host is a finding too.

    Args:
        held: The ports of servers in the network service, by id.
        rows_by_port: Port id -> the server whose record has the port.
        spared: Ids of ports and servers that are not checked.
    """
    findings = []
    for port_id, row in rows_by_port.items():
        port = held.get(port_id)
        if spared & {port_id, row.id}:
            continue
        if port is None:
            findings.append(
                Finding(
                    "interface-of-server",
                    row.id,
                    f"has an interface with port {port_id}, but the network service has no such port",
                    facts=(port_id,),
                )
            )
        elif port["device_id"] != row.id or (port.get("binding:host_id") or None) != row.host:
            findings.append(
                Finding(
                    "port-of-server",
                    port_id,
                    f"has the device_id {port['device_id']} and is bound to host "
                    f"{port.get('binding:host_id')}, but belongs to server {row.id} on host {row.host}",
                    "port-elsewhere",
                    (row.id,),
                )
            )
        other_hosts = [
            binding["host"]
            for binding in (port or {}).get("bindings", ())
            if binding["status"] != PORT_ACTIVE
        ]
        if other_hosts:
            findings.append(
                Finding(
                    "port-of-server",
                    port_id,
                    f"is also bound to {', '.join(sorted(other_hosts))}, though "
                    f"server {row.id} is not moving",
                    "port-twice",
                    (row.id, *sorted(other_hosts)),
                )
            )
    return findings


def _ignored_ids(tx: Connection) -> set[str]:
    """Return the ids of ports and servers that the checks of ports leave out.

    These are the targets of pending cleanups of ports, and the servers with a running action.
    """
    return {
        *(row.target for row in cleanups.list_all(tx) if row.kind in cleanups.OF_PORTS),
        *tx.scalars(sa.select(actions.c.server_id).where(actions.c.state.in_(LIVE))),
        *tx.scalars(_HELD),
    }


def _port_remedy(port: JsonMapping, resting: Mapping[str, ServerPlace]) -> str:
    """Return a text with the operator's commands for a port that no server's record has.

    If the port's server is in ``resting``, the commands attach or delete the port. Otherwise they
    adopt or discard a guest, or delete the port.

    Args:
        port: The port.
        resting: The servers without an action, by id.
    """
    port_id, server = port["id"], port["device_id"]
    if server in resting:
        return (
            f"To attach the port: openstack port set --device '' --device-owner '' {port_id}, then "
            f"openstack server add port {server} {port_id}. Otherwise: openstack port delete {port_id}"
        )
    return (
        "If a host has a guest of the server: kilonova host adopt or kilonova host discard. If not: "
        f"openstack port delete {port_id}"
    )


def wanderers(tx: Connection) -> set[str]:
    """Return the ids of the servers with a live migration, also an ended one.

    Only their ports can have bindings to two hosts.
    """
    return set(
        tx.scalars(
            sa.select(migrations.c.server_id)
            .distinct()
            .where(migrations.c.type == MigrationType.LIVE)
        )
    )


class Pending(NamedTuple):
    """Unfinished work of a server."""

    server: str
    #: Description of the work (see ``ages``).
    what: str
    #: Seconds.
    age: float


def ages(tx: Connection) -> dict[str, list[Pending]]:
    """Return unfinished work with the keys ``removals``, ``actions`` and ``cleanups``.

    A removal (a guest to be removed) is described by its host, an action by workflow, step, host
    and cause, and a pending cleanup by kind, target, number of tries and reason. A cleanup that
    looks for the result of a late call is included after its first attempt.
    """
    at = moment(tx)
    removals = [
        Pending(row.server_id, row.host, (at - row.changed_at) / SECOND)
        for row in tx.execute(_OWED)
    ]
    waiting = [
        Pending(
            row.server_id,
            f"{row.workflow}/{row.step or 'begin'} on {row.host or 'no host'}"
            f"{', stuck' if row.state == ActionState.STUCK else ''}{f': {row.cause}' if row.cause else ''}",
            (at - row.created_at) / SECOND,
        )
        for row in tx.execute(_IN_HAND)
    ]
    pending = [
        Pending(
            row.server_id,
            f"{cleanups.describe(row)}, tried {row.tries} times: {row.why}",
            (at - row.created_at) / SECOND,
        )
        for row in cleanups.list_all(tx)
        if row.tries or row.kind not in cleanups.LATE
    ]
    return {"removals": removals, "actions": waiting, "cleanups": pending}
