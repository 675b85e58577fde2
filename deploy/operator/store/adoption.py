# SPDX-License-Identifier: Apache-2.0
"""Creates or moves the record of a server for a guest without a record.

Called by ``kilonova host adopt`` after queries to the hosts and the network service.

Invariant: quota and the host's resources are counted as for any other server. All facts read before
are checked again in this one transaction: the server's row and place, that no action or move has
the server, and that no other guest has the assigned hardware.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from common.domain import errors, hardware, ids, states
from common.domain.context import RequestContext
from common.domain.json_types import JsonObject
from common.domain.models import Flavor, HardwareAssignment
from common.domain.server_facts import HostedServer
from common.domain.statuses import OPEN_MIGRATIONS, GuestState
from common.domain.wire import from_wire, to_wire
from common.notifications.events import Notice
from common.store import cleanups
from common.store.engine import for_update, notification_settings, now
from common.store.hosts import host_status
from common.store.notifications import outbox
from common.store.placement import allocations, inventories, zones
from common.store.placement.allocations import ClaimRequest
from common.store.rows import GuestRow, ServerRow, Values
from common.store.schema import allocations as held_table
from common.store.schema import guests as guests_table
from common.store.schema import hosts, migrations, providers, servers
from common.store.schema import inventories as stock_table
from common.store.servers import actions, guests, immediate_actions
from common.store.servers import servers as server_rows
from common.store.tenants import quotas

#: The name of the action in os-instance-actions.
NAME = "adopt"
CHANGED = "The records of server {server} have changed meanwhile; repeat the command."
#: States in which a server with a record may move to the guest's host.
_MAY_COME = (
    states.ACTIVE,
    states.STOPPED,
    states.PAUSED,
    states.SUSPENDED,
    states.RESCUED,
    states.ERROR,
    states.SHELVED_OFFLOADED,
)


@dataclass(frozen=True, slots=True)
class Adoption:
    """A guest, and the facts to write about its server."""

    server: str
    host: str
    #: As reported by the host.
    fence: int
    #: As reported by the host.
    power_state: int
    facts: HostedServer
    flavor: Flavor
    #: In the form of ``models.Interface``.
    interfaces: list[JsonObject]
    #: The host in the server's record, "" without a host. None: the server has no record.
    record: str | None = None
    #: True if quota and capacity of the host are ignored.
    is_forced: bool = False
    default_zone: str = "nova"

    @property
    def size(self) -> dict[str, int]:
        """Resource class -> amount that the server holds on its host.

        Raises:
            BadRequest: The flavor or the image requires hardware that Kilonova does not accept.
        """
        return hardware.resources(self.flavor, self.properties)

    @property
    def properties(self) -> Mapping[str, str]:
        return self.facts.image.properties if self.facts.image else {}

    @property
    def is_on(self) -> bool:
        return self.power_state != states.SHUTDOWN

    @property
    def vm_state(self) -> str:
        """The vm_state of the server after the adoption."""
        if self.facts.is_rescued:
            return states.RESCUED
        if self.facts.is_suspended:
            return states.SUSPENDED
        if not self.is_on:
            return states.STOPPED
        return states.PAUSED if self.power_state == states.POWER_PAUSED else states.ACTIVE


def adopt(tx: Connection, adoption: Adoption, limits: quotas.Numbers) -> None:
    """Create the server's row, or move the existing row to the guest's host.

    Also create the guest's record and allocation, a finished action in the journal, and a
    notification if notifications are configured. A guest on the former host becomes a pending
    removal. If the server has interfaces, a pending cleanup binds the ports.

    Args:
        tx: The transaction.
        adoption: The guest, and the facts about the server.
        limits: The quota limits of the server's project.

    Raises:
        NotFound: There is no such host.
        OverQuota: The project has no room for the server.
        Busy: An action or a move has the server.
        Conflict: The host does not answer or has no room, server, guest or assigned hardware
            changed since they were read, or ``_check`` refuses the server.
        BadRequest: As ``Adoption.size``.
    """
    quotas.lock(tx, adoption.facts.project_id)
    if not host_status.host_state(tx, adoption.host, locked=True).answers:
        raise errors.Conflict(
            f"Host {adoption.host} does not answer. Start its kilonova-agent first."
        )
    row = tx.execute(
        for_update(sa.select(servers).where(servers.c.id == adoption.server))
    ).one_or_none()
    _check(tx, adoption, row)
    _count(tx, adoption, row, limits)
    fence = max(adoption.fence, row.fence if row is not None else 0) + 1
    if row is not None and row.host:
        guests.add_removal(
            tx,
            adoption.server,
            fence,
            host=row.host,
            may_run=False,
            keeps_files=share_storage(tx, row.host, adoption.host),
        )
    _claim(tx, adoption)
    guests.add(
        tx,
        [
            {
                "server_id": adoption.server,
                "host": adoption.host,
                "fence": fence,
                "wanted": GuestState.RUNNING if adoption.is_on else GuestState.STOPPED,
                "may_run": adoption.is_on,
                "assignment": to_wire(adoption.facts.assignment)
                if adoption.facts.assignment
                else None,
            }
        ],
    )
    _write(tx, adoption, row, fence)
    context = RequestContext.of_ourselves(adoption.facts.project_id)
    immediate_actions.note(
        tx,
        NAME,
        adoption.server,
        actions.take_lock(tx, adoption.server, None),
        context,
        {"host": adoption.host, "was": adoption.record},
    )
    if adoption.interfaces:  # The ports may be bound to the previous host.
        cleanups.add(
            tx,
            [
                {
                    "kind": cleanups.PORTS,
                    "target": adoption.server,
                    "place": "",
                    "args": {},
                    "server_id": adoption.server,
                    "project_id": adoption.facts.project_id,
                    "why": f"the server was adopted on host {adoption.host}",
                }
            ],
        )
    if notification_settings(tx) is not None:
        outbox.add(tx, [Notice("instance.update", adoption.server)])


def share_storage(tx: Connection, first: str, second: str) -> bool:
    """Return True if both hosts report the same id of their storage.

    The result is False if a host reports no id.
    """
    storage_by_host = {
        row.name: (row.facts or {}).get("storage")
        for row in tx.execute(
            sa.select(hosts.c.name, hosts.c.facts).where(hosts.c.name.in_([first, second]))
        )
    }
    return bool(storage_by_host.get(first)) and storage_by_host.get(first) == storage_by_host.get(
        second
    )


def _check(tx: Connection, adoption: Adoption, row: ServerRow | None) -> None:
    """Check that server and guests are unchanged, and that the server may be adopted.

    Raises:
        Busy: An action or a move has the server.
        Conflict: The records changed, the guest has a record already, the server was deleted, its
            state does not permit the adoption, or the host reports another project.
    """
    places: list[GuestRow] = guests.places(tx, adoption.server)
    if any(place.host == adoption.host for place in places):
        raise errors.Conflict(
            f"The guest of server {adoption.server} on host {adoption.host} has a record already. See: kilonova host "
            f"removals {adoption.host}, and openstack server show {adoption.server}"
        )
    if row is not None and row.deleted:
        raise was_deleted(adoption.server, adoption.host)
    if (row is None) != (adoption.record is None) or (row is None and places):
        raise errors.Conflict(CHANGED.format(server=adoption.server))
    if row is None:
        return
    if row.project_id != adoption.facts.project_id:
        raise errors.Conflict(
            f"The guest cannot be adopted: server {adoption.server} belongs to project {row.project_id}, but host "
            f"{adoption.host} reports project {adoption.facts.project_id} for its guest."
        )
    if row.vm_state not in _MAY_COME:
        raise errors.Conflict(
            f"Server {adoption.server} cannot move to the guest's host while its vm_state is {row.vm_state}. Confirm, "
            f"revert, restore or delete the server, or run: openstack server set --state error {adoption.server}. "
            "Then repeat the command."
        )
    moving = tx.scalar(
        sa.select(migrations.c.id).where(
            migrations.c.server_id == adoption.server, migrations.c.status.in_(OPEN_MIGRATIONS)
        )
    )
    if row.action or moving is not None:
        raise errors.Busy(adoption.server)
    if (row.host or "") != adoption.record or any(place.host != row.host for place in places):
        raise errors.Conflict(CHANGED.format(server=adoption.server))


def was_deleted(server: str, host: str) -> errors.Conflict:
    """Return the error to raise if the server of the guest on ``host`` was deleted."""
    return errors.Conflict(
        f"Server {server} was deleted, and a deleted server is not created again. If the guest's disk is needed, "
        f"make an image of it. Then run: kilonova host discard {host} {server}"
    )


def _count(
    tx: Connection, adoption: Adoption, row: ServerRow | None, limits: quotas.Numbers
) -> None:
    """Check that the project has quota for the additional resources, unless ``is_forced``.

    These are all resources of a new server, or those by which an existing server grows.

    Raises:
        OverQuota: The project has no room for the server.
    """
    classes = Counter(adoption.size)
    size = quotas.Size(1, adoption.flavor.vcpus, adoption.flavor.memory_mb, classes)
    user = adoption.facts.user_id
    if row is not None:
        old_flavor = from_wire(Flavor, row.flavor)
        classes -= Counter(hardware.resources_of(old_flavor, row.image))
        additional = (
            max(0, adoption.flavor.vcpus - old_flavor.vcpus),
            max(0, adoption.flavor.memory_mb - old_flavor.memory_mb),
        )
        size, user = quotas.Size(0, *additional, classes), row.user_id
    if not adoption.is_forced:
        quotas.Account(tx, adoption.facts.project_id, limits).room(user, size)


def _claim(tx: Connection, adoption: Adoption) -> None:
    """Claim the resources of the host for the guest. With ``is_forced`` capacity is ignored.

    Raises:
        Conflict: The host has no room, the flavor requests dedicated hardware and the guest's
            hardware is unknown, or another guest has some of this hardware.
    """
    needs_assignment = hardware.hardware(adoption.flavor, adoption.properties).needs_assignment
    if needs_assignment and adoption.facts.assignment is None:
        raise errors.Conflict(
            f"Flavor {adoption.flavor.name} requests dedicated hardware, but host {adoption.host} does not report "
            "which hardware the guest has. Make an image of the guest's disk, and create a server from the image."
        )
    request = ClaimRequest(
        adoption.server,
        adoption.facts.project_id,
        adoption.facts.user_id,
        adoption.size,
        [adoption.host],
        forced=True,
        is_there=adoption.is_forced,
    )
    allocations.claim(tx, [request])
    if request.host is None:
        reason = "; ".join(shortages(tx, adoption.host, adoption.size)) or request.refused
        raise errors.Conflict(
            f"Host {adoption.host} has no room for the guest: {reason}. Move servers away, or give --force. Then "
            "the host gets no new servers until it has room."
        )
    if adoption.is_forced:
        inventories.settle(tx, list(allocations.lock(tx, [adoption.host]).values()))
    if adoption.facts.assignment is not None:
        _check_parts(tx, adoption, adoption.facts.assignment)


def shortages(tx: Connection, host: str, amounts: Mapping[str, int]) -> list[str]:
    """Return a text for each resource class of which the host has too little free.

    Args:
        tx: The transaction.
        host: Name of the host.
        amounts: Resource class -> needed amount.
    """
    used = {
        row.resource_class: int(row.used)
        for row in tx.execute(
            sa.select(held_table.c.resource_class, sa.func.sum(held_table.c.used).label("used"))
            .join(providers, providers.c.id == held_table.c.provider_id)
            .where(providers.c.host == host)
            .group_by(held_table.c.resource_class)
        )
    }
    capacities = {
        row.resource_class: int(inventories.capacity(row))
        for row in tx.execute(
            sa.select(stock_table)
            .join(providers, providers.c.id == stock_table.c.provider_id)
            .where(providers.c.host == host)
        )
    }
    return [
        f"{amount} {name} are needed, but {used.get(name, 0)} of {capacities.get(name, 0)} are in use"
        for name, amount in sorted(amounts.items())
        if used.get(name, 0) + amount > capacities.get(name, 0)
    ]


def _check_parts(tx: Connection, adoption: Adoption, own: HardwareAssignment) -> None:
    """Check that no other guest has CPUs or devices of ``own``. The caller has locked the provider.

    Raises:
        Conflict: Another guest has some of them.
    """
    own_parts = _parts(own)
    query = sa.select(guests_table).where(
        guests_table.c.host == adoption.host,
        guests_table.c.assignment.is_not(None),
        guests_table.c.server_id != adoption.server,
    )
    for row in tx.execute(query):
        shared = own_parts & _parts(from_wire(HardwareAssignment, row.assignment))
        if shared:
            raise errors.Conflict(
                f"The guest uses {', '.join(sorted(shared))} of host {adoption.host}, which server {row.server_id} "
                "has too. Move one of the two servers away."
            )


def _parts(assignment: HardwareAssignment) -> set[str]:
    return {
        *(f"CPU {cpu}" for node in assignment.numa_nodes for cpu in node.pins.values()),
        *(f"device {address}" for address in assignment.devices),
    }


def _write(tx: Connection, adoption: Adoption, row: ServerRow | None, fence: int) -> None:
    """Insert the row of a new server, or update the row of an existing server.

    The update sets host, zone, fence, states, flavor, image and interfaces, and clears fault and
    shelving.
    """
    zone = zones.hosts(tx, [adoption.host]).get(adoption.host, adoption.default_zone)
    values: Values = {
        "fence": fence,
        "vm_state": adoption.vm_state,
        "task_state": None,
        "power_state": adoption.power_state,
        "host": adoption.host,
        "availability_zone": zone,
        "flavor": to_wire(adoption.flavor),
        "flavor_id": adoption.flavor.id,
        "vcpus": adoption.flavor.vcpus,
        "memory_mb": adoption.flavor.memory_mb,
        "disk_gb": adoption.flavor.disk_gb,
        "image_id": adoption.facts.image.id if adoption.facts.image else None,
        "image": to_wire(adoption.facts.image) if adoption.facts.image else None,
        "interfaces": adoption.interfaces or None,
    }
    if row is not None:
        values |= {"fault": None, "shelved_image_id": None, "shelved_at": None}
    else:
        server_rows.insert(tx, [{**values, **_columns_from_host(adoption)}])
        values = {"launched_at": adoption.facts.created_at or now()}
        if adoption.facts.created_at:
            values["created_at"] = adoption.facts.created_at
    tx.execute(
        sa.update(servers).where(servers.c.id == adoption.server).values(**values, updated_at=now())
    )


def _columns_from_host(adoption: Adoption) -> Values:
    """Return further columns of a new server's row, which an existing server keeps at adoption.

    The values are the host's facts, and defaults for facts that the host does not report.
    """
    facts = adoption.facts
    return {
        "id": adoption.server,
        "project_id": facts.project_id,
        "user_id": facts.user_id,
        "name": facts.name,
        "hostname": facts.hostname or f"server-{adoption.server}",
        "pinned_availability_zone": facts.pinned_availability_zone or None,
        "key_name": facts.key_name or None,
        "key_data": facts.key_data or None,
        "config_drive": facts.config_drive,
        "meta": {},
        "tags": [],
        "scheduler_hints": {},
        "security_groups": [{"name": name} for name in facts.security_groups],
        "disks": facts.disks,
        "reservation_id": facts.reservation_id or f"r-{ids.new()[:8]}",
        "launch_index": facts.launch_index,
        "root_device_name": facts.root_device_name or "/dev/vda",
    }
