# SPDX-License-Identifier: Apache-2.0
"""Snapshots of the volumes of a server that boots from one, for an image that names them.

They are made with the caller's token, so that they are the caller's, before the action begins that
makes the image (decision 0067). Meanwhile the guest's file systems are held still by its agent,
where it has one. What was made for an image that is refused is deleted again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import orjson

from common.clients.volumes import AVAILABLE, CREATING, VolumeSnapshot
from common.domain import errors, local_disks, models, states
from common.domain.json_types import JsonObject
from common.domain.local_disks import SWAP
from common.domain.wire import from_wire
from common.store.rows import BlockDeviceRow, ServerRecord
from common.store.servers import volumes
from common.store.servers.servers import loads
from compute_api.compute.request import action_waits
from compute_api.compute.request.dependencies import TenantVolumes
from compute_api.compute.request.host_queries import query_host
from compute_api.compute.request.request import Request
from compute_api.compute.servers.disks import block_devices

log = logging.getLogger(__name__)
#: How long a guest is held still at most, and its snapshots are waited for meanwhile.
STILL_SECONDS, WAIT_SECONDS, POLL_SECONDS = 40.0, 30.0, 0.2
#: How long one that is being made is waited for before it can be deleted again.
GIVE_UP_SECONDS = 10.0
REQUIRED = "os_require_quiesce"


@dataclass
class VolumeSnapshots:
    """What was made for one image. properties: what the image says of it."""

    service: TenantVolumes
    token: str = field(repr=False)
    pause: Callable[[float], None] = time.sleep
    made: list[VolumeSnapshot] = field(default_factory=list)
    properties: dict[str, str] = field(default_factory=dict)

    @property
    def snapshots(self) -> list[str]:
        """Their ids."""
        return [one.id for one in self.made]

    def give_up(self) -> None:
        """Delete them: no image names them."""
        until, left = time.monotonic() + GIVE_UP_SECONDS, self.snapshots
        while left:
            left = [one for one in left if not self._deleted(one)]
            if not left or time.monotonic() > until:
                break
            self.pause(POLL_SECONDS)
        for snapshot in left:
            log.warning(
                "snapshot %s was made for an image that was refused, and cannot be deleted: its owner "
                "can, later",
                snapshot,
            )

    def _deleted(self, snapshot_id: str) -> bool:
        try:
            self.service.delete_snapshot(self.token, snapshot_id)
        except errors.Problem:
            return False
        return True


def make(request: Request, server: ServerRecord, name: str) -> VolumeSnapshots:
    """Snapshots of all volumes of the server, for an image of this name.

    Raises:
        Forbidden: a quota of the service does not allow them. BadRequest: it refuses. Conflict: the
        guest could not be held still, and its image requires that.
    """
    service = request.volumes
    if service is None:
        raise errors.Unavailable("This cloud's block storage service is not known here; try again.")
    rows = request.read(volumes.list_of, server.id)
    found = VolumeSnapshots(service, request.context.token)
    with action_waits.slot(request.services) as is_free:
        if not is_free:
            raise errors.Unavailable("Too many requests are waiting; try again.")
        try:
            with _still(request, server):
                for row in rows:
                    found.made.append(_made(found, row, name))
                _await(found)
        except errors.Problem as problem:
            found.give_up()
            if isinstance(problem, errors.TooLarge):
                raise errors.Forbidden(problem.text) from problem
            if isinstance(problem, errors.NotFound):
                raise errors.BadRequest(problem.text) from problem
            raise
    found.properties = _properties(server, rows, found.snapshots)
    return found


def _made(found: VolumeSnapshots, row: BlockDeviceRow, name: str) -> VolumeSnapshot:
    return found.service.make_snapshot(
        found.token, str(row.volume_id), f"snapshot for {name}"[:255]
    )


def _await(found: VolumeSnapshots) -> None:
    """Until they are taken, so that they are of one moment; what takes longer is as it is. Raises
    Conflict: one has failed."""
    until = time.monotonic() + WAIT_SECONDS
    while True:
        found.made = [
            found.service.snapshot(found.token, one.id) if one.status == CREATING else one
            for one in found.made
        ]
        for one in found.made:
            if one.status not in (CREATING, AVAILABLE):
                raise errors.Conflict(
                    f"Snapshot {one.id} of volume {one.volume_id} could not be made: the block storage "
                    f"service shows it as {one.status}; see there, and try again."
                )
        if time.monotonic() > until or all(one.status == AVAILABLE for one in found.made):
            return
        found.pause(POLL_SECONDS)


@contextmanager
def _still(request: Request, server: ServerRecord) -> Iterator[None]:
    """The guest's file systems are held still meanwhile; its host lets them go by itself when it
    hears nothing more."""
    if server.vm_state != states.ACTIVE:
        yield
        return
    said: JsonObject = {"server": server.id}
    try:
        query_host(request, server, "quiesce", {**said, "seconds": STILL_SECONDS})
    except errors.Problem as problem:
        required = loads(server.image or "{}").get("properties", {}).get(REQUIRED, "")
        if str(required).lower() in ("yes", "true", "1", "on", "y", "t"):
            raise errors.Conflict(
                "The guest's file systems could not be frozen, and its image requires that "
                f"({REQUIRED}): {problem.text}"
            ) from problem
        log.info("volumes of server %s are snapshotted as they are: %s", server.id, problem.text)
    try:
        yield
    finally:
        try:
            query_host(request, server, "unquiesce", said)
        except errors.Problem as problem:
            log.info("server %s may be held still until its time: %s", server.id, problem.text)


# --- what the image says ---
def _properties(
    server: ServerRecord, rows: Sequence[BlockDeviceRow], snapshots: Sequence[str]
) -> dict[str, str]:
    """As Nova writes it, and reads it again."""
    mappings = [
        *_local(server),
        *(_mapping(row, one) for row, one in zip(rows, snapshots, strict=True)),
    ]
    return {
        "block_device_mapping": orjson.dumps(mappings).decode(),
        "bdm_v2": "True",
        **({"root_device_name": server.root_device_name} if server.root_device_name else {}),
    }


def _mapping(row: BlockDeviceRow, snapshot: str) -> JsonObject:
    return {
        "source_type": block_devices.SNAPSHOT,
        "destination_type": block_devices.VOLUME,
        "snapshot_id": snapshot,
        "device_name": row.device_name,
        "boot_index": row.boot_index,
        "volume_size": row.size_gb,
        "disk_bus": row.disk_bus,
        "device_type": row.device_type,
        "delete_on_termination": bool(row.delete_on_termination),
        "no_device": None,
        "guest_format": None,
        "image_id": None,
        "volume_id": None,
        "volume_type": None,
        "tag": None,
    }


def _local(server: ServerRecord) -> list[JsonObject]:
    """The disks of the host that were asked for; what its flavor says each server has by itself."""
    if not server.disks:
        return []
    disks = local_disks.of(from_wire(models.Flavor, loads(server.flavor)), loads(server.disks))
    return [
        {
            "source_type": block_devices.BLANK,
            "destination_type": block_devices.LOCAL,
            "guest_format": SWAP if one.name == SWAP else one.format or None,
            "volume_size": one.size_mb if one.name == SWAP else one.size_mb // 1024,
            "boot_index": -1,
            "delete_on_termination": True,
            "no_device": None,
        }
        for one in disks
    ]
