# SPDX-License-Identifier: Apache-2.0
"""Encryption of the stored secrets, after ``[DEFAULT] secret_key`` was set or changed.

``kilonova database upgrade`` encrypts user data of servers that were created without a key.
``kilonova database reseal`` encrypts all stored secrets with the first key, so that the older keys
can be removed. Both may be repeated, and may run while other processes write: a row that changed
after the read is skipped, because these processes encrypt with the first key.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from common.security.vault import SEALED, Vault
from common.store.engine import Store
from common.store.schema import actions, block_devices, servers

#: The number of rows of one transaction.
ROWS = 200


@dataclass(frozen=True)
class SealedColumn:
    """A column with encrypted texts.

    Attributes:
        noun: What the column contains, in the plural.
        column: The column.
        renew: Returns the text of the column encrypted with the first key.
    """

    noun: str
    column: sa.Column[Any]
    renew: Callable[[Vault, str], str]

    @property
    def id(self) -> sa.Column[Any]:
        """The primary key of the column's table."""
        return next(iter(self.column.table.primary_key))


USER_DATA = SealedColumn("user data of servers", servers.c.user_data, Vault.renew_text)
COLUMNS = (
    USER_DATA,
    SealedColumn("secrets of actions", actions.c.secrets, Vault.renew),
    SealedColumn("connections of volumes", block_devices.c.connection, Vault.renew),
)


def seal_user_data(store: Store, vault: Vault) -> int:
    """Encrypt all user data that is stored as plain text, and return the number of changed servers.

    Raises:
        Unavailable: A server has such user data, and the vault has no key.
    """
    return _renew(store, vault, USER_DATA, [servers.c.user_data.not_like(f"{SEALED}%")])


def reseal(store: Store, vault: Vault) -> dict[str, int]:
    """Encrypt all stored secrets with the vault's first key.

    Returns:
        Noun of the column -> number of changed rows.

    Raises:
        Unavailable: No key of the vault opens a text.
    """
    return {sealed.noun: _renew(store, vault, sealed) for sealed in COLUMNS}


def _renew(
    store: Store,
    vault: Vault,
    sealed: SealedColumn,
    conditions: Sequence[sa.ColumnElement[bool]] = (),
) -> int:
    """Renew the texts of a column in the rows with these conditions. Return the number of rows."""
    changed, last = 0, ""
    while rows := store.read(partial(_read, sealed=sealed, conditions=conditions, last=last)):
        changes = [
            (key, text, new) for key, text in rows if (new := sealed.renew(vault, text)) != text
        ]
        if changes:
            changed += store.write(partial(_replace, sealed=sealed, changes=changes))
        last = rows[-1][0]
    return changed


def _read(
    tx: Connection, sealed: SealedColumn, conditions: Sequence[sa.ColumnElement[bool]], last: str
) -> list[tuple[str, str]]:
    return [
        (row[0], row[1])
        for row in tx.execute(
            sa.select(sealed.id, sealed.column)
            .where(sealed.id > last, sealed.column.is_not(None), *conditions)
            .order_by(sealed.id)
            .limit(ROWS)
        )
    ]


def _replace(tx: Connection, sealed: SealedColumn, changes: list[tuple[str, str, str]]) -> int:
    return sum(
        tx.execute(
            sa.update(sealed.column.table)
            .where(sealed.id == key, sealed.column == old)
            .values({sealed.column: new})
        ).rowcount
        for key, old, new in changes
    )
