# SPDX-License-Identifier: Apache-2.0
"""Aggregates: named groups of hosts with metadata. The key ``availability_zone`` makes one a zone.

The API calls this file. The scheduler reads the tables itself when ``updated_at`` changes.

Invariant: a host is in at most one zone, and its zone does not change while servers are on it.
A change of hosts or zone therefore locks the aggregate, and then the providers of the affected
hosts in ascending order. Claims lock these providers too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager

import sqlalchemy as sa
from sqlalchemy.engine import Connection
from sqlalchemy.exc import IntegrityError

from common.domain import errors, ids
from common.domain.statuses import GuestState
from common.store.engine import for_update, is_there, now
from common.store.notifications import outbox
from common.store.placement import allocations, inventories
from common.store.placement import zones as zones_of
from common.store.rows import AggregateRow, Values
from common.store.schema import DamagedObject, aggregate_hosts, aggregates, guests, servers

ZONE = zones_of.KEY
_MEMBER = aggregate_hosts.c
#: Returns True if this new row was committed.
is_made = is_there(aggregates)


def list_all(tx: Connection) -> tuple[list[AggregateRow], dict[int, list[str]]]:
    """Return all aggregates, and their hosts by aggregate id, in two statements."""
    rows: list[AggregateRow] = list(tx.execute(sa.select(aggregates).order_by(aggregates.c.id)))
    hosts: dict[int, list[str]] = {row.id: [] for row in rows}
    for number, host in tx.execute(sa.select(aggregate_hosts).order_by(_MEMBER.host)):
        hosts.setdefault(number, []).append(host)
    return rows, hosts


def show(tx: Connection, number: int) -> tuple[AggregateRow, list[str]]:
    """Return an aggregate and the names of its hosts.

    Raises:
        NotFound: The aggregate does not exist.
    """
    row = tx.execute(sa.select(aggregates).where(aggregates.c.id == number)).first()
    return _require_row(row, number), _hosts(tx, number)


def zones(tx: Connection, default: str, hosts: Iterable[str] | None = None) -> dict[str, str]:
    """Return host -> zone. Any host that is in no zone has the zone ``default``.

    Only ``[host]`` gives the default zone. ``get`` and iteration know only hosts in a zone.

    Args:
        tx: The transaction.
        default: The default availability zone.
        hosts: Read the zones of these hosts only. None: of all hosts.
    """
    return _Zones(zones_of.hosts(tx, hosts), default)


class _Zones(dict[str, str]):
    """Host -> zone, with the default zone for each missing host."""

    def __init__(self, found: dict[str, str], default: str) -> None:
        super().__init__(found)
        self.default = default

    def __missing__(self, host: str) -> str:
        return self.default


# --- changes ---
def create(tx: Connection, name: str, zone: str | None) -> AggregateRow:
    """Create an aggregate without hosts, and return its row. ``zone`` None: no availability zone.

    Raises:
        Conflict: The name is in use.
        BadRequest: The zone's name is empty or invalid.
    """
    meta = {} if zone is None else {ZONE: _check_zone_name(zone, "Cannot create aggregate.", name)}
    uuid = ids.new()
    with _unique(name):
        tx.execute(sa.insert(aggregates).values(uuid=uuid, name=name, meta=meta, created_at=now()))
    row = tx.execute(sa.select(aggregates).where(aggregates.c.uuid == uuid)).one()
    outbox.tell(
        tx, str(row.id), {**row._mapping, "id": None, "hosts": None}, "aggregate.create.start"
    )
    outbox.tell(tx, str(row.id), {**row._mapping, "hosts": []}, "aggregate.create.end")
    return row


def update(
    tx: Connection,
    number: int,
    default_zone: str,
    *,
    name: str | None = None,
    meta: Mapping[str, str | None] | None = None,
    what: str = "aggregate",
) -> None:
    """Rename an aggregate, or change its metadata, and apply new allocation ratios to its hosts.

    Args:
        tx: The transaction.
        number: Id of the aggregate.
        default_zone: The zone of hosts in no aggregate with a zone.
        name: The new name, or None to keep the name.
        meta: Metadata to add or overwrite, or None for no change. The value None removes a key,
            except the zone.
        what: "aggregate" if the request changes the aggregate itself. Otherwise the object's name
            in error messages, and the notification is that of a change of metadata.

    Raises:
        NotFound: The aggregate does not exist.
        Conflict: The name is in use, or the metadata is damaged.
        BadRequest: A host would be in two zones, or the zone of servers would change, or the zone's
            name is invalid or would be removed.
    """
    row = _lock(tx, number)
    if isinstance(row.meta, DamagedObject):
        raise errors.Conflict(
            f"Cannot update {what} {number}. Reason: its metadata in the database is damaged. Remove "
            "its hosts, delete it, and create it anew."
        )
    after = {key: value for key, value in {**row.meta, **(meta or {})}.items() if value is not None}
    refused = f"Cannot update {what} {number}."
    if ZONE in (meta or {}):
        _check_zone_name(after.get(ZONE), refused, row.name)
    changed = {key for key in (ZONE, *inventories.RATIOS) if row.meta.get(key) != after.get(key)}
    hosts = _hosts(tx, number) if changed else []
    providers = allocations.lock(tx, hosts) if hosts else {}
    if ZONE in changed:
        _check_zone(
            tx,
            number,
            hosts,
            row.meta.get(ZONE),
            after[ZONE],
            default_zone,
            lambda reason: errors.BadRequest(f"{refused} Reason: {reason}"),
        )
    with (
        _notify_around(tx, number, "update_prop" if what == "aggregate" else "update_metadata"),
        _unique(name or row.name),
    ):
        _write(tx, number, name=name or row.name, meta=after)
    inventories.settle(tx, providers.values())


def add_host(tx: Connection, number: int, host: str, default_zone: str) -> None:
    """Add a host to an aggregate, and apply the aggregate's allocation ratios to the host.

    Raises:
        NotFound: The aggregate or the host does not exist.
        Conflict: The host is a member already, or would be in two zones, or the zone of its servers
            would change.
    """
    row = _lock(tx, number)
    providers = allocations.lock(tx, [host])
    if host not in providers:
        raise errors.NotFound(f"Compute host {host} could not be found.")
    if host in _hosts(tx, number):
        raise errors.Conflict(f"Aggregate {number} already has host {host}.")
    if row.meta.get(ZONE):
        _check_zone(
            tx,
            number,
            [host],
            None,
            row.meta[ZONE],
            default_zone,
            lambda reason: errors.Conflict(
                f"Cannot add host to aggregate {number}. Reason: {reason}"
            ),
        )
    with _notify_around(tx, number, "add_host"):
        tx.execute(sa.insert(aggregate_hosts).values(aggregate_id=number, host=host))
        _write(tx, number)
    inventories.settle(tx, providers.values())


def remove_host(tx: Connection, number: int, host: str, default_zone: str) -> None:
    """Remove a host from an aggregate, and end the aggregate's allocation ratios for the host.

    Raises:
        NotFound: The aggregate does not exist, or does not contain the host.
        Conflict: The zone of the host's servers would change.
    """
    row = _lock(tx, number)
    providers = allocations.lock(tx, [host])
    refused = f"Cannot remove host {host} in aggregate {number}"
    if host not in _hosts(tx, number):
        raise errors.NotFound(f"{refused}: the aggregate does not contain the host.")
    if row.meta.get(ZONE):
        _check_zone(
            tx,
            number,
            [host],
            row.meta[ZONE],
            None,
            default_zone,
            lambda reason: errors.Conflict(f"{refused}: {reason}"),
        )
    with _notify_around(tx, number, "remove_host"):
        tx.execute(
            sa.delete(aggregate_hosts).where(_MEMBER.aggregate_id == number, _MEMBER.host == host)
        )
        _write(tx, number)
    inventories.settle(tx, providers.values())


def delete(tx: Connection, number: int) -> None:
    """Delete an empty aggregate.

    Raises:
        NotFound: The aggregate does not exist.
        BadRequest: The aggregate has hosts.
    """
    _lock(tx, number)
    if _hosts(tx, number):
        raise errors.BadRequest(
            f"Cannot delete aggregate {number}. Reason: Host aggregate is not empty: remove its "
            "hosts first."
        )
    with _notify_around(tx, number, "delete"):
        tx.execute(sa.delete(aggregates).where(aggregates.c.id == number))


def leave(tx: Connection, host: str) -> None:
    """Lock the aggregates of a host that is being removed, and set their ``updated_at``.

    The caller deletes the memberships later, under the lock of the host's provider. Until then the
    host may join another aggregate.
    """
    joined = sa.select(_MEMBER.aggregate_id).where(_MEMBER.host == host)
    for number in tx.scalars(
        for_update(
            sa.select(aggregates.c.id).where(aggregates.c.id.in_(joined)).order_by(aggregates.c.id)
        )
    ).all():
        _write(tx, number)


# --- the rules ---
@contextmanager
def _unique(name: str) -> Iterator[None]:
    """Raise Conflict if the database refuses the name as a duplicate."""
    try:
        yield
    except IntegrityError as problem:
        raise errors.Conflict(f"Aggregate {name} already exists.") from problem


def _check_zone_name(zone: str | None, refused: str, aggregate: str) -> str:
    """Return the zone's name, or raise BadRequest if the name is None, empty or invalid.

    A colon is invalid because a create request can contain ``zone:host``. ``refused`` is the
    beginning of the error message.
    """
    if not zone:
        raise errors.BadRequest(
            f"{refused} Reason: Aggregate {aggregate} does not support empty named availability "
            "zone"
        )
    if ":" in zone or len(zone) > 255 or zone != zone.strip() or not zone.isprintable():
        raise errors.BadRequest(
            f"{refused} Reason: an availability zone's name has at most 255 printable characters, "
            f"no ':' and no white space around it: {zone[:80]!r}"
        )
    return zone


def _check_zone(
    tx: Connection,
    number: int,
    hosts: Sequence[str],
    before: str | None,
    after: str | None,
    default: str,
    refusal: Callable[[str], errors.Problem],
) -> None:
    """Raise ``refusal(reason)`` unless these hosts may change from zone ``before`` to ``after``.

    A host must not get a second zone, and the zone of a host with servers must not change.

    ``before`` and ``after`` are the zone that the aggregate ``number`` gives to the hosts. None:
    the aggregate gives no zone. The caller has locked the hosts' providers.
    """
    others = zones_of.hosts(tx, hosts, but=number)
    taken = sorted({zone for zone in others.values() if after is not None and zone != after})
    if taken:
        raise refusal(f"One or more hosts already in availability zone(s) {taken}")
    moving = [
        host
        for host in hosts
        if (before or others.get(host, default)) != (after or others.get(host, default))
    ]
    held = _with_servers(tx, moving)
    if held:
        raise refusal(
            f"One or more hosts contain instances in this zone; first move or delete the instances on "
            f"{', '.join(held[:5])}{' …' if len(held) > 5 else ''}"
        )


def _with_servers(tx: Connection, hosts: Sequence[str]) -> list[str]:
    """Return the hosts of the argument that have servers or guests, sorted.

    Guests that the host still has to remove do not count.
    """
    if not hosts:
        return []
    placed = sa.select(guests.c.host).where(
        guests.c.host.in_(hosts), guests.c.wanted != GuestState.ABSENT
    )
    shown = sa.select(servers.c.host).where(servers.c.host.in_(hosts), servers.c.deleted == 0)
    return sorted(set(tx.scalars(sa.union(placed, shown))))


# --- rows ---
def _lock(tx: Connection, number: int) -> AggregateRow:
    return _require_row(
        tx.execute(for_update(sa.select(aggregates).where(aggregates.c.id == number))).first(),
        number,
    )


def _require_row(row: AggregateRow | None, number: int) -> AggregateRow:
    if row is None:
        raise errors.NotFound(f"Aggregate {number} could not be found.")
    return row


def _hosts(tx: Connection, number: int) -> list[str]:
    return list(
        tx.scalars(
            sa.select(_MEMBER.host).where(_MEMBER.aggregate_id == number).order_by(_MEMBER.host)
        )
    )


def _notify_around(tx: Connection, number: int, verb: str) -> AbstractContextManager[None]:
    """Return a context that writes two notifications about a change in its block.

    Their events are aggregate.VERB.start, with the aggregate before the change, and
    aggregate.VERB.end. Neither is written if the block raises. The caller has locked the aggregate.
    """

    def picture() -> Values | None:
        row = tx.execute(sa.select(aggregates).where(aggregates.c.id == number)).mappings().first()
        return {**row, "hosts": _hosts(tx, number)} if row else None

    return outbox.around(tx, f"aggregate.{verb}", str(number), picture)


def _write(tx: Connection, number: int, **values: object) -> None:
    tx.execute(
        sa.update(aggregates).where(aggregates.c.id == number).values(**values, updated_at=now())
    )
