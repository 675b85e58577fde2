# SPDX-License-Identifier: Apache-2.0
"""A host takes a snapshot of a volume that is a file, or merges one that is deleted, because the
block storage service asks for it while a server has the volume.

The service has made the new file, empty and upon the old one, and waits for a report. The host goes
over to it; that is written down before the service hears of it. What fails is reported as the
snapshot's error, and the server has its volume as before. The action holds the server until the
service says that the volume is in the new file: a move that asks it earlier would get the old one.
A delete of the server reports in place of the action that it ends (``volume_cleanups``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from common.clients.volumes import CREATING, DELETING, ERROR, ERROR_DELETING
from common.domain import errors
from common.domain.clock import SECOND
from common.domain.json_types import JsonObject
from common.domain.verbs import MergeVolume, SnapshotVolume
from common.store.engine import Connection
from common.store.rows import BlockDeviceRow
from conductor.engine.action_args import MergeSnapshotArgs, VolumeActionArgs, VolumeSnapshotArgs
from conductor.engine.action_data import ActionData
from conductor.engine.engine import Engine, Lane
from conductor.engine.run import MAX_CLEANING_TRIES, Run
from conductor.engine.step import Step
from conductor.engine.workflow import Workflow
from conductor.steps import volume_snapshots, volumes
from conductor.steps.volumes import FIRST_POLL_MICROS, MAX_POLL_MICROS, NAME_ID

QCOW2 = "qcow2"


@dataclass(kw_only=True)
class SnapshotData(ActionData):
    """What the steps leave."""

    notified: bool = False  #: the service has heard that the host is done
    finished: bool = False  #: the service is done with the snapshot
    since: int | None = None  #: when the action first looked whether it is, µs


CreateRun = Run[VolumeSnapshotArgs, SnapshotData]
DeleteRun = Run[MergeSnapshotArgs, ActionData]


def _row(run: Run[VolumeActionArgs, ActionData]) -> BlockDeviceRow:
    """The volume that the action is about."""
    return next(row for row in volumes.of(run) if row.uuid == run.args.block_device)


def _look(engine: Engine, run: CreateRun | DeleteRun, status: str) -> None:
    """What the service waits for no more is not begun."""
    found = volumes.service(engine).snapshot(run.args.snapshot_id)
    if found.status != status or found.volume_id != run.args.volume_id:
        run.fail(
            f"Snapshot {run.args.snapshot_id} of volume {found.volume_id} is {found.status} at the block "
            f"storage service, so nothing is done for volume {run.args.volume_id}."
        )


def _report_failure(engine: Engine, run: CreateRun | DeleteRun, status: str) -> None:
    """A service that is silent for long finds out by itself."""
    try:
        volume_snapshots.report(engine, run.args.snapshot_id, status)
    except errors.Unavailable:
        if run.action.sends < MAX_CLEANING_TRIES:
            raise


# --- create ---
def _look_at_new(engine: Engine, run: CreateRun) -> None:
    _look(engine, run, CREATING)


def _report_error(engine: Engine, run: CreateRun) -> None:
    _report_failure(engine, run, ERROR)


def in_file(connection: JsonObject, name: str) -> JsonObject:
    """The connection of a volume that is in this file of its folder."""
    place = {"name": name, "format": QCOW2}
    if isinstance(data := connection.get("data"), dict):
        return {**connection, "data": {**data, **place}}
    return {**connection, **place}


def file_of(connection: JsonObject) -> tuple[object, object]:
    """Name and format of the file that a connection leads to."""
    found = connection.get("data")
    data = found if isinstance(found, dict) else connection
    return data.get("name"), data.get("format")


def _sealed(engine: Engine, run: CreateRun) -> str:
    """The volume's connection as it is to be."""
    known = engine.vault.open(str(_row(run).connection))
    return engine.vault.seal(in_file(known, run.args.new_file))


def _snapshot(engine: Engine, run: CreateRun) -> SnapshotVolume:
    return SnapshotVolume(volume=volumes.describe(engine, _row(run), _sealed(engine, run)))


def _record(tx: Connection, engine: Engine, runs: Sequence[CreateRun]) -> None:
    for run in runs:
        run.set_volume(_row(run), connection=_sealed(engine, run))


