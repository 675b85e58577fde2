# SPDX-License-Identifier: Apache-2.0
"""Snapshot and backup: the server's disk becomes an image, while the server goes on.

A backup is a snapshot that counts: when it is whole, the oldest of its kind beyond the rotation go.
One that the image service keeps, because it is protected say, costs the new one nothing: it is
tried again later, and with each backup.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from common.action_args import BackupArgs, ImageArgs
from common.store.engine import Connection
from common.store.neighbours import cleanups
from conductor import images
from conductor.images import ImageData
from conductor.saga import Engine, Run, Step, Workflow

BackupRun = Run[BackupArgs, ImageData]


def _rotate(engine: Engine, run: BackupRun) -> None:
    args = {
        "owner": run.server.project_id,
        "newest": run.args.image_id,
        "backup_type": run.args.backup_type,
        "rotation": run.args.rotation,
    }
    with run.cleanup_on_failure(cleanups.BACKUPS, run.server.id, run.args.backup_type, **args):
        images.rotate(images.service(engine), run.server.id, args)


def _rotated(tx: Connection, engine: Engine, runs: Sequence[BackupRun]) -> None:
    """The rotation that counts is the last that was asked for."""
    for run in runs:
        cleanups.forget(tx, cleanups.BACKUPS, run.server.id, run.args.backup_type)


SNAPSHOT = Workflow(
    "snapshot", args=ImageArgs, data=ImageData, steps=(images.RECORD, images.UPLOAD)
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
