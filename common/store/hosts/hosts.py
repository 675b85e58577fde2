# SPDX-License-Identifier: Apache-2.0
"""Hosts: the machines with an agent, their sessions and their inventories.

A conductor calls ``register`` (``open_session``, then ``describe``) when an agent starts or returns
after silence, and ``describe`` alone when the host's inventory changes. ``list_all`` serves the
API's hypervisors.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from common.domain.clock import SECOND
from common.domain.json_types import JsonObject
from common.domain.models import HostInventory
from common.domain.service_binaries import Binary
from common.domain.statuses import ActionState, GuestState
from common.domain.wire import to_wire
from common.service.log import get_logger
from common.store.engine import for_update, insert_ignore, now
from common.store.hosts import services
from common.store.placement import allocations, inventories
from common.store.placement.providers import of_host
from common.store.rows import Values
from common.store.schema import (
    actions,
    guests,
    heartbeats,
    hosts,
    provider_traits,
    providers,
    servers,
)
from common.store.schema import allocations as allocations_table
from common.store.schema import inventories as inventories_table
from common.store.schema import services as services_table

log = get_logger(__name__)
#: The prefix of an entry of ``hosts.unclaimed`` that names files without a guest.
FILES = "files/"
#: Limit of session numbers, which every JSON reader represents exactly.
_SESSIONS_MOST = 2**53 - 2


def register(tx: Connection, name: str, boot_id: str, inventory: HostInventory) -> tuple[int, bool]:
    """Open a session of a new or known host, and store the host's inventory.

    Returns:
        The session, and True if the host was booted since its last registration. False at the first
        registration.

    Raises:
        Conflict: An operator's resource provider has the name of the host, and has a parent or
            children.
    """
    opened = open_session(tx, name, boot_id, inventory)
    describe(tx, name, inventory)
    return opened


def open_session(
    tx: Connection, name: str, boot_id: str, inventory: HostInventory
) -> tuple[int, bool]:
    """Open a new session of the host, and end a fencing of the host.

    The rows of a new host and its compute service are inserted. No provider is locked, so the
    caller can lock servers before ``describe``, which must follow.

    Returns:
        The session, and True if the host was booted since its last registration. False at the first
        registration.
    """
    insert_ignore(
        tx,
        hosts,
        {
            "name": name,
            "session": 0,
            "boot_id": boot_id,
            "booted_at": now(),
            "created_at": now(),
            "updated_at": now(),
            "hypervisor_hostname": name,  # until ``describe``
            **_facts(inventory),
        },
    )
    row = tx.execute(for_update(sa.select(hosts).where(hosts.c.name == name))).one()
    booted = row.boot_id != boot_id
    session = 1 + secrets.randbelow(_SESSIONS_MOST)
    values: Values = {"session": session, "boot_id": boot_id, "newest_exchange": 0}
    if booted:
        values["booted_at"] = now()
    tx.execute(sa.update(hosts).where(hosts.c.name == name).values(values))
    services.enrol(tx, name, Binary.COMPUTE, inventory.version)
    services.record_return(tx, name)
    return session, booted


def is_newest(tx: Connection, name: str, session: int, number: int) -> bool:
    """Record the exchange ``number`` of the session, and return True if it is the newest.

    Returns False if this or a later exchange is recorded already, or the session has ended.
    """
    exchange = {"host": name, "of_session": session, "newest_exchange": number, "number": number}
    return bool(tx.execute(_RECORD_EXCHANGE, exchange).rowcount)


_HOST: sa.BindParameter[str] = sa.bindparam("host")
_RECORD_EXCHANGE = sa.update(hosts).where(
    hosts.c.name == _HOST,
    hosts.c.session == sa.bindparam("of_session"),
    hosts.c.newest_exchange < sa.bindparam("number"),
)


def describe(tx: Connection, name: str, inventory: HostInventory) -> None:
    """Store the inventory and traits of a registered host, and record a heartbeat.

    A host that was removed meanwhile is ignored, and must register again.

    Raises:
        Conflict: An operator's resource provider has the name of the host, and has a parent or
            children.
    """
    if not tx.execute(
        sa.update(hosts).where(hosts.c.name == name).values(**_facts(inventory), updated_at=now())
    ).rowcount:
        return
    _name_hypervisor(tx, name, inventory.hypervisor_hostname)
    services.beat(tx, [name], Binary.COMPUTE)
    provider = of_host(tx, name)
    allocations.touch(tx, [provider])
    inventories.report(
        tx,
        provider,
        [
            inventories.Reported(
                resource_class, total, reserved, inventory.ratios.get(resource_class, 1.0)
            )
            for resource_class, total, reserved in (
                ("VCPU", inventory.vcpus, 0),
                ("PCPU", inventory.pcpus, 0),
                ("MEMORY_MB", inventory.memory_mb, inventory.reserved_memory_mb),
                ("DISK_GB", inventory.disk_gb, inventory.reserved_disk_gb),
            )
            if total
        ],
    )
    tx.execute(
        sa.delete(provider_traits).where(
            provider_traits.c.provider_id == provider, provider_traits.c.by_hand.is_(False)
        )
    )
    kept = set(
        tx.scalars(
            sa.select(provider_traits.c.trait).where(provider_traits.c.provider_id == provider)
        )
    )
    reported = sorted({*inventory.traits, *services.traits(tx, name)} - kept)
    if reported:
        tx.execute(
            sa.insert(provider_traits),
            [{"provider_id": provider, "trait": trait, "by_hand": False} for trait in reported],
        )


def _name_hypervisor(tx: Connection, name: str, reported: str) -> None:
    """Store the hypervisor name that a host reports, unless the name belongs to another host.

    The name of a host belongs to that host. Any other name belongs to the host that has it already,
    or to the oldest if several have it. If the name is refused, the hypervisor keeps its previous
    name, or else gets the host's name. A new refusal is logged. ``reported`` "" means the host's
    name. If the hypervisor gets the host's name, other hypervisors lose this name (``_take_back``).
    """
    reported = reported or name
    rows = {
        row.name: row
        for row in tx.execute(
            sa.select(
                hosts.c.name,
                hosts.c.created_at,
                hosts.c.hypervisor_hostname,
                hosts.c.refused_hostname,
            ).where(
                sa.or_(hosts.c.name.in_([name, reported]), hosts.c.hypervisor_hostname == reported)
            )
        )
    }
    own = rows.pop(name)
    previous, age = own.hypervisor_hostname, (own.created_at, name)
    rivals = [
        other
        for other, row in rows.items()
        if other == reported or previous != reported or (row.created_at, other) < age
    ]
    accepted, refused = reported, None
    if rivals and reported != name:
        accepted, refused = (previous if previous != reported else name), reported
        if own.refused_hostname != refused:
            log.warning(
                "a host reports the hypervisor name of another host, so the API shows another name",
                host=name,
                reported=reported,
                other_host=min(rivals),
                shown=accepted,
            )
    if accepted == name:
        _take_back(tx, name)
    if (accepted, refused) != (previous, own.refused_hostname):
        tx.execute(
            sa.update(hosts)
            .where(hosts.c.name == name)
            .values(hypervisor_hostname=accepted, refused_hostname=refused)
        )


def _take_back(tx: Connection, name: str) -> None:
    """Rename the hypervisors of other hosts that have the name of this host, to their hosts' names.

    They reported the name before this host existed. The name is recorded as refused for them.
    """
    tx.execute(
        sa.update(hosts)
        .where(hosts.c.hypervisor_hostname == name, hosts.c.name != name)
        .values(hypervisor_hostname=hosts.c.name, refused_hostname=name)
    )


def note_guests(tx: Connection, name: str, server_ids: Iterable[str]) -> list[str]:
    """Store the servers whose guests a host reports without a guest record of that host.

    ``server_ids`` are the servers of all guests that the host has.

    Returns:
        The servers stored now that the previous call for this host did not store.
    """
    reported = set(server_ids)
    known = tx.scalars(_GUESTS, {"host": name}) if reported else ()
    unclaimed = sorted(reported - set(known))
    before = tx.scalar(_UNCLAIMED_BY, {"host": name}) or []
    entries = [*unclaimed, *(one for one in before if one.startswith(FILES))]
    if entries != before:
        tx.execute(sa.update(hosts).where(hosts.c.name == name).values(unclaimed=entries or None))
    return sorted(set(unclaimed) - set(before))


_GUESTS = sa.select(guests.c.server_id).where(guests.c.host == _HOST)
_UNCLAIMED_BY = sa.select(hosts.c.unclaimed).where(hosts.c.name == _HOST)


def read_unclaimed(tx: Connection) -> list[tuple[str, str]]:
    """Return (server, host) of guests in the latest reports that have no guest record now."""
    found = [
        (server, row.name)
        for row in tx.execute(_UNCLAIMED)
        for server in row.unclaimed
        if not server.startswith(FILES)
    ]
    if not found:
        return []
    query = sa.select(guests.c.server_id, guests.c.host).where(
        guests.c.server_id.in_(sorted({server for server, _ in found}))
    )
    known = {(row.server_id, row.host) for row in tx.execute(query)}
    return sorted(set(found) - known)


def note_refusals(tx: Connection, refused: Mapping[str, int]) -> None:
    """Add numbers of refused messages (host -> number) to the hosts' counters, with the time.

    Unknown hosts are ignored.
    """
    tx.execute(
        sa.update(hosts)
        .where(hosts.c.name == sa.bindparam("host"))
        .values(
            refused_messages=hosts.c.refused_messages + sa.bindparam("number"), refused_at=now()
        ),
        [{"host": host, "number": number} for host, number in sorted(refused.items())],
    )


class RefusedHost(NamedTuple):
    """A host with refused messages, or with a refused hypervisor name.

    refused_messages: Number of refused messages since the host exists.
    refused_ago: Seconds since the last refused message, or None without a recent one.
    hypervisor_hostname: The name that the API shows.
    refused_hostname: The reported name, or None if that is not refused.
    """

    name: str
    refused_messages: int
    refused_ago: int | None
    hypervisor_hostname: str
    refused_hostname: str | None


def list_refused(tx: Connection, seconds: int) -> list[RefusedHost]:
    """Return hosts with messages refused in the last ``seconds``, or a refused hypervisor name."""
    since = now() - seconds * SECOND
    is_recent = hosts.c.refused_at >= since
    query = (
        sa.select(
            hosts.c.name,
            hosts.c.refused_messages,
            sa.case((is_recent, now() - hosts.c.refused_at)),
            hosts.c.hypervisor_hostname,
            hosts.c.refused_hostname,
        )
        .where(sa.or_(is_recent, hosts.c.refused_hostname.is_not(None)))
        .order_by(hosts.c.name)
    )
    return [
        RefusedHost(name, number, None if ago is None else max(0, int(ago)) // SECOND, *names)
        for name, number, ago, *names in tx.execute(query)
    ]


def store_metrics(tx: Connection, name: str, metrics: Mapping[str, float]) -> None:
    """Store a host's metrics with the current time."""
    tx.execute(
        sa.update(hosts).where(hosts.c.name == name).values(metrics=dict(metrics), metrics_at=now())
    )


