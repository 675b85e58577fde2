# SPDX-License-Identifier: Apache-2.0
"""Encrypts user data of servers that were created while the cloud had no ``[DEFAULT] secret_key``.

Called by ``kilonova database upgrade``. May be repeated, and may run while the API writes: a row
that changed after the read is skipped, because the API encrypts its own rows.
"""

from __future__ import annotations

from functools import partial

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from common.security.vault import SEALED, Vault
from common.store.engine import Store
from common.store.rows import ServerUserData
from common.store.schema import servers

C = servers.c
#: The number of rows of one transaction.
ROWS = 200


def seal_user_data(store: Store, vault: Vault) -> int:
    """Encrypt all user data that is stored as plain text, and return the number of changed servers.

    Raises:
        Unavailable: A server has such user data, and the vault has no key.
    """
    sealed, last = 0, ""
    while rows := store.read(partial(_read_unsealed, last=last)):
        changes = [
            {"of": row.id, "old": row.user_data, "new": vault.seal_text(row.user_data)}
            for row in rows
        ]
        sealed += store.write(partial(_seal, changes=changes))
        last = rows[-1].id
    return sealed


def _read_unsealed(tx: Connection, last: str) -> list[ServerUserData]:
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
