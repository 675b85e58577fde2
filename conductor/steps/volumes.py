# SPDX-License-Identifier: Apache-2.0
"""The volumes of servers at the block storage service: the steps that attach, detach, create,
delete and moves share.

An attachment is the permission to have a volume. It is made before a host may connect and ends
after the host has let go. A call that is repeated finds the attachment that it has made by server
and volume. A server that changes its host gets a new attachment before its old one ends, so that
nobody else can take the volume in between.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

from common.clients.volumes import CREATING as BEING_CREATED
from common.clients.volumes import Attachment
from common.domain import device_names, errors
from common.domain.clock import SECOND
from common.domain.json_types import JsonObject
from common.domain.models import AttachedVolume
from common.domain.statuses import BlockDeviceStatus
from common.store.cleanups import ATTACHMENT, LATE_ATTACHMENTS
from common.store.engine import Connection
from common.store.hosts import hosts, services
from common.store.rows import BlockDeviceRow
from common.store.servers import guests
from common.store.servers import volumes as volume_rows
from conductor.engine import late_calls
from conductor.engine.action_args import ActionArgs
from conductor.engine.action_data import ActionData
from conductor.engine.engine import Engine, Lane
from conductor.engine.external_services import VolumeApi
from conductor.engine.run import MAX_CLEANING_TRIES, AnyRun, Run
from conductor.engine.step import Step

FIRST_POLL_MICROS, MAX_POLL_MICROS = SECOND // 4, 4 * SECOND
#: Steps whose call makes attachments.
CALLS = ("reserve", "connect", "volumes", "connect_volumes", "move_volumes", "reserve_volumes")
BEING_MADE = (BEING_CREATED, "downloading")  #: statuses of a volume that is not there yet
COMPLETE = "attached"  #: status of an attachment whose server has the volume
NAME_ID = "name_id"  #: in a connection, whose volume has this id in the names of its storage


@dataclass(kw_only=True)
class VolumesData(ActionData):
    """What the steps of a server that is made with volumes leave."""

    volumes_since: int | None = None  #: when the action first looked whether they are there, µs


@dataclass(kw_only=True)
class ArrivingData(ActionData):
    """What a move leaves that needs two attachments at a time."""

    #: uuid of the row -> attachment and sealed connection of the host where the server is not
    volumes_arriving: dict[str, JsonObject] = field(default_factory=dict)


ReadyRun = Run[ActionArgs, VolumesData]
ArrivingRun = Run[ActionArgs, ArrivingData]


def service(engine: Engine) -> VolumeApi:
    """The block storage service.

    Raises:
        Unavailable: this conductor knows of none.
    """
    if engine.volumes is None:
        raise errors.Unavailable("This conductor has no block storage service.")
    return engine.volumes


# --- what a server has ---
def of(run: AnyRun) -> list[BlockDeviceRow]:
    """The server's volumes, counting what this action is about to write, as the guest counts its
    disks."""
    rows = [
        _changed(row, values)
        for row in run.volumes
        if (values := run.volume_changes.get(row.uuid, {})) is not None
    ]
    return sorted(rows, key=lambda row: (len(row.device_name), row.device_name))


def name_devices(run: AnyRun) -> None:
    """Name the server's volumes as its guest does, which boots and counts its disks.

    Volumes that were detached leave gaps in the names of a running guest. A boot closes the gaps.
    """
    if not run.volumes:
        return
    flavor, disks, image, root = (
        run.changes.get(name, getattr(run.server, name))
        for name in ("flavor", "disks", "image", "root_device_name")
    )
    local = volume_rows.local_names(flavor, disks, image, root)
    # A volume without a connection is not in the guest.
    rows = sorted(of(run), key=lambda row: (row.boot_index != 0, not row.connection))
    roots = [row for row in rows if row.boot_index == 0]
    names = device_names.count(local, [row.disk_bus for row in rows[len(roots) :]])
    for row, name in zip(rows, [*local[: len(roots)], *names], strict=True):
        if row.device_name != name:
            run.set_volume(row, device_name=name)


def _changed(row: BlockDeviceRow, values: JsonObject) -> BlockDeviceRow:
    if not values:
        return row
    kept = {name: getattr(row, name) for name in BlockDeviceRow.__annotations__}
    return cast(BlockDeviceRow, SimpleNamespace(**{**kept, **values}))


def boots_from_volume(run: AnyRun) -> bool:
    """Does a volume take the place of its root disk?"""
    return any(row.boot_index == 0 for row in run.volumes)


def described(engine: Engine, run: AnyRun) -> list[AttachedVolume]:
    """The connected volumes, as the server's host needs to know them."""
    return [_as_attached(engine, row, row.connection) for row in of(run) if row.connection]