def _facts(inventory: HostInventory) -> Values:
    return {
        "hypervisor_type": inventory.hypervisor_type,
        "hypervisor_version": inventory.hypervisor_version,
        "host_ip": inventory.host_ip,
        "cpu_info": inventory.cpu_info,
        "traits": sorted(inventory.traits),
        "numa_nodes": to_wire(inventory.numa_nodes),
        "devices": to_wire(inventory.devices),
        "facts": inventory.facts,
    }


# Frequent statements are built once.
_UNCLAIMED = sa.select(hosts.c.name, hosts.c.unclaimed).where(hosts.c.unclaimed.is_not(None))
_SESSIONS = sa.select(hosts.c.name, hosts.c.session)
_SESSIONS_OF = _SESSIONS.where(hosts.c.name.in_(sa.bindparam("names", expanding=True)))
_WAITED_FOR = sa.union(
    sa.select(actions.c.host).where(
        actions.c.state == ActionState.WAITING, actions.c.host.is_not(None)
    ),
    sa.select(guests.c.host).where(guests.c.wanted == GuestState.ABSENT),
)


def sessions(tx: Connection, names: Iterable[str]) -> dict[str, int]:
    """Return the current session of each of these hosts. Unknown hosts are left out."""
    return {
        row.name: row.session for row in tx.execute(_SESSIONS_OF, {"names": sorted(set(names))})
    }


