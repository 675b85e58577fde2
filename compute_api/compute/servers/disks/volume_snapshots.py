# SPDX-License-Identifier: Apache-2.0
"""Create volume snapshots for an image of a server that boots from a volume.

The snapshots are created with the caller's token, so that the caller owns them, before the action
begins that creates the image (decision 0067). A guest agent, if the guest has one, freezes the
file systems meanwhile. If the action cannot begin, the snapshots are deleted again.
"""

from __future__ import annotations

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
from common.service.log import get_logger
from common.store.rows import BlockDeviceRow, ServerRecord
from common.store.servers import volumes
from common.store.servers.servers import loads
from compute_api.compute.request import action_waits
from compute_api.compute.request.dependencies import TenantVolumes
from compute_api.compute.request.host_queries import query_host
from compute_api.compute.request.request import Request
from compute_api.compute.servers.disks import block_devices

log = get_logger(__name__)
#: Limit for a freeze of the guest, limit for the wait for snapshots, and the interval of polls.
STILL_SECONDS, WAIT_SECONDS, POLL_SECONDS = 40.0, 30.0, 0.2
#: How long to retry the deletion of a snapshot, which fails while the snapshot is being created.
GIVE_UP_SECONDS = 10.0
REQUIRED = "os_require_quiesce"


@dataclass
class VolumeSnapshots:
    """The volume snapshots for one image."""

    service: TenantVolumes
    token: str = field(repr=False)
    pause: Callable[[float], None] = time.sleep
    made: list[VolumeSnapshot] = field(default_factory=list)
    #: Properties of the image, which refer to the snapshots.
    properties: dict[str, str] = field(default_factory=dict)

    @property
    def snapshots(self) -> list[str]:
        """The ids of the snapshots."""
        return [snapshot.id for snapshot in self.made]

    def give_up(self) -> None:
        """Delete the snapshots, because no image will refer to them.

        A deletion that fails is retried for ``GIVE_UP_SECONDS``, then logged.
        """
        until, left = time.monotonic() + GIVE_UP_SECONDS, self.snapshots
        while left:
            left = [snapshot for snapshot in left if not self._is_deleted(snapshot)]
            if not left or time.monotonic() > until:
                break
            self.pause(POLL_SECONDS)
        for snapshot in left:
            log.warning(
                "a snapshot was created for an image that was refused, and cannot be deleted "
                "yet: its owner can delete it later",
                snapshot=snapshot,
            )

    def _is_deleted(self, snapshot_id: str) -> bool:
        try:
            self.service.delete_snapshot(self.token, snapshot_id)
        except errors.Problem:
            return False
        return True


def make(request: Request, server: ServerRecord, name: str) -> VolumeSnapshots:
    """Create and return snapshots of all volumes of the server, for an image with this name.

    The guest is frozen meanwhile, if possible. After an error, the snapshots are deleted again.

    Raises:
        Forbidden: A quota or the policy of the block storage service does not allow the snapshots.
        BadRequest: A volume does not exist any more, or the service refuses a request.
        Conflict: A snapshot failed, or the guest could not be frozen although its image requires
            that.
        Unavailable: The service does not answer or is not in the catalogue, or too many requests
            are waiting.
    """
    service = request.volumes
    if service is None:
        raise errors.Unavailable(
            "The service catalogue has no block storage service now, and the server boots from a "
            "volume; try again."
        )
    rows = request.read(volumes.list_of, server.id)
    snapshots = VolumeSnapshots(service, request.context.token)
    with action_waits.slot(request.services) as is_free:
        if not is_free:
            raise errors.Unavailable("Too many requests are waiting; try again.")
        try:
            with _freeze_guest(request, server):
                for row in rows:
                    snapshots.made.append(_create_snapshot(snapshots, row, name))
                _await_snapshots(snapshots)
        except errors.Problem as problem:
            snapshots.give_up()
            if isinstance(problem, errors.TooLarge):
                raise errors.Forbidden(problem.text) from problem
            if isinstance(problem, errors.NotFound):
                raise errors.BadRequest(problem.text) from problem
            raise
    snapshots.properties = _build_properties(server, rows, snapshots.snapshots)
    return snapshots


def _create_snapshot(snapshots: VolumeSnapshots, row: BlockDeviceRow, name: str) -> VolumeSnapshot:
    return snapshots.service.make_snapshot(
        snapshots.token, str(row.volume_id), f"snapshot for {name}"[:255]
    )


