# SPDX-License-Identifier: Apache-2.0
"""Resource classes: the standard classes, and CUSTOM_* of operators. For the placement service."""

from __future__ import annotations

from collections.abc import Iterable

import os_resource_classes
import sqlalchemy as sa
from sqlalchemy.engine import Connection
from sqlalchemy.exc import IntegrityError

from common.domain import errors
from common.store.engine import for_update, insert_ignore, now
from common.store.schema import inventories, resource_classes

STANDARD: tuple[str, ...] = tuple(os_resource_classes.STANDARDS)


def list_all(tx: Connection) -> list[tuple[str, int | None]]:
    """Return all classes with creation time in µs. The standard classes come first, with None."""
    own = tx.execute(
        sa.select(resource_classes).order_by(resource_classes.c.created_at, resource_classes.c.name)
    )
    return [*((name, None) for name in STANDARD), *((row.name, row.created_at) for row in own)]


def unknown(tx: Connection, names: Iterable[str], lock: bool = False) -> list[str]:
    """Return the names that are no resource class, sorted, in at most one statement.

    Args:
        tx: The transaction.
        names: The names to check.
        lock: Lock the existing CUSTOM_ classes until the transaction ends, so that they stay.
    """
    wanted = set(names) - set(STANDARD)
    if wanted:
        query = (
            sa.select(resource_classes.c.name)
            .where(resource_classes.c.name.in_(sorted(wanted)))
            .order_by(resource_classes.c.name)
        )
        wanted -= set(tx.scalars(for_update(query) if lock else query))
    return sorted(wanted)


def show(tx: Connection, name: str, lock: bool = False) -> int | None:
    """Return the creation time of a resource class in µs, or None for a standard class.

    ``lock`` locks the class until the end of the transaction.

    Raises:
        NotFound: The class does not exist.
    """
    if name in STANDARD:
        return None
    query = sa.select(resource_classes.c.created_at).where(resource_classes.c.name == name)
    row = tx.execute(for_update(query) if lock else query).first()
    if row is None:
        raise errors.NotFound(f"No such resource class {name}.")
    return int(row.created_at)


def create(tx: Connection, name: str) -> bool:
    """Create a CUSTOM_ resource class. Returns False if a class with this name exists."""
    if not unknown(tx, [name]):
        return False
    insert_ignore(tx, resource_classes, {"name": name, "created_at": now()})
    return True


def rename(tx: Connection, name: str, to: str) -> None:
    """Rename a CUSTOM_ resource class that has no inventory.

    Raises:
        NotFound: The class does not exist.
        BadRequest: The class is a standard class.
        Conflict: The new name is in use, or the class has an inventory.
    """
    if name in STANDARD:
        raise errors.BadRequest(f"Cannot update standard resource class {name}")
    show(tx, name, lock=True)
    exists = errors.Conflict(f"Resource class already exists: {to}")
    if not unknown(tx, [to]):
        raise exists
    _check_unused(tx, name, "update")
    try:
        tx.execute(
            sa.update(resource_classes).where(resource_classes.c.name == name).values(name=to)
        )
    except IntegrityError as problem:  # another writer was first
        raise exists from problem


def delete(tx: Connection, name: str) -> None:
    """Delete a CUSTOM_ resource class.

    Raises:
        NotFound: The class does not exist.
        BadRequest: The class is a standard class.
        Conflict: The class has an inventory.
    """
    if name in STANDARD:
        raise errors.BadRequest(
            f"Error in delete resource class: Cannot delete standard resource class {name}"
        )
    show(tx, name, lock=True)
    _check_unused(tx, name, "delete")
    tx.execute(sa.delete(resource_classes).where(resource_classes.c.name == name))


def _check_unused(tx: Connection, name: str, change: str) -> None:
    query = (
        sa.select(inventories.c.provider_id).where(inventories.c.resource_class == name).limit(1)
    )
    if tx.scalar(query) is not None:
        raise errors.Conflict(
            f"Error in {change} resource class: Class is in use in inventory: {name}"
        )