def all_sessions(tx: Connection) -> dict[str, int]:
    """Return the current session of every host."""
    return {row.name: row.session for row in tx.execute(_SESSIONS)}


def waited_for(tx: Connection) -> set[str]:
    """Return the hosts with a command whose result is missing, or with a pending guest cleanup."""
    return set(tx.scalars(_WAITED_FOR))


def facts_of(tx: Connection, names: Iterable[str]) -> dict[str, JsonObject]:
    """Return the reported facts of these hosts, with ``cpu_info``. Unknown hosts are left out."""
    return {
        row.name: {**(row.facts or {}), "cpu_info": row.cpu_info}
        for row in tx.execute(_FACTS_OF, {"names": sorted(set(names))})
    }


_FACTS_OF = sa.select(hosts.c.name, hosts.c.facts, hosts.c.cpu_info).where(
    hosts.c.name.in_(sa.bindparam("names", expanding=True))
)


# --- for the API ---
def list_all(
    tx: Connection,
    name: str | None = None,
    *,
    service_id: int | None = None,
    provider_uuid: str | None = None,
    pattern: str | None = None,
    after: int | None = None,
    limit: int | None = None,
) -> list[JsonObject]:
    """Return hosts as objects for the API, ordered by the id of their compute service.

    Hosts without a compute service or a resource provider are left out. This takes one statement,
    and three for each thousand hosts. Each object contains the columns of ``hosts``, the service
    (service_id, service_uuid, disabled, disabled_reason, forced_down, up, seen_at), provider_id and
    provider_uuid, the inventory by class (total, reserved, ratio, used), ``running_vms`` (the
    number of servers), and ``failures`` (failed builds in a row) with ``failed_at``.

    Args:
        tx: The transaction.
        name: Only the host with this name.
        service_id: Only the host with this service id.
        provider_uuid: Only the host with this resource provider.
        pattern: Only hosts with this text in the hypervisor's hostname.
        after: The service id after which the page begins. None: the first page.
        limit: The size of the page. None: all hosts.
    """
    both = sa.and_(services_table.c.host == hosts.c.name, services_table.c.binary == Binary.COMPUTE)
    beats = sa.and_(heartbeats.c.host == hosts.c.name, heartbeats.c.binary == Binary.COMPUTE)
    query = (
        sa.select(
            hosts,
            services_table.c.id.label("service_id"),
            services_table.c.uuid.label("service_uuid"),
            services_table.c.disabled,
            services_table.c.disabled_reason,
            services_table.c.forced_down,
            heartbeats.c.up,
            heartbeats.c.seen_at,
            providers.c.id.label("provider_id"),
            providers.c.uuid.label("provider_uuid"),
            providers.c.failures,
            providers.c.failed_at,
        )
        .select_from(
            hosts.join(services_table, both)
            .outerjoin(heartbeats, beats)
            .join(providers, providers.c.host == hosts.c.name)
        )
        .order_by(services_table.c.id)
        .limit(limit)
    )
    for column, value in (
        (hosts.c.name, name),
        (services_table.c.id, service_id),
        (providers.c.uuid, provider_uuid),
    ):
        if value is not None:
            query = query.where(column == value)
    if pattern is not None:
        query = query.where(hosts.c.hypervisor_hostname.contains(pattern, autoescape=True))
    if after is not None:
        query = query.where(services_table.c.id > after)
    found = [dict(row._mapping) for row in tx.execute(query)]
    for start in range(0, len(found), _AT_ONCE):
        _add_stock(tx, found[start : start + _AT_ONCE])
    return found


