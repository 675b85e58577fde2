# SPDX-License-Identifier: Apache-2.0
"""Pending cleanups: objects that an external service must still remove or correct for a server.

The conductor's runner adds them in the transaction that continues without them.
``conductor.steps.cleanups`` carries them out. Operators list, retry and drop them. There is at most
one per (kind, target, place). A row is deleted when the service has done the work, or when there is
no work left.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from common.domain.clock import SECOND
from common.store.engine import insert_many, now
from common.store.rows import CleanupRow, ServerRow, Values
from common.store.schema import cleanups, servers

#: Kinds with their targets: a port, a server (all its ports), a port (its binding to the host in
#: ``place``), an image, a server (its old backups), a share (the access rule of an address), an
#: attachment (of the volume in ``place``), a volume snapshot.
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
#: A port that a user deleted during an action of the server. The guest may still have the
#: interface.
GONE_PORT = "gone-port"
#: A volume (the place) that must be detached from a guest. The target is the server's row of it.
GUEST_VOLUME = "guest-volume"
#: Ports of a server, or attachments of the volume in ``place``, that a call may have created after
#: its timeout and repetition.
LATE_PORTS, LATE_ATTACHMENTS = "late-ports", "late-attachments"
OF_PORTS = (PORT, PORTS, BINDING, LATE_PORTS, GONE_PORT)
OF_VOLUMES = (ATTACHMENT, LATE_ATTACHMENTS, GUEST_VOLUME)
LATE = (LATE_PORTS, LATE_ATTACHMENTS)
GIVEN_UP = "A call timed out and was repeated. The first call may still have created something."
#: Longer than a service works on a call that timed out.
LATE_CALL = 60 * SECOND
#: Delay of the second try. Each further delay is doubled.
FIRST = 10 * SECOND
REFUSED_AT_MOST, SILENT_AT_MOST = 3600 * SECOND, 60 * SECOND
#: Longer than one round of tries.
LEASE = 300 * SECOND
LONGEST_WHY = 1000
ASKED = "Requested by an operator."
DELETED = "The port was deleted during an action of the server."


def add(tx: Connection, rows: Sequence[Values]) -> None:
    """Add pending cleanups that are due at once, or for the kinds ``LATE`` after ``LATE_CALL``.

    Each row has kind, target, place, args, server_id, project_id and why (None or "":
    ``GIVEN_UP``). An existing row with the same kind, target and place stays unchanged. Only an
    existing row of the kinds ``LATE`` is postponed until ``LATE_CALL`` from now, unless the row is
    due later already.
    """
    insert_many(
        tx,
        cleanups,
        [{**row, "why": (row["why"] or GIVEN_UP)[:LONGEST_WHY]} for row in rows],
        "created_at",
        "due_at",
        ignore=True,
    )
    late = [(row["kind"], row["target"], row["place"]) for row in rows if row["kind"] in LATE]
    if late:
        until = now() + LATE_CALL
        columns = cleanups.c
        tx.execute(
            sa.update(cleanups)
            .where(
                sa.tuple_(columns.kind, columns.target, columns.place).in_(late),
                columns.due_at < until,
            )
            .values(due_at=until)
        )


def ask(tx: Connection, kind: str, target: str, server_id: str, place: str = "") -> None:
    """Add a cleanup that an operator requests, due at once.

    An existing cleanup with the same kind, target and place stays unchanged.

    Args:
        tx: The transaction.
        kind: The kind of the cleanup, for example ``PORT``.
        target: The id of the object.
        server_id: Id of the server, which may be deleted or unknown.
        place: The host or volume that some kinds need, or "".
    """
    project = tx.scalar(sa.select(servers.c.project_id).where(servers.c.id == server_id))
    row: Values = {"kind": kind, "target": target, "place": place, "args": {}}
    add(tx, [{**row, "server_id": server_id, "project_id": project or "", "why": ASKED}])


def add_gone_port(tx: Connection, server_id: str, project_id: str, port_id: str) -> None:
    """Add the cleanup of a port that a user deleted while the server has a running action.

    The conductor carries out the cleanup after the end of the action.
    """
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
    """Return up to ``limit`` due cleanups of these kinds, and postpone them by ``LEASE``.

    The longest due come first. Rows that another transaction has locked are left out.
    """
    rows: list[CleanupRow] = list(tx.execute(_DUE, {"kinds": sorted(kinds), "most": limit}))
    if rows:
        tx.execute(
            sa.update(cleanups)
            .where(cleanups.c.id.in_([row.id for row in rows]))
            .values(due_at=now() + LEASE)
        )
    return rows


def postpone(tx: Connection, row: CleanupRow, why: str, at_most: int) -> None:
    """Record a failed try and its reason ``why``, and set the time of the next try.

    The delay is ``FIRST`` after the first try, and doubles with each further try up to ``at_most``
    µs.
    """
    later = min(FIRST * 2 ** min(row.tries, 20), at_most)
    tx.execute(
        sa.update(cleanups)
        .where(cleanups.c.id == row.id)
        .values(tries=row.tries + 1, why=why[:LONGEST_WHY], due_at=now() + later)
    )


def wait(tx: Connection, row: CleanupRow) -> None:
    """Postpone a cleanup by ``FIRST`` without counting a try, because its server is busy."""
    tx.execute(sa.update(cleanups).where(cleanups.c.id == row.id).values(due_at=now() + FIRST))


def strike(tx: Connection, row: CleanupRow, fence: int | None) -> bool:
    """Delete a completed cleanup and return True, unless the server has changed since.

    ``fence`` is the server's fence at the begin of the work. If the server now has another fence or
    a running action, the result is False and the cleanup stays, because the work was based on an
    old state. The caller then tries again later. With None, or if the server is deleted by now, the
    cleanup is deleted in any case.
    """
    if fence is not None:
        found = server_of(tx, row)
        if found is not None and (found.fence != fence or found.action is not None):
            return False
    tx.execute(sa.delete(cleanups).where(cleanups.c.id == row.id))
    return True


def server_of(tx: Connection, row: CleanupRow) -> ServerRow | None:
    """Return the server of a cleanup, or None if the server is deleted or unknown."""
    return tx.execute(
        sa.select(servers).where(servers.c.id == row.server_id, servers.c.deleted == 0)
    ).first()


def forget(tx: Connection, kind: str, target: str, place: str = "") -> None:
    """Delete a cleanup that is done or not needed any more, if it exists."""
    tx.execute(
        sa.delete(cleanups).where(
            cleanups.c.kind == kind, cleanups.c.target == target, cleanups.c.place == place
        )
    )


def list_all(tx: Connection) -> list[CleanupRow]:
    """Return all cleanups, oldest first."""
    return list(tx.execute(_ALL))


_ALL = sa.select(cleanups).order_by(cleanups.c.created_at, cleanups.c.id)


def hasten(tx: Connection, cleanup_id: int) -> bool:
    """Make a cleanup due at once, and set its number of tries to 0.

    A cleanup of the kinds ``LATE`` becomes due within ``LATE_CALL``. Because its call may still
    complete until then, an earlier search would find nothing and delete the cleanup.

    Returns False if the cleanup does not exist.
    """
    columns = cleanups.c
    soonest = sa.case((columns.kind.in_(LATE), now() + LATE_CALL), else_=now())
    due_at = sa.case((columns.due_at < soonest, columns.due_at), else_=soonest)
    found = tx.execute(
        sa.update(cleanups).where(columns.id == cleanup_id).values(due_at=due_at, tries=0)
    )
    return bool(found.rowcount)


def cancel(tx: Connection, cleanup_id: int) -> bool:
    """Delete a cleanup without doing the work. Returns False if the cleanup does not exist."""
    return bool(tx.execute(sa.delete(cleanups).where(cleanups.c.id == cleanup_id)).rowcount)


def describe(row: CleanupRow) -> str:
    """Return the kind, the target and, unless empty, the place of a cleanup as text."""
    return f"{row.kind} {row.target}{f' at {row.place}' if row.place else ''}"
