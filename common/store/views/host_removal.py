# SPDX-License-Identifier: Apache-2.0
"""The removal of an empty host: one transaction deletes its rows.

The host's keys and join token are not deleted here.
"""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from common.domain import errors
from common.domain.statuses import OPEN_MIGRATIONS
from common.store.hosts import aggregates, services
from common.store.placement import allocations
from common.store.rows import ServiceRow
from common.store.schema import (
    aggregate_hosts,
    guests,
    host_images,
    hosts,
    inventories,
    migrations,
    provider_aggregates,
    provider_traits,
    providers,
    servers,
)
from common.store.schema import allocations as allocations_table
from common.store.servers.guests import discard_removals


def remove(tx: Connection, service: ServiceRow, shown: str) -> None:
    """Delete an empty host: its compute service, aggregate memberships and resource provider.

    An agent that still runs registers again, as a new host. The pending cleanups of a host that is
    forced down are deleted too, because such a host is taken to be gone for good. If it returns,
    the conductor sends it the guests that must not run.

    Args:
        tx: The transaction.
        service: The compute service of the host.
        shown: The id of the service that refusals show: a number before microversion 2.53.

    Raises:
        Conflict: The host has servers, open migrations, guest records or allocations, or its
            resource provider has children.
    """
    name = service.host
    tx.execute(sa.delete(hosts).where(hosts.c.name == name))
    # After the delete, which waits for a concurrent registration.
    gone = services.are_dead(tx, name, locked=True)
    services.remove(tx, service)
    tx.execute(sa.delete(host_images).where(host_images.c.host == name))
    aggregates.leave(tx, name)
    # The lock keeps claims and changes of aggregates out until the transaction ends.
    provider = allocations.lock(tx, [name]).get(name)
    tx.execute(sa.delete(aggregate_hosts).where(aggregate_hosts.c.host == name))
    if gone:
        discard_removals(tx, name)
    _check_empty(tx, name, provider, shown)
    if provider is not None:
        for table in (inventories, provider_traits, provider_aggregates):
            tx.execute(sa.delete(table).where(table.c.provider_id == provider))
        tx.execute(sa.delete(providers).where(providers.c.id == provider))


def _check_empty(tx: Connection, name: str, provider: int | None, service: str) -> None:
    def count(table: sa.Table, *conditions: sa.ColumnElement[bool]) -> int:
        return tx.scalar(sa.select(sa.func.count()).select_from(table).where(*conditions)) or 0

    there = f"Unable to delete compute service with id {service} for host {name}. "
    if count(servers, servers.c.host == name, servers.c.deleted == 0):
        raise errors.Conflict(
            "Unable to delete compute service that is hosting instances. Migrate or delete the "
            "instances first."
        )
    moving = count(
        migrations,
        migrations.c.status.in_(OPEN_MIGRATIONS),
        sa.or_(migrations.c.source_host == name, migrations.c.dest_host == name),
    )
    if moving:
        raise _in_progress(there, moving)
    left = count(guests, guests.c.host == name)
    if left:
        raise errors.Conflict(
            f"{there}The host has not removed all guests ({left} left). It removes them when it is up again. If "
            "the host will not return, force its service down first."
        )
    if provider is None:
        return
    held = tx.scalar(
        sa.select(sa.func.count(allocations_table.c.consumer_id.distinct())).where(
            allocations_table.c.provider_id == provider
        )
    )
    if held:
        raise _in_progress(there, held)
    uuid = sa.select(providers.c.uuid).where(providers.c.id == provider).scalar_subquery()
    if count(providers, providers.c.parent_uuid == uuid):
        raise errors.Conflict(
            f"{there}The host's resource provider has child providers. Delete them first."
        )


def _in_progress(there: str, number: int) -> errors.Conflict:
    return errors.Conflict(
        f"{there}There are {number} in-progress migrations involving the host. Migrations must be "
        "completed or confirmed before the service can be deleted."
    )
