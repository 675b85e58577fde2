# SPDX-License-Identifier: Apache-2.0
"""A block storage service in memory with the volumes and snapshots of a test."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from common.clients.volumes import Volume, VolumeSnapshot, VolumeType
from common.domain import errors, ids
from common.store import schema
from tests.api.conftest import Cloud

VOLUME, OTHER, SHARED = (
    "a07f71dc-8151-4e7d-a0cc-cd24a3f11113",
    "227cc671-f30b-4488-96fd-7d0bf13648d8",
    "3cdf5132-64f2-4584-876a-bd296ae7eabd",
)
SNAPSHOT, TYPE = "e8debdc0-447a-4376-a10a-4cd9122d7986", "70a599e0-31e7-49b7-b260-868f441e862b"


class Volumes:
    """The volumes, snapshots and quotas that the API finds at the block storage service.

    A test changes ``by_id`` (the volumes), the quotas, ``new_snapshot_status`` and ``encrypts``
    (True to encrypt new volumes). ``created`` and ``deleted`` record the requests. The proxies use
    the separate ``proxy_records``.
    """

    def __init__(self) -> None:
        self.has_endpoint, self.volume_quota, self.encrypts = True, 100, False
        self.by_id = {
            volume: Volume(volume, "available", 2, availability_zone="nova", bootable=True)
            for volume in (VOLUME, OTHER)
        }
        self.by_id[SHARED] = Volume(SHARED, "in-use", 1, multiattach=True, availability_zone="nova")
        self.snapshots = {SNAPSHOT: VolumeSnapshot(SNAPSHOT, "available", 3, VOLUME)}
        self.snapshot_quota, self.new_snapshot_status = 100, "available"
        self.created: list[dict[str, Any]] = []
        self.deleted: list[str] = []
        self.proxy_records: dict[str, dict[str, dict[str, Any]]] = {"volumes": {}, "snapshots": {}}

    def has_service(self) -> bool:
        return self.has_endpoint

    def volume(self, token: str, volume_id: str) -> Volume:
        if volume_id not in self.by_id or token == "stranger":
            raise errors.NotFound(f"Volume {volume_id} could not be found.")
        return self.by_id[volume_id]

    def snapshot(self, token: str, snapshot_id: str) -> VolumeSnapshot:
        if snapshot_id not in self.snapshots:
            raise errors.NotFound(f"Snapshot {snapshot_id} could not be found.")
        return self.snapshots[snapshot_id]

    def make_snapshot(self, token: str, volume_id: str, name: str) -> VolumeSnapshot:
        if len(self.snapshots) > self.snapshot_quota:
            raise errors.TooLarge("The block storage service says: SnapshotLimitExceeded")
        snapshot = VolumeSnapshot(
            ids.new(), "creating", self.volume("", volume_id).size_gb, volume_id, token
        )
        self.snapshots[snapshot.id] = replace(snapshot, status=self.new_snapshot_status)
        return snapshot

    def delete_snapshot(self, token: str, snapshot_id: str) -> None:
        self.snapshots.pop(snapshot_id, None)

    def types(self, token: str) -> list[VolumeType]:
        return [VolumeType(TYPE, "fast")]

    def create(self, token: str, **values: Any) -> Volume:
        if len(self.created) >= self.volume_quota:
            raise errors.TooLarge("The block storage service says: VolumeLimitExceeded")
        volume = Volume(
            ids.new(),
            "creating",
            values["size_gb"],
            encrypted=self.encrypts,
            volume_type=values["volume_type"],
        )
        self.created.append({**values, "id": volume.id, "token": token})
        self.by_id[volume.id] = volume
        return volume

    def delete(self, token: str, volume_id: str) -> None:
        self.deleted.append(volume_id)

    # --- methods of the client for the proxies ---
    def records(self, token: str, resource: str) -> list[dict[str, Any]]:
        return [*self.proxy_records[resource].values()]

    def record(self, token: str, resource: str, record_id: str) -> dict[str, Any]:
        if record_id not in self.proxy_records[resource]:
            raise errors.NotFound(f"{record_id} could not be found.")
        return self.proxy_records[resource][record_id]

    def make(self, token: str, resource: str, values: dict[str, Any]) -> dict[str, Any]:
        if len(self.proxy_records[resource]) >= self.volume_quota:
            raise errors.TooLarge("The block storage service says: LimitExceeded")
        identity = {
            "id": ids.new(),
            "status": "creating",
            "created_at": "2026-11-23T10:00:00.000001",
        }
        self.proxy_records[resource][identity["id"]] = identity | {"size": 1} | values
        return self.record(token, resource, identity["id"])

    def remove(self, token: str, resource: str, record_id: str) -> None:
        self.record(token, resource, record_id)
        del self.proxy_records[resource][record_id]

    def change(self, volume_id: str, **values: Any) -> None:
        self.by_id[volume_id] = replace(self.by_id[volume_id], **values)


def add_volume_service(cloud: Cloud) -> Volumes:
    """Give the cloud an in-memory volume service, and return this service."""
    service = Volumes()
    cloud.services.volumes = service
    return service


def finish_attachments(cloud: Cloud, server: str, status: str = "attached", **values: Any) -> None:
    """Bring the server's volume attachments to a status, as a conductor does."""
    for row in cloud.rows(schema.block_devices):
        if row.server_id == server:
            cloud.change(
                schema.block_devices,
                schema.block_devices.c.uuid == row.uuid,
                status=status,
                attachment_id=row.attachment_id or ids.new(),
            )
    cloud.set_state(server, **values)
