# SPDX-License-Identifier: Apache-2.0
"""Volume attachments of a server in responses."""

from __future__ import annotations

from common.domain.json_types import JsonObject
from common.store.rows import BlockDeviceRow
from compute_api.http.microversions import Range

_TAGGED, _ENDING, _WHOLE = Range("2.70"), Range("2.79"), Range("2.89")


def is_shown(row: BlockDeviceRow, version: int) -> bool:
    """Return whether responses show the attachment.

    Since 2.89 an attachment is shown once the block storage service has reserved the volume,
    because the response contains the id of that attachment.
    """
    return version not in _WHOLE or row.attachment_id is not None


def of(row: BlockDeviceRow, version: int, new: bool = False) -> JsonObject:
    """Return the body of an attachment.

    Args:
        row: The attachment.
        version: The microversion of the request.
        new: Whether the body is the response to the attach request. Since 2.89 only this response
            has ``id``, and all others have attachment_id and bdm_uuid.
    """
    shown: JsonObject = {
        "serverId": row.server_id,
        "volumeId": row.volume_id,
        "device": row.device_name,
    }
    if new or version not in _WHOLE:
        shown["id"] = row.volume_id
    if version in _TAGGED:
        shown["tag"] = row.tag
    if version in _ENDING:
        shown["delete_on_termination"] = bool(row.delete_on_termination)
    if version in _WHOLE and not new:
        shown |= {"attachment_id": row.attachment_id, "bdm_uuid": row.uuid}
    return shown
