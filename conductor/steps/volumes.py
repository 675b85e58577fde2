# SPDX-License-Identifier: Apache-2.0
"""The volumes of servers: the steps that attach, detach, create, delete and moves share.

An attachment is the permission to use a volume. A host connects after the attachment was created,
and disconnects before the attachment ends. A repeated call finds its earlier attachment by server
and volume. When a server changes its host, the new attachment is created before the old one ends,
so that no other server can take the volume in between.
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
#: Steps that create attachments by their call.
CALLS = ("reserve", "connect", "volumes", "connect_volumes", "move_volumes", "reserve_volumes")
#: Statuses of a volume that does not exist yet.
BEING_MADE = (BEING_CREATED, "downloading")
#: Status of an attachment whose server has the volume.
COMPLETE = "attached"
#: Key in a connection: the id by which the storage backend names the volume.
NAME_ID = "name_id"


@dataclass(kw_only=True)
class VolumesData(ActionData):
    """Data that the creation of a server with volumes leaves for later steps."""

    #: Time of the first check whether the volumes exist, in microseconds.
    volumes_since: int | None = None


@dataclass(kw_only=True)
class ArrivingData(ActionData):
    """Data of a move that needs attachments for two hosts."""

    #: Row uuid -> attachment and sealed connection for the host that does not have the server.
    volumes_arriving: dict[str, JsonObject] = field(default_factory=dict)


ReadyRun = Run[ActionArgs, VolumesData]
ArrivingRun = Run[ActionArgs, ArrivingData]


def service(engine: Engine) -> VolumeApi:
    """Return the client of the block storage service.

    Raises:
        Unavailable: This conductor has no client of the block storage service.
    """
    if engine.volumes is None:
        raise errors.Unavailable("This conductor has no block storage service.")
    return engine.volumes


# --- the volumes of a server ---
def of(run: AnyRun) -> list[BlockDeviceRow]:
    """Return the server's volumes with the changes of this run, in the guest's disk order."""
    rows = [
        _apply_changes(row, values)
        for row in run.volumes
        if (values := run.volume_changes.get(row.uuid, {})) is not None
    ]
    return sorted(rows, key=lambda row: (len(row.device_name), row.device_name))


def name_devices(run: AnyRun) -> None:
    """Give the volumes the device names that the guest's next boot assigns.

    Volumes that were detached leave gaps in the names of a running guest. A boot closes the gaps.
    """
    if not run.volumes:
        return
    flavor, disks, image, root = (
        run.changes.get(name, getattr(run.server, name))
        for name in ("flavor", "disks", "image", "root_device_name")
    )
    local_names = volume_rows.local_names(flavor, disks, image, root)
    # A volume without a connection is not in the guest.
    rows = sorted(of(run), key=lambda row: (row.boot_index != 0, not row.connection))
    roots = [row for row in rows if row.boot_index == 0]
    names = device_names.assign_names(local_names, [row.disk_bus for row in rows[len(roots) :]])
    for row, name in zip(rows, [*local_names[: len(roots)], *names], strict=True):
        if row.device_name != name:
            run.set_volume(row, device_name=name)


def _apply_changes(row: BlockDeviceRow, values: JsonObject) -> BlockDeviceRow:
    if not values:
        return row
    columns = {name: getattr(row, name) for name in BlockDeviceRow.__annotations__}
    return cast(BlockDeviceRow, SimpleNamespace(**{**columns, **values}))


def boots_from_volume(run: AnyRun) -> bool:
    """Return True if the server's root disk is a volume."""
    return any(row.boot_index == 0 for row in run.volumes)


def described(engine: Engine, run: AnyRun) -> list[AttachedVolume]:
    """Return the connected volumes with the data that the server's host needs."""
    return [_as_attached(engine, row, row.connection) for row in of(run) if row.connection]


