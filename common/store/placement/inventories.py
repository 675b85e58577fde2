# SPDX-License-Identifier: Apache-2.0
"""Inventories: the amount of each resource class of a provider, and the origin of each value.

A host reports its classes (``report``). An operator can override the reserved amount and ratio of
these classes, and add own classes (``put``, ``remove``, called by the placement service). Metadata
of aggregates can contain ratios. ``settle`` computes ``reserved`` and ``allocation_ratio``, which
claims and schedulers read. An operator's override has priority over aggregates (the smallest ratio
of several), and these over the host's configuration.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import os_resource_classes
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from common.domain import errors
from common.domain.json_types import JsonMapping
from common.store.rows import InventoryRow, ProviderRow, Values
from common.store.schema import aggregate_hosts, aggregates, allocations, inventories, providers

#: Metadata key of an aggregate -> resource class whose ratio it sets.
RATIOS = {
    "cpu_allocation_ratio": "VCPU",
    "ram_allocation_ratio": "MEMORY_MB",
    "disk_allocation_ratio": "DISK_GB",
}


#: Default values of an operator's class.
DEFAULTS: Mapping[str, float] = {
    "reserved": 0,
    "min_unit": 1,
    "max_unit": 2**31 - 1,
    "step_size": 1,
    "allocation_ratio": 1.0,
}


#: Limit of a capacity, whatever the ratio, so that sums fit into the integers of databases and
#: programs.
MOST = 2**53
#: The largest number in the column ``excess``. A usage is a sum and may be larger.
_LARGEST_EXCESS = 2**31 - 1


class InUse(errors.Conflict):
    """A resource class that a request would remove from a provider has allocations."""

    code = "placement.inventory.inuse"


@dataclass(frozen=True, slots=True)
class Reported:
    """A resource class in the report of a host."""

    resource_class: str
    total: int
    reserved: int = 0
    ratio: float = 1.0


def report(tx: Connection, provider_id: int, reported: Sequence[Reported]) -> None:
    """Store the resource classes that the host of a locked provider reports.

    A class that the host no longer reports is removed unless it has allocations. Classes of an
    operator stay, but a class that the host reports now becomes the host's. ``settle`` follows.
    """
    known = {
        row.resource_class: row
        for row in tx.execute(
            sa.select(inventories).where(inventories.c.provider_id == provider_id)
        )
    }
    for one in reported:
        values = {
            "total": one.total,
            "max_unit": max(one.total, 1),
            "host_reserved": one.reserved,
            "host_ratio": one.ratio,
        }
        if one.resource_class in known:
            tx.execute(
                sa.update(inventories)
                .where(
                    inventories.c.provider_id == provider_id,
                    inventories.c.resource_class == one.resource_class,
                )
                .values(values)
            )
        else:
            tx.execute(
                sa.insert(inventories).values(
                    provider_id=provider_id,
                    resource_class=one.resource_class,
                    reserved=one.reserved,
                    allocation_ratio=one.ratio,
                    **values,
                )
            )
    used = sa.select(allocations.c.resource_class).where(allocations.c.provider_id == provider_id)
    gone = [
        name
        for name, row in known.items()
        if row.host_ratio is not None and name not in {one.resource_class for one in reported}
    ]
    if gone:
        tx.execute(
            sa.delete(inventories).where(
                inventories.c.provider_id == provider_id,
                inventories.c.resource_class.in_(gone),
                inventories.c.resource_class.not_in(used),
            )
        )
    settle(tx, [provider_id])


def settle(tx: Connection, provider_ids: Iterable[int]) -> None:
    """Compute and store ``reserved`` and ``allocation_ratio`` of these providers' inventories.

    In an operator's class both stay as they are. The caller has locked the providers and raised
    their generations. If the capacity is now below the usage, the usage is stored as ``excess``, or
    else 0. ``kilonova doctor`` accepts a usage up to ``excess``.
    """
    wanted = sorted(set(provider_ids))
    if not wanted:
        return
    ratios, used = _aggregate_ratios(tx, wanted), _sum_used(tx, wanted)
    for row in tx.execute(sa.select(inventories).where(inventories.c.provider_id.in_(wanted))):
        values = _settle_row(
            row,
            ratios.get((row.provider_id, row.resource_class)),
            used.get((row.provider_id, row.resource_class), 0),
        )
        if any(getattr(row, name) != value for name, value in values.items()):
            tx.execute(
                sa.update(inventories)
                .where(
                    inventories.c.provider_id == row.provider_id,
                    inventories.c.resource_class == row.resource_class,
                )
                .values(values)
            )


def capacity(row: InventoryRow | JsonMapping) -> int:
    """Return (total - reserved) * allocation_ratio without the fraction, at most ``MOST``."""
    values = row if isinstance(row, Mapping) else row._mapping
    return int(min((values["total"] - values["reserved"]) * values["allocation_ratio"], MOST))


# --- by hand ---
def of(tx: Connection, provider_ids: Iterable[int]) -> dict[int, dict[str, InventoryRow]]:
    """Return the inventories of each of these providers by resource class, in one statement."""
    found: dict[int, dict[str, InventoryRow]] = {number: {} for number in provider_ids}
    for row in tx.execute(
        sa.select(inventories)
        .where(inventories.c.provider_id.in_(sorted(found)))
        .order_by(inventories.c.resource_class)
    ):
        found[row.provider_id][row.resource_class] = row
    return found


def usages(tx: Connection, provider_ids: Iterable[int]) -> dict[tuple[int, str], int]:
    """Return the usage by (provider id, resource class), in one statement.

    Classes without allocations are left out.
    """
    return _sum_used(tx, sorted(set(provider_ids)))


def put(
    tx: Connection,
    provider: ProviderRow,
    wanted: Mapping[str, JsonMapping],
    whole: bool = True,
) -> None:
    """Set inventories of a provider for an operator.

    For an operator's class, missing values get their defaults. For a class that the host reports,
    ``reserved`` and ``allocation_ratio`` can be overridden. A missing value removes the override. A
    value that equals the current value changes nothing.

    Args:
        tx: The transaction.
        provider: The provider. The caller has locked it and raised its generation.
        wanted: Resource class -> inventory.
        whole: Remove all classes that are not in ``wanted``.

    Raises:
        Conflict: Another value than these two differs from the host's report, or a class to be
            removed is reported by the host.
        InUse: A class to be removed has allocations.
    """
    known = of(tx, [provider.id])[provider.id]
    if whole:
        remove(tx, provider, sorted(set(known) - set(wanted)))
    for name, values in wanted.items():
        row = known.get(name)
        if row is None:
            tx.execute(
                sa.insert(inventories).values(
                    provider_id=provider.id, resource_class=name, **{**DEFAULTS, **values}
                )
            )
            continue
        tx.execute(
            sa.update(inventories)
            .where(inventories.c.provider_id == provider.id, inventories.c.resource_class == name)
            .values(
                {**DEFAULTS, **values}
                if row.host_ratio is None
                else _by_hand(provider, row, values)
            )
        )
    settle(tx, [provider.id])


def remove(tx: Connection, provider: ProviderRow, names: Sequence[str]) -> None:
    """Remove an operator's resource classes from a provider. Missing classes are ignored.

    The caller has locked the provider and raised its generation.

    Raises:
        Conflict: The host reports one of the classes.
        InUse: One of the classes has allocations.
    """
    known = of(tx, [provider.id])[provider.id]
    held = sorted((name for _, name in _sum_used(tx, [provider.id]) if name in names), key=_place)
    if held:
        raise InUse(
            f"Inventory for '{', '.join(held)}' on resource provider '{provider.uuid}' in use."
        )
    reported = [name for name in names if name in known and known[name].host_ratio is not None]
    if reported:
        raise errors.Conflict(
            f"The host {provider.host} reports the inventory of {', '.join(reported)}, which cannot be removed. "
            "A request that sets all inventories must include it, and can change its reserved and "
            "allocation_ratio."
        )
    if names:
        tx.execute(
            sa.delete(inventories).where(
                inventories.c.provider_id == provider.id, inventories.c.resource_class.in_(names)
            )
        )


def _place(resource_class: str) -> tuple[int, str]:
    """Return the sort key of a class: standard classes first, in the order of the library."""
    known = os_resource_classes.STANDARDS
    return known.index(resource_class) if resource_class in known else len(known), resource_class


def _by_hand(provider: ProviderRow, row: InventoryRow, values: JsonMapping) -> Values:
    """Return the columns ``set_reserved`` and ``set_ratio`` that an operator's request changes.

    The host reports this class. A missing value removes the override (None). A value that equals
    the current value is left out. The result is never empty: without a change, ``set_reserved`` is
    returned as it is.

    Raises:
        Conflict: A value other than ``reserved`` and ``allocation_ratio`` differs from the report.
    """
    for name in ("total", "min_unit", "max_unit", "step_size"):
        if values.get(name, getattr(row, name)) != getattr(row, name):
            raise errors.Conflict(
                f"The host {provider.host} reports {name} {getattr(row, name)} for {row.resource_class}. Only "
                "reserved and allocation_ratio can be changed."
            )
    made: Values = {}
    for name, own in (("reserved", "set_reserved"), ("allocation_ratio", "set_ratio")):
        if name not in values:
            made[own] = None
        elif values[name] != getattr(row, name):
            made[own] = values[name]
    return made or {"set_reserved": row.set_reserved}


def _settle_row(row: InventoryRow, ratio: float | None, used: int) -> Values:
    values: Values = {"reserved": row.reserved, "allocation_ratio": row.allocation_ratio}
    if row.host_ratio is not None:
        values["reserved"] = row.set_reserved if row.set_reserved is not None else row.host_reserved
        values["allocation_ratio"] = next(
            one for one in (row.set_ratio, ratio, row.host_ratio) if one is not None
        )
    fits = used <= capacity({"total": row.total, **values})
    return {**values, "excess": 0 if fits else min(used, _LARGEST_EXCESS)}


def _aggregate_ratios(tx: Connection, provider_ids: Sequence[int]) -> dict[tuple[int, str], float]:
    """Return (provider id, resource class) -> smallest ratio of the host's aggregates.

    Invalid ratios are ignored. Classes for which no aggregate sets a ratio are left out.
    """
    query = (
        sa.select(providers.c.id, aggregates.c.meta)
        .select_from(
            providers.join(aggregate_hosts, aggregate_hosts.c.host == providers.c.host).join(
                aggregates, aggregates.c.id == aggregate_hosts.c.aggregate_id
            )
        )
        .where(providers.c.id.in_(provider_ids))
    )
    found: dict[tuple[int, str], float] = {}
    for row in tx.execute(query):
        for key, resource_class in RATIOS.items():
            ratio = ratio_of(row.meta.get(key))
            if ratio is not None:
                place = (row.id, resource_class)
                found[place] = min(found.get(place, ratio), ratio)
    return found


def ratio_of(text: str | None) -> float | None:
    """Return the text as a number, or None unless it is a number above 0 and below a million."""
    try:
        ratio = float(text) if text is not None else 0.0
    except ValueError:
        return None
    return ratio if 0 < ratio < 1e6 else None


def _sum_used(tx: Connection, provider_ids: Sequence[int]) -> dict[tuple[int, str], int]:
    query = (
        sa.select(
            allocations.c.provider_id,
            allocations.c.resource_class,
            sa.func.sum(allocations.c.used).label("used"),
        )
        .where(allocations.c.provider_id.in_(provider_ids))
        .group_by(allocations.c.provider_id, allocations.c.resource_class)
    )
    return {(row.provider_id, row.resource_class): int(row.used) for row in tx.execute(query)}
