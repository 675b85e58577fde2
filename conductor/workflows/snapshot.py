# SPDX-License-Identifier: Apache-2.0
"""Snapshot and backup: create an image of the server's disk while the server runs.

The image of a server that boots from a volume contains no data. It names snapshots of the server's
volumes, which the API has created with the user's token. The action completes the image, or deletes
the snapshots.

A backup is a snapshot with a rotation: after a complete backup, the oldest backups of the same type
beyond the rotation are deleted. An image that cannot be deleted, for example a protected one, does
not fail the backup. The deletion is tried again later, and with the next backup.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from common.store import cleanups
from common.store.engine import Connection
from conductor.engine.action_args import BackupArgs, ImageArgs
from conductor.engine.engine import Engine, Lane
from conductor.engine.run import Run
from conductor.engine.step import Step
from conductor.engine.workflow import Workflow
from conductor.steps import images, volume_snapshots
from conductor.steps.images import ImageData, ImageRun

BackupRun = Run[BackupArgs, ImageData]


def _rotate(engine: Engine, run: BackupRun) -> None:
    args = {
        "owner": run.server.project_id,
        "backup_type": run.args.backup_type,
        "rotation": run.args.rotation,
    }
    with run.cleanup_on_failure(cleanups.BACKUPS, run.server.id, run.args.backup_type, **args):
        images.rotate(engine, run.server.id, args)


def _remove_pending_rotations(tx: Connection, engine: Engine, runs: Sequence[BackupRun]) -> None:
    """Remove each server's pending rotations of its backup type, which this rotation replaces."""
    for run in runs:
        cleanups.forget(tx, cleanups.BACKUPS, run.server.id, run.args.backup_type)


def _has_snapshots(run: ImageRun) -> bool:
    """Return True if the image names volume snapshots."""
    return bool(run.args.snapshots)


def _has_disk(run: ImageRun) -> bool:
    return not run.args.snapshots


def _delete_snapshots(engine: Engine, run: ImageRun) -> None:
    volume_snapshots.delete(engine, run, run.args.snapshots)


def _leave_empty(engine: Engine, run: ImageRun) -> None:
    images.service(engine).leave_empty(run.args.image_id)


def _record_complete(tx: Connection, engine: Engine, runs: Sequence[ImageRun]) -> None:
    for run in runs:
        run.set(progress=100)


SNAPSHOT = Workflow(
    "snapshot",
    args=ImageArgs,
    data=ImageData,
    steps=(
        Step(
            "delete_snapshots",
            "Undo only: without the image, the snapshots would never be deleted.",
            undo_call=_delete_snapshots,
            lane=Lane.VOLUME,
            condition=_has_snapshots,
        ),
        images.RECORD,
        replace(images.UPLOAD, condition=_has_disk),
        Step(
            "leave_empty",
            "An image of snapshots contains only properties.",
            call=_leave_empty,
            apply=_record_complete,
            condition=_has_snapshots,
        ),
    ),
)

BACKUP = Workflow(
    "backup",
    args=BackupArgs,
    data=ImageData,
    steps=(
        images.RECORD,
        replace(images.UPLOAD, pivot=True),
        Step(
            "rotate",
            "Last, because old backups are deleted only when the new one is complete.",
            call=_rotate,
            apply=_remove_pending_rotations,
        ),
    ),
)
