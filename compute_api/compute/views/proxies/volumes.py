# SPDX-License-Identifier: Apache-2.0
"""Volumes and snapshots in responses, until 2.35."""

from __future__ import annotations

from common.domain.json_types import JsonMapping, JsonObject


def volume(record: JsonMapping) -> JsonObject:
    """Return the body of a volume in /os-volumes.

    ``attachments`` has one item: the first attachment, or an empty object.
    """
    return {
        "id": record["id"],
        "status": record["status"],
        "size": record["size"],
        "availabilityZone": record.get("availability_zone"),
        "createdAt": record["created_at"],
        "displayName": record.get("name"),
        "displayDescription": record.get("description"),
        "volumeType": record.get("volume_type"),
        "snapshotId": record.get("snapshot_id"),
        "metadata": record.get("metadata") or {},
        "attachments": [
            _build_attachment(record["id"], attachment)
            for attachment in (record.get("attachments") or ())[:1]
        ]
        or [{}],
    }


def _build_attachment(volume_id: str, record: JsonMapping) -> JsonObject:
    body: JsonObject = {"id": volume_id, "volumeId": volume_id, "serverId": record["server_id"]}
    if record.get("device"):
        body["device"] = record["device"]
    return body


def snapshot(record: JsonMapping) -> JsonObject:
    """Return the body of a snapshot in /os-snapshots."""
    return {
        "id": record["id"],
        "status": record["status"],
        "size": record["size"],
        "createdAt": record["created_at"],
        "displayName": record.get("name"),
        "displayDescription": record.get("description"),
        "volumeId": record["volume_id"],
    }
