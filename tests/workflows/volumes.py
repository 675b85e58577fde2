# SPDX-License-Identifier: Apache-2.0
"""A block storage service in memory, and functions that request actions on volumes.

Invariant: two servers, or two hosts, never have the same volume, unless the volume is multiattach
or the server is being live-migrated. For the errors that a test can cause see ``service_doubles``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from common.clients.volumes import (
    AVAILABLE,
    CREATING,
    DELETING,
    DOWNLOADING,
    ERROR,
    ERROR_DELETING,
    IN_USE,
    MIGRATING,
    Attachment,
    Volume,
    VolumeSnapshot,
)
from common.domain import device_names, errors, ids, states
from common.domain.context import RequestContext
from common.domain.json_types import JsonObject
from common.domain.statuses import BlockDeviceStatus
from common.store.engine import Connection
from common.store.servers import volumes
from common.store.servers.volumes import WantedVolume
from conductor.engine.external_services import VolumeApi
from tests.workflows.service_doubles import ServiceDouble

if TYPE_CHECKING:
    from tests.workflows.simulator import Cloud

#: Status of an assisted snapshot -> the statuses that a host may report for it.
NEXT = {CREATING: (CREATING, ERROR), DELETING: (DELETING, ERROR_DELETING)}
USER = RequestContext(user_id="user", project_id="project", roles=("member",), request_id="")


@dataclass
class HeldVolume:
    """An attachment of a volume to a server."""

    attachment: Attachment
    #: The host that may connect the volume with this attachment, or None.
    host: str | None = None


@dataclass
class AssistedSnapshot:
    """A snapshot that a host takes or merges for the service."""

    volume_id: str
    status: str
    #: Requests for the snapshot until the service has completed it. -1: no host has reported yet.
    looks: int = -1


@dataclass
class VolumeRecords:
    """The records of the service, by id."""

    volumes: dict[str, Volume] = field(default_factory=dict)
    held: dict[str, HeldVolume] = field(default_factory=dict)
    #: Volume -> requests for the volume until it is available.
    creating: dict[str, int] = field(default_factory=dict)
    #: Volume -> the image that was written last.
    images: dict[str, str] = field(default_factory=dict)
    #: Volume -> requests for the volume until the image is written.
    writing: dict[str, int] = field(default_factory=dict)
    #: Snapshot of a user -> the volume.
    snapshots: dict[str, str] = field(default_factory=dict)
    assisted: dict[str, AssistedSnapshot] = field(default_factory=dict)
    #: Migrated volume -> the volume that had its data before.
    name_ids: dict[str, str] = field(default_factory=dict)


def attach(cloud: Cloud, server: str, volume_id: str, **more: Any) -> str:
    """Request that a volume is attached, as the API does, and return the action's id.

    Args:
        cloud: The cloud.
        server: Id of the server.
        volume_id: Id of the volume.
        **more: Further fields of the requested volume.
    """
    requested_volume = cloud.volumes.build_wanted_volume(volume_id, **more)
    row = states.row("attach_volume")
    return cloud.accept(
        server,
        lambda tx: volumes.attach(
            tx, row, server, context=USER, project_id="project", volume=requested_volume
        ),
    )


def detach(cloud: Cloud, server: str, volume_id: str) -> str:
    """Request that a volume is detached, as the API does, and return the action's id."""
    row = states.row("detach_volume")
    return cloud.accept(
        server,
        lambda tx: volumes.detach(
            tx, row, server, context=USER, project_id="project", volume_id=volume_id
        ),
    )


def swap(cloud: Cloud, server: str, volume_id: str) -> str:
    """Begin to migrate a server's volume, and request its swap as the service does."""
    new = cloud.volumes.migrate(volume_id)
    row = states.row("swap_volume")
    size_gb = cloud.volumes.state.volumes[new].size_gb if new in cloud.volumes.state.volumes else 1
    return cloud.accept(
        server,
        lambda tx: volumes.swap(
            tx,
            row,
            server,
            context=USER,
            project_id="project",
            volume_id=volume_id,
            new_volume_id=new,
            new_size_gb=size_gb,
        ),
    )


