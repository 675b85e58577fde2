# SPDX-License-Identifier: Apache-2.0
"""Seal what stands readable in rows from before 0016: the user data of servers; and forget what an
action that has ended still holds of its request: injected files and user data.

Called by ``kilonova database upgrade``, repeatable, and harmless while the API writes: a row that
changed since it was read is left as it is, for what the API writes is sealed.
"""

from __future__ import annotations

from functools import partial

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from common.store.engine import Store
from common.store.rows import ServerUserData, Values
from common.store.schema import actions as actions_table
from common.store.schema import servers
from common.store.servers import actions
from common.vault import SEALED, Vault

A, C = actions_table.c, servers.c
WITH_FILES = ("create", "rebuild")  #: workflows whose requests may bring some
ROWS = 200  #: of one transaction


def seal_user_data(store: Store, vault: Vault) -> int:
    """Returns how many rows were sealed.

    Raises:
        Unavailable: there is such a row, and no key.
    """
    sealed, last = 0, ""
    while rows := store.read(partial(_readable, last=last)):
        changes = [
            {"of": row.id, "old": row.user_data, "new": vault.seal_text(row.user_data)}
            for row in rows
        ]
        sealed += store.write(partial(_seal, changes=changes))
        last = rows[-1].id
    return sealed


def forget_ended(store: Store) -> int:
    """Returns of how many actions something went."""
    forgotten, last = 0, ""
    while rows := store.read(partial(_ended_with_more, last=last)):
        changes = {row.id: change for row in rows if (change := actions.forgotten(row.args))}
        if changes:
            store.write(partial(_forget, changes=changes))
        forgotten += len(changes)
        last = rows[-1].id
    return forgotten


def _forget(tx: Connection, changes: dict[str, Values]) -> None:
    for action, change in changes.items():
        tx.execute(sa.update(actions_table).where(A.id == action).values(change))


def _ended_with_more(tx: Connection, last: str) -> list[sa.Row[tuple[str, object]]]:
    text = sa.type_coerce(A.args, sa.Text)
    return list(
        tx.execute(
            sa.select(A.id, A.args)
            .where(
                A.id > last,
                A.state.in_(actions.ENDED),
                A.workflow.in_(WITH_FILES),
                sa.or_(text.like('%"files":[{%'), text.like('%"user_data":"%')),
            )
            .order_by(A.id)
            .limit(ROWS)
        )
    )


def _readable(tx: Connection, last: str) -> list[ServerUserData]:
    return list(
        tx.execute(
            sa.select(C.id, C.user_data)
            .where(C.id > last, C.user_data.is_not(None), C.user_data.not_like(f"{SEALED}%"))
            .order_by(C.id)
            .limit(ROWS)
        )
    )


def _seal(tx: Connection, changes: list[dict[str, str]]) -> int:
    return sum(
        tx.execute(
            sa.update(servers)
            .where(C.id == change["of"], C.user_data == change["old"])
            .values(user_data=change["new"])
        ).rowcount
        for change in changes
    )
