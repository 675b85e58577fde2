# SPDX-License-Identifier: Apache-2.0
"""Remedies of findings about servers, their actions, guests and migrations.

Called by ``remedies.mend``, under the server's lock.
"""

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

#: Columns of a server that remedies write. The journal keeps their old values.
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
SETTLED = "No conductor took the action for a long time, and an operator ended it."
#: States in which a server's guest is off.
_OFF = (states.STOPPED, states.SUSPENDED)


def server(tx: Connection, server_id: str) -> ServerRow:
    """Return the row of a server. The caller has locked the server."""
    return tx.execute(sa.select(servers).where(servers.c.id == server_id)).one()


def write(tx: Connection, server_id: str, **values: object) -> None:
    """Set columns of the row of a server, and updated_at. The caller has locked the server."""
    tx.execute(
        sa.update(servers).where(servers.c.id == server_id).values(**values, updated_at=now())
    )


def _fail(tx: Connection, server_id: str, message: str) -> None:
    """Set the server to ERROR with this message as its fault, and clear the task_state.

    The user can then start the next action.
    """
    fault = {"code": 500, "message": message, "details": "", "created": moment(tx)}
    write(tx, server_id, vm_state=states.ERROR, task_state=None, fault=fault)


# --- states ---
def _clear_task_state(tx: Connection, finding: Finding) -> None:
    write(tx, finding.subject, task_state=None)


def _fail_build(tx: Connection, finding: Finding) -> None:
    _fail(
        tx, finding.subject, "The build of the server did not finish. Rebuild or delete the server."
    )


def _place_or_fail(tx: Connection, finding: Finding) -> None:
    row = server(tx, finding.subject)
    local_guests = [guest for guest in guests.places(tx, row.id) if guest.wanted in HERE]
    if len(local_guests) == 1:
        _place(tx, row, local_guests[0])
    elif row.shelved_image_id is not None:
        write(tx, row.id, vm_state=states.SHELVED_OFFLOADED, task_state=None)
    else:
        _fail(tx, row.id, "The guest of the server and its disk are lost. Delete the server.")


def _fail_shelved(tx: Connection, finding: Finding) -> None:
    _fail(tx, finding.subject, "The image of the shelved server is gone. Delete the server.")


def _set_resting_time(tx: Connection, finding: Finding) -> None:
    row = server(tx, finding.subject)
    column = "shelved_at" if row.vm_state == states.SHELVED else "soft_deleted_at"
    write(tx, row.id, **{column: now()})


def _unlock(tx: Connection, finding: Finding) -> None:
    write(tx, finding.subject, locked=False, locked_by=None, locked_reason=None)


# --- actions ---
def _release_server(tx: Connection, finding: Finding) -> None:
    write(tx, finding.subject, action=None, task_state=None)


def _raise_fence(tx: Connection, finding: Finding) -> None:
    [action] = finding.facts
    row, head = server(tx, finding.subject), actions.lock(tx, [action])[action]
    fence = max(row.fence, head.fence) + 1
    write(tx, row.id, fence=fence)
    actions.update(tx, {action: {"fence": fence}})


def _supersede(tx: Connection, finding: Finding) -> None:
    actions.supersede(tx, finding.facts[0])


def _make_due(tx: Connection, finding: Finding) -> None:
    actions.update(tx, {finding.facts[0]: {"due_at": now()}})


def _send_again(tx: Connection, finding: Finding) -> None:
    changes = {"state": ActionState.DUE, "due_at": now(), "host": None, "sent_at": None}
    actions.update(tx, {finding.facts[0]: changes})


def _end_lease(tx: Connection, finding: Finding) -> None:
    actions.update(tx, {finding.facts[0]: {"owner": None, "lease_until": None}})


def _retry(tx: Connection, finding: Finding) -> None:
    stuck_actions.retry(tx, finding.facts[0])


def _settle(tx: Connection, finding: Finding) -> None:
    stuck_actions.fail(tx, finding.facts[0], SETTLED)


