# SPDX-License-Identifier: Apache-2.0
"""Console tokens: who has one may open a guest's console, once; a browser again, until it expires.

Made by the API, used and kept by the console service. Only the token's SHA-256 is stored. It is
good for the very guest that it was made for (server, host and the fence of its record): a server
that was deleted or has moved has another one. Once a browser has fetched the page for it, it is
good for this browser only, which brings a cookie. A session of SPICE is several connections: each
brings the cookie that the first one brought.
``caller`` is the sealed token of the user who asked for it, for as long as the row stands. A token
that was used stands for the session that it opened, and whoever removes the row ends the session.
When the session ends, the row goes, unless the token is a browser's: that browser may open the
console again, as at a reload of the page. It may also do so while the session is open, which then
ends. Must stay true: whether a token may be used is decided by the one UPDATE in ``use`` or in
``take_over``; ``used_at`` tells one session of a token from the next.
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

UNUSED_PER_SERVER = 32  #: the newest; older ones are forgotten
_KEPT = 3600 * SECOND  #: after its expiry a row is kept for a while, for the clock may have jumped

#: The guest that a token was made for is still the one that is there.
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


def hashed(token: str) -> str:
    """How a token is known here."""
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
    """A token for the server's guest, good for ``seconds``. Conflict when it has none.

    Old rows are removed here: what expired long ago, and of this server's unused ones all but the
    newest.
    """
    guest = tx.execute(
        sa.select(guests).where(guests.c.server_id == server_id, guests.c.wanted.in_(HERE))
    ).first()
    if guest is None:
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
            hash=hashed(token),
            server_id=server_id,
            host=guest.host,
            fence=guest.fence,
            kind=kind,
            project_id=project_id,
            user_id=user_id,
            created_at=now(),
            expires_at=now() + seconds * SECOND,
            caller=caller,
        )
    )
    return token


def _remove(tx: Connection, found: sa.Select[Any]) -> None:
    old = list(tx.scalars(found))
    if old:
        tx.execute(sa.delete(console_tokens).where(console_tokens.c.hash.in_(old)))


def is_made(tx: Connection, token: str) -> bool:
    """Was this new token committed?"""
    return find(tx, token) is not None


def find(tx: Connection, token: str, cookie: str = "") -> ConsoleTokenRow | None:
    """The record of a token that could be used now by who brings this cookie."""
    return tx.execute(sa.select(console_tokens).where(_is_his(token, cookie))).first()


def _is_his(token: str, cookie: str) -> sa.ColumnElement[bool]:
    """The token can be used, and is no other browser's."""
    return sa.and_(
        console_tokens.c.hash == hashed(token),
        _USABLE,
        sa.or_(console_tokens.c.browser.is_(None), console_tokens.c.browser == hashed(cookie)),
    )


def bind(tx: Connection, token: str, cookie: str) -> bool:
    """From now on the token is good only for who brings this cookie; False: it had one, or cannot
    be used."""
    bound = tx.execute(
        sa.update(console_tokens)
        .where(console_tokens.c.hash == hashed(token), console_tokens.c.browser.is_(None), _USABLE)
        .values(browser=hashed(cookie))
    )
    return bound.rowcount == 1


def use(tx: Connection, token: str, cookie: str = "") -> ConsoleTokenRow | None:
    """Use the token up; its record, or None when it cannot be used (any more), or belongs to
    another browser. If it was nobody's, it belongs to who brings a cookie with it."""
    his = {"browser": hashed(cookie)} if cookie else {}
    used = tx.execute(
        sa.update(console_tokens).where(_is_his(token, cookie)).values(used_at=now(), **his)
    )
    if used.rowcount != 1:
        return None
    return tx.execute(sa.select(console_tokens).where(console_tokens.c.hash == hashed(token))).one()


def _is_open_in(token: str, cookie: str) -> sa.ColumnElement[bool]:
    """The token's session is open in the browser with this cookie."""
    return sa.and_(
        console_tokens.c.hash == hashed(token),
        console_tokens.c.browser == hashed(cookie),
        console_tokens.c.used_at.is_not(None),
        console_tokens.c.expires_at > now(),
        _GUEST_IS_THERE,
    )


def of_open_session(tx: Connection, token: str, cookie: str) -> ConsoleTokenRow | None:
    """The record of a session that is open, for who brings the cookie of its first connection."""
    if not cookie:
        return None
    return tx.execute(sa.select(console_tokens).where(_is_open_in(token, cookie))).first()


def take_over(tx: Connection, token: str, cookie: str) -> ConsoleTokenRow | None:
    """Give the open session of a token to a new connection of the same browser.

    Returns:
        the record, or None if the session is not open in this browser. The session that had the
        earlier ``used_at`` is to end.
    """
    taken = tx.execute(
        sa.update(console_tokens)
        .where(_is_open_in(token, cookie), console_tokens.c.kind.not_in(OF_SEVERAL_CONNECTIONS))
        .values(used_at=_later())
    )
    if taken.rowcount != 1:
        return None
    return tx.execute(sa.select(console_tokens).where(console_tokens.c.hash == hashed(token))).one()


def _later() -> sa.ColumnElement[int]:
    """Now, or a microsecond after the last use where the clock has not gone on."""
    last = console_tokens.c.used_at
    return sa.case((now() > last, now()), else_=last + 1)


def alive(tx: Connection, hashes: Sequence[str]) -> dict[str, int | None]:
    """Of these sessions those that may go on: hash -> when the token was used last, None where that
    session has ended. Their row is there, and so is their guest."""
    rows = tx.execute(
        sa.select(console_tokens.c.hash, console_tokens.c.used_at).where(
            console_tokens.c.hash.in_(hashes), _GUEST_IS_THERE
        )
    )
    return {row.hash: row.used_at for row in rows}


def keep(tx: Connection, hashes: Sequence[str], seconds: int) -> None:
    """These sessions are open: their rows do not expire for the next ``seconds``."""
    tx.execute(
        sa.update(console_tokens)
        .where(console_tokens.c.hash.in_(hashes))
        .values(expires_at=now() + seconds * SECOND)
    )


def forget(tx: Connection, token_hash: str, used_at: int) -> None:
    """The session that began at ``used_at`` has ended. A browser may open the console again, if it
    is of one connection; of anybody else the row goes."""
    own = sa.and_(console_tokens.c.hash == token_hash, console_tokens.c.used_at == used_at)
    again = sa.and_(
        console_tokens.c.browser.is_not(None), console_tokens.c.kind.not_in(OF_SEVERAL_CONNECTIONS)
    )
    tx.execute(sa.delete(console_tokens).where(own, sa.not_(again)))
    tx.execute(sa.update(console_tokens).where(own).values(used_at=None))


def sessions(tx: Connection) -> list[ConsoleTokenRow]:
    """Those that are open, or were when their console service died; oldest first."""
    return list(
        tx.execute(
            sa.select(console_tokens)
            .where(console_tokens.c.used_at.is_not(None), console_tokens.c.expires_at > now())
            .order_by(console_tokens.c.used_at, console_tokens.c.hash)
        )
    )


def revoke(tx: Connection, server_id: str | None) -> int:
    """End all sessions and tokens of a server (None: of all); returns how many there were."""
    gone = sa.delete(console_tokens)
    return int(
        tx.execute(
            gone if server_id is None else gone.where(console_tokens.c.server_id == server_id)
        ).rowcount
    )
