# SPDX-License-Identifier: Apache-2.0
"""Resource providers of hosts and of operators.

The placement service calls this file. Other files write the provider of a host, for example
``common.store.hosts.hosts``, which calls ``of_host``. Searches, views and traits treat all
providers alike, but a host's provider has a fixed name and no parent or child. Providers of
operators can form trees. A change of inventories, traits or aggregates locks the provider
(``lock``) and raises the generation. Readers read the generation first, so that a later write with
that generation fails if a change came in between.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection
from sqlalchemy.exc import IntegrityError

from common.domain import errors, ids
from common.domain.service_binaries import COMPUTE_DISABLED
from common.store.engine import for_update, insert_ignore, is_there, now
from common.store.rows import ProviderRow
from common.store.schema import (
    aggregate_hosts,
    aggregates,
    allocations,
    inventories,
    provider_aggregates,
    provider_traits,
    providers,
)

IN_USE, CONCURRENT, DUPLICATE, HAS_CHILDREN = (
    "placement.resource_provider.inuse",
    "placement.concurrent_update",
    "placement.duplicate_name",
    "placement.resource_provider.cannot_delete_parent",
)
#: Returns True if this new row was committed.
is_made = is_there(providers)


class ProviderConflict(errors.Conflict):
    """A conflict with an error code of the Placement API, by which clients see the kind."""

    def __init__(self, text: str, code: str) -> None:
        super().__init__(text)
        self.code = code


def show(tx: Connection, uuid: str, purpose: str = "") -> ProviderRow:
    """Return a provider by its uuid, in one statement. ``purpose`` ends the error message.

    Raises:
        NotFound: The provider does not exist.
    """
    return _one(tx, sa.select(providers).where(providers.c.uuid == uuid), uuid, purpose)


def lock(
    tx: Connection, uuid: str, generation: int | None = None, purpose: str = ""
) -> ProviderRow:
    """Lock a provider until the end of the transaction, and return its row.

    Only one of two writers with the same generation succeeds, if each writer raises the generation.

    Args:
        tx: The transaction.
        uuid: Uuid of the provider.
        generation: The generation that the caller has read. None: any generation.
        purpose: End of the error message if the provider does not exist.

    Raises:
        NotFound: The provider does not exist.
        ProviderConflict: The provider has another generation.
    """
    row = _one(tx, for_update(sa.select(providers).where(providers.c.uuid == uuid)), uuid, purpose)
    if generation is not None and generation != row.generation:
        raise ProviderConflict(
            f"resource provider generation conflict: {uuid} has generation {row.generation}, not "
            f"{generation}. Resource provider's generation already changed. Please update the generation "
            "and try again.",
            CONCURRENT,
        )
    return row


def _one(tx: Connection, query: sa.Select[Any], uuid: str, purpose: str) -> ProviderRow:
    row = tx.execute(query).first()
    if row is None:
        raise errors.NotFound(f"No resource provider with uuid {uuid} found{purpose}")
    return row


def create(
    tx: Connection, name: str, uuid: str | None = None, parent: str | None = None
) -> ProviderRow:
    """Create an operator's provider, and return its row.

    Args:
        tx: The transaction.
        name: Name of the provider.
        uuid: Uuid of the provider. None: a new one.
        parent: Uuid of the parent. None: the provider is the root of a tree.

    Raises:
        BadRequest: The parent does not exist, or equals the provider.
        ProviderConflict: The name or uuid is in use.
        Conflict: The parent is the provider of a host.
        Unavailable: A concurrent request interfered. The caller may repeat the request.
    """
    uuid = uuid or ids.new()
    if parent == uuid:
        raise errors.BadRequest(
            f'Unable to create resource provider "{name}", {uuid}: parent provider UUID cannot be '
            "same as UUID. Please set parent provider UUID to None if there is no parent."
        )
    _check_free(tx, name, uuid)
    root = uuid if parent is None else _parent(tx, parent).root_uuid
    insert_ignore(
        tx,
        providers,
        {
            "uuid": uuid,
            "root_uuid": root,
            "parent_uuid": parent,
            "name": name,
            "generation": 0,
            "created_at": now(),
            "changed_at": now(),
        },
    )
    made = tx.execute(
        sa.select(providers).where(providers.c.uuid == uuid, providers.c.name == name)
    ).first()
    if made is None:  # another writer took the name or the uuid meanwhile
        _check_free(tx, name, uuid)
        raise errors.Unavailable(
            f"The resource provider {name} was not created because of a concurrent request. Try again."
        )
    return made


def _check_free(tx: Connection, name: str, uuid: str) -> None:
    for row in tx.execute(
        sa.select(providers).where(sa.or_(providers.c.name == name, providers.c.uuid == uuid))
    ):
        field = f"uuid: {uuid}" if row.uuid == uuid else f"name: {name}"
        raise _duplicate_error(field)


def _duplicate_error(what: str) -> ProviderConflict:
    return ProviderConflict(f"Conflicting resource provider {what} already exists", DUPLICATE)


def _parent(tx: Connection, uuid: str) -> ProviderRow:
    row = tx.execute(for_update(sa.select(providers).where(providers.c.uuid == uuid))).first()
    if row is None:
        raise errors.BadRequest(f"parent provider UUID does not exist: {uuid}")
    if row.host is not None:
        raise errors.Conflict(
            f"{row.name} is the provider of a host, which cannot have child providers."
        )
    return row


def rename(tx: Connection, row: ProviderRow, name: str) -> None:
    """Rename an operator's provider. The caller has locked it. The present name changes nothing.

    Raises:
        ProviderConflict: The name is in use.
        Conflict: The provider belongs to a host.
    """
    if name == row.name:
        return
    if row.host is not None:
        raise errors.Conflict(
            f"{row.name} is the provider of a host, whose name cannot be changed."
        )
    _check_free(tx, name, "")
    try:
        tx.execute(
            sa.update(providers).where(providers.c.id == row.id).values(name=name, changed_at=now())
        )
    except IntegrityError as problem:  # another writer was first
        raise _duplicate_error(f"name: {name}") from problem


def move(tx: Connection, row: ProviderRow, parent: str | None, may_leave: bool) -> None:
    """Move an operator's provider with its subtree below another provider.

    With the parent None, the provider becomes the root of a tree. With the present parent, nothing
    changes. The caller has locked the provider.

    Args:
        tx: The transaction.
        row: The provider.
        parent: Uuid of the new parent, or None.
        may_leave: True if the provider may leave its present parent.

    Raises:
        BadRequest: The parent does not exist or is in the subtree, or the provider may not leave.
        Conflict: The provider or the parent belongs to a host.
    """
    if parent == row.parent_uuid:
        return
    if row.host is not None:
        raise errors.Conflict(f"{row.name} is the provider of a host, which cannot be moved.")
    below = _below(tx, row)
    if parent in below:
        raise errors.BadRequest("creating loop in the provider tree is not allowed.")
    if row.parent_uuid is not None and not may_leave:
        word = "un-parenting" if parent is None else "re-parenting"
        raise errors.BadRequest(
            f"{word} a provider is not currently allowed before microversion 1.37."
        )
    root = row.uuid if parent is None else _parent(tx, parent).root_uuid
    tx.execute(sa.update(providers).where(providers.c.id == row.id).values(parent_uuid=parent))
    tx.execute(
        sa.update(providers)
        .where(providers.c.uuid.in_(sorted(below)))
        .values(root_uuid=root, changed_at=now())
    )


def _below(tx: Connection, row: ProviderRow) -> set[str]:
    """Lock all providers of a provider's tree, and return the uuids of its subtree with its own."""
    children: dict[str | None, list[str]] = {}
    for one in tx.execute(
        for_update(
            sa.select(providers.c.uuid, providers.c.parent_uuid)
            .where(providers.c.root_uuid == row.root_uuid)
            .order_by(providers.c.id)
        )
    ):
        children.setdefault(one.parent_uuid, []).append(one.uuid)
    found: set[str] = set()
    ahead = [row.uuid]
    while ahead:
        uuid = ahead.pop()
        found.add(uuid)
        ahead += children.get(uuid, [])
    return found


