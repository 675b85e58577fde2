# SPDX-License-Identifier: Apache-2.0
"""Traits of providers: the standard traits, and CUSTOM_* of operators and hosts.

The placement service calls this file. An operator cannot remove traits that a host or its service
reports.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

import os_traits
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from common.domain import errors
from common.domain.service_binaries import COMPUTE_DISABLED
from common.store.engine import for_update, insert_ignore, now
from common.store.rows import ProviderRow
from common.store.schema import provider_traits, traits


@functools.cache
def standard() -> frozenset[str]:
    """Return the names of all traits of the library os-traits, as a cached set."""
    return frozenset(os_traits.get_traits())


def list_all(tx: Connection, associated: bool | None = None) -> list[str]:
    """Return all traits, sorted, in one or two statements.

    Args:
        tx: The transaction.
        associated: True: only traits that a provider has. False: only the others. None: all.
    """
    used = set(tx.scalars(sa.select(provider_traits.c.trait).distinct()))
    if associated:
        return sorted(used)
    known = {*standard(), *tx.scalars(sa.select(traits.c.name)), *used}
    return sorted(known if associated is None else known - used)


def unknown(tx: Connection, names: Iterable[str], lock: bool = False) -> list[str]:
    """Return the names that are no trait, sorted, in at most two statements.

    Args:
        tx: The transaction.
        names: The names to check.
        lock: Lock the existing CUSTOM_ traits until the transaction ends, so that they stay.
    """
    wanted = set(names) - standard()
    if wanted:
        query = (
            sa.select(traits.c.name)
            .where(traits.c.name.in_(sorted(wanted)))
            .order_by(traits.c.name)
        )
        wanted -= set(tx.scalars(for_update(query) if lock else query))
    if wanted:  # hosts may have some of their own
        wanted -= set(
            tx.scalars(
                sa.select(provider_traits.c.trait)
                .where(provider_traits.c.trait.in_(sorted(wanted)))
                .distinct()
            )
        )
    return sorted(wanted)


def show(tx: Connection, name: str) -> int | None:
    """Return the creation time of a trait in µs, or None if no request created the trait.

    These are standard traits, and traits that only hosts report.

    Raises:
        NotFound: The trait does not exist.
    """
    row = tx.execute(sa.select(traits.c.created_at).where(traits.c.name == name)).first()
    if row is None and unknown(tx, [name]):
        raise errors.NotFound(f"No such trait(s): {name}.")
    return row.created_at if row is not None else None


def create(tx: Connection, name: str) -> bool:
    """Create a CUSTOM_ trait. Returns False if the trait exists."""
    if not unknown(tx, [name]):
        return False
    insert_ignore(tx, traits, {"name": name, "created_at": now()})
    return True


def delete(tx: Connection, name: str) -> None:
    """Delete a CUSTOM_ trait.

    Raises:
        NotFound: The trait does not exist.
        BadRequest: The trait is a standard trait.
        Conflict: A provider has the trait.
    """
    if name in standard():
        raise errors.BadRequest(f"Cannot delete standard trait {name}.")
    # Delete first: no provider can receive the trait between the deletion and the check below.
    gone = tx.execute(sa.delete(traits).where(traits.c.name == name)).rowcount
    if (
        tx.scalar(
            sa.select(provider_traits.c.trait).where(provider_traits.c.trait == name).limit(1)
        )
        is not None
    ):
        raise errors.Conflict(f"The trait {name} is in use by a resource provider.")
    if not gone:
        raise errors.NotFound(f"No such trait(s): {name}.")


def of(tx: Connection, provider_ids: Iterable[int]) -> dict[int, list[str]]:
    """Return the traits of each of these providers, sorted, in one statement."""
    found: dict[int, list[str]] = {number: [] for number in provider_ids}
    for row in tx.execute(
        sa.select(provider_traits)
        .where(provider_traits.c.provider_id.in_(sorted(found)))
        .order_by(provider_traits.c.trait)
    ):
        found[row.provider_id].append(row.trait)
    return found


def put(tx: Connection, provider: ProviderRow, names: Iterable[str]) -> list[str]:
    """Replace the traits that operators have set for a locked provider.

    Traits that the host reports stay.

    Returns:
        All traits of the provider, sorted.

    Raises:
        BadRequest: A trait does not exist.
        Conflict: The request adds COMPUTE_STATUS_DISABLED to the provider of a host, where only the
            host's compute service sets this trait.
    """
    wanted = set(names)
    missing = unknown(tx, wanted, lock=True)
    if missing:
        raise errors.BadRequest(f"No such trait(s): {', '.join(missing)}.")
    own = provider_traits.c.provider_id == provider.id
    reported = set(
        tx.scalars(
            sa.select(provider_traits.c.trait).where(own, provider_traits.c.by_hand.is_(False))
        )
    )
    if provider.host is not None and COMPUTE_DISABLED in wanted - reported:
        raise errors.Conflict(
            f"{COMPUTE_DISABLED} can be set only by disabling the compute service of {provider.host}. "
            "Disable the service instead."
        )
    tx.execute(sa.delete(provider_traits).where(own, provider_traits.c.by_hand.is_(True)))
    added = sorted(wanted - reported)
    if added:
        tx.execute(
            sa.insert(provider_traits),
            [{"provider_id": provider.id, "trait": name, "by_hand": True} for name in added],
        )
    return sorted({*added, *reported})
