# SPDX-License-Identifier: Apache-2.0
"""Volumes and their snapshots as the Compute API showed them until 2.35."""

from __future__ import annotations

from common.domain.json_types import JsonMapping, JsonObject


def volume(found: JsonMapping) -> JsonObject:
    """One of os-volumes; of several servers that have it the first is told, of none an empty
    one."""
    return {
        "id": found["id"],
        "status": found["status"],
        "size": found["size"],
        "availabilityZone": found.get("availability_zone"),
        "createdAt": found["created_at"],
        "displayName": found.get("name"),
        "displayDescription": found.get("description"),
        "volumeType": found.get("volume_type"),
        "snapshotId": found.get("snapshot_id"),
        "metadata": found.get("metadata") or {},
        "attachments": [
            _attachment(found["id"], one) for one in (found.get("attachments") or ())[:1]
        ]
        or [{}],
    }


def _attachment(volume_id: str, found: JsonMapping) -> JsonObject:
    shown: JsonObject = {"id": volume_id, "volumeId": volume_id, "serverId": found["server_id"]}
    if found.get("device"):
        shown["device"] = found["device"]
    return shown


def snapshot(found: JsonMapping) -> JsonObject:
    """One of os-snapshots."""
    return {
        "id": found["id"],
        "status": found["status"],
        "size": found["size"],
        "createdAt": found["created_at"],
        "displayName": found.get("name"),
        "displayDescription": found.get("description"),
        "volumeId": found["volume_id"],
    }