def _await_snapshots(snapshots: VolumeSnapshots) -> None:
    """Poll until all snapshots are available, at most ``WAIT_SECONDS``.

    Why: while the guest is frozen, the snapshots show the same moment. Snapshots that take longer
    complete after the freeze, without an error.

    Raises:
        Conflict: A snapshot has failed.
        Problem: The block storage service does not answer, or refuses a poll.
    """
    until = time.monotonic() + WAIT_SECONDS
    while True:
        snapshots.made = [
            snapshots.service.snapshot(snapshots.token, snapshot.id)
            if snapshot.status == CREATING
            else snapshot
            for snapshot in snapshots.made
        ]
        for snapshot in snapshots.made:
            if snapshot.status not in (CREATING, AVAILABLE):
                raise errors.Conflict(
                    f"Snapshot {snapshot.id} of volume {snapshot.volume_id} failed: its status in the block storage "
                    f"service is {snapshot.status}. See the snapshot there, and try again."
                )
        if time.monotonic() > until or all(
            snapshot.status == AVAILABLE for snapshot in snapshots.made
        ):
            return
        snapshots.pause(POLL_SECONDS)


@contextmanager
def _freeze_guest(request: Request, server: ServerRecord) -> Iterator[None]:
    """Freeze the guest's file systems, and thaw them at the end of the with block.

    The block runs without a freeze if the server is not ACTIVE, or if the freeze fails and the
    image does not require it. The host thaws the file systems after ``STILL_SECONDS`` even if the
    request to thaw is lost.

    Raises:
        Conflict: The freeze failed, and the server's image requires the freeze.
    """
    if server.vm_state != states.ACTIVE:
        yield
        return
    arguments: JsonObject = {"server": server.id}
    try:
        query_host(request, server, "quiesce", {**arguments, "seconds": STILL_SECONDS})
    except errors.Problem as problem:
        required = loads(server.image or "{}").get("properties", {}).get(REQUIRED, "")
        if str(required).lower() in ("yes", "true", "1", "on", "y", "t"):
            raise errors.Conflict(
                "The guest's file systems could not be frozen, and its image requires that "
                f"({REQUIRED}): {problem.text}"
            ) from problem
        log.info(
            "the volumes of a server are snapshotted without freeze",
            server=server.id,
            problem=problem.text,
        )
    try:
        yield
    finally:
        try:
            query_host(request, server, "unquiesce", arguments)
        except errors.Problem as problem:
            log.info(
                "a server may stay frozen until its host thaws it",
                server=server.id,
                problem=problem.text,
            )


# --- properties of the image ---
def _build_properties(
    server: ServerRecord, rows: Sequence[BlockDeviceRow], snapshots: Sequence[str]
) -> dict[str, str]:
    """Return the properties of an image that consists of volume snapshots, in Nova's format.

    ``snapshots`` has the id of a snapshot for each of ``rows``.
    """
    mappings = [
        *_list_local_mappings(server),
        *(_build_mapping(row, snapshot) for row, snapshot in zip(rows, snapshots, strict=True)),
    ]
    return {
        "block_device_mapping": orjson.dumps(mappings).decode(),
        "bdm_v2": "True",
        **({"root_device_name": server.root_device_name} if server.root_device_name else {}),
    }


def _build_mapping(row: BlockDeviceRow, snapshot_id: str) -> JsonObject:
    return {
        "source_type": block_devices.SNAPSHOT,
        "destination_type": block_devices.VOLUME,
        "snapshot_id": snapshot_id,
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


def _list_local_mappings(server: ServerRecord) -> list[JsonObject]:
    """Return the mappings of the local disks other than the root disk, if any were requested.

    If the create request chose no local disks, the list is empty, because the disks of the flavor
    need no mapping.
    """
    if not server.disks:
        return []
    disks = local_disks.of(from_wire(models.Flavor, loads(server.flavor)), loads(server.disks))
    return [
        {
            "source_type": block_devices.BLANK,
            "destination_type": block_devices.LOCAL,
            "guest_format": SWAP if disk.name == SWAP else disk.format or None,
            "volume_size": disk.size_mb if disk.name == SWAP else disk.size_mb // 1024,
            "boot_index": -1,
            "delete_on_termination": True,
            "no_device": None,
        }
        for disk in disks
    ]
