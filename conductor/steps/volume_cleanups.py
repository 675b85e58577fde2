# SPDX-License-Identifier: Apache-2.0
"""The end of a server's volumes: the delete of their server, and pending cleanups of volumes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from common.clients.volumes import Attachment
from common.domain import errors, states
from common.domain.context import RequestContext
from common.domain.json_types import JsonObject
from common.domain.statuses import BlockDeviceStatus
from common.domain.wire import from_wire
from common.store.cleanups import ATTACHMENT
from common.store.engine import Connection
from common.store.hosts import services
from common.store.rows import ActionRow, BlockDeviceRow, CleanupRow, ServerRow
from common.store.servers import actions, block_devices
from common.store.servers import volumes as volume_rows
from conductor.engine.action_args import ActionArgs, SwapVolumeArgs
from conductor.engine.action_data import ActionData
from conductor.engine.engine import Engine
from conductor.engine.run import AnyRun, Run
from conductor.steps import volume_snapshots, volume_swaps, volumes
from conductor.steps.volumes import COMPLETE, service

DETACH = states.row("detach_volume")


@dataclass(kw_only=True)
class LeftVolume:
    """A volume that a deleted server had."""

    volume_id: str
    attachment_id: str | None = None
    #: True if the volume is deleted with its server.
    delete: bool = False
    #: The volume to which a swap was copying the data.
    migrates_to: str | None = None
    #: True if the swap had moved the server's data to ``migrates_to``.
    swapped: bool = False
    #: The snapshot that the host was creating or deleting for the service.
    snapshot: str | None = None
    #: The status to report for the snapshot.
    snapshot_status: str = ""


@dataclass(kw_only=True)
class LeavingData(ActionData):
    """Data that the delete of a server with volumes leaves for later steps."""

    #: The volumes of the deleted server.
    volumes: list[LeftVolume] = field(default_factory=list)


LeavingRun = Run[ActionArgs, LeavingData]


# --- delete ---
def mark_detaching(run: LeavingRun) -> None:
    """Record the volumes of a deleted server in the run's data, and mark their rows as detaching.

    A row without a volume id is left out.
    """
    rows = [row for row in volumes.of(run) if row.volume_id]
    run.data.volumes = [
        LeftVolume(
            volume_id=str(row.volume_id),
            attachment_id=row.attachment_id,
            delete=bool(row.delete_on_termination),
        )
        for row in rows
    ]
    for row in rows:
        run.set_volume(row, status=BlockDeviceStatus.DETACHING)


def record_superseded_action(run: LeavingRun, before: ActionRow) -> None:
    """Record what the superseded action was doing with a volume of the server.

    The end of the volume then includes the end of its swap or snapshot. A volume that was being
    detached is kept, even if it was to be deleted with the server.

    Args:
        run: The run of the delete, after ``mark_detaching``.
        before: The action that the delete has superseded.
    """
    for volume in run.data.volumes:
        if volume.volume_id != before.args.get("volume_id"):
            continue
        if before.workflow == "detach_volume":
            volume.delete = False
        elif before.workflow == "swap_volume":
            volume.migrates_to = from_wire(SwapVolumeArgs, before.args).new_volume_id
            volume.swapped = bool(before.data.get("swapped"))
        elif status := volume_snapshots.status_without_guest(before):
            volume.snapshot, volume.snapshot_status = before.args["snapshot_id"], status


def had_volumes(run: LeavingRun) -> bool:
    """Return True if the deleted server had volumes."""
    return bool(run.data.volumes)


def release_all(engine: Engine, run: LeavingRun) -> None:
    """End the attachments, and delete the volumes that are deleted with their server.

    A swap or snapshot of a volume is ended first. If a host may still have volumes connected, or
    the service refuses, the work becomes pending cleanups.

    Raises:
        Unavailable: The service does not answer, and tries are left.
    """
    holding_hosts = volumes.holding(engine, run.server.id)
    for volume in run.data.volumes:
        target = volume.attachment_id or volume.volume_id
        with run.cleanup_on_failure(
            ATTACHMENT,
            target,
            volume.volume_id,
            delete=volume.delete,
            **_further_work(volume),
        ):
            if holding_hosts:
                raise errors.Conflict(volumes.held_by(holding_hosts))
            if volume.snapshot:
                volume_snapshots.end_without_guest(engine, volume.snapshot, volume.snapshot_status)
            if volume.migrates_to:
                keeps = {str(volume.attachment_id)}
                volume_swaps.end_swap(
                    engine,
                    run.server.id,
                    volume.volume_id,
                    volume.migrates_to,
                    keeps,
                    volume.swapped,
                )
            for attachment in service(engine).attachments(run.server.id, volume.volume_id):
                service(engine).detach(attachment.id)
            if volume.delete:
                service(engine).delete(volume.volume_id)


def _further_work(volume: LeftVolume) -> JsonObject:
    """Return the swap and the snapshot that the pending cleanup of this volume must end, if any."""
    work: JsonObject = {}
    if volume.migrates_to:
        work |= {"migrates_to": volume.migrates_to, "swapped": volume.swapped}
    if volume.snapshot:
        work |= {"snapshot": volume.snapshot, "snapshot_status": volume.snapshot_status}
    return work


def forget_all(tx: Connection, engine: Engine, runs: Sequence[AnyRun]) -> None:
    """Delete the rows of the volumes of deleted servers."""
    for run in runs:
        run.remove_volumes(volumes.of(run))


# --- a pending cleanup ---
def reconcile(engine: Engine, row: CleanupRow, look: Callable[[], ServerRow | None]) -> None:
    """Bring a volume and its attachments to the state in the server's record.

    The volume is the cleanup's ``place``. The server keeps only the attachment in its row. A volume
    that was to be deleted with its server is deleted if no row of the server names it. A snapshot
    and a swap that the cleanup names are ended first.

    Args:
        engine: The conductor's engine.
        row: The pending cleanup.
        look: Reads the server. None: the server does not exist. Raises if an action has the server.

    Raises:
        Unavailable: A host may still have the volume connected, the service does not answer, or the
            service is still creating the snapshot.
        Conflict: The guest may use the volume by a connection that is not in the record, or the
            host's agent reports no connector.
        Problem: The service refuses.
    """
    attachments = service(engine).attachments(row.server_id, row.place)
    server = look()
    if holding_hosts := volumes.holding(engine, row.server_id):
        raise errors.Unavailable(volumes.held_by(holding_hosts))
    rows = engine.store.read(
        lambda tx: block_devices.of_servers(tx, [server] if server is not None else []).get(
            row.server_id, []
        )
    )
    own_rows = [volume for volume in rows if volume.volume_id == row.place]
    if snapshot := row.args.get("snapshot"):
        volume_snapshots.end_without_guest(engine, snapshot, row.args["snapshot_status"])
    if target := row.args.get("migrates_to"):
        keeps = {str(volume.attachment_id) for volume in own_rows}
        swapped = bool(row.args.get("swapped"))
        volume_swaps.end_swap(engine, row.server_id, row.place, target, keeps, swapped)
        attachments = service(engine).attachments(row.server_id, row.place)
    for attachment in attachments:
        own_row = next(
            (candidate for candidate in own_rows if candidate.attachment_id == attachment.id), None
        )
        if own_row is None:
            service(engine).detach(attachment.id)
        elif attachment.connection and server is not None and server.host is None:
            _reserve_anew(engine, own_row, server, attachment)
        elif attachment.connection and attachment.status != COMPLETE and own_row.connection:
            service(engine).complete(attachment.id)
    if server is not None:
        for volume in own_rows:
            _repair_row(engine, volume, server, attachments)
    if row.args.get("delete") and not own_rows:
        service(engine).delete(row.place)


def _repair_row(
    engine: Engine, row: BlockDeviceRow, server: ServerRow, attachments: Sequence[Attachment]
) -> None:
    """Connect the volume to its idle server's host, or record it as reserved if there is no host.

    Nothing changes if the row has this state already, or if the volume is being created or has an
    error.

    Raises:
        Conflict: As in ``_connect_again``.
    """
    if row.status not in (
        BlockDeviceStatus.RESERVED,
        BlockDeviceStatus.ATTACHING,
        BlockDeviceStatus.ATTACHED,
        BlockDeviceStatus.DETACHING,
    ):
        return
    if server.host and not (row.connection and row.status == BlockDeviceStatus.ATTACHED):
        _connect_again(engine, row, server, attachments)
    elif not server.host and (row.connection or row.status != BlockDeviceStatus.RESERVED):
        values = {"connection": None, "status": BlockDeviceStatus.RESERVED}
        engine.store.write(lambda tx: _change_idle(tx, row, server, values))


def _connect_again(
    engine: Engine, row: BlockDeviceRow, server: ServerRow, attachments: Sequence[Attachment]
) -> None:
    """Connect a volume to the host of its idle server. The guest gets it at the next start.

    An action left the volume without a connection, because the service refused one in the undo. If
    an action takes the server meanwhile, the connection is not recorded.

    Raises:
        Conflict: The guest may be using the volume by its old attachment, or the host's agent
            reports no connector.
    """
    connector = volumes.connector_of(engine, str(server.host))
    old = next(
        (attachment for attachment in attachments if attachment.id == row.attachment_id), None
    )
    reserved = old if old is not None and not old.connection else None
    if reserved is None:
        if old is not None and _may_run(engine, server):
            raise errors.Conflict(
                f"Volume {row.volume_id} cannot be connected again to host {server.host}, because the guest of "
                f"server {server.id} may be using the old attachment. Stop the server."
            )
        reserved = _reserve_anew(engine, row, server, old)
    if reserved is None:
        return
    device, mode = row.device_name, volumes.mode_of(row)
    connected = service(engine).connect(reserved.id, connector, device, mode)
    service(engine).complete(connected.id)
    sealed = engine.vault.seal(connected.connection)
    values = {
        "attachment_id": connected.id,
        "connection": sealed,
        "status": BlockDeviceStatus.ATTACHED,
    }
    engine.store.write(lambda tx: _change_idle(tx, row, server, values))


def _may_run(engine: Engine, server: ServerRow) -> bool:
    """Return True if the guest may run: not recorded as off, and the host not proved dead."""
    return server.power_state != states.SHUTDOWN and not engine.store.read(
        lambda tx: services.are_dead(tx, str(server.host))
    )


def _reserve_anew(
    engine: Engine, row: BlockDeviceRow, server: ServerRow, old: Attachment | None
) -> Attachment | None:
    """Replace an attachment by a new reservation, and store this in the volume's row.

    The service permits no second attachment beside an incomplete one, so an incomplete one ends
    first.

    Returns:
        The reservation. None if an action has taken the server meanwhile. Then the reservation is
        deleted again.
    """
    if old is not None and old.status != COMPLETE:
        service(engine).detach(old.id)
        old = None
    fresh = service(engine).attach(str(row.volume_id), row.server_id)
    values = {"attachment_id": fresh.id, "connection": None, "status": BlockDeviceStatus.RESERVED}
    is_stored = engine.store.write(lambda tx: _change_idle(tx, row, server, values))
    for unused in (old,) if is_stored else (fresh,):
        if unused is not None:
            service(engine).detach(unused.id)
    return fresh if is_stored else None


def _change_idle(tx: Connection, row: BlockDeviceRow, seen: ServerRow, values: JsonObject) -> bool:
    """Change the volume's row, unless its server has been deleted or taken by an action meanwhile.

    Args:
        tx: The transaction.
        row: The row of the volume.
        seen: The server as read earlier. Another fence means that an action has had the server.
        values: The changed columns.

    Returns:
        True if the row was changed.
    """
    server = actions.lock_servers(tx, [row.server_id]).get(row.server_id)
    if server is None or server.action is not None or server.fence != seen.fence:
        return False
    block_devices.change(tx, {row.uuid: values})
    return True


# --- a volume that the guest still has ---
def give_back(engine: Engine, row: CleanupRow, look: Callable[[], ServerRow | None]) -> None:
    """Begin to detach a volume in status error: its attach failed, and the undo of that failed.

    The cleanup is repeated until the volume is gone, so this raises Unavailable after the action
    has begun. It returns, which ends the cleanup, if the server does not exist or does not have the
    volume, or if the volume has another status.

    Args:
        engine: The conductor's engine.
        row: The pending cleanup. Its target is the uuid of the volume's row.
        look: Reads the server. None: the server does not exist. Raises if an action has the server.

    Raises:
        Unavailable: The action has begun. The next try of the cleanup checks the result.
        Problem: The action is not permitted now. The cleanup is tried again.
    """
    server = look()
    if server is None:
        return
    system = RequestContext.of_ourselves(server.project_id)

    def begin(tx: Connection) -> bool:
        volume_row = volume_rows.by_uuid(tx, row.target)
        if volume_row is None or volume_row.status != BlockDeviceStatus.ERROR:
            return False
        volume_rows.detach(
            tx, DETACH, row.server_id, context=system, project_id=None, volume_id=row.place
        )
        return True

    if engine.store.write(begin):
        raise errors.Unavailable(
            f"The detach of volume {row.place} from server {row.server_id} has begun."
        )