def _report_taken(engine: Engine, run: CreateRun) -> None:
    volumes.service(engine).update_snapshot_status(run.args.snapshot_id, CREATING)
    run.data.notified = True


def _look_whether_finished(engine: Engine, run: CreateRun) -> None:
    """Take over what the service says of the volume, when it says that it is in the new file."""
    row, file = _row(run), run.args.new_file
    found = volumes.service(engine).snapshot(run.args.snapshot_id)
    if found.status == CREATING and run.data.notified:
        return
    run.data.finished = True
    held = volumes.service(engine).attachments(run.server.id, row.volume_id)
    made = next((one for one in held if one.id == row.attachment_id), None)
    if made is None or file_of(made.connection) != (file, QCOW2):
        raise errors.Conflict(
            f"The server has volume {row.volume_id} in its file {file}, and the block storage service does "
            "not say so: what is written there is lost when it moves. See the service."
        )
    before = engine.vault.open(str(row.connection))
    kept = {name: before[name] for name in (NAME_ID,) if name in before}
    run.set_volume(row, connection=engine.vault.seal({**made.connection, **kept}))


def _await_service(tx: Connection, engine: Engine, runs: Sequence[CreateRun]) -> None:
    """Look again until it is done, or it has taken too long."""
    for run in runs:
        if run.data.since is None:
            run.data.since = run.locked_at
        late = run.locked_at - run.data.since >= engine.volume_timeout * SECOND
        if not (run.data.finished or run.ignored_refusal or late):
            run.retry_in(min(FIRST_POLL_MICROS * 2 ** min(run.data.polls, 8), MAX_POLL_MICROS))
            run.data.polls += 1


VOLUME_SNAPSHOT_CREATE = Workflow(
    "volume_snapshot_create",
    args=VolumeSnapshotArgs,
    data=SnapshotData,
    steps=(
        Step(
            "look_at_new",
            "first: a service that has given up takes the new file away; on the way back it hears of it",
            call=_look_at_new,
            undo_call=_report_error,
            lane=Lane.VOLUME,
        ),
        Step(
            "snapshot",
            "the guest goes on in the new file; of a host whose guests are dead either is as good",
            command=_snapshot,
            done_when_host_dead=True,
            pivot=True,
        ),
        Step(
            "note_file",
            "before the service hears of it: wherever the server comes next, it has the new file",
            apply=_record,
        ),
        Step(
            "report_taken",
            "from here on the service goes on",
            call=_report_taken,
            lane=Lane.VOLUME,
        ),
        Step(
            "await_service",
            "last: it says where the volume is, and whoever asks it afterwards gets the new file",
            call=_look_whether_finished,
            apply=_await_service,
            lane=Lane.VOLUME,
        ),
    ),
)


# --- delete ---
def _look_at_old(engine: Engine, run: DeleteRun) -> None:
    _look(engine, run, DELETING)


def _report_error_deleting(engine: Engine, run: DeleteRun) -> None:
    _report_failure(engine, run, ERROR_DELETING)


def _merge(engine: Engine, run: DeleteRun) -> MergeVolume:
    volume = volumes.describe(engine, _row(run))
    return MergeVolume(volume=volume, file=run.args.file, into=run.args.into)


def _report_merged(engine: Engine, run: DeleteRun) -> None:
    volumes.service(engine).update_snapshot_status(run.args.snapshot_id, DELETING)


def _shown_as_before(tx: Connection, engine: Engine, runs: Sequence[DeleteRun]) -> None:
    for run in runs:
        run.set(progress=0)


VOLUME_SNAPSHOT_DELETE = Workflow(
    "volume_snapshot_delete",
    args=MergeSnapshotArgs,
    data=ActionData,
    steps=(
        Step(
            "look_at_old",
            "first: what the service does not delete any more is kept; on the way back it hears of it",
            call=_look_at_old,
            undo_call=_report_error_deleting,
            lane=Lane.VOLUME,
        ),
        Step(
            "merge",
            "the host merges the files; the guest goes on in the one that it has",
            command=_merge,
            pivot=True,
        ),
        Step(
            "report_merged",
            "last: the service removes the file that nobody needs any more",
            call=_report_merged,
            apply=_shown_as_before,
            lane=Lane.VOLUME,
        ),
    ),
)
