# SPDX-License-Identifier: Apache-2.0
"""The end of a server's volumes: what its delete leaves at the block storage service, and what a
pending cleanup brings to what the records say now: at the service, or at a guest."""

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
    delete: bool = False  #: it goes with its server
    migrates_to: str | None = None  #: it was being copied into this one
    swapped: bool = False  #: and its data is there
    snapshot: str | None = None  #: which its host took, or merged, for the service
    snapshot_status: str = ""  #: that the service is to hear


@dataclass(kw_only=True)
class LeavingData(ActionData):
    """What deleting a server with volumes leaves."""

    volumes: list[LeftVolume] = field(default_factory=list)  #: that the server had


LeavingRun = Run[ActionArgs, LeavingData]


# --- delete ---
def leaving(run: LeavingRun) -> None:
    """All volumes of a server that is deleted are on their way out."""
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


def interrupted(run: LeavingRun, before: ActionRow) -> None:
    """The action that the delete has superseded may have been at work with one of them. One that
    was being detached is its user's: it does not go with the server."""
    for one in run.data.volumes:
        if one.volume_id != before.args.get("volume_id"):
            continue
        if before.workflow == "detach_volume":
            one.delete = False
        elif before.workflow == "swap_volume":
            one.migrates_to = from_wire(SwapVolumeArgs, before.args).new_volume_id
            one.swapped = bool(before.data.get("swapped"))
        elif status := volume_snapshots.status_without_guest(before):
            one.snapshot, one.snapshot_status = before.args["snapshot_id"], status


def had_volumes(run: LeavingRun) -> bool:
    """Had the server that is deleted any?"""
    return bool(run.data.volumes)


def release_all(engine: Engine, run: LeavingRun) -> None:
    """The attachments end, and the volumes that go with their server are deleted. What a silent
    host may have still is left to pending cleanups."""
    left = volumes.holding(engine, run.server.id)
    for one in run.data.volumes:
        target = one.attachment_id or one.volume_id
        with run.cleanup_on_failure(
            ATTACHMENT,
            target,
            one.volume_id,
            delete=one.delete,
            **_more(one),
        ):
            if left:
                raise errors.Conflict(volumes.held_by(left))
            if one.snapshot:
                volume_snapshots.end_without_guest(engine, one.snapshot, one.snapshot_status)
            if one.migrates_to:
                keeps = {str(one.attachment_id)}
                volume_swaps.end_swap(
                    engine, run.server.id, one.volume_id, one.migrates_to, keeps, one.swapped
                )
            for attachment in service(engine).attachments(run.server.id, one.volume_id):
                service(engine).detach(attachment.id)
            if one.delete:
                service(engine).delete(one.volume_id)


def _more(one: LeftVolume) -> JsonObject:
    """What else a pending cleanup of this volume has to do."""
    more: JsonObject = {}
    if one.migrates_to:
        more |= {"migrates_to": one.migrates_to, "swapped": one.swapped}
    if one.snapshot:
        more |= {"snapshot": one.snapshot, "snapshot_status": one.snapshot_status}
    return more


def forget_all(tx: Connection, engine: Engine, runs: Sequence[AnyRun]) -> None:
    """A server that is deleted has none."""
    for run in runs:
        run.remove_volumes(volumes.of(run))


# --- a pending cleanup ---
def reconcile(engine: Engine, row: CleanupRow, look: Callable[[], ServerRow | None]) -> None:
    """Of the volume that is the cleanup's place the server has the attachment that its row names,
    and no other; one that was to be deleted is, when no row of the server names it.

    Raises:
        Unavailable: a host may have it still, or the service does not answer. Conflict: a guest
        that runs may have it by an attachment that is not its server's. Other Problems: it refuses.
    """
    found = service(engine).attachments(row.server_id, row.place)
    server = look()
    if left := volumes.holding(engine, row.server_id):
        raise errors.Unavailable(volumes.held_by(left))
    rows = engine.store.read(
        lambda tx: block_devices.of_servers(tx, [server] if server is not None else []).get(
            row.server_id, []
        )
    )
    mine = [one for one in rows if one.volume_id == row.place]
    if snapshot := row.args.get("snapshot"):
        volume_snapshots.end_without_guest(engine, snapshot, row.args["snapshot_status"])
    if target := row.args.get("migrates_to"):
        keeps = {str(one.attachment_id) for one in mine}
        swapped = bool(row.args.get("swapped"))
        volume_swaps.end_swap(engine, row.server_id, row.place, target, keeps, swapped)
        found = service(engine).attachments(row.server_id, row.place)
    for one in found:
        known = next((each for each in mine if each.attachment_id == one.id), None)
        if known is None:
            service(engine).detach(one.id)
        elif one.connection and server is not None and server.host is None:
            _reserve_anew(engine, known, server, one)
        elif one.connection and one.status != COMPLETE and known.connection:
            service(engine).complete(one.id)
    if server is not None:
        for lost in mine:
            _bring_home(engine, lost, server, found)
    if row.args.get("delete") and not mine:
        service(engine).delete(row.place)


