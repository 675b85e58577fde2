# SPDX-License-Identifier: Apache-2.0
"""Remedies of wrong counts and amounts: quotas, shares, volumes, allocations, assigned hardware.

Called by ``remedies.mend``, under the server's lock.
"""

from __future__ import annotations

from collections.abc import Callable

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from common.domain import errors, hardware
from common.domain.models import Flavor
from common.domain.statuses import ShareStatus
from common.domain.wire import from_wire
from common.store import cleanups
from common.store.engine import now
from common.store.placement import allocations
from common.store.rows import ServerRow
from common.store.schema import allocations as allocations_table
from common.store.schema import (
    block_devices,
    providers,
    server_group_members,
    servers,
    share_mappings,
)
from common.store.schema import guests as guests_table
from common.store.schema import migrations as migrations_table
from common.store.servers import migrations, shares, volumes
from deploy.operator.doctor.finding import Finding


def holds(tx: Connection, consumer: str, host: str) -> bool:
    """Return True if the consumer has an allocation on the host."""
    query = (
        sa.select(allocations_table.c.used)
        .join(providers, providers.c.id == allocations_table.c.provider_id)
        .where(allocations_table.c.consumer_id == consumer, providers.c.host == host)
        .limit(1)
    )
    return tx.scalar(query) is not None


def allocate(tx: Connection, row: ServerRow, host: str, holder: str | None = None) -> None:
    """Replace the allocation on this host by the amounts of flavor and image, even without room.

    During a move, these are the amounts of the old flavor on the source and of the new flavor on
    the destination. Otherwise they are those of the server's flavor.

    Args:
        tx: The transaction.
        row: The server.
        host: Name of the host.
        holder: Id of the migration that gets the allocation. None: the server.

    Raises:
        Conflict: The host has no provider.
    """
    move = migrations.open_of(tx, [row.id]).get(row.id)
    flavor = row.flavor
    if move is not None and host in (move.source_host, move.dest_host):
        flavor = move.new_flavor if host == move.dest_host else move.old_flavor
    amounts = hardware.resources_of(from_wire(Flavor, flavor), row.image)
    allocations.put(
        tx,
        {
            "id": holder or row.id,
            "type": "migration" if holder else "server",
            "project_id": row.project_id,
            "user_id": row.user_id,
        },
        host,
        amounts,
    )


def _read_server(tx: Connection, server_id: str) -> ServerRow | None:
    return tx.execute(sa.select(servers).where(servers.c.id == server_id)).first()


def _count_quota(tx: Connection, finding: Finding) -> None:
    row = _read_server(tx, finding.subject)
    assert row is not None, "it was found"
    move = migrations.open_of(tx, [row.id]).get(row.id)
    flavors = [row.flavor] if move is None else [move.old_flavor, move.new_flavor]
    tx.execute(
        sa.update(servers)
        .where(servers.c.id == row.id)
        .values(
            **{name: max(flavor[name] for flavor in flavors) for name in ("vcpus", "memory_mb")},
            updated_at=now(),
        )
    )


def _recount(column: str, rows: sa.Table) -> Callable[[Connection, Finding], None]:
    """Return the remedy that sets a server's ``column`` to the number of its rows in ``rows``."""

    def mend(tx: Connection, finding: Finding) -> None:
        number = (
            sa.select(sa.func.count())
            .select_from(rows)
            .where(rows.c.server_id == finding.subject)
            .scalar_subquery()
        )
        tx.execute(
            sa.update(servers)
            .where(servers.c.id == finding.subject)
            .values({column: number, "updated_at": now()})
        )

    return mend


def _remove_shares_of_gone(tx: Connection, finding: Finding) -> None:
    mappings = list(
        tx.execute(sa.select(share_mappings).where(share_mappings.c.server_id == finding.subject))
    )
    shares.remove(tx, [mapping.uuid for mapping in mappings])
    for mapping in mappings:
        cleanups.ask(tx, cleanups.SHARE, mapping.share_id, finding.subject, mapping.access_to)


def _remove_rule(tx: Connection, finding: Finding) -> None:
    """Add a pending cleanup that removes the access rule of a share.

    If exactly one server has the share, the cleanup names this server, because it was probably on
    the rule's host before.
    """
    [address] = finding.facts
    query = sa.select(share_mappings.c.server_id).where(
        share_mappings.c.share_id == finding.subject
    )
    servers_of_share = tx.scalars(query.distinct()).all()
    server = str(servers_of_share[0]) if len(servers_of_share) == 1 else ""
    cleanups.ask(tx, cleanups.SHARE, finding.subject, server, address)


