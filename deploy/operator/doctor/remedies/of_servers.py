# SPDX-License-Identifier: Apache-2.0
"""Remedies of what is wrong with servers, their actions, guests and migrations. Called by
``remedies.mend``, under the server's lock."""

from __future__ import annotations

from collections.abc import Callable

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from common.domain import states
from common.domain.context import RequestContext
from common.domain.statuses import OPEN_MIGRATIONS, ActionState, GuestState, MigrationStatus
from common.store import cleanups
from common.store.engine import moment, now
from common.store.placement import allocations, zones
from common.store.rows import GuestRow, ServerRow, Values
from common.store.schema import guests as guests_table
from common.store.schema import migrations as migrations_table
from common.store.schema import servers
from common.store.servers import actions, guests, migrations
from common.store.servers.guests import HERE
from deploy.operator.doctor.finding import Finding
from deploy.operator.doctor.remedies.of_counts import allocate, holds
from deploy.operator.store import stuck_actions

#: Columns of a server that remedies write: its journal keeps what stood there.
WRITTEN = (
    "vm_state",
    "task_state",
    "action",
    "fence",
    "host",
    "availability_zone",
    "shelved_image_id",
    "shelved_at",
    "soft_deleted_at",
    "locked",
    "locked_by",
    "vcpus",
    "memory_mb",
    "shares",
)
SETTLED = "No conductor has taken it for long, and an operator has ended it."
#: States in which a server's guest is off.
_OFF = (states.STOPPED, states.SUSPENDED)


def server(tx: Connection, server_id: str) -> ServerRow:
    """A server that is locked."""
    return tx.execute(sa.select(servers).where(servers.c.id == server_id)).one()


def write(tx: Connection, server_id: str, **values: object) -> None:
    """Change a server that is locked."""
    tx.execute(
        sa.update(servers).where(servers.c.id == server_id).values(**values, updated_at=now())
    )


def _fail(tx: Connection, server_id: str, message: str) -> None:
    """The server shows what is wrong with it, and is free for what its user asks."""
    fault = {"code": 500, "message": message, "details": "", "created": moment(tx)}
    write(tx, server_id, vm_state=states.ERROR, task_state=None, fault=fault)


# --- its state ---
def _task_state(tx: Connection, finding: Finding) -> None:
    write(tx, finding.subject, task_state=None)


def _building(tx: Connection, finding: Finding) -> None:
    _fail(tx, finding.subject, "It was not built to its end. Rebuild it, or delete it.")


def _nowhere(tx: Connection, finding: Finding) -> None:
    row = server(tx, finding.subject)
    found = [one for one in guests.places(tx, row.id) if one.wanted in HERE]
    if len(found) == 1:
        _place(tx, row, found[0])
    elif row.shelved_image_id is not None:
        write(tx, row.id, vm_state=states.SHELVED_OFFLOADED, task_state=None)
    else:
        _fail(tx, row.id, "Its guest is gone, and so is its disk. Delete it.")


def _without_image(tx: Connection, finding: Finding) -> None:
    _fail(tx, finding.subject, "The image that it rested in is gone. Delete it.")


def _resting(tx: Connection, finding: Finding) -> None:
    row = server(tx, finding.subject)
    column = "shelved_at" if row.vm_state == states.SHELVED else "soft_deleted_at"
    write(tx, row.id, **{column: now()})


def _unlock(tx: Connection, finding: Finding) -> None:
    write(tx, finding.subject, locked=False, locked_by=None, locked_reason=None)


# --- its action ---
def _let_go(tx: Connection, finding: Finding) -> None:
    write(tx, finding.subject, action=None, task_state=None)


def _fence(tx: Connection, finding: Finding) -> None:
    [action] = finding.facts
    row, head = server(tx, finding.subject), actions.lock(tx, [action])[action]
    fence = max(row.fence, head.fence) + 1
    write(tx, row.id, fence=fence)
    actions.update(tx, {action: {"fence": fence}})


def _supersede(tx: Connection, finding: Finding) -> None:
    actions.supersede(tx, finding.facts[0])


def _due(tx: Connection, finding: Finding) -> None:
    actions.update(tx, {finding.facts[0]: {"due_at": now()}})


