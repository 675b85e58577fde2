# SPDX-License-Identifier: Apache-2.0
"""Snapshot and backup: the server's disk becomes an image, while the server goes on.

The image of a server that boots from a volume has no bytes. It names snapshots of its volumes,
which the API has made with the user's token: the action makes the image, or deletes them.

A backup is a snapshot that counts: when it is whole, the oldest of its kind beyond the rotation go.
One that the image service keeps, because it is protected say, costs the new one nothing: it is
tried again later, and with each backup.
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


def _rotated(tx: Connection, engine: Engine, runs: Sequence[BackupRun]) -> None:
    """The rotation that counts is the last that was asked for."""
    for run in runs:
        cleanups.forget(tx, cleanups.BACKUPS, run.server.id, run.args.backup_type)


def _has_snapshots(run: ImageRun) -> bool:
    """Is the image one of snapshots?"""
    return bool(run.args.snapshots)


def _has_disk(run: ImageRun) -> bool:
    return not run.args.snapshots


def _delete_snapshots(engine: Engine, run: ImageRun) -> None:
    volume_snapshots.delete(engine, run, run.args.snapshots)


def _leave_empty(engine: Engine, run: ImageRun) -> None:
    images.service(engine).leave_empty(run.args.image_id)


def _whole(tx: Connection, engine: Engine, runs: Sequence[ImageRun]) -> None:
    for run in runs:
        run.set(progress=100)


SNAPSHOT = Workflow(
    "snapshot",
    args=ImageArgs,
    data=ImageData,
    steps=(
        Step(
            "delete_snapshots",
            "only on the way back: without an image nobody looks for them",
            undo_call=_delete_snapshots,
            lane=Lane.VOLUME,
            condition=_has_snapshots,
        ),
        images.RECORD,
        replace(images.UPLOAD, condition=_has_disk),
        Step(
            "leave_empty",
            "the image of snapshots is what its properties say",
            call=_leave_empty,
            apply=_whole,
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
            "last: an old backup goes only when the new one is whole",
            call=_rotate,
            apply=_rotated,
        ),
    ),
)
