# SPDX-License-Identifier: Apache-2.0
"""Images that the conductor makes of servers: the steps that snapshot, backup and shelve share.

The image's id was chosen when the request was accepted, so each of these can be repeated: a record that is there is
the one we made, one that is gone was removed by us.
"""
from __future__ import annotations

from typing import Any

from common.models import Result
from common.store.engine import Connection
from conductor.saga import Engine, Run, Step


def image_id(run: Run) -> str:
    """The image of this action."""
    return str(run.action.args["image_id"])


def record(engine: Engine, run: Run) -> None:
    """Make the image's record, owned by the server's project."""
    assert engine.images is not None
    args, image = run.action.args, run.server.image or {}
    engine.images.create({
        "id": image_id(run), "name": args["name"], "owner": run.server.project_id, "disk_format": "qcow2",
        "container_format": "bare", "visibility": "private", "min_disk": run.server.flavor["root_gb"],
        "min_ram": int(image.get("min_ram", 0)), **args.get("properties", {})})


def discard(engine: Engine, run: Run) -> None:
    """Remove the image."""
    assert engine.images is not None
    engine.images.delete(image_id(run))


def upload(engine: Engine, run: Run) -> tuple[str, dict[str, Any]]:
    """Have the host copy the disk into the image."""
    return "snapshot", {"image_id": image_id(run)}


def uploaded(tx: Connection, run: Run, result: Result) -> None:
    """The image is whole."""
    run.data["size"] = result.data.get("size", 0)
    run.set(progress=100)


RECORD = Step("record", "before any byte is copied: the image service may refuse", outside=record, undo_outside=discard)
UPLOAD = Step("upload", "the guest goes on meanwhile; the image is what one moment saw", command=upload, done=uploaded)
