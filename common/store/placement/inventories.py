# SPDX-License-Identifier: Apache-2.0
"""Inventories: how much of each resource class a provider has, and who says so.

A host reports its classes (``report``); an operator may set reserved and ratio of those by hand,
and add classes of their own (``put``, ``remove``: the placement service); aggregates may carry
ratios. ``settle`` is where ``reserved`` and ``allocation_ratio``, the only two that claims and
schedulers read, follow from all of that: by hand before aggregates (the smallest of several) before
what the host is configured with.
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

#: Metadata of an aggregate that is the ratio of its hosts, as the API's users know it.
RATIOS = {
    "cpu_allocation_ratio": "VCPU",
    "ram_allocation_ratio": "MEMORY_MB",
    "disk_allocation_ratio": "DISK_GB",
}


#: Of a class made by hand, where nothing else is said.
DEFAULTS: Mapping[str, float] = {
    "reserved": 0,
    "min_unit": 1,
    "max_unit": 2**31 - 1,
    "step_size": 1,
    "allocation_ratio": 1.0,
}


#: No capacity is more, whatever the ratio: sums of it still fit into the whole numbers of databases
#: and programs.
MOST = 2**53


class InUse(errors.Conflict):
    """Somebody holds of what shall go."""

    code = "placement.inventory.inuse"


@dataclass(frozen=True, slots=True)
class Reported:
    """One class as its host reports it."""

    resource_class: str
    total: int
    reserved: int = 0
    ratio: float = 1.0


def report(tx: Connection, provider_id: int, reported: Sequence[Reported]) -> None:
    """Take in what the host of a provider, which is locked, has. A class it has no more goes,
    unless it is used."""
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
    """Let reserved and ratio of these providers, which are locked and touched, follow from who set
    them.

    Where that cuts a capacity below what is used, the excess is noted: nobody claimed too much.
    """
    wanted = sorted(set(provider_ids))
    if not wanted:
        return
    ratios, used = _aggregate_ratios(tx, wanted), _used(tx, wanted)
    for row in tx.execute(sa.select(inventories).where(inventories.c.provider_id.in_(wanted))):
        values = _settled(
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
    """What can be given out of an inventory, in whole units."""
    values = row if isinstance(row, Mapping) else row._mapping
    return int(min((values["total"] - values["reserved"]) * values["allocation_ratio"], MOST))


# --- by hand ---
def of(tx: Connection, provider_ids: Iterable[int]) -> dict[int, dict[str, InventoryRow]]:
    """The inventories of each of these providers, by class; one statement."""
    found: dict[int, dict[str, InventoryRow]] = {number: {} for number in provider_ids}
    for row in tx.execute(
        sa.select(inventories)
        .where(inventories.c.provider_id.in_(sorted(found)))
        .order_by(inventories.c.resource_class)
    ):
        found[row.provider_id][row.resource_class] = row
    return found


def usages(tx: Connection, provider_ids: Iterable[int]) -> dict[tuple[int, str], int]:
    """(provider, class) -> what is held of it; one statement."""
    return _used(tx, sorted(set(provider_ids)))


def put(
    tx: Connection,
    provider: ProviderRow,
    wanted: Mapping[str, JsonMapping],
    whole: bool = True,
) -> None:
    """Let a locked and touched provider have these classes, and with ``whole`` no others.

    Of a class made by hand everything is set; what ``wanted`` leaves out gets its default. A class
    that the host reports takes reserved and ratio by hand: left out they are the host's again, as
    it is they stay.

    Raises:
        Conflict: other facts than the host reports. InUse: a class that is left out is held by
        somebody.
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
    """Take classes made by hand from a locked and touched provider.

    Raises:
        Conflict: its host reports one of them. InUse: somebody holds of them.
    """
    known = of(tx, [provider.id])[provider.id]
    held = sorted((name for _, name in _used(tx, [provider.id]) if name in names), key=_place)
    if held:
        raise InUse(
            f"Inventory for '{', '.join(held)}' on resource provider '{provider.uuid}' in use."
        )
    reported = [name for name in names if name in known and known[name].host_ratio is not None]
    if reported:
        raise errors.Conflict(
            f"{', '.join(reported)}: the host {provider.host} reports this itself, so it cannot be "
            "removed; give it too, with another reserved or allocation_ratio if you like."
        )
    if names:
        tx.execute(
            sa.delete(inventories).where(
                inventories.c.provider_id == provider.id, inventories.c.resource_class.in_(names)
            )
        )


def _place(resource_class: str) -> tuple[int, str]:
    """Standard classes first, in the order that everybody knows."""
    known = os_resource_classes.STANDARDS
    return known.index(resource_class) if resource_class in known else len(known), resource_class


def _by_hand(provider: ProviderRow, row: InventoryRow, values: JsonMapping) -> Values:
    """What is set by hand of a class that the host reports."""
    for name in ("total", "min_unit", "max_unit", "step_size"):
        if values.get(name, getattr(row, name)) != getattr(row, name):
            raise errors.Conflict(
                f"{row.resource_class}: {name} is {getattr(row, name)}, as the host {provider.host} reports it; only "
                "reserved and allocation_ratio can be set by hand."
            )
    made: Values = {}
    for name, own in (("reserved", "set_reserved"), ("allocation_ratio", "set_ratio")):
        if name not in values:
            made[own] = None
        elif values[name] != getattr(row, name):
            made[own] = values[name]
    return made or {"set_reserved": row.set_reserved}


def _settled(row: InventoryRow, ratio: float | None, used: int) -> Values:
    values: Values = {"reserved": row.reserved, "allocation_ratio": row.allocation_ratio}
    if row.host_ratio is not None:
        values["reserved"] = row.set_reserved if row.set_reserved is not None else row.host_reserved
        values["allocation_ratio"] = next(
            one for one in (row.set_ratio, ratio, row.host_ratio) if one is not None
        )
    fits = used <= capacity({"total": row.total, **values})
    return {**values, "excess": 0 if fits else used}


def _aggregate_ratios(tx: Connection, provider_ids: Sequence[int]) -> dict[tuple[int, str], float]:
    """(provider, class) -> the smallest ratio that an aggregate of its host carries; a word that is
    no number is not one."""
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
    """The allocation ratio that a text says, or None when it says none."""
    try:
        ratio = float(text) if text is not None else 0.0
    except ValueError:
        return None
    return ratio if 0 < ratio < 1e6 else None


def _used(tx: Connection, provider_ids: Sequence[int]) -> dict[tuple[int, str], int]:
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