_AT_ONCE = 1000  # keys in one statement


def _add_stock(tx: Connection, found: list[JsonObject]) -> None:
    stock = _stock(tx, [host["provider_id"] for host in found])
    counts = _counts(tx, [host["name"] for host in found])
    for host in found:
        host["inventory"] = stock.get(host["provider_id"], {})
        host["running_vms"] = counts.get(host["name"], 0)


def _stock(tx: Connection, provider_ids: list[int]) -> dict[int, dict[str, dict[str, float]]]:
    used: dict[tuple[int, str], int] = {}
    for row in tx.execute(
        sa.select(
            allocations_table.c.provider_id,
            allocations_table.c.resource_class,
            sa.func.sum(allocations_table.c.used).label("used"),
        )
        .where(allocations_table.c.provider_id.in_(provider_ids))
        .group_by(allocations_table.c.provider_id, allocations_table.c.resource_class)
    ):
        used[row.provider_id, row.resource_class] = int(row.used)
    stock: dict[int, dict[str, dict[str, float]]] = {}
    for row in tx.execute(
        sa.select(inventories_table).where(inventories_table.c.provider_id.in_(provider_ids))
    ):
        stock.setdefault(row.provider_id, {})[row.resource_class] = {
            "total": row.total,
            "reserved": row.reserved,
            "ratio": row.allocation_ratio,
            "used": used.get((row.provider_id, row.resource_class), 0),
        }
    return stock


def _counts(tx: Connection, names: list[str]) -> dict[str, int]:
    return {
        row.host: row.number
        for row in tx.execute(
            sa.select(servers.c.host, sa.func.count().label("number"))
            .where(servers.c.host.in_(names), servers.c.deleted == 0)
            .group_by(servers.c.host)
        )
    }