def delete(tx: Connection, uuid: str) -> None:
    """Delete an operator's provider with its inventories, traits and membership of aggregates.

    Raises:
        NotFound: The provider does not exist.
        ProviderConflict: The provider has children or allocations.
        Conflict: The provider belongs to a host.
    """
    row = lock(tx, uuid, purpose=" for delete")
    if (
        tx.scalar(sa.select(providers.c.id).where(providers.c.parent_uuid == uuid).limit(1))
        is not None
    ):
        raise ProviderConflict(
            f"Unable to delete parent resource provider {uuid}: It has child resource providers.",
            HAS_CHILDREN,
        )
    if (
        tx.scalar(
            sa.select(allocations.c.provider_id).where(allocations.c.provider_id == row.id).limit(1)
        )
        is not None
    ):
        raise ProviderConflict(
            f"Unable to delete resource provider {uuid}: Resource provider has allocations.", IN_USE
        )
    if row.host is not None:
        raise errors.Conflict(
            f"{row.name} is the provider of a host. To delete it, delete the host's compute service."
        )
    for table in (inventories, provider_traits, provider_aggregates):
        tx.execute(sa.delete(table).where(table.c.provider_id == row.id))
    tx.execute(sa.delete(providers).where(providers.c.id == row.id))


def of_host(tx: Connection, host: str) -> int:
    """Lock the provider of a host, and return its id. A missing provider is created.

    If an operator's provider has the host's name, it becomes the host's provider and keeps its
    inventories and traits, except the trait COMPUTE_STATUS_DISABLED.

    Raises:
        Conflict: The operator's provider with the host's name has a parent or children.
    """
    uuid = ids.new()
    insert_ignore(
        tx,
        providers,
        {
            "uuid": uuid,
            "root_uuid": uuid,
            "name": host,
            "host": host,
            "generation": 0,
            "created_at": now(),
            "changed_at": now(),
        },
    )
    row = tx.execute(for_update(sa.select(providers.c.id).where(providers.c.host == host))).first()
    if row is None:
        row = tx.execute(for_update(sa.select(providers).where(providers.c.name == host))).one()
        if len(_below(tx, row)) > 1 or row.parent_uuid is not None:
            raise errors.Conflict(
                f"The resource provider {row.uuid} of an operator has the name of the host {host} and "
                "belongs to a tree. Rename this provider, so that the host can have its own provider."
            )
        tx.execute(sa.update(providers).where(providers.c.id == row.id).values(host=host))
        tx.execute(
            # From now on, only the compute service sets this trait.
            sa.delete(provider_traits).where(
                provider_traits.c.provider_id == row.id,
                provider_traits.c.trait == COMPUTE_DISABLED,
            )
        )
    return int(row.id)


