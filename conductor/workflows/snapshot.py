# SPDX-License-Identifier: Apache-2.0
"""Snapshot and backup: the server's disk becomes an image, while the server goes on.

A backup is a snapshot that counts: when it is whole, the oldest of its kind beyond the rotation go. One that the image
service keeps, because it is protected say, costs the new one nothing: it is tried again later, and with each backup.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from common.store import cleanups
from common.store.engine import Connection
from conductor import images
from conductor.saga import Engine, Run, Step, Workflow


def _rotate(engine: Engine, run: Run) -> None:
    args = {"owner": run.server.project_id, "newest": images.image_id(run),
            **{name: run.action.args[name] for name in ("backup_type", "rotation")}}
    with run.cleaning(cleanups.BACKUPS, run.server.id, args["backup_type"], **args):
        images.rotate(images.service(engine), run.server.id, args)


def _rotated(tx: Connection, engine: Engine, runs: Sequence[Run]) -> None:
    """The rotation that counts is the last that was asked for."""
    for run in runs:
        cleanups.forget(tx, cleanups.BACKUPS, run.server.id, run.action.args["backup_type"])


SNAPSHOT = Workflow("snapshot", steps=(images.RECORD, images.UPLOAD))

BACKUP = Workflow("backup", steps=(
    images.RECORD, replace(images.UPLOAD, pivot=True),
    Step("rotate", "last: an old backup goes only when the new one is whole", outside=_rotate, apply=_rotated)))