def described_arriving(engine: Engine, run: ArrivingRun) -> list[AttachedVolume]:
    """The same for the host where the server is not, which has attachments of its own."""
    there = run.data.volumes_arriving
    return [
        _as_attached(engine, row, there[row.uuid]["connection"])
        for row in of(run)
        if row.uuid in there
    ]


def needed(engine: Engine, run: AnyRun) -> list[AttachedVolume]:
    """Those without which the guest must not start; one that is connected nowhere says so, and no
    host takes it."""
    here = [
        row
        for row in of(run)
        if row.status in (BlockDeviceStatus.ATTACHED, BlockDeviceStatus.RESERVED)
    ]
    return [_as_attached(engine, row, row.connection) for row in here]


def describe(engine: Engine, row: BlockDeviceRow, sealed: str | None = None) -> AttachedVolume:
    """Return a volume as commands carry it, with the connection ``sealed`` or that of its row."""
    return _as_attached(engine, row, sealed or row.connection)


def _as_attached(engine: Engine, row: BlockDeviceRow, sealed: str | None) -> AttachedVolume:
    connection = engine.vault.open(sealed) if sealed else {}
    return AttachedVolume(
        str(row.volume_id),
        row.device_name,
        row.size_gb or 0,
        connection={name: value for name, value in connection.items() if name != NAME_ID},
        boot_index=row.boot_index,
        bus=row.disk_bus or "virtio",
        device_type=row.device_type or "disk",
        tag=row.tag or "",
        read_only=bool(row.read_only),
        multiattach=bool(row.multiattach),
        name_id=str(connection.get(NAME_ID) or ""),
    )


# --- attachments ---
def reserve(engine: Engine, run: AnyRun, row: BlockDeviceRow) -> None:
    """Nobody else can have the volume from here on."""
    expect_late_attachment(run, row)
    found = _found(engine, run, row) if run.is_repeated else []
    made = found[0] if found else service(engine).attach(str(row.volume_id), run.server.id)
    run.set_volume(row, attachment_id=made.id)


def expect_late_attachment(run: AnyRun, row: BlockDeviceRow) -> None:
    late_calls.expect_late_result(run, LATE_ATTACHMENTS, str(row.volume_id))


def _found(engine: Engine, run: AnyRun, row: BlockDeviceRow) -> list[Attachment]:
    """The attachments that the server has of the volume; those that let no host connect first."""
    found = service(engine).attachments(run.server.id, row.volume_id)
    return sorted(found, key=lambda one: bool(one.connection))


def connect(engine: Engine, run: AnyRun, row: BlockDeviceRow, connector: JsonObject) -> None:
    """Let the host of this connector have the volume that is reserved. A reservation that somebody
    has removed is made anew."""
    expect_late_attachment(run, row)
    try:
        made = let_connect(engine, row, str(row.attachment_id), connector)
    except errors.NotFound:
        fresh = service(engine).attach(str(row.volume_id), run.server.id)
        made = let_connect(engine, row, fresh.id, connector)
    run.set_volume(row, attachment_id=made.id, connection=engine.vault.seal(made.connection))


def let_connect(
    engine: Engine, row: BlockDeviceRow, attachment_id: str, connector: JsonObject
) -> Attachment:
    return service(engine).connect(attachment_id, connector, row.device_name, mode_of(row))


def mode_of(row: BlockDeviceRow) -> str:
    return "ro" if row.read_only else "rw"


def connector_of(engine: Engine, host: str) -> JsonObject:
    """Who the host is to the service.

    Raises:
        Conflict: its agent does not say.
    """
    facts = engine.store.read(lambda tx: hosts.facts_of(tx, [host])).get(host, {})
    if not facts.get("connector"):
        raise errors.Conflict(
            f"Host {host} connects no volumes: its agent reports no connector. Upgrade the agent, or use "
            "another host."
        )
    return dict(facts["connector"])