def _remove_volumes_of_gone(tx: Connection, finding: Finding) -> None:
    of_server = block_devices.c.server_id == finding.subject
    for volume in tx.execute(sa.select(block_devices).where(of_server)).all():
        if volume.volume_id is not None:
            target = volume.attachment_id or volume.volume_id
            cleanups.ask(tx, cleanups.ATTACHMENT, target, finding.subject, volume.volume_id)
    tx.execute(sa.delete(block_devices).where(of_server))


def _end_attachment(tx: Connection, finding: Finding) -> None:
    server, volume = finding.facts
    cleanups.ask(tx, cleanups.ATTACHMENT, finding.subject, server, volume)


def _complete_attachment(tx: Connection, finding: Finding) -> None:
    volume, attachment = finding.facts
    cleanups.ask(tx, cleanups.ATTACHMENT, attachment, finding.subject, volume)


def _reconnect_volume(tx: Connection, finding: Finding) -> None:
    [volume] = finding.facts
    row = volumes.show(tx, finding.subject, volume)
    target = row.attachment_id or volume
    cleanups.ask(tx, cleanups.ATTACHMENT, target, finding.subject, volume)


def _detach_volume(tx: Connection, finding: Finding) -> None:
    [volume] = finding.facts
    row = volumes.show(tx, finding.subject, volume)
    cleanups.ask(tx, cleanups.GUEST_VOLUME, row.uuid, finding.subject, volume)


def _fail_share(tx: Connection, finding: Finding) -> None:
    shares.put(tx, [finding.facts[0]], ShareStatus.ERROR)


def _release_allocation(tx: Connection, finding: Finding) -> None:
    [host] = finding.facts
    if not host:
        raise errors.Conflict(
            f"Consumer {finding.subject} holds resources of a provider without a host, which Kilonova does not change. "
            f"Run: openstack resource provider allocation unset {finding.subject}"
        )
    allocations.release(tx, [(finding.subject, host)])


def _allocate_guest(tx: Connection, finding: Finding) -> None:
    """Correct the allocation of a guest. The subject of the finding is the server or a migration.

    Raises:
        Conflict: The server has no row any more, or the host has no provider.
    """
    [host] = finding.facts
    columns = guests_table.c
    guest = tx.execute(
        sa.select(guests_table).where(
            columns.host == host,
            sa.or_(columns.server_id == finding.subject, columns.holder == finding.subject),
        )
    ).one()
    row = _read_server(tx, guest.server_id)
    if row is None:
        raise errors.Conflict(
            f"Server {guest.server_id} does not exist any more, so its guest on host {host} gets no allocation. See: "
            f"kilonova host removals {host}"
        )
    allocate(tx, row, host, guest.holder)


def _remove_consumer(tx: Connection, finding: Finding) -> None:
    allocations.release(tx, [(finding.subject, "")])


def _register_consumer(tx: Connection, finding: Finding) -> None:
    row = _read_server(tx, finding.subject)
    kind = "server"
    if row is None:
        columns = migrations_table.c
        row = tx.execute(sa.select(migrations_table).where(columns.uuid == finding.subject)).first()
        kind = "migration"
    if row is None:
        raise errors.Conflict(
            f"No server or migration has the id {finding.subject}. Run: openstack resource provider allocation unset "
            f"{finding.subject}"
        )
    allocations.register(
        tx,
        {
            "id": finding.subject,
            "type": kind,
            "project_id": row.project_id,
            "user_id": row.user_id,
        },
    )


def _clear_assignment(tx: Connection, finding: Finding) -> None:
    tx.execute(
        sa.update(guests_table)
        .where(guests_table.c.server_id == finding.subject, guests_table.c.host == finding.facts[0])
        .values(assignment=None)
    )


def _remove_members(tx: Connection, finding: Finding) -> None:
    tx.execute(
        sa.delete(server_group_members).where(server_group_members.c.group_id == finding.subject)
    )


COUNTS: dict[str, Callable[[Connection, Finding], None]] = {
    "counted": _count_quota,
    "shares": _recount("shares", share_mappings),
    "shares-of-gone": _remove_shares_of_gone,
    "share-rule-of-nobody": _remove_rule,
    "share-in-transit": _fail_share,
    "volumes": _recount("volumes", block_devices),
    "volumes-of-gone": _remove_volumes_of_gone,
    "attachment-of-server": _end_attachment,
    "attachment-incomplete": _complete_attachment,
    "volume-elsewhere": _reconnect_volume,
    "volume-in-error": _detach_volume,
    "allocation-of-nothing": _release_allocation,
    "guest-without-allocation": _allocate_guest,
    "allocation-exact": _allocate_guest,
    "consumer-of-nothing": _remove_consumer,
    "no-consumer": _register_consumer,
    "assignment-not-asked-for": _clear_assignment,
    "group-member": _remove_members,
}