def _send(tx: Connection, finding: Finding) -> None:
    again = {"state": ActionState.DUE, "due_at": now(), "host": None, "sent_at": None}
    actions.update(tx, {finding.facts[0]: again})


def _end_lease(tx: Connection, finding: Finding) -> None:
    actions.update(tx, {finding.facts[0]: {"owner": None, "lease_until": None}})


def _retry(tx: Connection, finding: Finding) -> None:
    stuck_actions.retry(tx, finding.facts[0])


def _settle(tx: Connection, finding: Finding) -> None:
    stuck_actions.settle(tx, finding.facts[0], SETTLED)


# --- its guests ---
def _remove(tx: Connection, row: ServerRow, host: str) -> None:
    """Its guest on this host goes, under a fence that the host does not know yet; not its files,
    where they are also those of the guest that stays."""
    write(tx, row.id, fence=row.fence + 1)
    shared = row.host is not None and host != row.host
    guests.add_debt(
        tx,
        row.id,
        row.fence + 1,
        host=host,
        keeps_files=shared and migrations.share_files(tx, host, row.host or ""),
    )


def _place(tx: Connection, row: ServerRow, guest: GuestRow) -> None:
    """The server is where its guest is; what it rested in goes, and its ports follow."""
    fence = row.fence + 1
    runs = guest.wanted == GuestState.RUNNING
    keeps = row.vm_state not in (states.SHELVED_OFFLOADED, states.SHELVED, states.BUILDING)
    zone = zones.hosts(tx, [guest.host]).get(guest.host, row.availability_zone)
    values: Values = {
        "fence": fence,
        "host": guest.host,
        "availability_zone": zone,
        "task_state": None,
        "shelved_image_id": None,
        "shelved_at": None,
    }
    if not keeps:
        values["vm_state"] = states.ACTIVE if runs else states.STOPPED
    write(tx, row.id, **values)
    guests.become(tx, row.id, guest.host, guest.wanted, fence=fence)
    if row.shelved_image_id is not None:
        cleanups.ask(tx, cleanups.IMAGE, row.shelved_image_id, row.id)
    if row.interfaces:
        cleanups.ask(tx, cleanups.PORTS, row.id, row.id)


def _one_guest(tx: Connection, finding: Finding) -> None:
    row = server(tx, finding.subject)
    for one in guests.places(tx, row.id):
        if one.may_run and one.wanted != GuestState.ABSENT and one.host != row.host:
            if one.wanted in HERE:
                _remove(tx, server(tx, row.id), one.host)
            else:
                guests.become(tx, row.id, one.host, one.wanted, may_run=False)


def _gone(tx: Connection, finding: Finding) -> None:
    [host] = finding.facts
    fence = tx.scalar(
        sa.select(guests_table.c.fence).where(
            guests_table.c.server_id == finding.subject, guests_table.c.host == host
        )
    )
    guests.add_debt(tx, finding.subject, (fence or 0) + 1, host=host)


def _files(tx: Connection, finding: Finding) -> None:
    """Its host removes what it has of it: no guest, and files that are nobody else's."""
    [host] = finding.facts
    row = server(tx, finding.subject)
    guests.discard(tx, row.id, host, elsewhere=None if row.deleted else row.host)


def _elsewhere(tx: Connection, finding: Finding) -> None:
    [host] = finding.facts
    row, places = server(tx, finding.subject), guests.places(tx, finding.subject)
    guest = next(one for one in places if one.host == host)
    has_own = any(one.host == row.host and one.wanted in HERE for one in places)
    rests = (
        row.host is None and row.shelved_image_id is not None and guest.wanted == GuestState.STOPPED
    )
    if has_own or rests:
        _remove(tx, row, host)
    else:
        _place(tx, row, guest)


def _record(tx: Connection, finding: Finding) -> None:
    row = server(tx, finding.subject)
    [host] = finding.facts
    if not holds(tx, row.id, host):
        allocate(tx, row, host)
    runs = row.vm_state not in _OFF
    wanted = GuestState.RUNNING if runs else GuestState.STOPPED
    guests.add(
        tx,
        [
            {
                "server_id": row.id,
                "host": host,
                "fence": row.fence,
                "wanted": wanted,
                "may_run": runs,
            }
        ],
    )


def _no_move(tx: Connection, finding: Finding) -> None:
    _remove(tx, server(tx, finding.subject), finding.facts[0])


