# SPDX-License-Identifier: Apache-2.0
"""The invariants of placement: allocations, capacity, assigned hardware, server groups, aggregates.

Called by ``doctor.check``. Reads only. Allocations are compared with the amounts that flavor and
image need, so that a change of the rules since a server's placement becomes visible.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from common.domain import errors, hardware
from common.domain.json_types import JsonObject
from common.domain.models import Device, Flavor, HardwareAssignment, NumaNode
from common.domain.service_binaries import COMPUTE_DISABLED, Binary
from common.domain.statuses import OPEN_MIGRATIONS, GuestState
from common.domain.wire import from_wire
from common.store.placement.inventories import capacity
from common.store.rows import GuestRow, MigrationRow, ServerRow
from common.store.schema import (
    aggregate_hosts,
    aggregates,
    allocations,
    consumers,
    hosts,
    inventories,
    provider_traits,
    providers,
)
from common.store.schema import services as services_table
from common.store.tenants import server_groups
from deploy.operator.doctor.finding import Finding

# Queries are built once, because monitoring runs the checks often.
_HELD = sa.select(allocations, providers.c.host).join(
    providers, providers.c.id == allocations.c.provider_id
)
_CONSUMERS = sa.select(consumers.c.id)
_USED = sa.select(
    allocations.c.provider_id,
    allocations.c.resource_class,
    sa.func.sum(allocations.c.used).label("used"),
).group_by(allocations.c.provider_id, allocations.c.resource_class)
_INVENTORIES = sa.select(inventories, providers.c.name).join(
    providers, providers.c.id == inventories.c.provider_id
)
_MARKED = (
    sa.select(providers.c.host)
    .join(provider_traits, provider_traits.c.provider_id == providers.c.id)
    .where(provider_traits.c.trait == COMPUTE_DISABLED, providers.c.host.is_not(None))
)
_DISABLED = sa.select(providers.c.host).join(
    services_table,
    sa.and_(
        services_table.c.host == providers.c.host,
        services_table.c.binary == Binary.COMPUTE,
        services_table.c.disabled.is_(True),
    ),
)
_HOSTS = sa.select(hosts.c.name)
_MEMBERS = sa.select(aggregate_hosts, aggregates.c.name, aggregates.c.meta).select_from(
    aggregate_hosts.outerjoin(aggregates, aggregates.c.id == aggregate_hosts.c.aggregate_id)
)


def check(
    tx: Connection,
    live: Mapping[str, ServerRow],
    records: Sequence[GuestRow],
    moves: Sequence[MigrationRow],
) -> Iterator[Finding]:
    """Yield the findings about allocations, consumers, capacity, hardware and server groups.

    This also checks aggregates, and the trait of disabled hosts.

    Args:
        tx: The transaction.
        live: The servers that are not deleted, by id.
        records: The guests.
        moves: The migrations that are open or hold resources.
    """
    yield from _allocations(tx, live, records, moves)
    yield from _capacity(tx)
    yield from _assignments(tx, live, records, _flavors_of_moves(moves))
    yield from _groups(tx)
    yield from _hosts(tx)


# --- allocations of servers ---
def _allocations(
    tx: Connection,
    live: Mapping[str, ServerRow],
    records: Sequence[GuestRow],
    moves: Sequence[MigrationRow],
) -> Iterator[Finding]:
    """Check that exactly the guests have allocations, with the amounts of flavor and image.

    During a move the source has the amounts of the old flavor, the destination those of the new
    flavor. During a resize on the same host, the migration may also have an allocation, which has
    the amounts for a revert. Amounts of guests to be removed or of deleted servers are not checked.
    Also check that exactly the consumers have allocations.
    """
    held: dict[tuple[str, str], dict[str, int]] = defaultdict(dict)
    for row in tx.execute(_HELD):
        held[row.consumer_id, row.host][row.resource_class] = row.used
    places = {(row.holder or row.server_id, row.host): row for row in records}
    kept_amounts = {
        (move.uuid, move.source_host): _amounts_for_revert(live[move.server_id], move)
        for move in moves
        if move.status in OPEN_MIGRATIONS
        and move.dest_host == move.source_host
        and move.server_id in live
    }
    for place in held.keys() & kept_amounts.keys():
        if held[place] != kept_amounts[place]:
            yield Finding(
                "allocation-exact",
                place[0],
                f"holds {held[place]} on {place[1]} for the revert of a resize, which needs {kept_amounts[place]}",
                "allocation-of-way-back",
                (place[1],),
            )
    for consumer, host in held.keys() - places.keys() - kept_amounts.keys():
        yield Finding(
            "allocation-of-guest",
            consumer,
            f"holds resources on {host}, but has no guest there",
            "allocation-of-nothing",
            (host or "",),
        )
    for holder, host in places.keys() - held.keys():
        yield Finding(
            "allocation-of-guest",
            holder,
            f"has a guest on {host} without an allocation",
            "guest-without-allocation",
            (host,),
        )
    flavors = _flavors_of_moves(moves)
    for place, amounts in held.items():
        guest = places.get(place)
        if guest is not None and guest.server_id in live and guest.wanted != GuestState.ABSENT:
            server = live[guest.server_id]
            yield from _check_amounts(
                server, flavors.get((server.id, guest.host), server.flavor), guest.host, amounts
            )
    consumer_ids = set(tx.scalars(_CONSUMERS))
    holding = {consumer for consumer, _ in held}
    for consumer in holding ^ consumer_ids:
        yield Finding(
            "consumer",
            consumer,
            "has allocations without a consumer"
            if consumer in holding
            else "is a consumer without allocations",
            "no-consumer" if consumer in holding else "consumer-of-nothing",
        )


def _amounts_for_revert(server: ServerRow, move: MigrationRow) -> dict[str, int]:
    """Return the amounts by which the old flavor exceeds the new flavor.

    A resize on the same host keeps them for a revert.
    """
    old, new = (
        hardware.resources_of(from_wire(Flavor, flavor), server.image)
        for flavor in (move.old_flavor, move.new_flavor)
    )
    return {
        name: amount - new.get(name, 0) for name, amount in old.items() if amount > new.get(name, 0)
    }


Flavors = Mapping[tuple[str, str], JsonObject]


def _flavors_of_moves(moves: Sequence[MigrationRow]) -> Flavors:
    """Return (server id, host) -> flavor for the two hosts of each open migration.

    If both are the same host, this is the new flavor.
    """
    flavors = {}
    for move in moves:
        if move.status in OPEN_MIGRATIONS and move.source_host and move.dest_host:
            flavors[move.server_id, move.source_host] = move.old_flavor
            flavors[move.server_id, move.dest_host] = move.new_flavor
    return flavors


def _check_amounts(
    server: ServerRow, flavor: JsonObject, host: str, amounts: Mapping[str, int]
) -> Iterator[Finding]:
    try:
        expected = hardware.resources_of(from_wire(Flavor, flavor), server.image)
    except errors.BadRequest as problem:
        yield Finding(
            "allocation-exact",
            server.id,
            f"has a flavor or image that this release refuses: {problem}",
            "flavor-refused",
        )
        return
    if amounts != expected:
        yield Finding(
            "allocation-exact",
            server.id,
            f"holds {dict(amounts)} on {host}, but its flavor and image need {expected}",
            facts=(host,),
        )


def _properties(server: ServerRow) -> dict[str, str]:
    return dict((server.image or {}).get("properties", {}))


def _capacity(tx: Connection) -> Iterator[Finding]:
    """Check that the allocations of each provider do not exceed the capacity.

    If the capacity was reduced below the allocated amount, up to that amount (``excess``) is
    accepted. An allocation without an inventory is a finding.
    """
    used = {(row.provider_id, row.resource_class): int(row.used) for row in tx.execute(_USED)}
    for row in tx.execute(_INVENTORIES):
        amount = used.pop((row.provider_id, row.resource_class), 0)
        if amount > max(capacity(row), row.excess):
            yield Finding(
                "capacity",
                row.name,
                f"{amount} {row.resource_class} are allocated, but the capacity is {capacity(row)}",
            )
    for (provider, resource_class), amount in used.items():
        yield Finding(
            "capacity",
            str(provider),
            f"{amount} {resource_class} are allocated without an inventory",
        )


# --- hardware of hosts ---
def _assignments(
    tx: Connection, live: Mapping[str, ServerRow], records: Sequence[GuestRow], flavors: Flavors
) -> Iterator[Finding]:
    """Check the assigned hardware of guests.

    A guest has assigned hardware exactly if the flavor or image requests some. Guests to be removed
    may have some. No two guests share hardware, and the hardware exists on the host.

    Args:
        tx: The transaction.
        live: The servers that are not deleted, by id.
        records: The guests.
        flavors: From ``_flavors_of_moves``. Other guests have the flavor of the server.
    """
    by_host: dict[str, list[tuple[str, HardwareAssignment]]] = defaultdict(list)
    for row in records:
        if row.assignment is not None:
            by_host[row.host].append((row.server_id, from_wire(HardwareAssignment, row.assignment)))
        server = live.get(row.server_id) if row.wanted != GuestState.ABSENT else None
        if server is not None and (row.assignment is not None) != _needs_assignment(
            server, flavors.get((server.id, row.host), server.flavor)
        ):
            yield Finding(
                "assignment-exact",
                row.server_id,
                "requests dedicated hardware of its host, but has none assigned"
                if row.assignment is None
                else "has assigned hardware that it does not ask for",
                "" if row.assignment is None else "assignment-not-asked-for",
                (row.host,),
            )
    if not by_host:
        return
    query = sa.select(hosts.c.name, hosts.c.numa_nodes, hosts.c.devices).where(
        hosts.c.name.in_(sorted(by_host))
    )
    host_rows = {row.name: row for row in tx.execute(query)}
    for host, held in by_host.items():
        yield from _check_unshared(host, held)
        if host in host_rows:
            numa_nodes = {
                record.id: record
                for record in (
                    from_wire(NumaNode, record) for record in host_rows[host].numa_nodes or ()
                )
            }
            devices = {
                from_wire(Device, record).address for record in host_rows[host].devices or ()
            }
            yield from _missing_hardware(host, held, numa_nodes, devices)


def _needs_assignment(server: ServerRow, flavor: JsonObject) -> bool:
    try:
        return hardware.hardware(from_wire(Flavor, flavor), _properties(server)).needs_assignment
    except errors.BadRequest:
        return False  # ``_check_amounts`` reports this server.


def _check_unshared(host: str, held: Sequence[tuple[str, HardwareAssignment]]) -> Iterator[Finding]:
    """Check that no two guests have the same CPU or device.

    Args:
        host: Name of the host.
        held: Server id and assigned hardware of each guest on the host.
    """
    owners: dict[str, list[str]] = defaultdict(list)
    for server, assignment in held:
        for numa_node in assignment.numa_nodes:
            for cpu in numa_node.pins.values():
                owners[f"CPU {cpu}"].append(server)
        for device in assignment.devices:
            owners[f"device {device}"].append(server)
    for part, servers in sorted(owners.items()):
        if len(servers) > 1:
            yield Finding(
                "assignment-exact", host, f"{part} is held by {', '.join(sorted(servers))}"
            )


def _missing_hardware(
    host: str,
    held: Sequence[tuple[str, HardwareAssignment]],
    numa_nodes: Mapping[int, NumaNode],
    devices: set[str],
) -> Iterator[Finding]:
    """Check that the assigned CPUs, memory pages and devices exist on the host.

    Hardware is missing if a host's configuration was reduced while guests had the hardware.

    Args:
        host: Name of the host.
        held: Server id and assigned hardware of each guest on the host.
        numa_nodes: The host's NUMA nodes by number.
        devices: Addresses of the host's devices.
    """
    pages: Counter[tuple[int, int]] = Counter()
    for server, assignment in held:
        for numa_node in assignment.numa_nodes:
            own = (
                set(numa_nodes[numa_node.numa_node].pcpus)
                if numa_node.numa_node in numa_nodes
                else set()
            )
            if set(numa_node.pins.values()) - own:
                yield Finding(
                    "assignment-exact",
                    server,
                    f"holds CPUs {sorted(set(numa_node.pins.values()) - own)} that NUMA node "
                    f"{numa_node.numa_node} of {host} does not report",
                )
            if numa_node.page_kb:
                pages[numa_node.numa_node, numa_node.page_kb] += (
                    numa_node.memory_mb * 1024 // numa_node.page_kb
                )
        gone = sorted(set(assignment.devices) - devices)
        if gone:
            yield Finding(
                "assignment-exact", server, f"holds devices {gone} that {host} does not report"
            )
    for (number, size), count in sorted(pages.items()):
        existing = numa_nodes[number].pages.get(str(size), 0) if number in numa_nodes else 0
        if count > existing:
            yield Finding(
                "assignment-exact",
                host,
                f"{count} of {existing} pages of {size} KiB in NUMA node {number} are held",
            )


# --- server groups and hosts ---
def _groups(tx: Connection) -> Iterator[Finding]:
    """Check that the servers of groups with hard policies are on allowed hosts.

    Several servers with the policy affinity are on one host. With anti-affinity, a host has at most
    ``max_server_per_host`` servers of the group. A guest to be removed does not count.
    """
    for group, group_state in server_groups.hard(tx).items():
        counts = Counter(host for _, host in group_state.members)
        if (
            group_state.policy == server_groups.AFFINITY
            and len(counts) > 1
            and len({server for server, _ in group_state.members}) > 1
        ):
            yield Finding(
                "group-policy",
                group,
                f"has the policy affinity, but its servers are on {', '.join(sorted(counts))}",
            )
        if group_state.policy == server_groups.ANTI_AFFINITY:
            for host, count in sorted(counts.items()):
                if count > group_state.most:
                    yield Finding(
                        "group-policy",
                        group,
                        f"has the policy anti-affinity with at most {group_state.most} servers per host, but {count} "
                        f"of its servers are on {host}",
                    )


def _hosts(tx: Connection) -> Iterator[Finding]:
    """Check traits of disabled hosts, and members of aggregates.

    A host has the trait COMPUTE_STATUS_DISABLED exactly if its service is disabled. Aggregates
    contain existing hosts, each in at most one zone.
    """
    marked, disabled = set(tx.scalars(_MARKED)), set(tx.scalars(_DISABLED))
    for host in sorted(marked ^ disabled):
        yield Finding(
            "disabled-trait",
            host,
            f"is {'' if host in disabled else 'not '}disabled and has "
            f"{'' if host in marked else 'not '}the trait {COMPUTE_DISABLED}",
        )
    host_names, zones = set(tx.scalars(_HOSTS)), defaultdict(set)
    for row in tx.execute(_MEMBERS):
        if row.name is None or row.host not in host_names:
            yield Finding(
                "aggregate-host",
                row.host,
                f"is a member of aggregate {row.name or row.aggregate_id}, but there is "
                f"{'no such aggregate' if row.name is None else 'no such host'}",
                facts=(str(row.aggregate_id),),
            )
        elif row.meta.get("availability_zone"):
            zones[row.host].add(row.meta["availability_zone"])
    for host, names in sorted(zones.items()):
        if len(names) > 1:
            yield Finding("one-zone", host, f"is in the zones {', '.join(sorted(names))}")
