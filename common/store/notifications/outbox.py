# SPDX-License-Identifier: Apache-2.0
"""The outbox: notifications that a transaction writes together with its change.

One conductor sends them. Rows are numbered under the lock of their object, so their order is the
order of its changes. With notifications off (``Store.notify_with``), the functions that write
notices run no statement. The sender holds a lease, sends rows in order, and deletes them when the
broker has them. After a crash in between, rows are sent again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import sqlalchemy as sa
from sqlalchemy.engine import Connection, RowMapping

from common.domain import states
from common.domain.clock import SECOND
from common.domain.context import RequestContext
from common.domain.statuses import ActionState
from common.notifications import events
from common.notifications.events import COMPUTE, Notice
from common.service.notification_options import OFF, VM_AND_TASK_STATE
from common.store.engine import insert_ignore, insert_many, notification_settings, now
from common.store.rows import NotificationRow, ServerState, Values
from common.store.schema import actions, hosts, keypairs, leases, notifications, servers

LEASE = 30 * SECOND
#: A notification that has waited this long needs an operator.
LATE = 300 * SECOND
#: The name of the lease.
SENDER = "notifications"
#: A snapshot of an object that is no server.
Picture = RowMapping | Mapping[str, object]
_S = servers.c
_KEY = (keypairs.c.user_id == _S.user_id, keypairs.c.name == _S.key_name)
#: Columns of a server for payloads. Never user data or passwords, which are secret.
PICTURE = sa.select(
    _S.id,
    _S.project_id,
    _S.user_id,
    _S.name,
    _S.hostname,
    _S.description,
    _S.vm_state,
    _S.task_state,
    _S.power_state,
    _S.progress,
    _S.locked,
    _S.locked_reason,
    _S.host,
    _S.availability_zone,
    _S.pinned_availability_zone,
    _S.image_id,
    _S.image,
    _S.flavor,
    _S.key_name,
    _S.key_data,
    _S.meta,
    _S.tags,
    _S.trusted_image_certificates,
    _S.access_ip_v4,
    _S.access_ip_v6,
    _S.disk_config,
    _S.reservation_id,
    _S.created_at,
    _S.updated_at,
    _S.launched_at,
    _S.terminated_at,
    _S.deleted_at,
    _S.interfaces,
    _S.scheduler_hints,
    _S.security_groups,
    sa.select(hosts.c.hypervisor_hostname)
    .where(hosts.c.name == _S.host)
    .scalar_subquery()
    .label("node"),
    sa.select(keypairs.c.type).where(*_KEY).scalar_subquery().label("key_type"),
    sa.select(keypairs.c.fingerprint).where(*_KEY).scalar_subquery().label("key_fingerprint"),
).where(_S.id.in_(sa.bindparam("ids", expanding=True)))
_OF_A_PERIOD = (events.EXISTS, "instance.update")
_FAULTS = {ActionState.SUPERSEDED: "Superseded", ActionState.FAILED: "ActionFailed"}


# --- for transactions that change objects ---
def add(tx: Connection, notices: Sequence[Notice]) -> None:
    """Write notices with snapshots of their servers as of now, in at most three statements.

    The caller calls this after its changes. A notice about another object contains the snapshot.
    Notices about a server without a row are left out, and notices about the shutdown of a server
    without a host. With notifications off, nothing is written.
    """
    settings = notification_settings(tx)
    if settings is None or not notices:
        return
    ids = sorted({notice.key for notice in notices if notice.of_server})
    pictures = (
        {row["id"]: dict(row) for row in tx.execute(PICTURE, {"ids": ids}).mappings()}
        if ids
        else {}
    )
    rows = []
    for notice in notices:
        picture = pictures.get(notice.key) if notice.of_server else notice.about.get("object")
        if picture is None or (
            notice.event.startswith("instance.shutdown") and picture["host"] is None
        ):
            continue
        about = {name: value for name, value in notice.about.items() if name != "object"}
        if notice.event in _OF_A_PERIOD:
            about = {"periods": settings.periods, **about}
        host = (
            picture.get("host")
            if notice.source == COMPUTE or notice.event.startswith("service.")
            else None
        )
        rows.append(
            {
                "event": notice.event,
                "key": notice.key[:255],
                "publisher": f"{notice.source}:{host or settings.host}",
                "body": {"request": notice.request, "object": picture, "about": about},
            }
        )
    insert_many(tx, notifications, rows, "created_at")


def add_begun(tx: Connection, rows: Iterable[Values], was: ServerState | None = None) -> None:
    """Write the notices about begun actions.

    Args:
        tx: The transaction.
        rows: The columns of the new actions.
        was: The server before the action, if ``rows`` has one row. This adds instance.update if the
            notifications contain task states. None: write no instance.update.
    """
    settings = notification_settings(tx)
    if settings is None:
        return
    found = []
    for row in rows:
        request, action = events.request(row), states.BY_WORKFLOW.get(row["workflow"])
        if was is not None and settings.states == VM_AND_TASK_STATE:
            found.append(
                Notice(
                    "instance.update",
                    row["server_id"],
                    request,
                    {"old_state": was.vm_state, "old_task_state": was.task_state},
                )
            )
        about = events.about(row["workflow"], row.get("args") or {})
        found += [
            Notice(event, row["server_id"], request, about)
            for event in events.event_names(action).begun
        ]
    add(tx, found)


def add_ended(tx: Connection, action_id: str) -> None:
    """Write the notices about an action that failed or was superseded outside its workflow.

    For example, an operator has failed the action, or another action has superseded it. An action
    in another state has no notices.
    """
    if notification_settings(tx) is None:
        return
    row = tx.execute(sa.select(actions).where(actions.c.id == action_id)).mappings().first()
    if row is None or row["state"] not in _FAULTS:
        return
    fault = {
        "exception": _FAULTS[row["state"]],
        "message": row["message"] or "",
        "step": row["step"] or "",
        "details": row["cause"] or "",
    }
    about = {**events.about(row["workflow"], row["args"]), "fault": fault}
    add(
        tx,
        [
            Notice(event, row["server_id"], events.request(row), about)
            for event in events.event_names(states.BY_WORKFLOW.get(row["workflow"])).failed
        ],
    )


def add_done(
    tx: Connection,
    row: states.Action,
    server_id: str,
    context: RequestContext,
    was: ServerState,
) -> None:
    """Write the notices about an immediate action, which this transaction has executed.

    ``was`` is the server before the action. The notice is the action's own, or else
    instance.update, unless such notices are off.
    """
    settings = notification_settings(tx)
    if settings is None:
        return
    request = {"id": context.request_id, "user": context.user_id, "project": context.project_id}
    found = [Notice(event, server_id, request) for event in events.event_names(row).done]
    if not row.notification and settings.states != OFF:
        found.append(
            Notice(
                "instance.update",
                server_id,
                request,
                {"old_state": was.vm_state, "old_task_state": was.task_state},
            )
        )
    add(tx, found)


def tell(tx: Connection, key: str, picture: Picture | None, *names: str) -> None:
    """Write a notice for each of the event names, about an object that is no server.

    ``key`` is the object's id and ``picture`` its snapshot. Without a snapshot nothing is written.
    """
    if picture is not None:
        add(tx, [Notice(name, key, about={"object": dict(picture)}) for name in names])


@contextmanager
def around(
    tx: Connection, name: str, key: str, take: Callable[[], Picture | None]
) -> Iterator[None]:
    """Write NAME.start with a snapshot before the block, and NAME.end with one after the block.

    Both are written after the block, and neither if the block raises. ``take`` returns the
    snapshot, or None if the object does not exist. If the block creates the object, there is no
    NAME.start. If the block deletes the object, NAME.end has the first snapshot. With notifications
    off, ``take`` is not called.
    """
    is_on = notification_settings(tx) is not None
    before = take() if is_on else None
    yield
    tell(tx, key, before, f"{name}.start")
    tell(tx, key, (take() or before) if is_on else None, f"{name}.end")


# --- for the sender ---
_NEXT = (
    sa.select(notifications)
    .order_by(notifications.c.id)
    .limit(sa.bindparam("most", type_=sa.Integer))
)
_OLDEST = sa.select(notifications.c.id).limit(1)
_NEWEST = sa.select(sa.func.max(notifications.c.id))
_COUNT = sa.select(sa.func.count()).select_from(notifications)
_FIRST = sa.select(notifications.c.created_at).order_by(notifications.c.id).limit(1).subquery()
_LATE = sa.select(_FIRST.c.created_at).where(_FIRST.c.created_at < now() - LATE)


class Waiting(NamedTuple):
    """Number of waiting notifications, and event, object id and time (µs) of the oldest."""

    number: int
    event: str
    key: str
    since: int


def waiting(tx: Connection) -> Waiting | None:
    """Return the number of waiting notifications and the oldest, or None if none waits.

    The count reads the whole outbox.
    """
    oldest = tx.execute(_NEXT, {"most": 1}).first()
    return (
        None
        if oldest is None
        else Waiting(tx.scalar(_COUNT) or 0, oldest.event, oldest.key, oldest.created_at)
    )


def late(tx: Connection) -> int | None:
    """Return the time in µs of the oldest notification if it has waited for ``LATE``, or None."""
    return tx.scalar(_LATE)


def is_empty(tx: Connection) -> bool:
    """Return True if no notification waits."""
    return tx.scalar(_OLDEST) is None


def take(tx: Connection, owner: str, most: int) -> list[NotificationRow]:
    """Take or renew the lease of the sender, and return up to ``most`` rows, oldest first.

    Returns [] if another conductor has the lease, if no row waits, and in the very first call,
    which only inserts the row of the lease.
    """
    free = sa.or_(leases.c.owner == owner, leases.c.until < now())
    mine = tx.execute(
        sa.update(leases)
        .where(leases.c.name == SENDER, free)
        .values(owner=owner, until=now() + LEASE)
    )
    if not mine.rowcount:
        # If the row was missing, the next call takes the lease.
        insert_ignore(tx, leases, {"name": SENDER, "owner": "", "until": 0})
        return []
    return list(tx.execute(_NEXT, {"most": most}))


def strike(tx: Connection, ids: Sequence[int]) -> None:
    """Delete rows that the broker has accepted."""
    tx.execute(sa.delete(notifications).where(notifications.c.id.in_(ids)))


def let_go(tx: Connection, owner: str) -> None:
    """Release the lease if ``owner`` has it, so that another conductor can send at once."""
    tx.execute(
        sa.update(leases).where(leases.c.name == SENDER, leases.c.owner == owner).values(until=0)
    )


def trim(tx: Connection, most: int) -> int:
    """Delete the oldest rows, so that at most ``most`` are left, and return the deleted number.

    Gaps in the ids count as rows, so fewer rows may be left.
    """
    newest = tx.scalar(_NEWEST)
    if newest is None or newest <= most:
        return 0
    return tx.execute(sa.delete(notifications).where(notifications.c.id <= newest - most)).rowcount