def _may_not_run(tx: Connection, finding: Finding) -> None:
    tx.execute(
        sa.update(guests_table)
        .where(
            guests_table.c.server_id == finding.subject,
            guests_table.c.host == finding.facts[0],
            guests_table.c.wanted.not_in((*HERE, GuestState.ABSENT)),
        )
        .values(may_run=False, changed_at=now())
    )


def _hand_back(tx: Connection, finding: Finding) -> None:
    [host] = finding.facts
    for one in guests.places(tx, finding.subject):
        if one.host == host and one.holder is not None:
            guests.hold(tx, finding.subject, host, None)
            if holds(tx, finding.subject, host):
                allocations.release(tx, [(one.holder, host)])
            else:
                allocate(tx, server(tx, finding.subject), host)
                allocations.release(tx, [(one.holder, host)])


def _resend(tx: Connection, finding: Finding) -> None:
    tx.execute(
        sa.update(guests_table)
        .where(
            guests_table.c.server_id == finding.subject,
            guests_table.c.host == finding.facts[0],
            guests_table.c.wanted == GuestState.ABSENT,
        )
        .values(sent_at=None)
    )


def _reboot(tx: Connection, finding: Finding) -> None:
    row = server(tx, finding.subject)
    system = RequestContext.of_ourselves(row.project_id)
    actions.begin(tx, states.row("reboot", "HARD"), row.id, context=system)


def _detach(tx: Connection, finding: Finding) -> None:
    row = server(tx, finding.subject)
    system = RequestContext.of_ourselves(row.project_id)
    [port] = finding.facts
    actions.begin(tx, states.row("detach_interface"), row.id, context=system, args={"port": port})


# --- its moves ---
def _newest_move(tx: Connection, finding: Finding) -> None:
    columns = migrations_table.c
    mine = sa.and_(columns.server_id == finding.subject, columns.status.in_(OPEN_MIGRATIONS))
    newest = tx.scalar(sa.select(sa.func.max(columns.id)).where(mine))
    tx.execute(
        sa.update(migrations_table)
        .where(mine, columns.id != newest)
        .values(status=MigrationStatus.ERROR, updated_at=now())
    )


def _end_move(tx: Connection, finding: Finding) -> None:
    found = tx.execute(
        sa.select(servers).where(servers.c.id == finding.subject, servers.c.deleted == 0)
    ).first()
    if found is None:
        migrations.end_open(tx, [finding.subject], MigrationStatus.ERROR)
        return
    migrations.abandon(tx, found.id, found.fence + 1)
    write(tx, found.id, fence=found.fence + 1)
    if found.vm_state == states.RESIZED:
        _not_resized(tx, finding)


def _not_resized(tx: Connection, finding: Finding) -> None:
    row = server(tx, finding.subject)
    runs = any(one.wanted == GuestState.RUNNING for one in guests.places(tx, row.id))
    write(
        tx,
        row.id,
        vm_state=states.ACTIVE if runs else states.STOPPED,
        vcpus=row.flavor["vcpus"],
        memory_mb=row.flavor["memory_mb"],
    )


SERVERS: dict[str, Callable[[Connection, Finding], None]] = {
    "task-state": _task_state,
    "building-idle": _building,
    "nowhere": _nowhere,
    "shelved-without-image": _without_image,
    "resting-since": _resting,
    "lock": _unlock,
    "held-by-ended": _let_go,
    "fence-of-action": _fence,
    "holds-nothing": _supersede,
    "due": _due,
    "never-sent": _send,
    "lease-of-action": _end_lease,
    "stuck": _retry,
    "overdue": _settle,
    "one-guest": _one_guest,
    "guest-of-gone-server": _gone,
    "guest-elsewhere": _elsewhere,
    "files-elsewhere": _files,
    "no-guest-record": _record,
    "guest-of-no-move": _no_move,
    "kept-may-run": _may_not_run,
    "held-by-no-migration": _hand_back,
    "debt-sent": _resend,
    "guest-there": _reboot,
    "volume-of-another": _reboot,
    "volume-not-in-guest": _reboot,
    "interface-of-server": _detach,
    "one-move": _newest_move,
    "move-without-action": _end_move,
    "resized-without-move": _not_resized,
}