def described_arriving(engine: Engine, run: ArrivingRun) -> list[AttachedVolume]:
    """Return the volumes with the connections for the host that does not have the server.

    During a live migration this host has attachments of its own, in ``volumes_arriving``. Until the
    switch this is the destination. After the switch this is the source, and the connections are
    empty. Volumes without an attachment for this host are left out.
    """
    arriving = run.data.volumes_arriving
    return [
        _as_attached(engine, row, arriving[row.uuid]["connection"])
        for row in of(run)
        if row.uuid in arriving
    ]


def needed(engine: Engine, run: AnyRun) -> list[AttachedVolume]:
    """Return the volumes that a host must connect before the guest starts.

    These have the status attached or reserved. A volume without a connection is included, so that
    the host refuses to start the guest.
    """
    rows = [
        row
        for row in of(run)
        if row.status in (BlockDeviceStatus.ATTACHED, BlockDeviceStatus.RESERVED)
    ]
    return [_as_attached(engine, row, row.connection) for row in rows]


def describe(engine: Engine, row: BlockDeviceRow, sealed: str | None = None) -> AttachedVolume:
    """Return a volume in the form that commands contain.

    The connection is ``sealed``, or that of the row if ``sealed`` is None. {} without a connection.
    """
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
    """Reserve the volume for the server, and store the attachment's id in the volume's row.

    A repeated call uses the attachment of the earlier try.
    """
    expect_late_attachment(run, row)
    attachments = _find_attachments(engine, run, row) if run.is_repeated else []
    attachment = (
        attachments[0] if attachments else service(engine).attach(str(row.volume_id), run.server.id)
    )
    run.set_volume(row, attachment_id=attachment.id)


def expect_late_attachment(run: AnyRun, row: BlockDeviceRow) -> None:
    """Add a pending cleanup for an attachment that an earlier try may still create.

    A first try adds no cleanup.
    """
    late_calls.expect_late_result(run, LATE_ATTACHMENTS, str(row.volume_id))


def _find_attachments(engine: Engine, run: AnyRun, row: BlockDeviceRow) -> list[Attachment]:
    """Return the server's attachments of the volume, first those without a connection."""
    attachments = service(engine).attachments(run.server.id, row.volume_id)
    return sorted(attachments, key=lambda attachment: bool(attachment.connection))


def connect(engine: Engine, run: AnyRun, row: BlockDeviceRow, connector: JsonObject) -> None:
    """Connect a reserved volume to the host of this connector.

    Attachment and sealed connection are stored in the volume's row. If the reservation was deleted,
    the volume is reserved again.
    """
    expect_late_attachment(run, row)
    try:
        attachment = let_connect(engine, row, str(row.attachment_id), connector)
    except errors.NotFound:
        reservation = service(engine).attach(str(row.volume_id), run.server.id)
        attachment = let_connect(engine, row, reservation.id, connector)
    run.set_volume(
        row, attachment_id=attachment.id, connection=engine.vault.seal(attachment.connection)
    )


def let_connect(
    engine: Engine, row: BlockDeviceRow, attachment_id: str, connector: JsonObject
) -> Attachment:
    """Give the attachment a connector, and return the attachment with its connection.

    Device name and mode are those of the row.

    Raises:
        NotFound: The attachment does not exist.
    """
    return service(engine).connect(attachment_id, connector, row.device_name, mode_of(row))


def mode_of(row: BlockDeviceRow) -> str:
    """Return the attach mode of a volume: "ro" or "rw"."""
    return "ro" if row.read_only else "rw"


def connector_of(engine: Engine, host: str) -> JsonObject:
    """Return the connector of a host, by which the service identifies the host.

    Raises:
        Conflict: The host's agent reports no connector.
    """
    facts = engine.store.read(lambda tx: hosts.facts_of(tx, [host])).get(host, {})
    if not facts.get("connector"):
        raise errors.Conflict(
            f"Host {host} cannot connect volumes, because its agent reports no connector. Upgrade the agent, "
            "or use another host."
        )
    return dict(facts["connector"])