def _renew(
    engine: Engine,
    run: AnyRun,
    row: BlockDeviceRow,
    connector: JsonObject | None,
    holding: Sequence[str],
) -> None:
    """Another attachment in place of the present one, which ends when none of the hosts ``holding``
    the volume is left; for the host of the connector, or for none. The service has no second one
    beside one that is not complete: that one ends first."""
    expect_late_attachment(run, row)
    found = _found(engine, run, row)
    if connector is None and [(one.id, bool(one.connection)) for one in found] == [
        (row.attachment_id, False)
    ]:
        run.set_volume(
            row, connection=None, status=BlockDeviceStatus.RESERVED
        )  # it was never let to a host
        return
    fresh = next((one for one in found if one.id != row.attachment_id and not one.connection), None)
    old = [one for one in found if one is not fresh]
    incomplete = [one for one in old if one.status != COMPLETE and not holding]
    _end(engine, run, row, incomplete, holding)
    if fresh is None:
        fresh = service(engine).attach(str(row.volume_id), run.server.id)
    _end(engine, run, row, [one for one in old if one not in incomplete], holding)
    run.set_volume(row, attachment_id=fresh.id, connection=None, status=BlockDeviceStatus.RESERVED)
    if connector is not None:
        _connect_and_complete(engine, run, _changed(row, {"attachment_id": fresh.id}), connector)


def _end(
    engine: Engine,
    run: AnyRun,
    row: BlockDeviceRow,
    attachments: Sequence[Attachment],
    holding: Sequence[str],
) -> None:
    for one in attachments:
        if holding:
            run.add_cleanup(ATTACHMENT, one.id, held_by(holding), str(row.volume_id))
            continue
        with _tolerantly(run, one.id, row):
            service(engine).detach(one.id)


def _connect_and_complete(
    engine: Engine, run: AnyRun, row: BlockDeviceRow, connector: JsonObject
) -> None:
    connect(engine, run, row, connector)
    made = run.volume_changes[row.uuid] or {}
    service(engine).complete(made["attachment_id"])
    run.set_volume(row, status=BlockDeviceStatus.ATTACHED)


def _tolerantly(run: AnyRun, attachment: str, row: BlockDeviceRow) -> AbstractContextManager[None]:
    """On the way back what may not end holds nobody up."""
    if run.is_undoing:
        return run.cleanup_on_failure(ATTACHMENT, attachment, str(row.volume_id))
    return nullcontext()


def holding(engine: Engine, server_id: str) -> list[str]:
    """Hosts that may have volumes of the server connected which it has not there any more: they owe
    the removal of its guest, and there is no proof that they are dead."""

    def look(tx: Connection) -> list[str]:
        owing = {debt.host for debt in guests.debts_of(tx, [server_id])}
        return sorted(host for host in owing if not services.are_dead(tx, host))

    return engine.store.read(look)


def held_by(found: Sequence[str]) -> str:
    return (
        f"Host {', '.join(found)} has not let go of it yet. When it never will: force it down, or "
        "have it back."
    )


# --- a server that is made, or comes back ---
def are_reserved(run: AnyRun) -> bool:
    """Is there nothing left to wait for, and to reserve?"""
    return all(row.attachment_id for row in run.volumes)


def make_ready(engine: Engine, run: ReadyRun) -> None:
    """Look whether the volumes that are made for it are there, and reserve those that are."""
    for row in of(run):
        if row.status == BlockDeviceStatus.CREATING and not _is_made(engine, run, row):
            continue
        if not row.attachment_id:
            reserve(engine, run, row)


def _is_made(engine: Engine, run: AnyRun, row: BlockDeviceRow) -> bool:
    found = service(engine).volume(str(row.volume_id))
    if found.status.startswith("error"):
        run.fail(
            f"Volume {row.volume_id} could not be made: the block storage service shows it as {found.status}."
        )
    if found.status in BEING_MADE or found.status.startswith("error"):
        return False
    run.set_volume(row, status=BlockDeviceStatus.RESERVED, size_gb=found.size_gb)
    return True


def await_volumes(tx: Connection, engine: Engine, runs: Sequence[ReadyRun]) -> None:
    """Go on when all are reserved; else look again, until it has taken too long."""
    for run in runs:
        if run.data.volumes_since is None:
            run.data.volumes_since = run.locked_at
        missing = [
            str(row.volume_id) for row in of(run) if row.status == BlockDeviceStatus.CREATING
        ]
        if not missing:
            continue
        if run.locked_at - run.data.volumes_since >= engine.volume_timeout * SECOND:
            run.fail(
                f"Volume {', '.join(missing)} was not made within {engine.volume_timeout} seconds; make it "
                "first, and create the server with it."
            )
        else:
            run.retry_in(min(FIRST_POLL_MICROS * 2 ** min(run.data.polls, 8), MAX_POLL_MICROS))
            run.data.polls += 1


