# SPDX-License-Identifier: Apache-2.0
"""/os-assisted-volume-snapshots: the block storage service has a host take a snapshot of a volume
that is a file, or merge one that is deleted, while a server has it.

The service asks for it, never a tenant. The answer only says that the action has begun; what became
of it the conductor tells the service. A second action of the server waits its turn.
"""

from __future__ import annotations

import re
from functools import partial

import orjson

from common.domain import errors, states
from common.domain.json_types import JsonObject
from common.store.rows import BlockDeviceRow, Values
from common.store.servers import actions, volumes
from compute_api.compute.request import action_waits
from compute_api.compute.request.request import Request

CREATE, DELETE = states.row("volume_snapshot_create"), states.row("volume_snapshot_delete")
#: A file beside the volume's own, by its name alone.
FILE_NAME = re.compile(r"\w[\w.-]{0,199}", re.ASCII)
SNAPSHOT_ID = re.compile(r"[\w-]{1,64}", re.ASCII)
FORMAT = "qcow2"


def create(request: Request) -> JsonObject:
    """POST /os-assisted-volume-snapshots"""
    given = request.body["snapshot"]
    about = given["create_info"]
    wanted = {
        "snapshot_id": _snapshot_id(about["snapshot_id"]),
        "new_file": _file(about["new_file"], "new_file"),
    }
    _begin(request, CREATE, given["volume_id"], wanted)
    return {"snapshot": {"id": about.get("id"), "volumeId": given["volume_id"]}}


def delete(request: Request, snapshot_id: str) -> None:
    """DELETE /os-assisted-volume-snapshots/{id}"""
    about = _delete_info(request.first("delete_info"))
    files = {
        name: None if about.get(given) is None else _file(about[given], given)
        for name, given in (("file", "file_to_merge"), ("into", "merge_target_file"))
    }
    if files["into"] is not None and files["file"] is None:
        raise errors.BadRequest("delete_info names a merge_target_file and no file_to_merge.")
    wanted = {"snapshot_id": _snapshot_id(snapshot_id), **files}
    _begin(request, DELETE, about["volume_id"], wanted)


def _delete_info(text: str | None) -> JsonObject:
    """Raises BadRequest: it is not there, or says too little."""
    try:
        found = orjson.loads(text or "")
    except orjson.JSONDecodeError as problem:
        raise errors.BadRequest("delete_info must be a JSON object.") from problem
    if not isinstance(found, dict) or not isinstance(found.get("volume_id"), str):
        raise errors.BadRequest("delete_info must be a JSON object with a volume_id.")
    if found.get("type", FORMAT) != FORMAT:
        raise errors.BadRequest(f"delete_info must have the type {FORMAT}, or none.")
    return found


def _snapshot_id(given: str) -> str:
    if not SNAPSHOT_ID.fullmatch(given):
        raise errors.BadRequest("The snapshot's id is none.")
    return given


def _file(given: object, name: str) -> str:
    if not isinstance(given, str) or not FILE_NAME.fullmatch(given):
        raise errors.BadRequest(f"{name} must be the name of a file, without a folder.")
    return given


def _begin(request: Request, row: states.Action, volume_id: str, about: Values) -> None:
    """Raises BadRequest: no server has the volume, several may, or its state does not allow it."""
    server_id = _device(request, volume_id).server_id
    is_begun = partial(actions.is_begun, server_id=server_id)
    begin = partial(
        request.make,
        is_begun,
        volumes.assist,
        row,
        server_id,
        context=request.context,
        project_id=None,  # a service asks, whose project is another one
        volume_id=volume_id,
        about=about,
    )
    try:
        action_waits.begin_in_turn(request.services, server_id, begin)
    except (errors.Conflict, errors.NotFound) as problem:
        raise errors.BadRequest(problem.text) from problem
    request.services.wakeup.wake()


def _device(request: Request, volume_id: str) -> BlockDeviceRow:
    rows = request.read(volumes.of_volume, volume_id)
    if not rows:
        raise errors.BadRequest(f"No server has volume {volume_id[:80]}.")
    if len(rows) > 1 or rows[0].multiattach:
        raise errors.BadRequest(
            f"Volume {volume_id} is one that several servers may have, whose snapshots no host takes."
        )
    return rows[0]
