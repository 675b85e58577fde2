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
    found = engine.images.find({"owner": run.server.project_id, "image_type": "backup",
                                "backup_type": args["backup_type"], "instance_uuid": run.server.id})
    # The image service tells ages in seconds: the new one may not stand first.
    older = [str(image["id"]) for image in found if image["id"] != images.image_id(run)]
    for image in [images.image_id(run), *older][int(args["rotation"]):]:
        engine.images.delete(image)


SNAPSHOT = Workflow("snapshot", steps=(images.RECORD, images.UPLOAD))

BACKUP = Workflow("backup", steps=(
    images.RECORD, images.UPLOAD,
    Step("rotate", "last: an old backup goes only when the new one is whole", outside=_rotate)))
