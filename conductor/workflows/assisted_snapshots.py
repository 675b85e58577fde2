# SPDX-License-Identifier: Apache-2.0
"""Snapshots of file volumes that the block storage service delegates to the server's host.

The host takes a snapshot, or merges a deleted snapshot, because only the host can change the files
of an attached volume.

Create: the service has created an empty file on top of the volume's file and waits for a report.
The guest switches to the new file, the conductor stores the new file in the connection, and then
the conductor reports to the service. A failure is reported as an error of the snapshot, and the
server keeps the old file. The action continues until the service itself names the new file.
Otherwise a move would get a connection with the old file from the service.

A delete of the server reports for the action that it supersedes (``volume_cleanups``).
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
    """Data that the steps of a snapshot's creation leave for later steps."""

    #: True once the conductor has reported the snapshot to the service.
    notified: bool = False
    #: True once the service has completed the snapshot.
    finished: bool = False
    #: Time of the first check whether the service has completed the snapshot, in µs.
    since: int | None = None


CreateRun = Run[VolumeSnapshotArgs, SnapshotData]
DeleteRun = Run[MergeSnapshotArgs, ActionData]


def _find_row(run: Run[VolumeActionArgs, ActionData]) -> BlockDeviceRow:
    """Return the row of the action's volume, with the run's changes that are not stored yet."""
    return next(row for row in volumes.of(run) if row.uuid == run.args.block_device)


def _check_snapshot(engine: Engine, run: CreateRun | DeleteRun, status: str) -> None:
    """Fail the run unless the service shows this status and the run's volume for the snapshot.

    Raises:
        NotFound: The snapshot does not exist.
        Unavailable: The service does not answer.
    """
    snapshot = volumes.service(engine).snapshot(run.args.snapshot_id)
    if snapshot.status != status or snapshot.volume_id != run.args.volume_id:
        run.fail(
            f"Snapshot {run.args.snapshot_id} must have the status {status} and belong to volume "
            f"{run.args.volume_id}, but the block storage service shows the status {snapshot.status} and volume "
            f"{snapshot.volume_id}."
        )


def _report_failure(engine: Engine, run: CreateRun | DeleteRun, status: str) -> None:
    """Report the status of the snapshot to the service, as ``volume_snapshots.report`` does.

    After ``MAX_CLEANING_TRIES`` tries without an answer the report is given up without an error.

    Raises:
        Unavailable: The service does not answer, and tries are left. The runner repeats the step.
        Problem: The service refuses the report for another reason.
    """
    try:
        volume_snapshots.report(engine, run.args.snapshot_id, status)
    except errors.Unavailable:
        if run.action.sends < MAX_CLEANING_TRIES:
            raise


# --- create ---
def _check_new_snapshot(engine: Engine, run: CreateRun) -> None:
    _check_snapshot(engine, run, CREATING)


def _report_error(engine: Engine, run: CreateRun) -> None:
    _report_failure(engine, run, ERROR)


def set_connection_file(connection: JsonObject, name: str) -> JsonObject:
    """Return a copy of a volume's connection that names this qcow2 file in the volume's folder."""
    place = {"name": name, "format": QCOW2}
    if isinstance(data := connection.get("data"), dict):
        return {**connection, "data": {**data, **place}}
    return {**connection, **place}


def read_connection_file(connection: JsonObject) -> tuple[object, object]:
    """Return the name and the format of the file in a connection. A missing value is None."""
    inner_data = connection.get("data")
    data = inner_data if isinstance(inner_data, dict) else connection
    return data.get("name"), data.get("format")


def _seal_connection(engine: Engine, run: CreateRun) -> str:
    """Return the volume's stored connection, changed to name the new file and encrypted again."""
    old_connection = engine.vault.open(str(_find_row(run).connection))
    return engine.vault.seal(set_connection_file(old_connection, run.args.new_file))


def _snapshot_command(engine: Engine, run: CreateRun) -> SnapshotVolume:
    return SnapshotVolume(
        volume=volumes.describe(engine, _find_row(run), _seal_connection(engine, run))
    )


def _record(tx: Connection, engine: Engine, runs: Sequence[CreateRun]) -> None:
    for run in runs:
        run.set_volume(_find_row(run), connection=_seal_connection(engine, run))