# --- aggregates: the operators' and the hosts', shown together ---
def aggregates_of(tx: Connection, provider_ids: Iterable[int]) -> dict[int, list[str]]:
    """Return the uuids of the aggregates of each of these providers, sorted, in one statement.

    These are the aggregates that operators set for the provider, and those of its host, without
    duplicates.
    """
    wanted = sorted(set(provider_ids))
    by_hand = sa.select(
        provider_aggregates.c.provider_id, provider_aggregates.c.aggregate_uuid.label("uuid")
    ).where(provider_aggregates.c.provider_id.in_(wanted))
    found: dict[int, dict[str, str]] = {number: {} for number in wanted}
    for number, uuid in tx.execute(by_hand.union(_of_hosts(wanted)).order_by("uuid")):
        found[number].setdefault(ids.spellings(uuid)[0], uuid)
    return {number: [*uuids.values()] for number, uuids in found.items()}


def _of_hosts(provider_ids: Sequence[int]) -> sa.Select[Any]:
    return (
        sa.select(providers.c.id, aggregates.c.uuid)
        .select_from(
            providers.join(aggregate_hosts, aggregate_hosts.c.host == providers.c.host).join(
                aggregates, aggregates.c.id == aggregate_hosts.c.aggregate_id
            )
        )
        .where(providers.c.id.in_(provider_ids))
    )


def set_aggregates(tx: Connection, provider: ProviderRow, uuids: Iterable[str]) -> list[str]:
    """Replace the aggregates that operators have set for a locked provider.

    Each uuid is stored in the caller's spelling, with or without dashes. Aggregates of the
    provider's host are not stored.

    Returns:
        All aggregates of the provider, the host's last.
    """
    hosts = {row.uuid for row in tx.execute(_of_hosts([provider.id]))}
    tx.execute(
        sa.delete(provider_aggregates).where(provider_aggregates.c.provider_id == provider.id)
    )
    spelled: dict[str, str] = {}
    for uuid in uuids:
        spelled.setdefault(ids.spellings(uuid)[0], uuid)
    added = [uuid for known, uuid in spelled.items() if known not in hosts]
    if added:
        tx.execute(
            sa.insert(provider_aggregates),
            [{"provider_id": provider.id, "aggregate_uuid": uuid} for uuid in added],
        )
    return [*added, *sorted(hosts)]
