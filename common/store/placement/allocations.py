# SPDX-License-Identifier: Apache-2.0
"""Allocations: which consumer holds how much of which host.

The conductor writes them. A reset of a server's state and commands of operators, for example
``kilonova host adopt``, write them too. The placement service only reads them. Resources are taken
in ``claim`` and given back in ``release``. ``claim`` checks the conditions of a placement under
locks: first hard server groups, then providers in ascending order. Usage is always the sum of the
rows, never a counter.

Invariant: a disabled host gets no server unless the request is forced. Once ``services.set_state``
has committed, no claim follows, so an empty disabled host stays empty. Only the scheduler checks
other traits. They guide the placement and guarantee no property.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from common.domain import errors, numa
from common.domain.clock import SECOND
from common.domain.hardware import Hardware
from common.domain.json_types import JsonObject
from common.domain.models import Device, HardwareAssignment, NumaNode
from common.domain.service_binaries import COMPUTE_DISABLED
from common.domain.wire import from_wire
from common.service.log import get_logger
from common.store.engine import for_update, insert_many, now
from common.store.placement import zones
from common.store.rows import LockedProvider, Values
from common.store.schema import (
    allocations,
    consumers,
    guests,
    hosts,
    inventories,
    provider_traits,
    providers,
)
from common.store.tenants import server_groups

log = get_logger(__name__)


@dataclass
class ClaimRequest:
    """The claim of one consumer on the first of several hosts that still fits."""

    #: The consumer: a server or a migration.
    consumer: str
    project_id: str
    user_id: str
    #: The amount of each resource class.
    resources: dict[str, int]
    #: Candidates in order of preference.
    hosts: list[str]
    #: True if an operator insists on the host, even if it is disabled or builds fail there.
    forced: bool = False
    #: True if the consumer already uses the resources on the host, whether there is room or not.
    is_there: bool = False
    #: The availability zone that the host must still be in.
    zone: str | None = None
    #: The server group of the server.
    group: str | None = None
    #: The requested parts of the host. None: no particular parts.
    hardware: Hardware | None = None
    #: The host that the consumer leaves, and the migration that holds its resources there from now
    #: on.
    leaves: tuple[str, str] | None = None
    #: Resources that the consumer holds on the host that it leaves. If it stays there, only the
    #: difference is claimed.
    has: dict[str, int] = field(default_factory=dict)
    #: Result: the claimed host. None: no host fits.
    host: str | None = field(default=None)
    #: Result: the parts of the host that the consumer has.
    assignment: HardwareAssignment | None = field(default=None)
    #: Result: True if builds failed on the host before this claim.
    tried: bool = field(default=False)
    #: Result: why the last rejected host was rejected.
    refused: str = field(default="")

    def stays(self, host: str | None) -> bool:
        """Return True if ``host`` is the host that the consumer would leave."""
        return self.leaves is not None and self.leaves[0] == host


@dataclass(frozen=True, slots=True)
class FailedBuildLimit:
    """The limit of failed builds, after which claims leave out a host for a pause.

    After the pause the host gets one server as a trial, and is left out again until the build has
    succeeded or a further pause is over.
    """

    #: Failed builds in a row. 0: no host is ever left out.
    failures: int = 5
    #: Seconds for which the host is left out.
    pause: int = 300


@dataclass
class _Room:
    """The free amount and the units of one resource class of a locked provider."""

    free: float
    min_unit: int
    max_unit: int
    step_size: int

    def fits(self, amount: int, has: int = 0) -> bool:
        return (
            amount - has <= self.free
            and self.min_unit <= amount <= self.max_unit
            and amount % self.step_size == 0
        )


@dataclass
class _Parts:
    """The CPUs, memory and devices of a locked host, and their assignments to guests."""

    numa_nodes: list[NumaNode]
    devices: list[Device]
    held: list[HardwareAssignment]


@dataclass
class _Host:
    """A host whose provider is locked, with the changes by claims of this transaction."""

    provider: int
    left_out: bool
    failures: int
    on_trial: bool
    disabled: bool = False
    rooms: dict[str, _Room] = field(default_factory=dict)
    parts: _Parts | None = None
    zone: str | None = None

    def refuses(
        self,
        request: ClaimRequest,
        amounts: Mapping[str, int],
        group: server_groups.Hard | None,
        name: str,
    ) -> str:
        """Return why the request cannot have this host, or "".

        If the request has ``hardware`` and nothing else prevents the claim, this also sets the
        request's ``assignment``.

        Args:
            request: The request.
            amounts: Resource class -> amount, without zeros.
            group: The server group of the request with a hard policy, or None.
            name: Name of this host.
        """
        if self.left_out and not request.forced:
            return "builds fail there"
        if self.disabled and not request.forced and not request.stays(name):
            return "disabled"
        if request.zone is not None and request.zone != self.zone and not request.forced:
            return f"not in zone {request.zone}"
        has = request.has if request.stays(name) else {}
        short = next(
            (
                one
                for one, amount in amounts.items()
                if one not in self.rooms
                or not (request.is_there or self.rooms[one].fits(amount, has.get(one, 0)))
            ),
            None,
        )
        if short is not None:
            return f"short of {short}"
        if group is not None and not group.allows(request.consumer, name):
            return f"its server group's policy {group.policy}"
        if request.hardware is not None:
            parts = self.parts or _Parts([], [], [])
            request.assignment = numa.fit(
                parts.numa_nodes, parts.devices, parts.held, request.hardware
            )
            return (
                ""
                if request.assignment is not None
                else "no CPUs, memory pages or devices that fit"
            )
        return ""

    def take(self, request: ClaimRequest, amounts: Mapping[str, int]) -> None:
        """Account for a request that has got this host, so that later requests see the rest.

        Subtract the amounts, or if the consumer stays on this host, only what it adds. Record the
        ``assignment``, and set ``tried``. A host on trial is left out after an unforced request.
        """
        has = request.has if request.stays(request.host) else {}
        for resource_class, amount in amounts.items():
            self.rooms[resource_class].free -= max(0, amount - has.get(resource_class, 0))
        if request.assignment is not None and self.parts is not None:
            self.parts.held.append(request.assignment)
        request.tried = self.failures > 0
        self.left_out = self.left_out or (self.on_trial and not request.forced)


def claim(
    tx: Connection,
    requests: Sequence[ClaimRequest],
    failed_build_limit: FailedBuildLimit | None = None,
    default_zone: str = "nova",
) -> None:
    """Claim the first of the proposed hosts that still fits, for each request.

    Consumers and allocations are inserted for the requests with a host. If the consumer leaves a
    host, the migration gets the resources there. The results are attributes of the requests:
    ``host`` (None: no host fits), ``assignment``, ``tried`` and ``refused``. The transaction locks
    only hosts that are the first choice of a request, or that a request leaves. Other alternates
    are not considered. The caller must get new proposals for the requests without a host. A request
    accounts for the earlier requests in the list.

    Args:
        tx: The transaction.
        requests: The claims.
        failed_build_limit: When hosts with failed builds are left out. None: the defaults.
        default_zone: The zone of hosts that are in no zone.
    """
    wanted = sorted({request.hosts[0] for request in requests if request.hosts})
    if not wanted:
        return
    groups = server_groups.lock_hard(
        tx, {request.group for request in requests if request.group and request.hosts}
    )
    wanted = sorted(
        {*wanted, *(request.leaves[0] for request in requests if request.leaves and request.hosts)}
    )
    locked = _hosts(
        tx,
        wanted,
        failed_build_limit or FailedBuildLimit(),
        any(request.hardware is not None for request in requests),
    )
    if any(request.zone is not None for request in requests):
        found = zones.hosts(tx, wanted)
        for name, host in locked.items():
            host.zone = found.get(name, default_zone)
    rows, holders, trials = [], [], set()
    for request in requests:
        amounts = {name: amount for name, amount in request.resources.items() if amount}
        group = groups.get(request.group or "")
        request.host = _first(request, amounts, group, locked)
        if request.host is None:
            continue
        host = locked[request.host]
        if host.on_trial and not request.forced:
            trials.add(host.provider)
        host.take(request, amounts)
        if group is not None:
            group.members.append((request.consumer, request.host))
        rows += _rows(host.provider, request.consumer, amounts)
        holders.append(_holder(request.consumer, "server", request))
        if request.leaves is not None and request.leaves[0] in locked:
            kept = _move_old_resources(tx, request, locked[request.leaves[0]].provider, amounts)
            rows += kept
            holders += (
                [_holder(request.leaves[1], "migration", request)]
                if kept or not request.stays(request.host)
                else []
            )
    if holders:
        _add_consumers(tx, holders)
        insert_many(tx, allocations, rows)
    if trials:
        tx.execute(
            sa.update(providers).where(providers.c.id.in_(sorted(trials))).values(failed_at=now())
        )


def _rows(provider: int, consumer: str, amounts: Mapping[str, int]) -> list[Values]:
    return [
        {"provider_id": provider, "consumer_id": consumer, "resource_class": name, "used": amount}
        for name, amount in amounts.items()
        if amount > 0
    ]


def _holder(consumer: str, kind: str, request: ClaimRequest) -> dict[str, str]:
    return {
        "id": consumer,
        "type": kind,
        "project_id": request.project_id,
        "user_id": request.user_id,
    }


def _move_old_resources(
    tx: Connection, request: ClaimRequest, provider: int, amounts: Mapping[str, int]
) -> list[Values]:
    """Give the resources at the old host to the migration, and return the allocations to insert.

    If the server leaves the host, the migration becomes the consumer of the allocations there, and
    the result is []. If the server stays, its old allocations are deleted, and the result contains
    the migration's allocations: the amounts that a revert would need in addition.
    """
    assert request.leaves is not None
    if not request.stays(request.host):
        hand_over(tx, provider, request.consumer, request.leaves[1])
        return []
    _drop(tx, provider, request.consumer)
    return _rows(
        provider,
        request.leaves[1],
        {name: had - amounts.get(name, 0) for name, had in request.has.items()},
    )


def _drop(tx: Connection, provider: int, consumer: str) -> None:
    tx.execute(
        sa.delete(allocations).where(
            allocations.c.provider_id == provider, allocations.c.consumer_id == consumer
        )
    )


def _first(
    request: ClaimRequest,
    amounts: Mapping[str, int],
    group: server_groups.Hard | None,
    locked: Mapping[str, _Host],
) -> str | None:
    for name in request.hosts:
        if name in locked:
            request.refused = locked[name].refuses(request, amounts, group, name)
            if not request.refused:
                return name
    return None


def _hosts(
    tx: Connection, names: Sequence[str], failed_build_limit: FailedBuildLimit, with_parts: bool
) -> dict[str, _Host]:
    """Lock the providers of these hosts, and return host -> free resources and failed builds.

    Hosts without a provider are left out. ``with_parts``: read CPUs, memory and devices too.
    """
    locked = {}
    for row in _lock(tx, names):
        bad = 0 < failed_build_limit.failures <= row.failures
        over = bad and row.at >= (row.failed_at or 0) + failed_build_limit.pause * SECOND
        locked[row.host] = _Host(
            row.id, left_out=bad and not over, failures=row.failures, on_trial=over
        )
    _read_rooms(tx, {host.provider: host for host in locked.values()})
    parts = _parts(tx, names) if with_parts else {}
    for name, host in locked.items():
        host.parts = parts.get(name)
    return locked


def _lock(tx: Connection, names: Sequence[str]) -> list[LockedProvider]:
    """Lock the providers of these hosts in the order of their ids, and return the rows.

    This also raises the providers' generations and sets ``changed_at``. Hosts without a provider
    are left out.
    """
    rows: list[LockedProvider] = list(tx.execute(_PROVIDERS_LOCKED, {"names": list(names)}))
    touch(tx, (row.id for row in rows))
    return rows


_PROVIDERS_LOCKED = for_update(
    sa.select(
        providers.c.id,
        providers.c.host,
        providers.c.failures,
        providers.c.failed_at,
        now().label("at"),
    )
    .where(providers.c.host.in_(sa.bindparam("names", expanding=True)))
    .order_by(providers.c.id)
)


def lock(tx: Connection, hosts: Sequence[str]) -> dict[str, int]:
    """Lock the providers of these hosts in the order of their ids, and return host -> id.

    This also raises the providers' generations and sets ``changed_at``. Hosts without a provider
    are left out.
    """
    return {row.host: row.id for row in _lock(tx, hosts)}


def judge(tx: Connection, verdicts: Sequence[tuple[str, int]]) -> None:
    """Change the hosts' counts of failed builds in a row.

    Each verdict is (host, -1) for a failure, (host, 0) for a success, or (host, 1) to undo the
    count of a failure. A success sets the count to 0, whatever the host's other verdicts. The count
    is never below 0. A failure also sets ``failed_at``, and a count of 0 clears ``failed_at``.
    """
    if not verdicts:
        return
    for row in _lock(tx, sorted({host for host, _ in verdicts})):
        own = [verdict for host, verdict in verdicts if host == row.host]
        failures = 0 if 0 in own else max(0, row.failures - sum(own))
        values: Values = {"failures": failures}
        if failures == 0:
            values["failed_at"] = None
        elif -1 in own:
            values["failed_at"] = now()
        tx.execute(sa.update(providers).where(providers.c.id == row.id).values(values))


def touch(tx: Connection, provider_ids: Iterable[int]) -> None:
    """Raise the generations of providers that the caller has locked, and set ``changed_at``."""
    tx.execute(_TOUCH, {"ids": sorted(set(provider_ids))})


_TOUCH = (
    sa.update(providers)
    .where(providers.c.id.in_(sa.bindparam("ids", expanding=True)))
    .values(generation=providers.c.generation + 1, changed_at=now())
)


def _read_rooms(tx: Connection, locked: Mapping[int, _Host]) -> None:
    """Set ``rooms`` and ``disabled`` of these locked hosts (by provider id), in one statement.

    Why a statement after the lock: the lock may have waited for the transaction that disabled the
    host.
    """
    for row in tx.execute(_select_rooms(), {"ids": list(locked)}):
        host, capacity = locked[row.provider_id], (row.total - row.reserved) * row.allocation_ratio
        host.rooms[row.resource_class] = _Room(
            capacity - int(row.used), row.min_unit, row.max_unit, row.step_size
        )
        host.disabled = row.disabled is not None


@cache
def _select_rooms() -> sa.Select[Any]:
    """Return the statement of ``_read_rooms``. Cached, because every claim runs it."""
    ids: sa.BindParameter[Any] = sa.bindparam("ids", expanding=True)
    used = (
        sa.select(
            allocations.c.provider_id,
            allocations.c.resource_class,
            sa.func.sum(allocations.c.used).label("used"),
        )
        .where(allocations.c.provider_id.in_(ids))
        .group_by(allocations.c.provider_id, allocations.c.resource_class)
        .subquery()
    )
    return (
        sa.select(
            inventories,
            sa.func.coalesce(used.c.used, 0).label("used"),
            provider_traits.c.trait.label("disabled"),
        )
        .select_from(
            inventories.outerjoin(
                used,
                sa.and_(
                    used.c.provider_id == inventories.c.provider_id,
                    used.c.resource_class == inventories.c.resource_class,
                ),
            ).outerjoin(
                provider_traits,
                sa.and_(
                    provider_traits.c.provider_id == inventories.c.provider_id,
                    provider_traits.c.trait == COMPUTE_DISABLED,
                ),
            )
        )
        .where(inventories.c.provider_id.in_(ids))
    )


def _parts(tx: Connection, names: Sequence[str]) -> dict[str, _Parts]:
    """Return the CPUs, memory and devices of hosts with the guests' assignments.

    Assignments of pending cleanups are included. A host with a damaged record is logged and left
    out, so that no CPU or device is assigned twice.
    """
    rows = tx.execute(
        sa.select(hosts.c.name, hosts.c.numa_nodes, hosts.c.devices).where(hosts.c.name.in_(names))
    )
    stock = {row.name: row for row in rows}
    assigned = tx.execute(
        sa.select(guests.c.host, guests.c.assignment).where(
            guests.c.host.in_(names), guests.c.assignment.is_not(None)
        )
    )
    held: dict[str, list[JsonObject]] = {name: [] for name in stock}
    for host, assignment in assigned:
        if host in held:
            held[host].append(assignment)
    parts = {}
    for name, row in stock.items():
        try:
            parts[name] = _Parts(
                [from_wire(NumaNode, one) for one in row.numa_nodes or ()],
                [from_wire(Device, one) for one in row.devices or ()],
                [from_wire(HardwareAssignment, one) for one in held[name]],
            )
        except (ValueError, TypeError):
            log.exception(
                "a host assigns no CPUs or devices, because a stored NUMA node, device or assignment is damaged",
                host=name,
            )
    return parts


def _add_consumers(tx: Connection, holders: list[dict[str, str]]) -> None:
    """Insert consumers with generation 0. An existing consumer stays unchanged."""
    insert_many(
        tx, consumers, [{"generation": 0, **row} for row in holders], "created_at", ignore=True
    )


def hand_over(tx: Connection, provider: int, holder: str, to: str) -> None:
    """Move the allocations at a locked provider from the consumer ``holder`` to ``to``."""
    tx.execute(_HAND_OVER, {"provider": provider, "holder": holder, "consumer_id": to})


_HAND_OVER = sa.update(allocations).where(
    allocations.c.provider_id == sa.bindparam("provider"),
    allocations.c.consumer_id == sa.bindparam("holder"),
)


def hand_back(tx: Connection, migration: str, server: str, host: str) -> None:
    """Move the allocations of an ended migration on a host to the server.

    The migration is deleted as a consumer.
    """
    provider = lock(tx, [host]).get(host)
    if provider is not None:
        hand_over(tx, provider, migration, server)
    tx.execute(sa.delete(consumers).where(consumers.c.id == migration))


def stay(
    tx: Connection, migration: str, server: str, host: str, amounts: Mapping[str, int] | None = None
) -> None:
    """Delete the allocations of an ended migration whose server has stayed on the host.

    The migration is deleted as a consumer. With ``amounts`` the server then holds exactly these on
    the host. None: its own allocations are unchanged. A host without a provider is ignored.
    """
    provider = lock(tx, [host]).get(host)
    if provider is None:
        return
    _drop(tx, provider, migration)
    tx.execute(sa.delete(consumers).where(consumers.c.id == migration))
    if amounts is not None:
        _drop(tx, provider, server)
        insert_many(tx, allocations, _rows(provider, server, amounts))


def release(tx: Connection, placements: Sequence[tuple[str, str]]) -> None:
    """Delete the allocations of these (consumer, host) pairs.

    Consumers in the pairs that have no allocations left are deleted too.
    """
    ids = lock(tx, sorted({host for _, host in placements}))
    held = [(ids[host], server) for server, host in placements if host in ids]
    tx.execute(_RELEASE, {"consumers": [server for _, server in held], "held": held})
    tx.execute(_FORGET, {"consumers": sorted({server for server, _ in placements})})


_CONSUMERS: sa.BindParameter[Any] = sa.bindparam("consumers", expanding=True)
_RELEASE = sa.delete(allocations).where(
    allocations.c.consumer_id.in_(_CONSUMERS),
    sa.tuple_(allocations.c.provider_id, allocations.c.consumer_id).in_(
        sa.bindparam("held", expanding=True)
    ),
)
#: Deletes consumers that have no allocations.
_FORGET = sa.delete(consumers).where(
    consumers.c.id.in_(_CONSUMERS),
    consumers.c.id.not_in(
        sa.select(allocations.c.consumer_id).where(allocations.c.consumer_id.in_(_CONSUMERS))
    ),
)


def put(tx: Connection, holder: Mapping[str, str], host: str, amounts: Mapping[str, int]) -> None:
    """Replace the allocations of a consumer on a host, even if there is no room.

    Why: the consumer's guest exists on the host. A missing consumer is inserted.

    Args:
        tx: The transaction.
        holder: id, type, project_id and user_id of the consumer.
        host: Name of the host.
        amounts: Resource class -> amount.

    Raises:
        Conflict: The host has no provider.
    """
    provider = lock(tx, [host]).get(host)
    if provider is None:
        raise errors.Conflict(f"Host {host} has no resource provider. Run: kilonova doctor")
    _drop(tx, provider, holder["id"])
    register(tx, holder)
    insert_many(tx, allocations, _rows(provider, holder["id"], amounts))


def register(tx: Connection, holder: Mapping[str, str]) -> None:
    """Insert a consumer (id, type, project_id and user_id) if it does not exist."""
    _add_consumers(tx, [dict(holder)])
