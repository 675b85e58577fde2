# SPDX-License-Identifier: Apache-2.0
"""Search for resource providers by name, tree, aggregates, traits and free resources.

The placement service uses this for its list of providers and for allocation candidates. A search is
one statement. Each provider is judged alone: resources of its tree or aggregates are not added.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from common.domain import ids
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

Names = frozenset[str]


@dataclass(frozen=True, slots=True)
class ProviderFilters:
    """Conditions on a provider, all of which must be met.

    in_tree: uuid of any provider of the tree. member_of, not_member_of: uuids of aggregates.
    required, forbidden: traits of the provider. root_required, root_forbidden: traits of the root
    of its tree. The provider needs at least one element of each set in ``member_of``, ``required``
    and ``root_required``, and must have no element of the other sets. resources: amounts that must
    be free and permitted by the inventory's units.
    """

    name: str | None = None
    uuid: str | None = None
    in_tree: str | None = None
    member_of: tuple[Names, ...] = ()
    not_member_of: Names = frozenset()
    required: tuple[Names, ...] = ()
    forbidden: Names = frozenset()
    resources: Mapping[str, int] = field(default_factory=dict)
    root_required: tuple[Names, ...] = ()
    root_forbidden: Names = frozenset()


def find(tx: Connection, wanted: ProviderFilters, limit: int | None = None) -> list[ProviderRow]:
    """Return the matching providers in the order of their ids, at most ``limit``. None: all."""
    query = sa.select(providers).where(*_conditions(wanted)).order_by(providers.c.id)
    return list(tx.execute(query if limit is None else query.limit(limit)))


def trees(tx: Connection, roots: Collection[str]) -> list[ProviderRow]:
    """Return all providers of the trees with these uuids of roots, in one statement."""
    return list(
        tx.execute(
            sa.select(providers)
            .where(providers.c.root_uuid.in_(sorted(roots)))
            .order_by(providers.c.id)
        )
    )


def _conditions(wanted: ProviderFilters) -> list[sa.ColumnElement[bool]]:
    found: list[sa.ColumnElement[bool]] = []
    if wanted.name is not None:
        found.append(providers.c.name == wanted.name)
    if wanted.uuid is not None:
        found.append(providers.c.uuid == wanted.uuid)
    if wanted.in_tree is not None:
        tree = providers.alias("tree")
        found.append(
            providers.c.root_uuid.in_(
                sa.select(tree.c.root_uuid).where(tree.c.uuid == wanted.in_tree)
            )
        )
    found += [_member(group) for group in wanted.member_of]
    if wanted.not_member_of:
        found.append(~_member(wanted.not_member_of))
    found += [_has(providers.c.id, group) for group in wanted.required]
    if wanted.forbidden:
        found.append(~_has(providers.c.id, wanted.forbidden))
    if wanted.root_required or wanted.root_forbidden:
        found.append(_root(wanted))
    found += [_offers(name, amount) for name, amount in wanted.resources.items()]
    return found


def _member(uuids: Names) -> sa.ColumnElement[bool]:
    spelled = sorted({one for uuid in uuids for one in ids.spellings(uuid)})
    by_hand = sa.select(provider_aggregates.c.provider_id).where(
        provider_aggregates.c.provider_id == providers.c.id,
        provider_aggregates.c.aggregate_uuid.in_(spelled),
    )
    by_host = (
        sa.select(aggregate_hosts.c.host)
        .select_from(
            aggregate_hosts.join(aggregates, aggregates.c.id == aggregate_hosts.c.aggregate_id)
        )
        .where(aggregate_hosts.c.host == providers.c.host, aggregates.c.uuid.in_(sorted(uuids)))
    )
    return sa.or_(by_hand.correlate(providers).exists(), by_host.correlate(providers).exists())


def _has(provider_id: sa.ColumnElement[int], names: Names) -> sa.ColumnElement[bool]:
    return sa.exists().where(
        provider_traits.c.provider_id == provider_id, provider_traits.c.trait.in_(sorted(names))
    )


def _root(wanted: ProviderFilters) -> sa.ColumnElement[bool]:
    root = providers.alias("root")
    conditions = [_has(root.c.id, group) for group in wanted.root_required]
    if wanted.root_forbidden:
        conditions.append(~_has(root.c.id, wanted.root_forbidden))
    return sa.exists().where(root.c.uuid == providers.c.root_uuid, *conditions)


def _offers(resource_class: str, amount: int) -> sa.ColumnElement[bool]:
    used = (
        sa.select(sa.func.coalesce(sa.func.sum(allocations.c.used), 0))
        .where(
            allocations.c.provider_id == providers.c.id,
            allocations.c.resource_class == resource_class,
        )
        .correlate(providers)
        .scalar_subquery()
    )
    stock = inventories.c
    return sa.exists().where(
        stock.provider_id == providers.c.id,
        stock.resource_class == resource_class,
        stock.min_unit <= amount,
        stock.max_unit >= amount,
        sa.literal(amount) % stock.step_size == 0,
        used + amount <= (stock.total - stock.reserved) * stock.allocation_ratio,
    )
