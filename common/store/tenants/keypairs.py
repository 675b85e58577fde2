# SPDX-License-Identifier: Apache-2.0
"""Key pairs: public keys by user and name. Private keys are never stored.

The API calls this file. A server stores a copy of the public key.
"""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.engine import Connection
from sqlalchemy.exc import IntegrityError

from common.domain import errors
from common.store.engine import is_there, now
from common.store.notifications import outbox
from common.store.rows import KeypairRow, Values
from common.store.schema import keypairs

#: Returns True if this new row was committed.
is_made = is_there(keypairs)


def page(
    tx: Connection, user_id: str, marker: str | None = None, limit: int | None = None
) -> list[KeypairRow]:
    """Return up to ``limit`` (None: all) of the user's key pairs after the name ``marker``.

    The key pairs are sorted by name.

    Raises:
        BadRequest: The marker is not the name of a key pair of the user.
    """
    query = sa.select(keypairs).where(keypairs.c.user_id == user_id).order_by(keypairs.c.name)
    if marker is not None:
        if (
            tx.scalar(
                sa.select(keypairs.c.id).where(
                    keypairs.c.user_id == user_id, keypairs.c.name == marker
                )
            )
            is None
        ):
            raise errors.BadRequest(f"marker [{marker}] not found")
        query = query.where(keypairs.c.name > marker)
    return list(tx.execute(query if limit is None else query.limit(limit)))


def show(tx: Connection, user_id: str, name: str) -> KeypairRow:
    """Return a key pair of the user by its name.

    Raises:
        NotFound: The user has no such key pair.
    """
    row = tx.execute(
        sa.select(keypairs).where(keypairs.c.user_id == user_id, keypairs.c.name == name)
    ).first()
    if row is None:
        raise errors.NotFound(f"Keypair {name} not found for user {user_id}")
    return row


def count(tx: Connection, user_id: str) -> int:
    """Return the number of the user's key pairs."""
    return int(
        tx.scalar(
            sa.select(sa.func.count()).select_from(keypairs).where(keypairs.c.user_id == user_id)
        )
        or 0
    )


def create(tx: Connection, values: Values, imported: bool = True) -> KeypairRow:
    """Insert a key pair, and return its row.

    Args:
        tx: The transaction.
        values: user_id, name, type, fingerprint and public_key.
        imported: True if the user has sent the public key. False if Kilonova has created the pair.

    Raises:
        Conflict: The user has a key pair with this name.
    """
    exists = errors.Conflict(f"Key pair '{values['name']}' already exists.")
    if (
        tx.scalar(
            sa.select(keypairs.c.id).where(
                keypairs.c.user_id == values["user_id"], keypairs.c.name == values["name"]
            )
        )
        is not None
    ):
        raise exists
    try:
        tx.execute(sa.insert(keypairs).values(created_at=now()), values)
    except IntegrityError as problem:  # another API process was first
        raise exists from problem
    unknown = {"fingerprint": None, **({} if imported else {"public_key": None})}
    verb, key = "import" if imported else "create", f"{values['user_id']}/{values['name']}"
    outbox.tell(tx, key, {**values, **unknown}, f"keypair.{verb}.start")
    outbox.tell(tx, key, values, f"keypair.{verb}.end")
    return show(tx, values["user_id"], values["name"])


def delete(tx: Connection, user_id: str, name: str) -> None:
    """Delete a key pair.

    Raises:
        NotFound: The user has no such key pair.
    """
    row = show(tx, user_id, name)
    tx.execute(sa.delete(keypairs).where(keypairs.c.id == row.id))
    outbox.tell(tx, f"{user_id}/{name}", row._mapping, "keypair.delete.start", "keypair.delete.end")
