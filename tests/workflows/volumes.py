# SPDX-License-Identifier: Apache-2.0
"""A block storage service in memory, as the conductor uses it; see ``neighbours`` for what can go
wrong. It keeps the rules itself: a volume is never let to two servers, nor to two hosts unless one
server moves while it runs."""

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
from tests.workflows.neighbours import Neighbour

if TYPE_CHECKING:
    from tests.workflows.simulator import Cloud

#: What the service takes as the status of a snapshot that a host takes or merges.
NEXT = {CREATING: (CREATING, ERROR), DELETING: (DELETING, ERROR_DELETING)}
USER = RequestContext(user_id="user", project_id="project", roles=("member",), request_id="")


@dataclass
class HeldVolume:
    """An attachment, and the host that may connect by it."""

    attachment: Attachment
    host: str | None = None


@dataclass
class AssistedSnapshot:
    """A snapshot that a host takes or merges. ``looks``: until the service is done, once it has
    heard of it; -1: it has not."""

    volume_id: str
    status: str
    looks: int = -1


@dataclass
class VolumeRecords:
    """What it remembers. ``creating``: volume -> looks until it is there; ``name_ids``: migrated
    volume -> where its data is."""

    volumes: dict[str, Volume] = field(default_factory=dict)
    held: dict[str, HeldVolume] = field(default_factory=dict)
    creating: dict[str, int] = field(default_factory=dict)
    images: dict[str, str] = field(default_factory=dict)  #: volume -> what was written
    writing: dict[str, int] = field(default_factory=dict)  #: volume -> looks until it is written
    snapshots: dict[str, str] = field(default_factory=dict)  #: id -> of which volume
    assisted: dict[str, AssistedSnapshot] = field(default_factory=dict)  #: those that hosts take
    name_ids: dict[str, str] = field(default_factory=dict)


def attach(cloud: Cloud, server: str, volume_id: str, **more: Any) -> str:
    """Ask for a volume as the API does."""
    wanted = cloud.volumes.wanted(volume_id, **more)
    row = states.row("attach_volume")
    return cloud.accept(
        server,
        lambda tx: volumes.attach(
            tx, row, server, context=USER, project_id="project", volume=wanted
        ),
    )


def detach(cloud: Cloud, server: str, volume_id: str) -> str:
    """Ask for the end of it."""
    row = states.row("detach_volume")
    return cloud.accept(
        server,
        lambda tx: volumes.detach(
            tx, row, server, context=USER, project_id="project", volume_id=volume_id
        ),
    )


def swap(cloud: Cloud, server: str, volume_id: str) -> str:
    """The service migrates a volume that a server has, and asks for the swap as the API does."""
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
    """The block storage service says that one has grown."""
    row = cloud.store.read(lambda tx: volumes.show(tx, server, volume_id))
    return cloud.ask(
        server, "extend_volume", args={"block_device": row.uuid, "volume_id": volume_id}
    )


def of(cloud: Cloud, server: str) -> dict[str, str]:
    """The status of each volume of a server."""
    rows = cloud.store.read(lambda tx: volumes.list_of(tx, server))
    return {str(row.volume_id): row.status for row in rows}


def take_snapshot(cloud: Cloud, server: str, volume_id: str) -> str:
    """The service has made a file for a snapshot, and asks for it as the API does."""
    snapshot = cloud.volumes.begin_assisted(volume_id, CREATING)
    about = {"snapshot_id": snapshot, "new_file": f"volume-{volume_id}.{snapshot}"}
    return _assist(cloud, server, "volume_snapshot_create", volume_id, about)


def merge_snapshot(cloud: Cloud, server: str, volume_id: str) -> str:
    """The service deletes a snapshot, and asks for the merge as the API does."""
    snapshot = cloud.volumes.begin_assisted(volume_id, DELETING)
    about = {"snapshot_id": snapshot, "file": None, "into": None}
    return _assist(cloud, server, "volume_snapshot_delete", volume_id, about)


def _assist(cloud: Cloud, server: str, key: str, volume_id: str, about: dict[str, Any]) -> str:
    row, snapshot = states.row(key), cloud.volumes.state.assisted[about["snapshot_id"]]
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
                details=about,
            ),
        )
    except errors.Problem:
        snapshot.status = ERROR
        raise
    except BaseException:
        cloud.volumes.refused.append((key, about["snapshot_id"]))  # no answer came
        raise