def connect_all(engine: Engine, run: AnyRun) -> None:
    """Let the server's host have all of its volumes."""
    assert run.host is not None, "it is placed"
    for row in of(run):
        with _connected_later(run, row):
            connector = connector_of(engine, run.host)
            if row.connection:  # it could not be ended when the server left its host
                _renew(engine, run, row, connector, [])
            else:
                _connect_and_complete(engine, run, row, connector)


@contextmanager
def _connected_later(run: AnyRun, row: BlockDeviceRow) -> Iterator[None]:
    """On the way back a volume whose connection is refused is connected by a pending cleanup; until
    then the server has it nowhere, and its guest stays off."""
    try:
        yield
    except errors.Unavailable:
        raise
    except errors.Problem as problem:
        if not run.is_undoing:
            raise
        run.set_volume(row, connection=None, status=BlockDeviceStatus.RESERVED)
        run.add_cleanup(ATTACHMENT, str(row.attachment_id), problem.text, str(row.volume_id))


def reserve_again(engine: Engine, run: AnyRun) -> None:
    """The server has no host any more, and keeps its volumes: on the way back when its host has let
    go of them, or had time to."""
    left = _still_holding(engine, run) if run.is_undoing else holding(engine, run.server.id)
    for row in of(run):
        if not (row.connection or run.is_undoing):
            continue
        with run.cleanup_on_failure(ATTACHMENT, str(row.attachment_id), str(row.volume_id)):
            _renew(engine, run, row, None, left)


def release(engine: Engine, run: AnyRun) -> None:
    """The server's host has let go of its volumes, and nobody has them: they are reserved.

    Raises:
        Conflict: another host may have them still.
    """
    if left := holding(engine, run.server.id):
        raise errors.Conflict(held_by(left))
    for row in of(run):
        _renew(engine, run, row, None, [])


def _still_holding(engine: Engine, run: AnyRun) -> list[str]:
    """On the way back: nobody, since no guest may run where an action has failed; a host that
    answers is waited for.

    Raises:
        Unavailable: it has not let go yet.
    """
    found = holding(engine, run.server.id)
    if found and run.action.sends < MAX_CLEANING_TRIES:
        raise errors.Unavailable(held_by(found))
    return []


CONNECT: Step[Any, Any] = Step(
    "connect_volumes",
    "when the host is known, and before it makes the guest",
    call=connect_all,
    undo_call=reserve_again,
    lane=Lane.VOLUME,
    condition=Run.has_volumes,
)


# --- a server that moves ---
def move_to(engine: Engine, run: AnyRun, host: str) -> None:
    """The server's volumes are for this host, when no other one has them connected any more."""
    left = _still_holding(engine, run) if run.is_undoing else []
    for row in of(run):
        with _connected_later(run, row):
            _renew(engine, run, row, connector_of(engine, host), left)


def connect_also(engine: Engine, run: ArrivingRun, host: str) -> None:
    """Let this host have the volumes too: the server moves there while it runs."""
    connector, arriving = connector_of(engine, host), {}
    for row in of(run):
        expect_late_attachment(run, row)
        for one in _found(engine, run, row) if run.is_repeated else ():
            if one.id != row.attachment_id:  # of an earlier try; no host has got it
                service(engine).detach(one.id)
        made = service(engine).attach(
            str(row.volume_id), run.server.id, connector, row.device_name, mode_of(row)
        )
        arriving[row.uuid] = {
            "attachment": made.id,
            "connection": engine.vault.seal(made.connection),
        }
    run.data.volumes_arriving = arriving


def disconnect_arriving(engine: Engine, run: ArrivingRun) -> None:
    """The other host must not have them any more: the destination on the way back, the source
    after the move."""
    left = _still_holding(engine, run) if run.is_undoing else holding(engine, run.server.id)
    for row in of(run):
        known = str(run.data.volumes_arriving.get(row.uuid, {}).get("attachment") or row.uuid)
        with run.cleanup_on_failure(ATTACHMENT, known, str(row.volume_id)):
            if left:
                raise errors.Conflict(held_by(left))
            for one in _found(engine, run, row):
                if one.id != row.attachment_id:
                    service(engine).detach(one.id)
                elif not run.is_undoing and one.status != COMPLETE:
                    service(engine).complete(one.id)


def exchange(run: ArrivingRun) -> None:
    """The server has changed places: its rows have the attachments of its new host, the action's
    data those of the other one."""
    arriving = run.data.volumes_arriving
    left = {}
    for row in of(run):
        if row.uuid in arriving:
            left[row.uuid] = {"attachment": row.attachment_id, "connection": None}
            made = arriving[row.uuid]
            run.set_volume(row, attachment_id=made["attachment"], connection=made["connection"])
    run.data.volumes_arriving = left
