# SPDX-License-Identifier: Apache-2.0
"""Images of servers: the steps that snapshot, backup and shelve share, and checks of images.

The API chooses the image's id before it accepts the request, so each step can be repeated: an
existing record was created by an earlier try, and a missing one was deleted by Kilonova. The module
also rotates backups, and checks whether an image can still be used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

from common.clients import image_checks
from common.clients.image import ACTIVE, Image
from common.domain import errors
from common.domain.json_types import JsonMapping, JsonObject
from common.domain.models import Flavor, Result
from common.domain.verbs import Snapshot, StoredImage
from common.domain.wire import from_wire
from common.store.cleanups import IMAGE
from common.store.engine import Connection
from common.store.servers import actions
from conductor.engine.action_args import ImageArgs
from conductor.engine.action_data import ActionData
from conductor.engine.engine import Engine
from conductor.engine.external_services import ImageApi
from conductor.engine.run import AnyRun, Run
from conductor.engine.step import Step

T = TypeVar("T")


@dataclass(kw_only=True)
class ImageData(ActionData):
    """Data that the creation of an image leaves for later steps."""

    #: Size of the image in bytes.
    size: int = 0


ImageRun = Run[ImageArgs, ImageData]


def service(engine: Engine) -> ImageApi:
    """Return the client of the image service.

    Raises:
        Unavailable: This conductor has no client of the image service.
    """
    if engine.images is None:
        raise errors.Unavailable("This conductor has no image service.")
    return engine.images


def try_all(call: Callable[[T], None], members: Iterable[T]) -> None:
    """Call a function for each member, and continue after a refusal.

    Raises:
        Unavailable: The service does not answer. The remaining members are not tried.
        Problem: The first refusal, after all members were tried.
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
    """Delete a server's active backups of one type, except the newest ``rotation`` backups.

    The journal of actions orders the backups. The image service reports times in whole seconds, so
    its order counts only for images that no action in the journal created.

    Args:
        engine: The conductor's engine.
        server: The id of the server.
        args: owner, backup_type, and rotation (the number of backups to keep).

    Raises:
        Problem: The service refuses. A refused deletion is raised after all deletions were tried.
        Unavailable: The image service does not answer.
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
        if image.get("status") == ACTIVE
    ]
    fences = engine.store.read(lambda tx: actions.backup_fences(tx, server))
    backups.sort(key=lambda image: fences.get(image, 0), reverse=True)
    try_all(images.delete, backups[int(args["rotation"]) :])


# --- the image of a disk ---
def check(engine: Engine, image_id: str, flavor: JsonObject) -> None:
    """Check again that an image can be used, because the image may have changed meanwhile.

    The flavor's memory and root disk must also be large enough for the image. A root disk of 0 GiB
    is not compared.

    Raises:
        Problem: The image cannot be used. The text contains the reason.
        Unavailable: The image service does not answer.
    """
    image_checks.check_flavor(check_disk(engine, image_id), from_wire(Flavor, flavor))


def check_disk(engine: Engine, image_id: str) -> Image:
    """Check that hosts can create a disk from an image, and return the image.

    The image is not compared with a flavor.

    Raises:
        Problem, Unavailable: As for ``check``.
    """
    image = service(engine).look(image_id)
    image_checks.check_disk(image)
    return image


def check_own(engine: Engine, run: AnyRun) -> None:
    """Check the image of the server's disk with the server's flavor, as ``check`` does.

    The server must have such an image (``has_own``).

    Raises:
        Problem, Unavailable: As for ``check``.
    """
    check(engine, str((run.server.image or {})["id"]), run.server.flavor)


def has_own(run: AnyRun) -> bool:
    """Return True if the server's disk was created from an image."""
    return bool((run.server.image or {}).get("id"))


# --- steps ---
def _create_record(engine: Engine, run: ImageRun) -> None:
    """Create the image's record for the server's project. An identical record is no error."""
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


def _upload(engine: Engine, run: ImageRun) -> Snapshot:
    return Snapshot(image_id=run.args.image_id)


def _record_upload(tx: Connection, run: ImageRun, result: Result) -> None:
    run.data.size = from_wire(StoredImage, result.data).size
    run.set(progress=100)


RECORD = Step(
    "record",
    "The image service may refuse, so its record is created before any data is copied.",
    call=_create_record,
    undo_call=_delete_image,
)
UPLOAD = Step(
    "upload",
    "The guest continues to run. The image contains the disk at one moment.",
    command=_upload,
    on_result=_record_upload,
)