def boots(cloud: Cloud, server: str) -> bool:
    """Does a server boot from a volume?"""
    return cloud.store.read(lambda tx: volumes.root_of(tx, server)) is not None


def insert(tx: Connection, server: str, wanted: Sequence[WantedVolume]) -> None:
    """The volumes that a server is created with."""
    boots_from_volume = any(one.more.get("boot_index") == 0 for one in wanted)
    local = [] if boots_from_volume else [device_names.root_name(None)]
    wanted = sorted(wanted, key=lambda one: one.more.get("boot_index") != 0)
    names = device_names.assign_names(local, [one.bus for one in wanted])
    volumes.insert(
        tx,
        [
            {
                "uuid": ids.new(),
                "server_id": server,
                "volume_id": one.volume_id,
                "status": BlockDeviceStatus.RESERVED,
                "size_gb": one.size_gb,
                "device_name": name,
                "delete_on_termination": one.delete_on_termination,
                "multiattach": one.multiattach,
                **one.more,
            }
            for one, name in zip(wanted, names, strict=True)
        ],
    )


class Volumes(Neighbour, interface=VolumeApi):
    """Implements ``conductor.engine.external_services.VolumeApi``. ``moving``: servers that may be
    connected at two hosts just now, which whoever tests says."""

    def __init__(self) -> None:
        super().__init__("block storage service")
        self.state = VolumeRecords()
        self.moving: set[str] = set()
        self.deleted: list[str] = []
        self.writes_to = ""  #: the status of a volume that was written; "": by its attachments

    # --- what users do ---
    def moves(self, server: str, live: bool) -> None:
        """May the server's volumes be let to two hosts from now on?"""
        self.moving -= {server}
        if live:
            self.moving |= {server}

    def make(self, looks: int = 0, size_gb: int = 1, multiattach: bool = False) -> str:
        """A volume that is there after so many looks."""
        volume_id = ids.new()
        self.state.volumes[volume_id] = Volume(
            volume_id, CREATING if looks else AVAILABLE, size_gb, multiattach=multiattach
        )
        self.state.creating[volume_id] = looks
        return volume_id

    def make_snapshot(self, volume_id: str) -> str:
        """A snapshot of a volume, made by its user."""
        self.state.snapshots[made := ids.new()] = volume_id
        return made

    def begin_assisted(self, volume_id: str, status: str) -> str:
        """A snapshot that a host is to take (``creating``) or to merge (``deleting``)."""
        self.state.assisted[made := ids.new()] = AssistedSnapshot(volume_id, status)
        return made

    def awaited(self) -> list[str]:
        """Snapshots of which the service still waits to hear, and has not refused to."""
        refused = {about for _, about in self.refused}
        return [
            snapshot
            for snapshot, one in self.state.assisted.items()
            if one.status in NEXT and one.looks < 0 and snapshot not in refused
        ]

    def wanted(self, volume_id: str, **more: Any) -> WantedVolume:
        """What the API freezes of a volume that a server is to get."""
        found = self.state.volumes[volume_id]
        return WantedVolume(
            volume_id=volume_id, size_gb=found.size_gb, multiattach=found.multiattach, **more
        )

    def finish(self) -> None:
        """All volumes are there."""
        for volume_id, found in list(self.state.volumes.items()):
            if found.status == CREATING:
                self.state.volumes[volume_id] = replace(found, status=AVAILABLE)
            elif found.status == DOWNLOADING:
                self._judge(volume_id)

    def migrate(self, volume_id: str) -> str:
        """The volume into which the data of this one is to go."""
        found = self.state.volumes.get(volume_id)
        if found is None:
            return ids.new()
        new = self.make(size_gb=found.size_gb)
        self._note(volume_id, migration=MIGRATING)
        self._note(new, migration=f"target:{volume_id}")
        return new

    def _note(self, volume_id: str, **values: Any) -> None:
        self.state.volumes[volume_id] = replace(self.state.volumes[volume_id], **values)

    # --- what the conductor asks ---
    def volume(self, volume_id: str) -> Volume:
        self._speak("volume", volume_id)
        found = self._known(volume_id)
        if found.status == CREATING:
            left = self.state.creating[volume_id] = self.state.creating[volume_id] - 1
            if left <= 0:
                found = self.state.volumes[volume_id] = replace(found, status=AVAILABLE)
        if found.status == DOWNLOADING:
            left = self.state.writing[volume_id] = self.state.writing[volume_id] - 1
            if left <= 0:
                self._judge(volume_id, self.writes_to)
                found = self.state.volumes[volume_id]
        return self._answer(found)

    def delete(self, volume_id: str) -> None:
        self._speak("delete", volume_id)
        found = self.state.volumes.get(volume_id)
        if found is not None:
            if found.status != AVAILABLE:
                raise errors.BadRequest(f"Volume {volume_id} is {found.status}.")
            del self.state.volumes[volume_id]
            self.deleted.append(volume_id)
        self._answer(None)

    def reimage(self, volume_id: str, image_id: str) -> None:
        self._speak("reimage", volume_id)
        found = self._known(volume_id)
        if found.status != "reserved":
            raise errors.BadRequest(f"Volume {volume_id} is {found.status}.")
        assert not self.hosts_of(volume_id), "a host has what is written"
        self.state.volumes[volume_id] = replace(found, status=DOWNLOADING)
        self.state.writing[volume_id] = 2
        self.state.images[volume_id] = image_id
        self._answer(None)

    def delete_snapshot(self, snapshot_id: str) -> None:
        self._speak("delete_snapshot", snapshot_id)
        self.state.snapshots.pop(snapshot_id, None)
        self._answer(None)

    def snapshot(self, snapshot_id: str) -> VolumeSnapshot:
        self._speak("snapshot", snapshot_id)
        found = self._assisted(snapshot_id)
        if found.looks > 0:
            found.looks -= 1
            if not found.looks:
                found.status = AVAILABLE
                self._go_over(found.volume_id, snapshot_id)
        return self._answer(VolumeSnapshot(snapshot_id, found.status, 1, found.volume_id))

    def update_snapshot_status(self, snapshot_id: str, status: str) -> None:
        self._speak("update_snapshot_status", snapshot_id)
        found = self._assisted(snapshot_id)
        if status not in NEXT.get(found.status, ()):
            raise errors.BadRequest(f"Snapshot {snapshot_id} is {found.status}, not {status}.")
        if status == DELETING:
            del self.state.assisted[snapshot_id]
        elif status == CREATING:
            found.looks = found.looks if found.looks > 0 else 2
        else:
            found.status = status
        self._answer(None)

    def _assisted(self, snapshot_id: str) -> AssistedSnapshot:
        if snapshot_id not in self.state.assisted:
            raise errors.NotFound(f"Snapshot {snapshot_id} could not be found.")
        return self.state.assisted[snapshot_id]

    def _go_over(self, volume_id: str, snapshot_id: str) -> None:
        """The volume is in the file that was made for the snapshot."""
        place = {"name": f"volume-{volume_id}.{snapshot_id}", "format": "qcow2"}
        for held in self._of(volume_id):
            known = held.attachment.connection
            if known:
                there = {**known, "data": {**known["data"], **place}}
                held.attachment = replace(held.attachment, connection=there)

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
        found = self._known(volume_id)
        users = {held.attachment.server_id for held in self._of(volume_id)}
        free = found.status == AVAILABLE or (
            found.status == IN_USE and (users == {server} or found.multiattach)
        )
        if not free:
            raise errors.BadRequest(f"Volume {volume_id} is {found.status}.")
        made = Attachment(ids.new(), volume_id, server, "reserved")
        self.state.held[made.id] = HeldVolume(made)
        if connector is not None:
            made = self._connected(made.id, connector, mountpoint or "", mode or "")
        self._judge(volume_id)
        return self._answer(made)

    def connect(
        self, attachment_id: str, connector: JsonObject, mountpoint: str, mode: str
    ) -> Attachment:
        self._speak("connect", self._about(attachment_id))
        held = self._held(attachment_id)
        others = self._of(held.attachment.volume_id)
        if any(other.host is not None and other is not held for other in others) and not (
            self._known(held.attachment.volume_id).multiattach
        ):
            raise errors.Conflict("Duplicate connectors detected.")
        return self._answer(self._connected(attachment_id, connector, mountpoint, mode))

    def _connected(
        self, attachment_id: str, connector: JsonObject, mountpoint: str, mode: str
    ) -> Attachment:
        held = self._held(attachment_id)
        host, volume = connector["host"], self._known(held.attachment.volume_id)
        others = self.hosts_of(volume.id) - {host}
        if others and not volume.multiattach and held.attachment.server_id not in self.moving:
            raise AssertionError(f"{volume.id} would be at {host} beside {', '.join(others)}")
        if held.host not in (None, host):
            raise AssertionError(f"{attachment_id} of {held.host} would go to {host}")
        data = {"export": f"{volume.id}@{host}", "auth_password": "secret", "mode": mode}
        made = replace(
            held.attachment,
            status="attaching",
            connection={"driver_volume_type": "nfs", "data": {**data, "mountpoint": mountpoint}},
        )
        self.state.held[attachment_id] = HeldVolume(made, host)
        self._judge(volume.id)
        return made

    def complete(self, attachment_id: str) -> None:
        self._speak("complete", self._about(attachment_id))
        held = self._held(attachment_id)
        held.attachment = replace(held.attachment, status="attached")
        self._judge(held.attachment.volume_id)
        self._answer(None)

    def detach(self, attachment_id: str) -> None:
        self._speak("detach", self._about(attachment_id))
        held = self.state.held.pop(attachment_id, None)
        if held is not None:
            self._judge(held.attachment.volume_id)
        self._answer(None)

    def end_migration(self, volume_id: str, new_volume_id: str, failed: bool) -> str:
        self._speak("end_migration", volume_id)
        old, new = self._known(volume_id), self._known(new_volume_id)
        if old.migration != MIGRATING or new.migration != f"target:{volume_id}":
            raise errors.BadRequest(f"Volume {volume_id} is not migrating to {new_volume_id}.")
        goes = new_volume_id if failed else volume_id
        if self._of(goes):
            raise AssertionError(f"the data of {goes} goes while a server may have it")
        del self.state.volumes[new_volume_id]
        if not failed:
            self.state.name_ids[volume_id] = new_volume_id
            for held in self._of(new_volume_id):
                held.attachment = replace(held.attachment, volume_id=volume_id)
        self._note(volume_id, migration="error" if failed else "success")
        self._judge(volume_id)
        return self._answer(volume_id)

    # --- what it is like ---
    def told(self) -> list[JsonObject]:
        """All attachments, as the doctor asks for them."""
        return [asdict(held.attachment) for held in self.state.held.values()]

    def hosts_of(self, volume_id: str) -> set[str]:
        """Hosts that may have it."""
        return {held.host for held in self._of(volume_id) if held.host is not None}

    def _of(self, volume_id: str) -> list[HeldVolume]:
        return [held for held in self.state.held.values() if held.attachment.volume_id == volume_id]

    def _about(self, attachment_id: str) -> str:
        held = self.state.held.get(attachment_id)
        return held.attachment.volume_id if held is not None else attachment_id

    def _known(self, volume_id: str) -> Volume:
        found = self.state.volumes.get(volume_id)
        if found is None:
            raise errors.NotFound(f"Volume {volume_id} could not be found.")
        return found

    def _held(self, attachment_id: str) -> HeldVolume:
        held = self.state.held.get(attachment_id)
        if held is None:
            raise errors.NotFound(f"Attachment {attachment_id} could not be found.")
        return held

    def _judge(self, volume_id: str, status: str = "") -> None:
        """What its status is by its attachments."""
        if status:
            self.state.volumes[volume_id] = replace(self.state.volumes[volume_id], status=status)
            return
        found, held = self.state.volumes[volume_id], self._of(volume_id)
        status = (
            IN_USE
            if any(one.attachment.status == "attached" for one in held)
            else "attaching"
            if any(one.host is not None for one in held)
            else "reserved"
            if held
            else AVAILABLE
        )
        self.state.volumes[volume_id] = replace(found, status=status)