def _renew(
    engine: Engine,
    run: AnyRun,
    row: BlockDeviceRow,
    connector: JsonObject | None,
    holding: Sequence[str],
) -> None:
    """Replace the server's attachments of the volume by a new attachment.

    A reservation of an earlier try is used. The service permits no second attachment beside an
    incomplete one, so incomplete attachments end first, unless ``holding`` contains hosts.

    Args:
        engine: The conductor's engine.
        run: The run of the step.
        row: The row of the volume, which gets the new attachment.
        connector: The connector of the host that connects the volume. None: the volume is only
            reserved, and a reservation that is the only attachment is kept.
        holding: Hosts that may still have the volume connected. With such hosts, pending cleanups
            end the old attachments after the hosts have disconnected.
    """
    expect_late_attachment(run, row)
    attachments = _find_attachments(engine, run, row)
    if connector is None and [
        (attachment.id, bool(attachment.connection)) for attachment in attachments
    ] == [(row.attachment_id, False)]:
        # The present attachment is a reservation already.
        run.set_volume(row, connection=None, status=BlockDeviceStatus.RESERVED)
        return
    new = next(
        (
            attachment
            for attachment in attachments
            if attachment.id != row.attachment_id and not attachment.connection
        ),
        None,
    )
    old = [attachment for attachment in attachments if attachment is not new]
    incomplete = [attachment for attachment in old if attachment.status != COMPLETE and not holding]
    _end(engine, run, row, incomplete, holding)
    if new is None:
        new = service(engine).attach(str(row.volume_id), run.server.id)
    _end(
        engine,
        run,
        row,
        [attachment for attachment in old if attachment not in incomplete],
        holding,
    )
    run.set_volume(row, attachment_id=new.id, connection=None, status=BlockDeviceStatus.RESERVED)
    if connector is not None:
        _connect_and_complete(
            engine, run, _apply_changes(row, {"attachment_id": new.id}), connector
        )


def _end(
    engine: Engine,
    run: AnyRun,
    row: BlockDeviceRow,
    attachments: Sequence[Attachment],
    holding: Sequence[str],
) -> None:
    for attachment in attachments:
        if holding:
            run.add_cleanup(ATTACHMENT, attachment.id, held_by(holding), str(row.volume_id))
            continue
        with _cleanup_if_undoing(run, attachment.id, row):
            service(engine).detach(attachment.id)


def _connect_and_complete(
    engine: Engine, run: AnyRun, row: BlockDeviceRow, connector: JsonObject
) -> None:
    connect(engine, run, row, connector)
    changes = run.volume_changes[row.uuid] or {}
    service(engine).complete(changes["attachment_id"])
    run.set_volume(row, status=BlockDeviceStatus.ATTACHED)


def _cleanup_if_undoing(
    run: AnyRun, attachment: str, row: BlockDeviceRow
) -> AbstractContextManager[None]:
    """Return a context that turns a failure into a pending cleanup, but only in an undo.

    A service that does not answer is called again before that, as in ``Run.cleanup_on_failure``.
    """
    if run.is_undoing:
        return run.cleanup_on_failure(ATTACHMENT, attachment, str(row.volume_id))
    return nullcontext()


def holding(engine: Engine, server_id: str) -> list[str]:
    """Return the hosts that may still have volumes of the server connected.

    These are the hosts with a pending removal of the server's guest, except hosts that are proved
    dead.
    """

    def read(tx: Connection) -> list[str]:
        hosts_with_removals = {removal.host for removal in guests.removals_of(tx, [server_id])}
        return sorted(host for host in hosts_with_removals if not services.are_dead(tx, host))

    return engine.store.read(read)


def held_by(host_names: Sequence[str]) -> str:
    """Return the text that these hosts have not disconnected a volume yet, with the next step."""
    return (
        f"Host {', '.join(host_names)} has not disconnected the volume yet. If the host cannot do "
        "so, repair the host or force it down."
    )


# --- create and unshelve ---
def are_reserved(run: AnyRun) -> bool:
    """Return True if each volume of the server has an attachment."""
    return all(row.attachment_id for row in run.volumes)