# --- guests ---
def _remove(tx: Connection, row: ServerRow, host: str) -> None:
    """Let the host remove its guest of the server, under a new fence.

    The files stay if the server's recorded host shares them.
    """
    write(tx, row.id, fence=row.fence + 1)
    shared = row.host is not None and host != row.host
    guests.add_removal(
        tx,
        row.id,
        row.fence + 1,
        host=host,
        keeps_files=shared and migrations.share_files(tx, host, row.host or ""),
    )


def _place(tx: Connection, row: ServerRow, guest: GuestRow) -> None:
    """Make the guest's host the server's host, under a new fence.

    A server that is shelved or BUILDING becomes ACTIVE or STOPPED, like the guest. Pending cleanups
    delete a shelved image and bind the ports to the host.
    """
    fence = row.fence + 1
    runs = guest.wanted == GuestState.RUNNING
    keeps_state = row.vm_state not in (states.SHELVED_OFFLOADED, states.SHELVED, states.BUILDING)
    zone = zones.hosts(tx, [guest.host]).get(guest.host, row.availability_zone)
    values: Values = {
        "fence": fence,
        "host": guest.host,
        "availability_zone": zone,
        "task_state": None,
        "shelved_image_id": None,
        "shelved_at": None,
    }
    if not keeps_state:
        values["vm_state"] = states.ACTIVE if runs else states.STOPPED
    write(tx, row.id, **values)
    guests.become(tx, row.id, guest.host, guest.wanted, fence=fence)
    if row.shelved_image_id is not None:
        cleanups.ask(tx, cleanups.IMAGE, row.shelved_image_id, row.id)
    if row.interfaces:
        cleanups.ask(tx, cleanups.PORTS, row.id, row.id)


def _keep_one_guest(tx: Connection, finding: Finding) -> None:
    row = server(tx, finding.subject)
    for guest in guests.places(tx, row.id):
        if guest.may_run and guest.wanted != GuestState.ABSENT and guest.host != row.host:
            if guest.wanted in HERE:
                _remove(tx, server(tx, row.id), guest.host)
            else:
                guests.become(tx, row.id, guest.host, guest.wanted, may_run=False)


def _remove_guest_of_gone(tx: Connection, finding: Finding) -> None:
    [host] = finding.facts
    fence = tx.scalar(
        sa.select(guests_table.c.fence).where(
            guests_table.c.server_id == finding.subject, guests_table.c.host == host
        )
    )
    guests.add_removal(tx, finding.subject, (fence or 0) + 1, host=host)


def _remove_files(tx: Connection, finding: Finding) -> None:
    """Add a pending cleanup so that the host removes the server's files.

    Raises:
        Conflict: The server is not deleted, and has no host or has an action. Or the server has a
            guest record other than that of a running or stopped guest on the server's host.
    """
    [host] = finding.facts
    row = server(tx, finding.subject)
    guests.discard(tx, row.id, host, elsewhere=None if row.deleted else row.host)


def _place_or_remove(tx: Connection, finding: Finding) -> None:
    [host] = finding.facts
    row, places = server(tx, finding.subject), guests.places(tx, finding.subject)
    guest = next(place for place in places if place.host == host)
    has_own = any(place.host == row.host and place.wanted in HERE for place in places)
    is_in_image = (
        row.host is None and row.shelved_image_id is not None and guest.wanted == GuestState.STOPPED
    )
    if has_own or is_in_image:
        _remove(tx, row, host)
    else:
        _place(tx, row, guest)


def _add_record(tx: Connection, finding: Finding) -> None:
    row = server(tx, finding.subject)
    [host] = finding.facts
    if not holds(tx, row.id, host):
        allocate(tx, row, host)
    runs = row.vm_state not in _OFF
    guest_state = GuestState.RUNNING if runs else GuestState.STOPPED
    guests.add(
        tx,
        [
            {
                "server_id": row.id,
                "host": host,
                "fence": row.fence,
                "wanted": guest_state,
                "may_run": runs,
            }
        ],
    )


