# SPDX-License-Identifier: Apache-2.0
"""The end of a server's volumes: what its delete leaves at the block storage service, and what a
pending cleanup brings to what the records say now."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from common import errors
from common.action_args import ActionArgs, SwapVolumeArgs
from common.clients.volumes import Attachment
from common.store.engine import Connection
from common.store.neighbours.cleanups import ATTACHMENT
from common.store.rows import ActionRow, BlockDeviceRow, CleanupRow, ServerRow
from common.store.servers import actions, block_devices
from common.store.servers.volumes import DETACHING, RESERVED
from common.wire import from_wire
from conductor import volume_swaps, volumes
from conductor.saga import ActionData, AnyRun, Engine, Run
from conductor.volumes import COMPLETE


@dataclass(kw_only=True)
class LeftVolume:
    """A volume that a deleted server had."""

    volume_id: str
    attachment_id: str | None = None
    delete: bool = False  #: it goes with its server
    migrates_to: str | None = None  #: it was being copied into this one
    swapped: bool = False  #: and its data is there


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
        run.set_volume(row, status=DETACHING)


def leaving_swap(run: LeavingRun, before: ActionRow) -> None:
    """The action that the delete has superseded was copying one of them into another one."""
    swap = from_wire(SwapVolumeArgs, before.args)
    for one in run.data.volumes:
        if one.volume_id == swap.volume_id:
            one.migrates_to = swap.new_volume_id
            one.swapped = bool(before.data.get("swapped"))


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
            **{"migrates_to": one.migrates_to, "swapped": one.swapped} if one.migrates_to else {},
        ):
            if left:
                raise errors.Conflict(volumes.held_by(left))
            if one.migrates_to:
                keeps = {str(one.attachment_id)}
                volume_swaps.end_swap(
                    engine, run.server.id, one.volume_id, one.migrates_to, keeps, one.swapped
                )
            for attachment in volumes.service(engine).attachments(run.server.id, one.volume_id):
                volumes.service(engine).detach(attachment.id)
            if one.delete:
                volumes.service(engine).delete(one.volume_id)


def forget_all(tx: Connection, engine: Engine, runs: Sequence[AnyRun]) -> None:
    """A server that is deleted has none."""
    for run in runs:
        run.remove_volumes(volumes.of(run))


# --- a pending cleanup ---
def reconcile(engine: Engine, row: CleanupRow, look: Callable[[], ServerRow | None]) -> None:
    """Of the volume that is the cleanup's place the server has the attachment that its row names,
    and no other; one that was to be deleted is, when no row of the server names it.

    Raises:
        Unavailable: a host may have it still, or the service does not answer. Other Problems: it
        refuses.
    """
    found = volumes.service(engine).attachments(row.server_id, row.place)
    server = look()
    if left := volumes.holding(engine, row.server_id):
        raise errors.Unavailable(volumes.held_by(left))
    rows = engine.store.read(
        lambda tx: block_devices.of_servers(tx, [server] if server is not None else []).get(
            row.server_id, []
        )
    )
    mine = [one for one in rows if one.volume_id == row.place]
    if target := row.args.get("migrates_to"):
        keeps = {str(one.attachment_id) for one in mine}
        volume_swaps.end_swap(
            engine, row.server_id, row.place, target, keeps, bool(row.args.get("swapped"))
        )
        found = volumes.service(engine).attachments(row.server_id, row.place)
    for one in found:
        known = next((each for each in mine if each.attachment_id == one.id), None)
        if known is None:
            volumes.service(engine).detach(one.id)
        elif one.connection and server is not None and server.host is None:
            _reserve_anew(engine, known, one)
        elif one.connection and one.status != COMPLETE:
            volumes.service(engine).complete(one.id)
    if row.args.get("delete") and not mine:
        volumes.service(engine).delete(row.place)


def _reserve_anew(engine: Engine, row: BlockDeviceRow, old: Attachment) -> None:
    """The server has left its host, and its attachment is of that host still."""
    fresh = volumes.service(engine).attach(str(row.volume_id), row.server_id)

    def exchange_it(tx: Connection) -> bool:
        server = actions.lock_servers(tx, [row.server_id]).get(row.server_id)
        if server is None or server.action is not None or server.host is not None:
            return False
        values = {"attachment_id": fresh.id, "connection": None, "status": RESERVED}
        block_devices.change(tx, {row.uuid: values})
        return True

    taken = engine.store.write(exchange_it)
    volumes.service(engine).detach(old.id if taken else fresh.id)