def make_ready(engine: Engine, run: ReadyRun) -> None:
    """Reserve each volume of the server that exists and has no attachment yet.

    The size of a volume that the service has created for the server is recorded. Volumes that the
    service is still creating are left to the next poll. The run fails if the service could not
    create a volume.
    """
    for row in of(run):
        if row.status == BlockDeviceStatus.CREATING and not _has_been_created(engine, run, row):
            continue
        if not row.attachment_id:
            reserve(engine, run, row)


def _has_been_created(engine: Engine, run: AnyRun, row: BlockDeviceRow) -> bool:
    """Return True if the service has created a volume, after recording size and status reserved.

    If the service could not create the volume, the run fails, and the result is False.
    """
    volume = service(engine).volume(str(row.volume_id))
    if volume.status.startswith("error"):
        run.fail(
            f"Volume {row.volume_id} could not be created: its status at the block storage service is {volume.status}."
        )
    if volume.status in BEING_MADE or volume.status.startswith("error"):
        return False
    run.set_volume(row, status=BlockDeviceStatus.RESERVED, size_gb=volume.size_gb)
    return True


def await_volumes(tx: Connection, engine: Engine, runs: Sequence[ReadyRun]) -> None:
    """Continue when the service has created all volumes. Until then poll with growing pauses.

    After ``volume_timeout`` seconds the run fails.
    """
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
                f"Volume {', '.join(missing)} was not created within {engine.volume_timeout} seconds. Create the "
                "volume first, and then create the server with it."
            )
        else:
            run.retry_in(min(FIRST_POLL_MICROS * 2 ** min(run.data.polls, 8), MAX_POLL_MICROS))
            run.data.polls += 1


def connect_all(engine: Engine, run: AnyRun) -> None:
    """Connect all of the server's volumes to its host, and mark them as in use.

    In an undo, a refusal or a missing connector becomes a pending cleanup, and the volume is only
    reserved.

    Raises:
        Conflict: The host's agent reports no connector. Not raised in an undo.
        Problem: The service refuses. Not raised in an undo.
        Unavailable: The service does not answer.
    """
    assert run.host is not None, "the server has a host in this step"
    for row in of(run):
        with _connect_later_if_undoing(run, row):
            connector = connector_of(engine, run.host)
            if row.connection:  # The attachment did not end when the server left its old host.
                _renew(engine, run, row, connector, [])
            else:
                _connect_and_complete(engine, run, row, connector)


@contextmanager
def _connect_later_if_undoing(run: AnyRun, row: BlockDeviceRow) -> Iterator[None]:
    """In an undo, leave a refused connection to a pending cleanup.

    Until then the volume is only reserved, and the guest stays off.
    """
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
    """Reserve the connected volumes of a server that has no host any more.

    An undo reserves all volumes, after the hosts have disconnected them or no tries are left.
    Outside of an undo, pending cleanups end the old attachments after the hosts in ``holding`` have
    disconnected. A refusal becomes a pending cleanup.

    Raises:
        Unavailable: In an undo a host must disconnect first, or the service does not answer, and
            tries are left.
    """
    holding_hosts = (
        _still_holding(engine, run) if run.is_undoing else holding(engine, run.server.id)
    )
    for row in of(run):
        if not (row.connection or run.is_undoing):
            continue
        with run.cleanup_on_failure(ATTACHMENT, str(row.attachment_id), str(row.volume_id)):
            _renew(engine, run, row, None, holding_hosts)


def release(engine: Engine, run: AnyRun) -> None:
    """Reserve the volumes again after the server's host has disconnected them.

    Raises:
        Conflict: A host with an old guest of the server may still have the volumes connected.
    """
    if holding_hosts := holding(engine, run.server.id):
        raise errors.Conflict(held_by(holding_hosts))
    for row in of(run):
        _renew(engine, run, row, None, [])


