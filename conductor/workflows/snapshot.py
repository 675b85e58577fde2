# SPDX-License-Identifier: Apache-2.0
"""Snapshot and backup: the server's disk becomes an image, while the server goes on.

A backup is a snapshot that counts: when it is whole, the oldest of its kind beyond the rotation go.
"""
from __future__ import annotations

from conductor import images
from conductor.saga import Engine, Run, Step, Workflow


def _rotate(engine: Engine, run: Run) -> None:
    assert engine.images is not None
    args = run.action.args
    kept = int(args["rotation"])
    found = engine.images.find({"owner": run.server.project_id, "image_type": "backup",
                                "backup_type": args["backup_type"], "instance_uuid": run.server.id})
    for image in found[kept:]:
        engine.images.delete(str(image["id"]))


SNAPSHOT = Workflow("snapshot", steps=(images.RECORD, images.UPLOAD))

BACKUP = Workflow("backup", steps=(
    images.RECORD, images.UPLOAD,
    Step("rotate", "last: an old backup goes only when the new one is whole", outside=_rotate)))