def extend(cloud: Cloud, server: str, volume_id: str) -> str:
    """Request the guest's part of an extend, as the block storage service does."""
    row = cloud.store.read(lambda tx: volumes.show(tx, server, volume_id))
    return cloud.ask(
        server, "extend_volume", args={"block_device": row.uuid, "volume_id": volume_id}
    )


def of(cloud: Cloud, server: str) -> dict[str, str]:
    """Return the status of each volume of a server, by the volume's id."""
    rows = cloud.store.read(lambda tx: volumes.list_of(tx, server))
    return {str(row.volume_id): row.status for row in rows}


def take_snapshot(cloud: Cloud, server: str, volume_id: str) -> str:
    """Begin an assisted snapshot, and request the host's part as the service does."""
    snapshot = cloud.volumes.begin_assisted(volume_id, CREATING)
    details = {"snapshot_id": snapshot, "new_file": f"volume-{volume_id}.{snapshot}"}
    return _request_assistance(cloud, server, "volume_snapshot_create", volume_id, details)


def merge_snapshot(cloud: Cloud, server: str, volume_id: str) -> str:
    """Begin to delete an assisted snapshot, and request the host's part as the service does."""
    snapshot = cloud.volumes.begin_assisted(volume_id, DELETING)
    details = {"snapshot_id": snapshot, "file": None, "into": None}
    return _request_assistance(cloud, server, "volume_snapshot_delete", volume_id, details)


def _request_assistance(
    cloud: Cloud, server: str, key: str, volume_id: str, details: dict[str, Any]
) -> str:
    row, snapshot = states.row(key), cloud.volumes.state.assisted[details["snapshot_id"]]
    try:
        return cloud.accept(
            server,
            lambda tx: volumes.assist(
                tx,
                row,
                server,
                context=USER,
                project_id="project",
                volume_id=volume_id,
                details=details,
            ),
        )
    except errors.Problem:
        snapshot.status = ERROR
        raise
    except BaseException:
        # Without an answer the service does not wait for a report on the snapshot.
        cloud.volumes.refused.append((key, details["snapshot_id"]))
        raise


def is_volume_backed(cloud: Cloud, server: str) -> bool:
    """Return True if a server boots from a volume."""
    return cloud.store.read(lambda tx: volumes.root_of(tx, server)) is not None


def insert(tx: Connection, server: str, requested_volumes: Sequence[WantedVolume]) -> None:
    """Insert the rows of the volumes with which a server is created."""
    boots_from_volume = any(volume.more.get("boot_index") == 0 for volume in requested_volumes)
    local = [] if boots_from_volume else [device_names.root_name(None)]
    ordered = sorted(requested_volumes, key=lambda volume: volume.more.get("boot_index") != 0)
    names = device_names.assign_names(local, [volume.bus for volume in ordered])
    volumes.insert(
        tx,
        [
            {
                "uuid": ids.new(),
                "server_id": server,
                "volume_id": volume.volume_id,
                "status": BlockDeviceStatus.RESERVED,
                "size_gb": volume.size_gb,
                "device_name": name,
                "delete_on_termination": volume.delete_on_termination,
                "multiattach": volume.multiattach,
                **volume.more,
            }
            for volume, name in zip(ordered, names, strict=True)
        ],
    )


