# SPDX-License-Identifier: Apache-2.0
"""A guest that no record knows becomes a server again, as an operator says.

Called by ``kilonova host adopt``, which has asked the hosts and the network service. Must stay
true: quota and resources of the host are counted as for any other server, and whatever was read
before is looked at again in this one transaction: the server's row and its place, that no action
and no move has it, and that nobody else has the guest's parts of the host.
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

#: What os-instance-actions calls it.
NAME = "adopt"
CHANGED = "The records of {server} have changed meanwhile; look again."
#: States in which a server that has a record may get its guest's place.
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
    """A guest, and what is to be written of it. fence, power_state: as its host tells; interfaces:
    of ``models.Interface``; record: the host that the server's record names, "" for none, None: it
    has no record. is_forced: although quota or host have no room."""

    server: str
    host: str
    fence: int
    power_state: int
    facts: HostedServer
    flavor: Flavor
    interfaces: list[JsonObject]
    record: str | None = None
    is_forced: bool = False
    default_zone: str = "nova"

    @property
    def size(self) -> dict[str, int]:
        """Resource class -> amount that it holds of its host. Raises BadRequest."""
        return hardware.resources(self.flavor, self.properties)

    @property
    def properties(self) -> Mapping[str, str]:
        return self.facts.image.properties if self.facts.image else {}

    @property
    def is_on(self) -> bool:
        return self.power_state != states.SHUTDOWN

    @property
    def vm_state(self) -> str:
        """What the server is from now on."""
        if self.facts.is_rescued:
            return states.RESCUED
        if self.facts.is_suspended:
            return states.SUSPENDED
        if not self.is_on:
            return states.STOPPED
        return states.PAUSED if self.power_state == states.POWER_PAUSED else states.ACTIVE


def adopt(tx: Connection, one: Adoption, limits: quotas.Numbers) -> None:
    """Write the server's row, or its place, with the guest's record and its resources.

    Raises:
        NotFound: there is no such host. OverQuota: the project has no room for it. Conflict: the
        host does not answer or has no room, or server, guest or parts of the host are not as they
        were seen.
    """
    quotas.lock(tx, one.facts.project_id)
    if not host_status.host_state(tx, one.host, locked=True).answers:
        raise errors.Conflict(f"Host {one.host} does not answer: start its kilonova-agent first.")
    known = tx.execute(
        for_update(sa.select(servers).where(servers.c.id == one.server))
    ).one_or_none()
    _check(tx, one, known)
    _count(tx, one, known, limits)
    fence = max(one.fence, known.fence if known is not None else 0) + 1
    if known is not None and known.host:
        guests.add_debt(
            tx,
            one.server,
            fence,
            host=known.host,
            may_run=False,
            keeps_files=share_storage(tx, known.host, one.host),
        )
    _claim(tx, one)
    guests.add(
        tx,
        [
            {
                "server_id": one.server,
                "host": one.host,
                "fence": fence,
                "wanted": GuestState.RUNNING if one.is_on else GuestState.STOPPED,
                "may_run": one.is_on,
                "assignment": to_wire(one.facts.assignment) if one.facts.assignment else None,
            }
        ],
    )
    _write(tx, one, known, fence)
    context = RequestContext.of_ourselves(one.facts.project_id)
    immediate_actions.note(
        tx,
        NAME,
        one.server,
        actions.take_lock(tx, one.server, None),
        context,
        {"host": one.host, "was": one.record},
    )
    if one.interfaces:  # they may be bound to where it was
        cleanups.add(
            tx,
            [
                {
                    "kind": cleanups.PORTS,
                    "target": one.server,
                    "place": "",
                    "args": {},
                    "server_id": one.server,
                    "project_id": one.facts.project_id,
                    "why": f"it was adopted on host {one.host}",
                }
            ],
        )
    if notification_settings(tx) is not None:
        outbox.add(tx, [Notice("instance.update", one.server)])


def share_storage(tx: Connection, first: str, second: str) -> bool:
    """Have two hosts the same files, as they tell?"""
    found = {
        row.name: (row.facts or {}).get("storage")
        for row in tx.execute(
            sa.select(hosts.c.name, hosts.c.facts).where(hosts.c.name.in_([first, second]))
        )
    }
    return bool(found.get(first)) and found.get(first) == found.get(second)


def _check(tx: Connection, one: Adoption, known: ServerRow | None) -> None:
    """Are server and guests as they were seen?"""
    places: list[GuestRow] = guests.places(tx, one.server)
    if any(row.host == one.host for row in places):
        raise errors.Conflict(
            f"The guest of {one.server} on host {one.host} has a record; see kilonova host debts "
            f"{one.host}, and openstack server show {one.server}."
        )
    if known is not None and known.deleted:
        raise was_deleted(one.server, one.host)
    if (known is None) != (one.record is None) or (known is None and places):
        raise errors.Conflict(CHANGED.format(server=one.server))
    if known is None:
        return
    if known.project_id != one.facts.project_id:
        raise errors.Conflict(
            f"Server {one.server} is of project {known.project_id}, and its guest on {one.host} "
            f"says that it is of {one.facts.project_id}: it is not adopted."
        )
    if known.vm_state not in _MAY_COME:
        raise errors.Conflict(
            f"Server {one.server} is {known.vm_state}: confirm, revert, restore or delete it, or "
            f"openstack server set --state error {one.server}, and look again."
        )
    moving = tx.scalar(
        sa.select(migrations.c.id).where(
            migrations.c.server_id == one.server, migrations.c.status.in_(OPEN_MIGRATIONS)
        )
    )
    if known.action or moving is not None:
        raise errors.Busy(one.server)
    if (known.host or "") != one.record or any(row.host != known.host for row in places):
        raise errors.Conflict(CHANGED.format(server=one.server))


def was_deleted(server: str, host: str) -> errors.Conflict:
    """Why a server that was deleted does not come back."""
    return errors.Conflict(
        f"Server {server} was deleted, and its id is not given again: make an image of the guest's "
        f"disk if it is wanted, and then: kilonova host discard {host} {server}"
    )


def _count(tx: Connection, one: Adoption, known: ServerRow | None, limits: quotas.Numbers) -> None:
    """Has the project room for what it did not have before?"""
    classes = Counter(one.size)
    size = quotas.Size(1, one.flavor.vcpus, one.flavor.memory_mb, classes)
    user = one.facts.user_id
    if known is not None:
        had = from_wire(Flavor, known.flavor)
        classes -= Counter(hardware.resources_of(had, known.image))
        more = (max(0, one.flavor.vcpus - had.vcpus), max(0, one.flavor.memory_mb - had.memory_mb))
        size, user = quotas.Size(0, *more, classes), known.user_id
    if not one.is_forced:
        quotas.Account(tx, one.facts.project_id, limits).room(user, size)


def _claim(tx: Connection, one: Adoption) -> None:
    """Take what it holds of its host; where it already is, nothing but room counts."""
    needs = hardware.hardware(one.flavor, one.properties).needs_assignment
    if needs and one.facts.assignment is None:
        raise errors.Conflict(
            f"Its flavor {one.flavor.name} asks for parts of a host for itself, and the host does "
            "not tell which the guest has: make an image of its disk, and a server of that."
        )
    request = ClaimRequest(
        one.server,
        one.facts.project_id,
        one.facts.user_id,
        one.size,
        [one.host],
        forced=True,
        is_there=one.is_forced,
    )
    allocations.claim(tx, [request])
    if request.host is None:
        short = "; ".join(shortages(tx, one.host, one.size)) or request.refused
        raise errors.Conflict(
            f"Host {one.host} has no room for it: {short}. Move servers away, or give --force, "
            "and it gets no new ones until there is room."
        )
    if one.is_forced:
        inventories.settle(tx, list(allocations.lock(tx, [one.host]).values()))
    if one.facts.assignment is not None:
        _check_parts(tx, one, one.facts.assignment)


def shortages(tx: Connection, host: str, amounts: Mapping[str, int]) -> list[str]:
    """Of which classes a host has too little, in words with numbers."""
    used = {
        row.resource_class: int(row.used)
        for row in tx.execute(
            sa.select(held_table.c.resource_class, sa.func.sum(held_table.c.used).label("used"))
            .join(providers, providers.c.id == held_table.c.provider_id)
            .where(providers.c.host == host)
            .group_by(held_table.c.resource_class)
        )
    }
    there = {
        row.resource_class: int(inventories.capacity(row))
        for row in tx.execute(
            sa.select(stock_table)
            .join(providers, providers.c.id == stock_table.c.provider_id)
            .where(providers.c.host == host)
        )
    }
    return [
        f"{amount} {name} are needed, and {used.get(name, 0)} of {there.get(name, 0)} are used"
        for name, amount in sorted(amounts.items())
        if used.get(name, 0) + amount > there.get(name, 0)
    ]


def _check_parts(tx: Connection, one: Adoption, own: HardwareAssignment) -> None:
    """No other guest has its CPUs or devices; its provider is locked."""
    wanted = _parts(own)
    query = sa.select(guests_table).where(
        guests_table.c.host == one.host,
        guests_table.c.assignment.is_not(None),
        guests_table.c.server_id != one.server,
    )
    for row in tx.execute(query):
        shared = wanted & _parts(from_wire(HardwareAssignment, row.assignment))
        if shared:
            raise errors.Conflict(
                f"The guest has {', '.join(sorted(shared))} of host {one.host}, which are "
                f"{row.server_id}'s by now: stop one of them, and move it away."
            )


def _parts(assignment: HardwareAssignment) -> set[str]:
    return {
        *(f"CPU {cpu}" for node in assignment.numa_nodes for cpu in node.pins.values()),
        *(f"device {address}" for address in assignment.devices),
    }


def _write(tx: Connection, one: Adoption, known: ServerRow | None, fence: int) -> None:
    """The row of a new server, or the place of one that is there."""
    zone = zones.hosts(tx, [one.host]).get(one.host, one.default_zone)
    values: Values = {
        "fence": fence,
        "vm_state": one.vm_state,
        "task_state": None,
        "power_state": one.power_state,
        "host": one.host,
        "availability_zone": zone,
        "flavor": to_wire(one.flavor),
        "flavor_id": one.flavor.id,
        "vcpus": one.flavor.vcpus,
        "memory_mb": one.flavor.memory_mb,
        "disk_gb": one.flavor.disk_gb,
        "image_id": one.facts.image.id if one.facts.image else None,
        "image": to_wire(one.facts.image) if one.facts.image else None,
        "interfaces": one.interfaces or None,
    }
    if known is not None:
        values |= {"fault": None, "shelved_image_id": None, "shelved_at": None}
    else:
        server_rows.insert(tx, [{**values, **_described(one)}])
        values = {"launched_at": one.facts.created_at or now()}
        if one.facts.created_at:
            values["created_at"] = one.facts.created_at
    tx.execute(
        sa.update(servers).where(servers.c.id == one.server).values(**values, updated_at=now())
    )


def _described(one: Adoption) -> Values:
    """What only its host remembers."""
    facts = one.facts
    return {
        "id": one.server,
        "project_id": facts.project_id,
        "user_id": facts.user_id,
        "name": facts.name,
        "hostname": facts.hostname or f"server-{one.server}",
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
