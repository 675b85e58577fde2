# SPDX-License-Identifier: Apache-2.0
"""Console tokens: each token opens a guest's console once, or several times in the same browser.

The API creates tokens, and the console service uses and extends them. Only a token's SHA-256 is
stored. A token is valid for one guest (server, host and fence), so not after a move or a delete.
The first browser that loads the console page gets a cookie, and the token then works in that
browser only. A SPICE session has several connections, and all of them send the first one's cookie.

``caller`` is the sealed token of the user. The row of a used token represents the open session, and
deleting the row ends the session. At the end of the session the row is deleted, unless the token
belongs to a browser. That browser may open the console again, for example after a reload of the
page. A reload during the session ends the old session.

Invariant: only the UPDATE in ``use`` or ``take_over`` decides whether a token may be used.
``used_at`` distinguishes the sessions of a token.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from common.domain import errors
from common.domain.clock import SECOND
from common.domain.console_types import OF_SEVERAL_CONNECTIONS
from common.store.engine import now
from common.store.rows import ConsoleTokenRow
from common.store.schema import console_tokens, guests
from common.store.servers.guests import HERE

#: Number of unused tokens per server. Older tokens are deleted.
UNUSED_PER_SERVER = 32
#: How long expired rows are kept, in case the clock has jumped.
_KEPT = 3600 * SECOND

#: Condition: the token's guest still exists.
_GUEST_IS_THERE = (
    sa.exists()
    .where(
        guests.c.server_id == console_tokens.c.server_id,
        guests.c.host == console_tokens.c.host,
        guests.c.fence == console_tokens.c.fence,
        guests.c.wanted.in_(HERE),
    )
    .correlate(console_tokens)
)
_USABLE = sa.and_(
    console_tokens.c.used_at.is_(None), console_tokens.c.expires_at > now(), _GUEST_IS_THERE
)


def hash_token(token: str) -> str:
    """Return the stored form of a token or cookie: the SHA-256 in hexadecimal."""
    return hashlib.sha256(token.encode(errors="surrogateescape")).hexdigest()


def create(
    tx: Connection,
    server_id: str,
    kind: str,
    *,
    project_id: str,
    user_id: str,
    seconds: int,
    caller: str | None = None,
) -> str:
    """Create and return a token for the server's guest, valid for ``seconds``.

    This also deletes tokens that expired long ago, and the server's oldest tokens without an open
    session, so that at most ``UNUSED_PER_SERVER`` without a session are left. ``kind`` is the
    console type, and ``caller`` the sealed token of the user.

    Raises:
        Conflict: The server has no guest on its own host.
    """
    guest_row = tx.execute(
        sa.select(guests).where(guests.c.server_id == server_id, guests.c.wanted.in_(HERE))
    ).first()
    if guest_row is None:
        raise errors.Conflict(f"Instance {server_id} is not ready")
    _remove(
        tx,
        sa.select(console_tokens.c.hash)
        .where(console_tokens.c.expires_at < now() - _KEPT)
        .limit(1000),
    )
    _remove(
        tx,
        sa.select(console_tokens.c.hash)
        .where(console_tokens.c.server_id == server_id, console_tokens.c.used_at.is_(None))
        .order_by(console_tokens.c.created_at.desc(), console_tokens.c.hash)
        .limit(1000)
        .offset(UNUSED_PER_SERVER - 1),
    )
    token = secrets.token_urlsafe(32)
    tx.execute(
        sa.insert(console_tokens).values(
            hash=hash_token(token),
            server_id=server_id,
            host=guest_row.host,
            fence=guest_row.fence,
            kind=kind,
            project_id=project_id,
            user_id=user_id,
            created_at=now(),
            expires_at=now() + seconds * SECOND,
            caller=caller,
        )
    )
    return token


def _remove(tx: Connection, query: sa.Select[Any]) -> None:
    old = list(tx.scalars(query))
    if old:
        tx.execute(sa.delete(console_tokens).where(console_tokens.c.hash.in_(old)))


def is_created(tx: Connection, token: str) -> bool:
    """Return True if a new token exists and can be used, for ``is_there`` of ``Store.write``."""
    return find(tx, token) is not None


def find(tx: Connection, token: str, cookie: str = "") -> ConsoleTokenRow | None:
    """Return the row of a token if the token can be used with this cookie, or None.

    A token that is bound to no browser can be used with any cookie.
    """
    return tx.execute(sa.select(console_tokens).where(_is_usable_by(token, cookie))).first()


def _is_usable_by(token: str, cookie: str) -> sa.ColumnElement[bool]:
    """Return the condition that the token can be used, and belongs to no other browser."""
    return sa.and_(
        console_tokens.c.hash == hash_token(token),
        _USABLE,
        sa.or_(console_tokens.c.browser.is_(None), console_tokens.c.browser == hash_token(cookie)),
    )


def bind(tx: Connection, token: str, cookie: str) -> bool:
    """Bind the token to the browser with this cookie, and return True.

    Returns False if the token is bound already, even to this cookie, or cannot be used.
    """
    update = tx.execute(
        sa.update(console_tokens)
        .where(
            console_tokens.c.hash == hash_token(token), console_tokens.c.browser.is_(None), _USABLE
        )
        .values(browser=hash_token(cookie))
    )
    return update.rowcount == 1


def use(tx: Connection, token: str, cookie: str = "") -> ConsoleTokenRow | None:
    """Begin a session with the token, and return the token's row.

    A token that is bound to no browser is bound to the cookie, unless that is "". Returns None if
    the token cannot be used (unknown, expired, in use, without its guest), or belongs to another
    browser.
    """
    browser_change = {"browser": hash_token(cookie)} if cookie else {}
    update = tx.execute(
        sa.update(console_tokens)
        .where(_is_usable_by(token, cookie))
        .values(used_at=now(), **browser_change)
    )
    if update.rowcount != 1:
        return None
    return tx.execute(
        sa.select(console_tokens).where(console_tokens.c.hash == hash_token(token))
    ).one()


def _is_open_in(token: str, cookie: str) -> sa.ColumnElement[bool]:
    """Return the condition that the token's session is open in the browser with this cookie."""
    return sa.and_(
        console_tokens.c.hash == hash_token(token),
        console_tokens.c.browser == hash_token(cookie),
        console_tokens.c.used_at.is_not(None),
        console_tokens.c.expires_at > now(),
        _GUEST_IS_THERE,
    )