class Volumes(ServiceDouble, interface=VolumeApi):
    """Implement ``conductor.engine.external_services.VolumeApi`` in memory."""

    def __init__(self) -> None:
        super().__init__("block storage service")
        self.state = VolumeRecords()
        #: Servers whose volumes two hosts may connect, because of a live migration.
        self.moving: set[str] = set()
        self.deleted: list[str] = []
        #: The status of a volume after an image was written. "": the status by its attachments.
        self.writes_to = ""

    # --- users and the service itself ---
    def record_move(self, server: str, live: bool) -> None:
        """Record a move. Only in a live migration may two hosts connect the server's volumes."""
        self.moving -= {server}
        if live:
            self.moving |= {server}

    def make(self, looks: int = 0, size_gb: int = 1, multiattach: bool = False) -> str:
        """Create a volume and return its id.

        Args:
            looks: Requests for the volume until it is available. 0: at once.
            size_gb: Size in GiB.
            multiattach: True if several servers may have the volume.
        """
        volume_id = ids.new()
        self.state.volumes[volume_id] = Volume(
            volume_id, CREATING if looks else AVAILABLE, size_gb, multiattach=multiattach
        )
        self.state.creating[volume_id] = looks
        return volume_id

    def make_snapshot(self, volume_id: str) -> str:
        """Create a snapshot of a volume, as a user does, and return its id."""
        self.state.snapshots[snapshot_id := ids.new()] = volume_id
        return snapshot_id

    def begin_assisted(self, volume_id: str, status: str) -> str:
        """Record a snapshot for a host to take (``creating``) or merge (``deleting``)."""
        self.state.assisted[snapshot_id := ids.new()] = AssistedSnapshot(volume_id, status)
        return snapshot_id

    def list_awaited(self) -> list[str]:
        """Return the assisted snapshots for which the service still expects a host's report."""
        refused = {about for _, about in self.refused}
        return [
            snapshot_id
            for snapshot_id, snapshot in self.state.assisted.items()
            if snapshot.status in NEXT and snapshot.looks < 0 and snapshot_id not in refused
        ]

    def build_wanted_volume(self, volume_id: str, **more: Any) -> WantedVolume:
        """Return a volume as the API stores it in a request to attach the volume."""
        volume = self.state.volumes[volume_id]
        return WantedVolume(
            volume_id=volume_id, size_gb=volume.size_gb, multiattach=volume.multiattach, **more
        )

    def finish(self) -> None:
        """Complete all volumes that are being created or written."""
        for volume_id, volume in list(self.state.volumes.items()):
            if volume.status == CREATING:
                self.state.volumes[volume_id] = replace(volume, status=AVAILABLE)
            elif volume.status == DOWNLOADING:
                self._update_status(volume_id)

    def migrate(self, volume_id: str) -> str:
        """Begin to migrate a volume, and return the id of the new volume for its data."""
        volume = self.state.volumes.get(volume_id)
        if volume is None:
            return ids.new()
        new = self.make(size_gb=volume.size_gb)
        self._change(volume_id, migration=MIGRATING)
        self._change(new, migration=f"target:{volume_id}")
        return new

    def _change(self, volume_id: str, **values: Any) -> None:
        self.state.volumes[volume_id] = replace(self.state.volumes[volume_id], **values)

    # --- VolumeApi ---
    def volume(self, volume_id: str) -> Volume:
        self._speak("volume", volume_id)
        volume = self._read_volume(volume_id)
        if volume.status == CREATING:
            left = self.state.creating[volume_id] = self.state.creating[volume_id] - 1
            if left <= 0:
                volume = self.state.volumes[volume_id] = replace(volume, status=AVAILABLE)
        if volume.status == DOWNLOADING:
            left = self.state.writing[volume_id] = self.state.writing[volume_id] - 1
            if left <= 0:
                self._update_status(volume_id, self.writes_to)
                volume = self.state.volumes[volume_id]
        return self._answer(volume)

    def delete(self, volume_id: str) -> None:
        self._speak("delete", volume_id)
        volume = self.state.volumes.get(volume_id)
        if volume is not None:
            if volume.status != AVAILABLE:
                raise errors.BadRequest(f"Volume {volume_id} is {volume.status}.")
            del self.state.volumes[volume_id]
            self.deleted.append(volume_id)
        self._answer(None)

    def reimage(self, volume_id: str, image_id: str) -> None:
        self._speak("reimage", volume_id)
        volume = self._read_volume(volume_id)
        if volume.status != "reserved":
            raise errors.BadRequest(f"Volume {volume_id} is {volume.status}.")
        assert not self.hosts_of(volume_id), "a host has what is written"
        self.state.volumes[volume_id] = replace(volume, status=DOWNLOADING)
        self.state.writing[volume_id] = 2
        self.state.images[volume_id] = image_id
        self._answer(None)

    def delete_snapshot(self, snapshot_id: str) -> None:
        self._speak("delete_snapshot", snapshot_id)
        self.state.snapshots.pop(snapshot_id, None)
        self._answer(None)

    def snapshot(self, snapshot_id: str) -> VolumeSnapshot:
        self._speak("snapshot", snapshot_id)
        snapshot = self._read_assisted(snapshot_id)
        if snapshot.looks > 0:
            snapshot.looks -= 1
            if not snapshot.looks:
                snapshot.status = AVAILABLE
                self._switch_to_snapshot_file(snapshot.volume_id, snapshot_id)
        return self._answer(VolumeSnapshot(snapshot_id, snapshot.status, 1, snapshot.volume_id))

    def update_snapshot_status(self, snapshot_id: str, status: str) -> None:
        self._speak("update_snapshot_status", snapshot_id)
        snapshot = self._read_assisted(snapshot_id)
        if status not in NEXT.get(snapshot.status, ()):
            raise errors.BadRequest(f"Snapshot {snapshot_id} is {snapshot.status}, not {status}.")
        if status == DELETING:
            del self.state.assisted[snapshot_id]
        elif status == CREATING:
            snapshot.looks = snapshot.looks if snapshot.looks > 0 else 2
        else:
            snapshot.status = status
        self._answer(None)

    def _read_assisted(self, snapshot_id: str) -> AssistedSnapshot:
        if snapshot_id not in self.state.assisted:
            raise errors.NotFound(f"Snapshot {snapshot_id} could not be found.")
        return self.state.assisted[snapshot_id]

    def _switch_to_snapshot_file(self, volume_id: str, snapshot_id: str) -> None:
        """Let the volume's connections name the file that was created for the snapshot."""
        place = {"name": f"volume-{volume_id}.{snapshot_id}", "format": "qcow2"}
        for held in self._attachments_of(volume_id):
            connection = held.attachment.connection
            if connection:
                new_connection = {**connection, "data": {**connection["data"], **place}}
                held.attachment = replace(held.attachment, connection=new_connection)

    def attachments(self, server: str, volume_id: str | None = None) -> list[Attachment]:
        self._speak("attachments", volume_id or server)
        return self._answer(
            [
                held.attachment
                for held in self.state.held.values()
                if held.attachment.server_id == server
                and volume_id in (None, held.attachment.volume_id)
            ]
        )

    def attach(
        self,
        volume_id: str,
        server: str,
        connector: JsonObject | None = None,
        mountpoint: str | None = None,
        mode: str | None = None,
    ) -> Attachment:
        self._speak("attach", volume_id)
        volume = self._read_volume(volume_id)
        users = {held.attachment.server_id for held in self._attachments_of(volume_id)}
        is_free = volume.status == AVAILABLE or (
            volume.status == IN_USE and (users == {server} or volume.multiattach)
        )
        if not is_free:
            raise errors.BadRequest(f"Volume {volume_id} is {volume.status}.")
        attachment = Attachment(ids.new(), volume_id, server, "reserved")
        self.state.held[attachment.id] = HeldVolume(attachment)
        if connector is not None:
            attachment = self._connect(attachment.id, connector, mountpoint or "", mode or "")
        self._update_status(volume_id)
        return self._answer(attachment)

    def connect(
        self, attachment_id: str, connector: JsonObject, mountpoint: str, mode: str
    ) -> Attachment:
        self._speak("connect", self._volume_id_of(attachment_id))
        held = self._read_attachment(attachment_id)
        others = self._attachments_of(held.attachment.volume_id)
        if any(other.host is not None and other is not held for other in others) and not (
            self._read_volume(held.attachment.volume_id).multiattach
        ):
            raise errors.Conflict("Duplicate connectors detected.")
        return self._answer(self._connect(attachment_id, connector, mountpoint, mode))

    def _connect(
        self, attachment_id: str, connector: JsonObject, mountpoint: str, mode: str
    ) -> Attachment:
        held = self._read_attachment(attachment_id)
        host, volume = connector["host"], self._read_volume(held.attachment.volume_id)
        others = self.hosts_of(volume.id) - {host}
        if others and not volume.multiattach and held.attachment.server_id not in self.moving:
            raise AssertionError(f"{volume.id} would be at {host} beside {', '.join(others)}")
        if held.host not in (None, host):
            raise AssertionError(f"{attachment_id} of {held.host} would go to {host}")
        data = {"export": f"{volume.id}@{host}", "auth_password": "secret", "mode": mode}
        attachment = replace(
            held.attachment,
            status="attaching",
            connection={"driver_volume_type": "nfs", "data": {**data, "mountpoint": mountpoint}},
        )
        self.state.held[attachment_id] = HeldVolume(attachment, host)
        self._update_status(volume.id)
        return attachment

    def complete(self, attachment_id: str) -> None:
        self._speak("complete", self._volume_id_of(attachment_id))
        held = self._read_attachment(attachment_id)
        held.attachment = replace(held.attachment, status="attached")
        self._update_status(held.attachment.volume_id)
        self._answer(None)

    def detach(self, attachment_id: str) -> None:
        self._speak("detach", self._volume_id_of(attachment_id))
        held = self.state.held.pop(attachment_id, None)
        if held is not None:
            self._update_status(held.attachment.volume_id)
        self._answer(None)

    def end_migration(self, volume_id: str, new_volume_id: str, failed: bool) -> str:
        self._speak("end_migration", volume_id)
        old, new = self._read_volume(volume_id), self._read_volume(new_volume_id)
        if old.migration != MIGRATING or new.migration != f"target:{volume_id}":
            raise errors.BadRequest(f"Volume {volume_id} is not migrating to {new_volume_id}.")
        lost_data = new_volume_id if failed else volume_id
        if self._attachments_of(lost_data):
            raise AssertionError(f"the data of {lost_data} goes while a server may have it")
        del self.state.volumes[new_volume_id]
        if not failed:
            self.state.name_ids[volume_id] = new_volume_id
            for held in self._attachments_of(new_volume_id):
                held.attachment = replace(held.attachment, volume_id=volume_id)
        self._change(volume_id, migration="error" if failed else "success")
        self._update_status(volume_id)
        return self._answer(volume_id)

    # --- the state of the service ---
    def list_attachments(self) -> list[JsonObject]:
        """Return all attachments in the doctor's format."""
        return [asdict(held.attachment) for held in self.state.held.values()]

    def hosts_of(self, volume_id: str) -> set[str]:
        """Return the hosts that may have connected the volume."""
        return {held.host for held in self._attachments_of(volume_id) if held.host is not None}

    def _attachments_of(self, volume_id: str) -> list[HeldVolume]:
        return [held for held in self.state.held.values() if held.attachment.volume_id == volume_id]

    def _volume_id_of(self, attachment_id: str) -> str:
        held = self.state.held.get(attachment_id)
        return held.attachment.volume_id if held is not None else attachment_id

    def _read_volume(self, volume_id: str) -> Volume:
        volume = self.state.volumes.get(volume_id)
        if volume is None:
            raise errors.NotFound(f"Volume {volume_id} could not be found.")
        return volume

    def _read_attachment(self, attachment_id: str) -> HeldVolume:
        held = self.state.held.get(attachment_id)
        if held is None:
            raise errors.NotFound(f"Attachment {attachment_id} could not be found.")
        return held

    def _update_status(self, volume_id: str, status: str = "") -> None:
        """Set the volume's status to ``status``, or by default to the status by attachments."""
        if status:
            self.state.volumes[volume_id] = replace(self.state.volumes[volume_id], status=status)
            return
        volume, attachments = self.state.volumes[volume_id], self._attachments_of(volume_id)
        status = (
            IN_USE
            if any(held.attachment.status == "attached" for held in attachments)
            else "attaching"
            if any(held.host is not None for held in attachments)
            else "reserved"
            if attachments
            else AVAILABLE
        )
        self.state.volumes[volume_id] = replace(volume, status=status)
