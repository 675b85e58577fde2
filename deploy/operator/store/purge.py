# SPDX-License-Identifier: Apache-2.0
"""Removal of old rows: the kinds of rows, their retention times, and the deletion.

Called by ``kilonova database purge``. ``KINDS`` defines when a row of a kind is old, and which
dependent rows are deleted first. Each kind is read once along the primary key. Each transaction
deletes at most ``ROWS`` rows, and locks at most ``LOOKED_AT`` rows of the kind. A killed purge can
be repeated. Notifications have no kind, because their rows are deleted as soon as a broker has
accepted them.

Invariant: no row is deleted that a remaining row refers to. Migrations and actions of existing
servers are deleted only if their kind is named.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from common.domain.clock import SECOND
from common.domain.statuses import OPEN_MIGRATIONS
from common.store.engine import Store, moment
from common.store.hosts.host_actions import OPEN as OPEN_HOST_ACTIONS
from common.store.schema import (
    actions,
    allocations,
    block_devices,
    cleanups,
    console_tokens,
    events,
    guests,
    host_action_events,
    host_actions,
    idempotency_keys,
    migrations,
    server_group_members,
    servers,
    share_mappings,
)
from common.store.servers.actions import ENDED, LIVE

DAY = 24 * 3600 * SECOND
#: The limit of deleted rows per transaction.
ROWS = 500
#: The maximum number of rows of a kind per query.
LOOKED_AT = 100
Key = tuple[Any, ...]
Condition = sa.ColumnElement[bool]


@dataclass(frozen=True)
class Hanging:
    """Rows that depend on a row of a kind, and are deleted before it.

    ``column`` refers to the row of the kind. With ``through``, ``column`` refers to a row of a
    table in between, whose column ``through`` refers to the row of the kind. For example, events
    refer to actions, which refer to servers.
    """

    column: sa.Column[str]
    through: sa.Column[str] | None = None

    def of(self, ids: Sequence[object] | sa.Select[tuple[object]]) -> Condition:
        """Return the condition on the rows that depend on these rows of the kind.

        Args:
            ids: The ids of the rows, or a query for them.
        """
        if self.through is None:
            return self.column.in_(ids)
        return self.column.in_(
            sa.select(self.through.table.c.id).where(self.through.in_(ids)).correlate(None)
        )


@dataclass(frozen=True)
class RowKind:
    """A kind of rows that ``kilonova database purge`` deletes, with their dependent rows."""

    name: str
    table: sa.Table
    #: Times since which the row is old. The latest counts.
    over: tuple[sa.ColumnElement[int], ...]
    only: tuple[Condition, ...]
    #: Days for which an old row is kept.
    days: int
    hanging: tuple[Hanging, ...] = ()
    #: True if rows are deleted only if the operator names the kind: the history of existing
    #: servers.
    named_only: bool = False

    @property
    def key(self) -> tuple[sa.Column[object], ...]:
        return tuple(self.table.primary_key.columns)

    def is_over(self, before: int) -> Condition:
        """Return the condition on rows that were old before this time (µs) and meet ``only``."""
        return sa.and_(*(since < before for since in self.over), *self.only)


def _none(*conditions: Condition) -> Condition:
    return ~sa.exists(sa.literal(1)).where(*conditions)


def _is_idle(server: sa.Column[Any]) -> Condition:
    """Return the condition that no action has the server. An action may need older rows.

    A server without a row is idle.
    """
    return _none(servers.c.id == server, servers.c.action.is_not(None))


_A, _H, _M, _S = actions.c, host_actions.c, migrations.c, servers.c
KINDS = (
    RowKind(
        # Deleted servers.
        "servers",
        servers,
        # A server that ran counts as used until it was terminated.
        (_S.deleted_at, sa.case((_S.launched_at.is_(None), _S.deleted_at), else_=_S.terminated_at)),
        (
            _S.deleted == 1,
            _S.action.is_(None),
            _none(guests.c.server_id == _S.id),
            _none(allocations.c.consumer_id == _S.id),
            _none(cleanups.c.server_id == _S.id),
            _none(share_mappings.c.server_id == _S.id),
            _none(block_devices.c.server_id == _S.id),
            _none(_M.server_id == _S.id, _M.status.in_(OPEN_MIGRATIONS)),
            _none(_A.server_id == _S.id, _A.state.in_(LIVE)),
        ),
        90,
        (
            Hanging(events.c.action_id, through=_A.server_id),
            Hanging(_A.server_id),
            Hanging(_M.server_id),
            Hanging(console_tokens.c.server_id),
            Hanging(server_group_members.c.server_id),
            Hanging(idempotency_keys.c.server_id),
        ),
    ),
    RowKind(
        # Before actions, because migrations refer to them.
        "migrations",
        migrations,
        (_M.updated_at,),
        (
            _M.status.not_in(OPEN_MIGRATIONS),
            _is_idle(_M.server_id),
            _none(guests.c.server_id == _M.server_id, guests.c.holder == _M.uuid),
            _none(allocations.c.consumer_id == _M.uuid),
        ),
        365,
        named_only=True,
    ),
    RowKind(
        "actions",
        actions,
        (_A.finished_at,),
        (_A.state.in_(ENDED), _is_idle(_A.server_id), _none(_M.action_id == _A.id)),
        365,
        (Hanging(events.c.action_id),),
        named_only=True,
    ),
    RowKind(
        "host-actions",
        host_actions,
        (_H.finished_at,),
        (_H.state.not_in(OPEN_HOST_ACTIONS), _H.open_host.is_(None)),
        90,
        (Hanging(host_action_events.c.action_id),),
    ),
    RowKind("console-tokens", console_tokens, (console_tokens.c.expires_at,), (), 1),
    RowKind("idempotency-keys", idempotency_keys, (idempotency_keys.c.created_at,), (), 30),
)


def chosen(names: Sequence[str]) -> list[RowKind]:
    """Return the kinds with these names. Without names, all kinds without ``named_only``."""
    return [kind for kind in KINDS if (kind.name in names if names else not kind.named_only)]


def counts(tx: Connection, kind: RowKind, days: int) -> Counter[str]:
    """Return table -> number of rows that ``purge`` would delete, with dependent rows."""
    is_over = kind.is_over(moment(tx) - days * DAY)
    numbers = Counter({kind.table.name: tx.scalar(_count(kind.table, is_over)) or 0})
    for hanging in kind.hanging:
        dependents = hanging.of(sa.select(kind.table.c.id).where(is_over).correlate(None))
        numbers[hanging.column.table.name] += (
            tx.scalar(_count(hanging.column.table, dependents)) or 0
        )
    return numbers


def _count(table: sa.FromClause, condition: Condition) -> sa.Select[Any]:
    return sa.select(sa.func.count()).select_from(table).where(condition)


def purge(
    store: Store,
    kind: RowKind,
    days: int,
    report: Callable[[Counter[str]], None] = lambda removed: None,
) -> Counter[str]:
    """Delete rows that were old more than ``days`` days ago, and return their numbers by table.

    Rows that other transactions have locked stay for the next call.

    Args:
        store: The database.
        kind: The kind of rows.
        days: Days for which an old row is kept.
        report: Called after each transaction with the numbers of deleted rows so far.

    Raises:
        NoStore, TooBusy, Unsure: The database does not answer, or the rows are locked. Deleted rows
            stay deleted. Repeat the call.
    """
    before = store.read(moment) - days * DAY
    removed: Counter[str] = Counter()
    last_key: Key | None = None
    while keys := store.read(partial(_read_keys, kind=kind, before=before, after=last_key)):
        is_complete = False
        while not is_complete:
            # A part with an unconfirmed COMMIT is repeated, because deleting again has no effect.
            part = store.write(
                partial(_remove, kind=kind, keys=keys, before=before),
                lambda tx, result: False,
            )
            removed += part
            is_complete = part.total() < ROWS
            report(removed)
        last_key = keys[-1]
    return removed


def _read_keys(tx: Connection, kind: RowKind, before: int, after: Key | None) -> list[Key]:
    """Return at most ``LOOKED_AT`` keys of old rows after the key ``after``, without locks.

    ``_remove`` checks them again under a lock.
    """
    query = sa.select(*kind.key).where(kind.is_over(before)).order_by(*kind.key).limit(LOOKED_AT)
    if after is not None:
        query = query.where(_is_after(kind.key, after))
    return [tuple(row) for row in tx.execute(query)]


def _is_after(columns: Sequence[sa.Column[object]], after: Key) -> Condition:
    """Return the condition on rows after this key, column by column.

    Why: MariaDB uses no index for a comparison of tuples.
    """
    first, rest = columns[0] > after[0], columns[1:]
    return (
        first
        if not rest
        else sa.or_(first, sa.and_(columns[0] == after[0], _is_after(rest, after[1:])))
    )


def _remove(tx: Connection, kind: RowKind, keys: Sequence[Key], before: int) -> Counter[str]:
    """Delete at most ``ROWS`` rows of these keys and of their dependents. Return numbers by table.

    Rows that other transactions have locked, or that are not old any more, stay. If fewer than
    ``ROWS`` rows were deleted, no other rows of these keys remain.
    """
    locked_keys = [
        tuple(row)
        for row in tx.execute(
            sa.select(*kind.key)
            .where(_among(kind.key, keys), kind.is_over(before))
            .order_by(*kind.key)
            .with_for_update(skip_locked=True)
        )
    ]
    removed: Counter[str] = Counter()
    if not locked_keys:
        return removed
    for hanging in kind.hanging:
        condition = hanging.of([key[0] for key in locked_keys])
        table = hanging.column.table
        assert isinstance(table, sa.Table)
        removed[table.name] += _delete(tx, table, condition, ROWS - removed.total())
        if removed.total() >= ROWS:
            return removed
    condition = _among(kind.key, locked_keys)
    removed[kind.table.name] += _delete(tx, kind.table, condition, ROWS - removed.total())
    return removed


def _delete(tx: Connection, table: sa.Table, condition: Condition, most: int) -> int:
    key = tuple(table.primary_key.columns)
    keys = [tuple(row) for row in tx.execute(sa.select(*key).where(condition).limit(most))]
    if not keys:
        return 0
    return int(tx.execute(sa.delete(table).where(_among(key, keys))).rowcount)


def _among(columns: Sequence[sa.Column[object]], keys: Sequence[Key]) -> Condition:
    if len(columns) == 1:
        return columns[0].in_([key[0] for key in keys])
    return sa.tuple_(*columns).in_(keys)
