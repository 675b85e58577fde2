# SPDX-License-Identifier: Apache-2.0
"""Pending cleanups: what a neighbour has still to remove or put right for a server, and when it is
asked again.

The conductor's runner adds them in the transaction that goes on without them,
``conductor.steps.cleanups`` carries them out, the operator lists, hastens and drops them. Of one
thing (kind, target, place) there is at most one. A row goes when the neighbour has done it, or
when there is nothing to do any more.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from common.domain.clock import SECOND
from common.store.engine import insert_many, now
from common.store.rows import CleanupRow, ServerRow, Values
from common.store.schema import cleanups, servers

#: Kinds, and what the target of each is: a port, a server all of whose ports are meant, a port that
#: is bound to a host besides its own, an image, a server whose old backups are meant, a share that
#: a host's address may mount, an attachment of the volume that is the place, a snapshot
#: of a volume.
PORT, PORTS, BINDING, IMAGE, BACKUPS, SHARE, ATTACHMENT, SNAPSHOT = (
    "port",
    "ports",
    "binding",
    "image",
    "backups",
    "share",
    "attachment",
    "snapshot",
)
#: A port that was deleted while an action had its server. The server's guest may still have it.
GONE_PORT = "gone-port"
#: A volume (the place) that a guest has still to give back; the target is the server's row of it.
GUEST_VOLUME = "guest-volume"
#: The same for a server's ports, and for its attachments of the volume that is the place: what a
#: call may have made there after it was given up and made again.
LATE_PORTS, LATE_ATTACHMENTS = "late-ports", "late-attachments"
OF_PORTS = (PORT, PORTS, BINDING, LATE_PORTS, GONE_PORT)
OF_VOLUMES = (ATTACHMENT, LATE_ATTACHMENTS, GUEST_VOLUME)
LATE = (LATE_PORTS, LATE_ATTACHMENTS)
GIVEN_UP = "A call was given up and made again; what the first one makes late is looked for."
LATE_CALL = 60 * SECOND  #: longer than a neighbour works at a call that was given up
FIRST = 10 * SECOND  #: until the second try; doubled each time
REFUSED_AT_MOST, SILENT_AT_MOST = 3600 * SECOND, 60 * SECOND
LEASE = 300 * SECOND  #: longer than one round of tries takes
LONGEST_WHY = 1000
ASKED = "an operator asked for it"
DELETED = "The port was deleted while an action had the server."


def add(tx: Connection, rows: Sequence[Values]) -> None:
    """Remember what is to be done, at once for the first time, and what comes late when it has
    come: each row has kind, target, place, args, server_id, project_id and why. What is known
    already stays as it is."""
    insert_many(
        tx,
        cleanups,
        [{**row, "why": (row["why"] or GIVEN_UP)[:LONGEST_WHY]} for row in rows],
        "created_at",
        "due_at",
        ignore=True,
    )
    if late := [row["target"] for row in rows if row["kind"] in LATE]:
        tx.execute(
            sa.update(cleanups)
            .where(cleanups.c.kind.in_(LATE), cleanups.c.target.in_(late))
            .values(due_at=now() + LATE_CALL)
        )


def ask(tx: Connection, kind: str, target: str, server_id: str, place: str = "") -> None:
    """An operator wants this done for a server, which may be gone."""
    project = tx.scalar(sa.select(servers.c.project_id).where(servers.c.id == server_id))
    row: Values = {"kind": kind, "target": target, "place": place, "args": {}}
    add(tx, [{**row, "server_id": server_id, "project_id": project or "", "why": ASKED}])


def add_gone_port(tx: Connection, server_id: str, project_id: str, port_id: str) -> None:
    """Record that a port of the server was deleted, for when no action has the server any more."""
    row: Values = {"kind": GONE_PORT, "target": port_id, "place": "", "args": {}, "why": DELETED}
    add(tx, [{**row, "server_id": server_id, "project_id": project_id}])


_DUE = (
    sa.select(cleanups)
    .where(cleanups.c.due_at <= now(), cleanups.c.kind.in_(sa.bindparam("kinds", expanding=True)))
    .order_by(cleanups.c.due_at)
    .limit(sa.bindparam("most", type_=sa.Integer))
    .with_for_update(skip_locked=True)
)


def take(tx: Connection, kinds: Collection[str], limit: int) -> list[CleanupRow]:
    """The cleanups of these kinds that are due, oldest first; nobody else gets them for a while."""
    rows: list[CleanupRow] = list(tx.execute(_DUE, {"kinds": sorted(kinds), "most": limit}))
    if rows:
        tx.execute(
            sa.update(cleanups)
            .where(cleanups.c.id.in_([row.id for row in rows]))
            .values(due_at=now() + LEASE)
        )
    return rows


def postpone(tx: Connection, row: CleanupRow, why: str, at_most: int) -> None:
    """It could not be done; the time to the next try grows up to ``at_most``."""
    later = min(FIRST * 2 ** min(row.tries, 20), at_most)
    tx.execute(
        sa.update(cleanups)
        .where(cleanups.c.id == row.id)
        .values(tries=row.tries + 1, why=why[:LONGEST_WHY], due_at=now() + later)
    )


def wait(tx: Connection, row: CleanupRow) -> None:
    """It could not be tried: an action has its server."""
    tx.execute(sa.update(cleanups).where(cleanups.c.id == row.id).values(due_at=now() + FIRST))


def strike(tx: Connection, row: CleanupRow, fence: int | None) -> bool:
    """It is done; unless its server has changed since it had this ``fence`` (None: it is gone for
    good), for then what was done may be wrong by now."""
    if fence is not None:
        found = server_of(tx, row)
        if found is not None and (found.fence != fence or found.action is not None):
            return False
    tx.execute(sa.delete(cleanups).where(cleanups.c.id == row.id))
    return True


def server_of(tx: Connection, row: CleanupRow) -> ServerRow | None:
    """The server of a cleanup; None when it is deleted."""
    return tx.execute(
        sa.select(servers).where(servers.c.id == row.server_id, servers.c.deleted == 0)
    ).first()


def forget(tx: Connection, kind: str, target: str, place: str = "") -> None:
    """It has been done by somebody else, or is not wanted any more."""
    tx.execute(
        sa.delete(cleanups).where(
            cleanups.c.kind == kind, cleanups.c.target == target, cleanups.c.place == place
        )
    )


def list_all(tx: Connection) -> list[CleanupRow]:
    """All of them, oldest first."""
    return list(tx.execute(_ALL))


_ALL = sa.select(cleanups).order_by(cleanups.c.created_at, cleanups.c.id)


def hasten(tx: Connection, cleanup_id: int) -> bool:
    """Try it again at once; is there such a one?"""
    found = tx.execute(
        sa.update(cleanups).where(cleanups.c.id == cleanup_id).values(due_at=now(), tries=0)
    )
    return bool(found.rowcount)


def drop(tx: Connection, cleanup_id: int) -> bool:
    """Do not try it any more; is there such a one?"""
    return bool(tx.execute(sa.delete(cleanups).where(cleanups.c.id == cleanup_id)).rowcount)


def worded(row: CleanupRow) -> str:
    """What it is about, for people."""
    return f"{row.kind} {row.target}{f' at {row.place}' if row.place else ''}"
