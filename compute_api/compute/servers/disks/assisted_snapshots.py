# SPDX-License-Identifier: Apache-2.0
"""Handlers of /os-assisted-volume-snapshots, which only the block storage service calls.

A host creates a snapshot of an attached volume that is a file, or merges a snapshot that the
service deletes. The response only confirms that the action has begun. The conductor reports the
result to the service. If the server has another running action, the request waits for its end.
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
#: Name of a file in the folder of the volume's file.
FILE_NAME = re.compile(r"\w[\w.-]{0,199}", re.ASCII)
SNAPSHOT_ID = re.compile(r"[\w-]{1,64}", re.ASCII)
FORMAT = "qcow2"


def create(request: Request) -> JsonObject:
    """Begin a snapshot of an attached volume for POST /os-assisted-volume-snapshots.

    The response repeats the id in ``create_info``, or null, and the id of the volume.

    Raises:
        BadRequest: A field is invalid, or the volume or its server does not allow a snapshot.
    """
    body = request.body["snapshot"]
    create_info = body["create_info"]
    arguments = {
        "snapshot_id": _check_snapshot_id(create_info["snapshot_id"]),
        "new_file": _check_file_name(create_info["new_file"], "new_file"),
    }
    _begin(request, CREATE, body["volume_id"], arguments)
    return {"snapshot": {"id": create_info.get("id"), "volumeId": body["volume_id"]}}


def delete(request: Request, snapshot_id: str) -> None:
    """Begin the merge of a snapshot for DELETE /os-assisted-volume-snapshots/{id}.

    Raises:
        BadRequest: The id or ``delete_info`` is invalid, or the volume or its server does not allow
            the merge.
    """
    delete_info = _parse_delete_info(request.query_value("delete_info"))
    files = {
        name: None
        if delete_info.get(field) is None
        else _check_file_name(delete_info[field], field)
        for name, field in (("file", "file_to_merge"), ("into", "merge_target_file"))
    }
    if files["into"] is not None and files["file"] is None:
        raise errors.BadRequest(
            "delete_info has a merge_target_file without a file_to_merge; give both."
        )
    arguments = {"snapshot_id": _check_snapshot_id(snapshot_id), **files}
    _begin(request, DELETE, delete_info["volume_id"], arguments)


def _parse_delete_info(text: str | None) -> JsonObject:
    """Parse the query parameter ``delete_info``.

    Raises:
        BadRequest: The parameter is missing, is no JSON object, has no volume_id, or has another
            type than ``FORMAT``.
    """
    try:
        delete_info = orjson.loads(text or "")
    except orjson.JSONDecodeError as problem:
        raise errors.BadRequest("delete_info must be a JSON object.") from problem
    if not isinstance(delete_info, dict) or not isinstance(delete_info.get("volume_id"), str):
        raise errors.BadRequest("delete_info must be a JSON object with a volume_id.")
    if delete_info.get("type", FORMAT) != FORMAT:
        raise errors.BadRequest(f"delete_info must have the type {FORMAT}, or no type.")
    return delete_info


def _check_snapshot_id(snapshot_id: str) -> str:
    if not SNAPSHOT_ID.fullmatch(snapshot_id):
        raise errors.BadRequest(
            f"{snapshot_id[:80]!r} is not a snapshot id: it must have 1 to 64 letters, digits, "
            "hyphens and underscores."
        )
    return snapshot_id


def _check_file_name(value: object, name: str) -> str:
    if not isinstance(value, str) or not FILE_NAME.fullmatch(value):
        raise errors.BadRequest(
            f"{name} must be the name of a file without a folder: 1 to 200 letters, digits, underscores, dots and "
            "hyphens, without a dot or hyphen at the beginning."
        )
    return value


def _begin(request: Request, row: states.Action, volume_id: str, details: Values) -> None:
    """Begin the action on the server that has the volume, and wake a conductor.

    If another action of the server is running, wait for its end for a limited time.

    Args:
        request: The request of the block storage service.
        row: The action, ``CREATE`` or ``DELETE``.
        volume_id: Id of the volume.
        details: Further arguments of the action: the snapshot and the files.

    Raises:
        BadRequest: The volume is not attached, is multiattach, or the server's state does not allow
            the action. Or the other action has not ended in time.
    """
    server_id = _find_device(request, volume_id).server_id
    is_begun = partial(actions.is_begun, server_id=server_id)
    begin = partial(
        request.make,
        is_begun,
        volumes.assist,
        row,
        server_id,
        context=request.context,
        # The caller is a service, and the server belongs to another project.
        project_id=None,
        volume_id=volume_id,
        details=details,
    )
    try:
        action_waits.begin_in_turn(request.services, server_id, begin)
    except (errors.Conflict, errors.NotFound) as problem:
        raise errors.BadRequest(problem.text) from problem
    request.services.wakeup.wake()


def _find_device(request: Request, volume_id: str) -> BlockDeviceRow:
    """Return the row of a volume's only attachment.

    Raises:
        BadRequest: No server has the volume, or the volume is multiattach.
    """
    rows = request.read(volumes.of_volume, volume_id)
    if not rows:
        raise errors.BadRequest(f"No server has volume {volume_id[:80]}.")
    if len(rows) > 1 or rows[0].multiattach:
        raise errors.BadRequest(
            f"Volume {volume_id} is multiattach. Hosts take no snapshots of multiattach volumes."
        )
    return rows[0]
