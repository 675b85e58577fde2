# SPDX-License-Identifier: Apache-2.0
"""Images that the conductor makes of servers: the steps that snapshot, backup and shelve share.

The image's id was chosen when the request was accepted, so each of these can be repeated: a record
that is there is the one we made, one that is gone was removed by us.

Also here: which backups go when a newer one is whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

from common import errors
from common.action_args import ImageArgs
from common.json_types import JsonMapping
from common.models import Result
from common.store.engine import Connection
from common.store.neighbours.cleanups import IMAGE
from common.store.servers import actions
from conductor.external_services import ImageApi
from conductor.saga import ActionData, Engine, Run, Step, Verb

T = TypeVar("T")


@dataclass(kw_only=True)
class ImageData(ActionData):
    """What making an image leaves."""

    size: int = 0  #: of the image, bytes


ImageRun = Run[ImageArgs, ImageData]


def service(engine: Engine) -> ImageApi:
    """The image service.

    Raises:
        Unavailable: this conductor knows of none.
    """
    if engine.images is None:
        raise errors.Unavailable("This conductor has no image service.")
    return engine.images


def try_all(call: Callable[[T], None], members: Iterable[T]) -> None:
    """Make the call for each, also after a refusal.

    Raises:
        Unavailable: at once. Problem: the first refusal, when all were tried.
    """
    refused: errors.Problem | None = None
    for member in members:
        try:
            call(member)
        except errors.Unavailable:
            raise
        except errors.Problem as problem:
            refused = refused or problem
    if refused is not None:
        raise refused


def rotate(engine: Engine, server: str, args: JsonMapping) -> None:
    """Keep the newest active backups of one type of a server and delete the others.

    The journal of actions orders the backups. The image service tells ages in whole seconds, so
    its order only counts for images that no action of the journal made.

    Args:
        args: owner, backup_type, and rotation (how many backups are kept).

    Raises:
        Problem: the first refusal, after all deletions were tried.
        Unavailable: the image service does not answer.
    """
    images = service(engine)
    backups = [
        str(image["id"])
        for image in images.find(
            {
                "owner": args["owner"],
                "image_type": "backup",
                "backup_type": args["backup_type"],
                "instance_uuid": server,
            }
        )
        if image.get("status") == "active"
    ]
    fences = engine.store.read(lambda tx: actions.backup_fences(tx, server))
    backups.sort(key=lambda image: fences.get(image, 0), reverse=True)
    try_all(images.delete, backups[int(args["rotation"]) :])


# --- steps ---
def _create_record(engine: Engine, run: ImageRun) -> None:
    """Make the image's record, owned by the server's project."""
    args, image = run.args, run.server.image or {}
    service(engine).create(
        {
            "id": args.image_id,
            "name": args.name,
            "owner": run.server.project_id,
            "disk_format": "qcow2",
            "container_format": "bare",
            "visibility": "private",
            "min_disk": 0 if args.snapshots else run.server.flavor["root_gb"],
            "min_ram": int(image.get("min_ram", 0)),
            **args.properties,
        }
    )


def _delete_image(engine: Engine, run: ImageRun) -> None:
    with run.cleanup_on_failure(IMAGE, run.args.image_id):
        service(engine).delete(run.args.image_id)


def _upload(engine: Engine, run: ImageRun) -> Verb:
    """Have the host copy the disk into the image."""
    return "snapshot", {"image_id": run.args.image_id}


def _uploaded(tx: Connection, run: ImageRun, result: Result) -> None:
    run.data.size = result.data.get("size", 0)
    run.set(progress=100)


RECORD = Step(
    "record",
    "before any byte is copied: the image service may refuse",
    call=_create_record,
    undo_call=_delete_image,
)
UPLOAD = Step(
    "upload",
    "the guest goes on meanwhile; the image is what one moment saw",
    command=_upload,
    on_result=_uploaded,
)