def _still_holding(engine: Engine, run: AnyRun) -> list[str]:
    """Raise Unavailable in an undo while hosts may have volumes of the server connected.

    Returns:
        An empty list: no host delays the end of attachments. After the last try this also holds for
        hosts that have not answered, because no guest of a failed action may run.

    Raises:
        Unavailable: A host has not disconnected the volumes yet, and tries are left.
    """
    host_names = holding(engine, run.server.id)
    if host_names and run.action.sends < MAX_CLEANING_TRIES:
        raise errors.Unavailable(held_by(host_names))
    return []


CONNECT: Step[Any, Any] = Step(
    "connect_volumes",
    "The host must be known, and needs the connections to create the guest.",
    call=connect_all,
    undo_call=reserve_again,
    lane=Lane.VOLUME,
    condition=Run.has_volumes,
)


# --- moves ---
def move_to(engine: Engine, run: AnyRun, host: str) -> None:
    """Replace the attachments of all volumes by attachments for this host.

    In an undo, a refusal or a missing connector becomes a pending cleanup, and the volume is only
    reserved.

    Raises:
        Conflict: The agent of the host reports no connector. Not raised in an undo.
        Problem: The service refuses. Not raised in an undo.
        Unavailable: The service does not answer, or in an undo a host must disconnect first.
    """
    holding_hosts = _still_holding(engine, run) if run.is_undoing else []
    for row in of(run):
        with _connect_later_if_undoing(run, row):
            _renew(engine, run, row, connector_of(engine, host), holding_hosts)


def connect_also(engine: Engine, run: ArrivingRun, host: str) -> None:
    """Connect the volumes to a second host, to which the server moves while it runs.

    The new attachments are stored in ``volumes_arriving``, and the rows stay unchanged. A repeated
    call first deletes the attachments of the earlier try.

    Raises:
        Conflict: The host's agent reports no connector.
    """
    connector, arriving = connector_of(engine, host), {}
    for row in of(run):
        expect_late_attachment(run, row)
        for attachment in _find_attachments(engine, run, row) if run.is_repeated else ():
            # Another attachment was created by an earlier try, and is used by no host.
            if attachment.id != row.attachment_id:
                service(engine).detach(attachment.id)
        new = service(engine).attach(
            str(row.volume_id), run.server.id, connector, row.device_name, mode_of(row)
        )
        arriving[row.uuid] = {
            "attachment": new.id,
            "connection": engine.vault.seal(new.connection),
        }
    run.data.volumes_arriving = arriving


def disconnect_arriving(engine: Engine, run: ArrivingRun) -> None:
    """End the attachments of the host that does not have the server.

    In an undo this is the destination, after a move the source. After a move, the attachment of the
    new host is completed if it is not complete yet. A host that may still have the volumes
    connected delays an undo, and after a move leaves pending cleanups. A refusal leaves a
    pending cleanup too.
    """
    holding_hosts = (
        _still_holding(engine, run) if run.is_undoing else holding(engine, run.server.id)
    )
    for row in of(run):
        target = str(run.data.volumes_arriving.get(row.uuid, {}).get("attachment") or row.uuid)
        with run.cleanup_on_failure(ATTACHMENT, target, str(row.volume_id)):
            if holding_hosts:
                raise errors.Conflict(held_by(holding_hosts))
            for attachment in _find_attachments(engine, run, row):
                if attachment.id != row.attachment_id:
                    service(engine).detach(attachment.id)
                elif not run.is_undoing and attachment.status != COMPLETE:
                    service(engine).complete(attachment.id)


def exchange(run: ArrivingRun) -> None:
    """Exchange the attachments of the rows with those in the action's data.

    The server has moved, so the rows need the attachments of its new host.
    """
    arriving = run.data.volumes_arriving
    old = {}
    for row in of(run):
        if row.uuid in arriving:
            old[row.uuid] = {"attachment": row.attachment_id, "connection": None}
            new = arriving[row.uuid]
            run.set_volume(row, attachment_id=new["attachment"], connection=new["connection"])
    run.data.volumes_arriving = old
