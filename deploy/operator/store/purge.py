# SPDX-License-Identifier: Apache-2.0
"""Old rows go: what kinds there are, for how long each is kept, and how they are removed.

Called by ``kilonova database purge``. ``KINDS`` says it all: when a row of a kind is over, and what
hangs on it and goes before it. A kind is walked once along its primary key, so what is kept costs
one look. Each transaction removes at most ``ROWS`` rows and holds its own rows only; a purge that
is killed leaves nothing but work for the next one. Must stay true: nothing goes that a living row
refers to, and nothing of a living server unless its kind is named. Notifications have no kind: a
row goes as soon as a broker has it.
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
ROWS = 500  #: that one transaction removes
LOOKED_AT = 100  #: rows of a kind that are taken in hand together
Key = tuple[Any, ...]
Condition = sa.ColumnElement[bool]


@dataclass(frozen=True)
class Hanging:
    """Rows that go before the row whose id they have in ``column``. ``through``: it is the id of a
    row of that column's table, which has the id of the kind's row there."""

    column: sa.Column[str]
    through: sa.Column[str] | None = None

    def of(self, ids: Sequence[object] | sa.Select[tuple[object]]) -> Condition:
        """Those of these rows; ``ids``: values or a query."""
        if self.through is None:
            return self.column.in_(ids)
        return self.column.in_(
            sa.select(self.through.table.c.id).where(self.through.in_(ids)).correlate(None)
        )


@dataclass(frozen=True)
class RowKind:
    """What is removed together. ``days``: kept for so long after it was over. ``named_only``:
    it belongs to servers that live, so it goes only where somebody names it."""

    name: str
    table: sa.Table
    over: tuple[sa.ColumnElement[int], ...]  # the moments since which it is: the last one counts
    only: tuple[Condition, ...]
    days: int
    hanging: tuple[Hanging, ...] = ()
    named_only: bool = False

    @property
    def key(self) -> tuple[sa.Column[object], ...]:
        return tuple(self.table.primary_key.columns)

    def is_over(self, before: int) -> Condition:
        """Rows that were over before this moment, and that nothing refers to."""
        return sa.and_(*(since < before for since in self.over), *self.only)


def _none(*conditions: Condition) -> Condition:
    return ~sa.exists(sa.literal(1)).where(*conditions)


def _is_idle(server: sa.Column[Any]) -> Condition:
    """No action is at the server: one that is may need what an earlier one has left."""
    return _none(servers.c.id == server, servers.c.action.is_not(None))


_A, _H, _M, _S = actions.c, host_actions.c, migrations.c, servers.c
KINDS = (
    RowKind(
        "servers",  # deleted ones
        servers,
        # One that has run is part of what was used until it was terminated.
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
        "migrations",  # before actions, which they refer to
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
    """The kinds of these names; without names all but those that must be named."""
    return [one for one in KINDS if (one.name in names if names else not one.named_only)]


def counts(tx: Connection, kind: RowKind, days: int) -> Counter[str]:
    """How many rows would go, by table; those that hang on them too."""
    is_over = kind.is_over(moment(tx) - days * DAY)
    found = Counter({kind.table.name: tx.scalar(_count(kind.table, is_over)) or 0})
    for hanging in kind.hanging:
        those = hanging.of(sa.select(kind.table.c.id).where(is_over).correlate(None))
        found[hanging.column.table.name] += tx.scalar(_count(hanging.column.table, those)) or 0
    return found


def _count(table: sa.FromClause, those: Condition) -> sa.Select[Any]:
    return sa.select(sa.func.count()).select_from(table).where(those)


def purge(
    store: Store,
    kind: RowKind,
    days: int,
    said: Callable[[Counter[str]], None] = lambda removed: None,
) -> Counter[str]:
    """Remove what was over more than ``days`` ago; returns how many rows of each table.

    ``said`` is called with the sum so far after each transaction.

    Raises:
        NoStore, TooBusy, Unsure: the database does not answer, or gives no rows. What was removed
        is removed; do it again.
    """
    before = store.read(moment) - days * DAY
    removed: Counter[str] = Counter()
    after: Key | None = None
    while keys := store.read(partial(_next, kind=kind, before=before, after=after)):
        is_whole = False
        while not is_whole:
            # A part whose COMMIT nobody answered is done again: what is gone is gone.
            part = store.write(
                partial(_remove, kind=kind, keys=keys, before=before),
                lambda tx, made: False,
            )
            removed += part
            is_whole = part.total() < ROWS
            said(removed)
        after = keys[-1]
    return removed


def _next(tx: Connection, kind: RowKind, before: int, after: Key | None) -> list[Key]:
    """Without locks: what is found here is looked at again under one."""
    query = sa.select(*kind.key).where(kind.is_over(before)).order_by(*kind.key).limit(LOOKED_AT)
    if after is not None:
        query = query.where(_behind(kind.key, after))
    return [tuple(row) for row in tx.execute(query)]


def _behind(columns: Sequence[sa.Column[object]], after: Key) -> Condition:
    """Rows behind this key; spelled out, as MariaDB has no index for a greater tuple."""
    first, rest = columns[0] > after[0], columns[1:]
    return (
        first
        if not rest
        else sa.or_(first, sa.and_(columns[0] == after[0], _behind(rest, after[1:])))
    )


def _remove(tx: Connection, kind: RowKind, keys: Sequence[Key], before: int) -> Counter[str]:
    """At most ``ROWS`` rows; fewer: these keys are done, but for those that others hold."""
    held = [
        tuple(row)
        for row in tx.execute(
            sa.select(*kind.key)
            .where(_among(kind.key, keys), kind.is_over(before))
            .order_by(*kind.key)
            .with_for_update(skip_locked=True)
        )
    ]
    removed: Counter[str] = Counter()
    if not held:
        return removed
    for hanging in kind.hanging:
        those = hanging.of([key[0] for key in held])
        table = hanging.column.table
        assert isinstance(table, sa.Table)
        removed[table.name] += _delete(tx, table, those, ROWS - removed.total())
        if removed.total() >= ROWS:
            return removed
    those = _among(kind.key, held)
    removed[kind.table.name] += _delete(tx, kind.table, those, ROWS - removed.total())
    return removed


def _delete(tx: Connection, table: sa.Table, those: Condition, most: int) -> int:
    key = tuple(table.primary_key.columns)
    found = [tuple(row) for row in tx.execute(sa.select(*key).where(those).limit(most))]
    if not found:
        return 0
    return int(tx.execute(sa.delete(table).where(_among(key, found))).rowcount)


def _among(columns: Sequence[sa.Column[object]], keys: Sequence[Key]) -> Condition:
    if len(columns) == 1:
        return columns[0].in_([key[0] for key in keys])
    return sa.tuple_(*columns).in_(keys)