def _remove_guest(tx: Connection, finding: Finding) -> None:
    _remove(tx, server(tx, finding.subject), finding.facts[0])


def _forbid_run(tx: Connection, finding: Finding) -> None:
    tx.execute(
        sa.update(guests_table)
        .where(
            guests_table.c.server_id == finding.subject,
            guests_table.c.host == finding.facts[0],
            guests_table.c.wanted.not_in((*HERE, GuestState.ABSENT)),
        )
        .values(may_run=False, changed_at=now())
    )


def _move_allocation_back(tx: Connection, finding: Finding) -> None:
    [host] = finding.facts
    for guest in guests.places(tx, finding.subject):
        if guest.host == host and guest.holder is not None:
            guests.hold(tx, finding.subject, host, None)
            if holds(tx, finding.subject, host):
                allocations.release(tx, [(guest.holder, host)])
            else:
                allocate(tx, server(tx, finding.subject), host)
                allocations.release(tx, [(guest.holder, host)])


def _resend_removal(tx: Connection, finding: Finding) -> None:
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


# --- migrations ---
def _keep_newest_move(tx: Connection, finding: Finding) -> None:
    columns = migrations_table.c
    mine = sa.and_(columns.server_id == finding.subject, columns.status.in_(OPEN_MIGRATIONS))
    newest = tx.scalar(sa.select(sa.func.max(columns.id)).where(mine))
    tx.execute(
        sa.update(migrations_table)
        .where(mine, columns.id != newest)
        .values(status=MigrationStatus.ERROR, updated_at=now())
    )


def _end_move(tx: Connection, finding: Finding) -> None:
    row = tx.execute(
        sa.select(servers).where(servers.c.id == finding.subject, servers.c.deleted == 0)
    ).first()
    if row is None:
        migrations.end_open(tx, [finding.subject], MigrationStatus.ERROR)
        return
    migrations.abandon(tx, row.id, row.fence + 1)
    write(tx, row.id, fence=row.fence + 1)
    if row.vm_state == states.RESIZED:
        _leave_resized(tx, finding)


def _leave_resized(tx: Connection, finding: Finding) -> None:
    row = server(tx, finding.subject)
    runs = any(guest.wanted == GuestState.RUNNING for guest in guests.places(tx, row.id))
    write(
        tx,
        row.id,
        vm_state=states.ACTIVE if runs else states.STOPPED,
        vcpus=row.flavor["vcpus"],
        memory_mb=row.flavor["memory_mb"],
    )


SERVERS: dict[str, Callable[[Connection, Finding], None]] = {
    "task-state": _clear_task_state,
    "building-idle": _fail_build,
    "nowhere": _place_or_fail,
    "shelved-without-image": _fail_shelved,
    "resting-since": _set_resting_time,
    "lock": _unlock,
    "held-by-ended": _release_server,
    "fence-of-action": _raise_fence,
    "holds-nothing": _supersede,
    "due": _make_due,
    "never-sent": _send_again,
    "lease-of-action": _end_lease,
    "stuck": _retry,
    "overdue": _settle,
    "one-guest": _keep_one_guest,
    "guest-of-gone-server": _remove_guest_of_gone,
    "guest-elsewhere": _place_or_remove,
    "files-elsewhere": _remove_files,
    "no-guest-record": _add_record,
    "guest-of-no-move": _remove_guest,
    "kept-may-run": _forbid_run,
    "held-by-no-migration": _move_allocation_back,
    "removal-sent": _resend_removal,
    "guest-there": _reboot,
    "volume-of-another": _reboot,
    "volume-not-in-guest": _reboot,
    "interface-of-server": _detach,
    "one-move": _keep_newest_move,
    "move-without-action": _end_move,
    "resized-without-move": _leave_resized,
}