def _bring_home(
    engine: Engine, row: BlockDeviceRow, server: ServerRow, found: Sequence[Attachment]
) -> None:
    """The volume is where its idle server is."""
    if row.status not in (
        BlockDeviceStatus.RESERVED,
        BlockDeviceStatus.ATTACHING,
        BlockDeviceStatus.ATTACHED,
        BlockDeviceStatus.DETACHING,
    ):
        return
    if server.host and not (row.connection and row.status == BlockDeviceStatus.ATTACHED):
        _connect_again(engine, row, server, found)
    elif not server.host and (row.connection or row.status != BlockDeviceStatus.RESERVED):
        values = {"connection": None, "status": BlockDeviceStatus.RESERVED}
        engine.store.write(lambda tx: _change_idle(tx, row, server, values))


def _connect_again(
    engine: Engine, row: BlockDeviceRow, server: ServerRow, found: Sequence[Attachment]
) -> None:
    """Its connection was refused on the way back of an action: the host of the idle server may have
    it again, whose guest gets it when it starts."""
    connector = volumes.connector_of(engine, str(server.host))
    old = next((one for one in found if one.id == row.attachment_id), None)
    reserved = old if old is not None and not old.connection else None
    if reserved is None:
        if old is not None and _may_run(engine, server):
            raise errors.Conflict("Its guest may run with it: stop the server first.")
        reserved = _reserve_anew(engine, row, server, old)
    if reserved is None:
        return
    device, mode = row.device_name, volumes.mode_of(row)
    made = service(engine).connect(reserved.id, connector, device, mode)
    service(engine).complete(made.id)
    sealed = engine.vault.seal(made.connection)
    values = {"attachment_id": made.id, "connection": sealed, "status": BlockDeviceStatus.ATTACHED}
    engine.store.write(lambda tx: _change_idle(tx, row, server, values))


def _may_run(engine: Engine, server: ServerRow) -> bool:
    """Is its guest not off, on a host of which there is no proof that it is dead?"""
    return server.power_state != states.SHUTDOWN and not engine.store.read(
        lambda tx: services.are_dead(tx, str(server.host))
    )


def _reserve_anew(
    engine: Engine, row: BlockDeviceRow, server: ServerRow, old: Attachment | None
) -> Attachment | None:
    """In place of an attachment that is another host's, or none, one that is nobody's; None: an
    action has taken the server meanwhile. The service has no second one beside one that is not
    complete."""
    if old is not None and old.status != COMPLETE:
        service(engine).detach(old.id)
        old = None
    fresh = service(engine).attach(str(row.volume_id), row.server_id)
    values = {"attachment_id": fresh.id, "connection": None, "status": BlockDeviceStatus.RESERVED}
    taken = engine.store.write(lambda tx: _change_idle(tx, row, server, values))
    for spare in (old,) if taken else (fresh,):
        if spare is not None:
            service(engine).detach(spare.id)
    return fresh if taken else None


def _change_idle(tx: Connection, row: BlockDeviceRow, seen: ServerRow, values: JsonObject) -> bool:
    """Unless its server has changed since it was looked at."""
    server = actions.lock_servers(tx, [row.server_id]).get(row.server_id)
    if server is None or server.action is not None or server.fence != seen.fence:
        return False
    block_devices.change(tx, {row.uuid: values})
    return True


# --- a volume that a guest has still to give back ---
def give_back(engine: Engine, row: CleanupRow, look: Callable[[], ServerRow | None]) -> None:
    """A volume that could not be attached, nor be taken back: it is detached by an action of ours,
    again and again, until the guest does not have it.

    Raises:
        Unavailable: such an action was begun. Other Problems: the server's state does not let it.
    """
    server = look()
    if server is None:
        return
    system = RequestContext.of_ourselves(server.project_id)

    def begin(tx: Connection) -> bool:
        found = volume_rows.by_uuid(tx, row.target)
        if found is None or found.status != BlockDeviceStatus.ERROR:
            return False
        volume_rows.detach(
            tx, DETACH, row.server_id, context=system, project_id=None, volume_id=row.place
        )
        return True

    if engine.store.write(begin):
        raise errors.Unavailable("Its host is asked to let go of it.")