def of_open_session(tx: Connection, token: str, cookie: str) -> ConsoleTokenRow | None:
    """Return the token's row if its session is open in the browser with this cookie, or None."""
    if not cookie:
        return None
    return tx.execute(sa.select(console_tokens).where(_is_open_in(token, cookie))).first()


def take_over(tx: Connection, token: str, cookie: str) -> ConsoleTokenRow | None:
    """Replace the open session of a token by a session for a new connection of the same browser.

    The new session has a later ``used_at``. The caller must end the connection of the earlier
    session.

    Returns:
        The row, or None if the session is not open in this browser, or sessions of this kind have
        several connections.
    """
    update = tx.execute(
        sa.update(console_tokens)
        .where(_is_open_in(token, cookie), console_tokens.c.kind.not_in(OF_SEVERAL_CONNECTIONS))
        .values(used_at=_later())
    )
    if update.rowcount != 1:
        return None
    return tx.execute(
        sa.select(console_tokens).where(console_tokens.c.hash == hash_token(token))
    ).one()


def _later() -> sa.ColumnElement[int]:
    """Return the current time, or one microsecond after the last use if that is later."""
    last = console_tokens.c.used_at
    return sa.case((now() > last, now()), else_=last + 1)


def alive(tx: Connection, hashes: Sequence[str]) -> dict[str, int | None]:
    """Return hash -> ``used_at`` of each token whose row and guest still exist.

    A session may continue only if the result contains its token with its own ``used_at``. None
    means that the token has no open session.
    """
    rows = tx.execute(
        sa.select(console_tokens.c.hash, console_tokens.c.used_at).where(
            console_tokens.c.hash.in_(hashes), _GUEST_IS_THERE
        )
    )
    return {row.hash: row.used_at for row in rows}


def keep(tx: Connection, hashes: Sequence[str], seconds: int) -> None:
    """Set the expiry of these tokens, whose sessions are open, to ``seconds`` from now."""
    tx.execute(
        sa.update(console_tokens)
        .where(console_tokens.c.hash.in_(hashes))
        .values(expires_at=now() + seconds * SECOND)
    )


def forget(tx: Connection, token_hash: str, used_at: int) -> None:
    """End the session of the token that began at ``used_at``, unless a later one replaced it.

    If the token is bound to a browser and sessions of its kind have one connection, the token can
    be used again. Otherwise its row is deleted.
    """
    own = sa.and_(console_tokens.c.hash == token_hash, console_tokens.c.used_at == used_at)
    again = sa.and_(
        console_tokens.c.browser.is_not(None), console_tokens.c.kind.not_in(OF_SEVERAL_CONNECTIONS)
    )
    tx.execute(sa.delete(console_tokens).where(own, sa.not_(again)))
    tx.execute(sa.update(console_tokens).where(own).values(used_at=None))


def sessions(tx: Connection) -> list[ConsoleTokenRow]:
    """Return the open sessions, oldest first, including those of a dead console service."""
    return list(
        tx.execute(
            sa.select(console_tokens)
            .where(console_tokens.c.used_at.is_not(None), console_tokens.c.expires_at > now())
            .order_by(console_tokens.c.used_at, console_tokens.c.hash)
        )
    )


def revoke(tx: Connection, server_id: str | None) -> int:
    """Delete all tokens of a server, or of all servers (None), and return the number of tokens.

    This ends their sessions.
    """
    delete_query = sa.delete(console_tokens)
    return int(
        tx.execute(
            delete_query
            if server_id is None
            else delete_query.where(console_tokens.c.server_id == server_id)
        ).rowcount
    )