def _report_taken(engine: Engine, run: CreateRun) -> None:
    volumes.service(engine).update_snapshot_status(run.args.snapshot_id, CREATING)
    run.data.notified = True


def _check_finished(engine: Engine, run: CreateRun) -> None:
    """Put the service's connection into the volume's row once the service has ended the creation.

    While the service still creates the snapshot, do nothing. A report that the service refused also
    counts as the end of the creation.

    Raises:
        Conflict: The server's attachment is missing at the service or does not name the new file.
        NotFound: The snapshot does not exist.
        Unavailable: The service does not answer.
    """
    row, file = _find_row(run), run.args.new_file
    snapshot = volumes.service(engine).snapshot(run.args.snapshot_id)
    if snapshot.status == CREATING and run.data.notified:
        return
    run.data.finished = True
    attachments = volumes.service(engine).attachments(run.server.id, row.volume_id)
    attachment = next((each for each in attachments if each.id == row.attachment_id), None)
    if attachment is None or read_connection_file(attachment.connection) != (file, QCOW2):
        raise errors.Conflict(
            f"Server {run.server.id} writes volume {row.volume_id} to the file {file}, but the block storage "
            "service names another file. A move of the server would lose this data. Check the volume at the "
            "block storage service before you move the server."
        )
    before = engine.vault.open(str(row.connection))
    kept_fields = {name: before[name] for name in (NAME_ID,) if name in before}
    run.set_volume(row, connection=engine.vault.seal({**attachment.connection, **kept_fields}))


def _await_service(tx: Connection, engine: Engine, runs: Sequence[CreateRun]) -> None:
    """Poll again with a growing delay until the service ends the creation or refuses a request.

    After ``volume_timeout`` the polls end too, and the row keeps the connection of ``note_file``.
    """
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
            "First, because the service removes the new file after giving up. The undo reports "
            "the failure.",
            call=_check_new_snapshot,
            undo_call=_report_error,
            lane=Lane.VOLUME,
        ),
        Step(
            "snapshot",
            "The guest switches to the new file. A dead host counts as done, because no guest "
            "writes.",
            command=_snapshot_command,
            done_when_host_dead=True,
            pivot=True,
        ),
        Step(
            "note_file",
            "Before the report, so that the server has the new file wherever it starts next.",
            apply=_record,
        ),
        Step(
            "report_taken",
            "From here on the service completes the snapshot.",
            call=_report_taken,
            lane=Lane.VOLUME,
        ),
        Step(
            "await_service",
            "Last, because a later move must get the new file from the service.",
            call=_check_finished,
            apply=_await_service,
            lane=Lane.VOLUME,
        ),
    ),
)


# --- delete ---
def _check_old_snapshot(engine: Engine, run: DeleteRun) -> None:
    _check_snapshot(engine, run, DELETING)


def _report_error_deleting(engine: Engine, run: DeleteRun) -> None:
    _report_failure(engine, run, ERROR_DELETING)


def _merge_command(engine: Engine, run: DeleteRun) -> MergeVolume:
    volume = volumes.describe(engine, _find_row(run))
    return MergeVolume(volume=volume, file=run.args.file, into=run.args.into)


def _report_merged(engine: Engine, run: DeleteRun) -> None:
    volumes.service(engine).update_snapshot_status(run.args.snapshot_id, DELETING)


def _clear_progress(tx: Connection, engine: Engine, runs: Sequence[DeleteRun]) -> None:
    for run in runs:
        run.set(progress=0)


VOLUME_SNAPSHOT_DELETE = Workflow(
    "volume_snapshot_delete",
    args=MergeSnapshotArgs,
    data=ActionData,
    steps=(
        Step(
            "look_at_old",
            "First, because a snapshot that is no longer being deleted must be kept. The undo "
            "reports the failure.",
            call=_check_old_snapshot,
            undo_call=_report_error_deleting,
            lane=Lane.VOLUME,
        ),
        Step(
            "merge",
            "The host merges the files, and the guest keeps its current file.",
            command=_merge_command,
            pivot=True,
        ),
        Step(
            "report_merged",
            "Last, because the service then deletes the merged file.",
            call=_report_merged,
            apply=_clear_progress,
            lane=Lane.VOLUME,
        ),
    ),
)
