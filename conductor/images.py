# SPDX-License-Identifier: Apache-2.0
"""Images that the conductor makes of servers: the steps that snapshot, backup and shelve share.

The image's id was chosen when the request was accepted, so each of these can be repeated: a record that is there is
the one we made, one that is gone was removed by us.

Also here: which backups go when a newer one is whole.
"""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from common import errors
from common.models import Result
from common.store.cleanups import IMAGE
from common.store.engine import Connection
from conductor.calls import try_all
from conductor.saga import Engine, Images, Run, Step


def service(engine: Engine) -> Images:
    """The image service.

    Raises:
        Unavailable: this conductor knows of none.
    """
    if engine.images is None:
        raise errors.Unavailable("This conductor has no image service.")
    return engine.images


def image_id(run: Run) -> str:
    """The image of this action."""
    return str(run.action.args["image_id"])


def record(engine: Engine, run: Run) -> None:
    """Make the image's record, owned by the server's project."""
    args, image = run.action.args, run.server.image or {}
    service(engine).create({
        "id": image_id(run), "name": args["name"], "owner": run.server.project_id, "disk_format": "qcow2",
        "container_format": "bare", "visibility": "private", "min_disk": run.server.flavor["root_gb"],
        "min_ram": int(image.get("min_ram", 0)), **args.get("properties", {})})


def discard(engine: Engine, run: Run) -> None:
    """Remove the image."""
    with run.cleaning(IMAGE, image_id(run)):
        service(engine).delete(image_id(run))


def rotate(images: Images, server: str, args: Mapping[str, Any]) -> None:
    """Of a server's whole backups of one type the newest stay, as many as the rotation says; all others are tried.

    ``args``: owner, backup_type, rotation, and newest: the image that counts as the newest whatever its age, because
    the image service tells ages in seconds.

    Raises:
        Problem: the first refusal. Unavailable: the image service does not answer.
    """
    found = [str(image["id"]) for image in images.find({
        "owner": args["owner"], "image_type": "backup", "backup_type": args["backup_type"], "instance_uuid": server})
        if image.get("status") == "active"]
    newest = [args["newest"]] if args["newest"] in found else []
    try_all(images.delete, [*newest, *(image for image in found if image not in newest)][int(args["rotation"]):])


def upload(engine: Engine, run: Run) -> tuple[str, dict[str, Any]]:
    """Have the host copy the disk into the image."""
    return "snapshot", {"image_id": image_id(run)}


def uploaded(tx: Connection, run: Run, result: Result) -> None:
    """The image is whole."""
    run.data["size"] = result.data.get("size", 0)
    run.set(progress=100)


RECORD = Step("record", "before any byte is copied: the image service may refuse", outside=record, undo_outside=discard)
UPLOAD = Step("upload", "the guest goes on meanwhile; the image is what one moment saw", command=upload, done=uploaded)
