# SPDX-License-Identifier: Apache-2.0
"""Records which volumes each guest on this host has, and attaches and detaches them.

Called by ``virt.libvirt.driver`` and ``guests``. The record is a file in the guest's folder with
the volumes and their connections, which only the agent may read. A volume is recorded before it is
connected, and removed from the record after it is disconnected. So every connected volume is in a
record, even after a crash.

Invariant: a guest gets only verified volumes. A volume leaves the stored definition only after the
release by the running guest.
"""

from __future__ import annotations

import json
import os
import re
import threading
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree.ElementTree import Element

from common.domain.command_progress import CommandPhase
from common.domain.json_types import JsonObject
from common.domain.models import AttachedVolume, DomainState
from common.domain.wire import from_wire, to_wire
from common.service.log import get_logger
from compute_agent.verb_context import Cancelled, VerbContext, VerbFailed
from compute_agent.virt import volumes
from compute_agent.virt.driver import RUNNING
from compute_agent.virt.libvirt.domains import power
from compute_agent.virt.libvirt.domains.connection import (
    AFFECT_LIVE,
    BLOCK_RESIZE_BYTES,
    Connection,
    GuestDomain,
)
from compute_agent.virt.libvirt.domains.unplugging import RELEASE_SECONDS, unplug
from compute_agent.virt.libvirt.volumes.connectors import Connectors
from compute_agent.virt.libvirt.xml import domain_xml, volume_xml
from compute_agent.virt.libvirt.xml.volume_xml import VolumeSource

log = get_logger(__name__)
FILE, COPIED_FILE = "volumes{}.json", "volume-copied{}.json"
NOT_IN_NAME = re.compile(r"[^\w.-]", re.ASCII)
#: Model of the controller that a guest gets with the first SCSI disk.
SCSI_MODEL = "virtio-scsi"
NO_SERIALS: Mapping[str, str] = {}


@dataclass(frozen=True)
class GuestVolumes:
    """The volumes of all guests.

    If hosts share the folder ``instances``, each host has a separate record of a guest, because
    connections differ by host.

    Attributes:
        instances: Folder of the guests' folders.
        connectors: Connect and disconnect volumes.
    """

    instances: Path
    connectors: Connectors = field(default_factory=Connectors)
    _locks: defaultdict[str, threading.Lock] = field(
        default_factory=lambda: defaultdict(threading.Lock)
    )

    def file(self, server: str, name: str = FILE) -> Path:
        """Return the path of one of the guest's records on this host.

        The record is that of the volumes (``FILE``) or of a complete copy (``COPIED_FILE``).
        """
        host = NOT_IN_NAME.sub("_", str(self.connectors.about.get("host", "")))
        return self.instances / server / name.format(f".{host}" if host else "")

    def of(self, server: str) -> list[AttachedVolume]:
        """Return the guest's recorded volumes, or [] without a record.

        A volume that ``attach`` added comes after the older volumes.
        """
        return [from_wire(AttachedVolume, entry) for entry in _read_entries(self.file(server))]

    def copied(self, server: str) -> list[AttachedVolume]:
        """Return the volume whose copy is complete, with the connection of the new place.

        The list has at most one element, and is empty while a copy is in progress. See
        ``volume_copies``.
        """
        return [
            from_wire(AttachedVolume, entry)
            for entry in _read_entries(self.file(server, COPIED_FILE))
        ]

    def keep_copied(self, server: str, copied_volumes: list[AttachedVolume]) -> None:
        """Record the volume whose copy is complete. [] records that no complete copy exists."""
        _write_entries(
            self.file(server, COPIED_FILE), [to_wire(volume) for volume in copied_volumes]
        )

    def placed(
        self, requested_volumes: Iterable[AttachedVolume]
    ) -> tuple[tuple[AttachedVolume, VolumeSource], ...]:
        """Return each volume with the place at which QEMU finds the volume.

        The volumes are neither connected nor read.

        Raises:
            VerbFailed: This host cannot use the connection, QoS or block sizes of a volume.
        """
        return tuple((volume, self.connectors.source(volume)) for volume in requested_volumes)

    def keep(self, server: str, requested_volumes: Iterable[AttachedVolume]) -> None:
        """Record that the guest has exactly these volumes, and disconnect the others.

        Added volumes are not connected. A recorded volume with another connection counts as another
        volume. A multiattach volume that is in the record of another guest of this host stays
        connected. Without the guest's folder this method has no effect.

        Raises:
            VerbFailed: A volume cannot be disconnected.
        """
        if not (self.instances / server).exists():
            return
        requested_volumes = list(requested_volumes)
        kept_keys = {(volume.volume_id, _connection_key(volume)) for volume in requested_volumes}
        for volume in self.of(server):
            if (volume.volume_id, _connection_key(volume)) not in kept_keys:
                self._release(server, volume)
        self._write(server, requested_volumes)

    def relocate(
        self, libvirt: Connection, server: str, volume: AttachedVolume, source: VolumeSource
    ) -> None:
        """Change a volume's place in stored definition and record, and disconnect the old place.

        A place is where QEMU finds the data of a volume. The place that a running guest uses is not
        changed.

        Args:
            libvirt: Connection to libvirtd.
            server: Id of the server.
            volume: The volume with the connection of the new place.
            source: The new place.

        Raises:
            VerbFailed: The old place cannot be disconnected.
        """
        stored = libvirt.describe(server, stored=True)
        libvirt.define(volume_xml.with_place(stored, volume.volume_id, source))
        self.keep(
            server,
            [
                volume if present.volume_id == volume.volume_id else present
                for present in self.of(server)
            ],
        )

    def keep_only(self, libvirt: Connection, server: str, ids: Collection[str]) -> None:
        """Remove all volumes that are not in ``ids`` from a guest that is about to start.

        Definition and record change, and the volumes are disconnected. A running guest is not
        changed.

        Raises:
            VerbFailed: The guest does not exist, is paused or suspended and has another volume, or
                a volume cannot be disconnected.
        """
        domain = power.find(libvirt, server)
        stored = libvirt.describe(server, stored=True)
        present_ids = {
            *volume_xml.find_disks(stored),
            *(volume.volume_id for volume in self.of(server)),
        }
        others = sorted(present_ids - set(ids))
        if not others or domain.power_state == RUNNING:
            return
        if domain.active or domain.saved:
            raise volumes.foreign(others)
        for volume_id in others:
            log.warning(
                "a server starts without a volume, which was detached",
                server=server,
                volume=volume_id,
            )
            stored = volume_xml.without(stored, volume_id)
        libvirt.define(stored)
        for volume_id in others:
            self._forget(server, volume_id)

    def complete(
        self,
        libvirt: Connection,
        server: str,
        needed: Iterable[AttachedVolume],
        context: VerbContext,
    ) -> None:
        """Attach the missing volumes of ``needed`` to a guest that is off, before its start.

        The boot order of the stored definition is updated too. An active or suspended guest is not
        changed.

        Raises:
            VerbFailed: The guest does not exist, or a volume cannot be connected or attached.
            Cancelled: The verb was cancelled. Some volumes may be attached.
        """
        domain = power.find(libvirt, server)
        if domain.active or domain.saved:
            return
        present_ids = volume_xml.find_disks(libvirt.describe(server, stored=True))
        missing_volumes = [
            candidate for candidate in needed if candidate.volume_id not in present_ids
        ]
        self.placed(missing_volumes)
        for volume in missing_volumes:
            log.warning(
                "a server lacks a volume, which is attached now",
                server=server,
                volume=volume.volume_id,
            )
            self.attach(libvirt, server, domain.fence, volume, context)
        if boot_volumes := [candidate for candidate in needed if domain_xml.boots(candidate)]:
            stored = libvirt.describe(server, stored=True)
            if (ordered := volume_xml.booted_from(stored, boot_volumes)) != stored:
                libvirt.define(ordered)

    def connect(self, server: str, context: VerbContext) -> None:
        """Connect and verify the volumes of a guest that is about to start.

        The record of a copy is dropped, because the copy becomes outdated when the guest writes.

        Raises:
            VerbFailed: A volume is not available, too small, or another device than before.
            Cancelled: The verb was cancelled. Some volumes may be connected.
        """
        self.keep_copied(server, [])
        for volume in self.of(server):
            context.phase(CommandPhase.CONNECTING_VOLUMES)
            if context.cancelled():
                raise Cancelled
            self._connect(server, volume)

    def _connect(self, server: str, volume: AttachedVolume) -> int:
        """Connect the volume, record its serial if none is recorded, and return the size in bytes.

        Raises:
            VerbFailed: The volume is not available, too small, or another device than before.
                Another device stays connected.
        """
        with self._locks[volume.volume_id]:
            device = self.connectors.connect(volume)
        recorded_serial = self._read_serials(server).get(volume.volume_id, "")
        if recorded_serial and device.serial and device.serial != recorded_serial:
            raise VerbFailed(
                f"The device that this host found for volume {volume.volume_id} is another device than before, and is "
                "not attached to the server; check the volume service.",
                details=f"the serial is {device.serial[:100]!r}, and was {recorded_serial[:100]!r}",
            )
        if device.serial and not recorded_serial:
            self._write(server, self.of(server), {volume.volume_id: device.serial})
        return device.size_bytes

    def _release(self, server: str, volume: AttachedVolume) -> None:
        """Disconnect the volume, unless another guest's record has the same multiattach volume.

        Only guests of this host count.

        Raises:
            VerbFailed: The volume cannot be disconnected.
        """
        with self._locks[volume.volume_id]:
            if not (volume.multiattach and self._is_elsewhere(server, volume.volume_id)):
                self.connectors.disconnect(volume)

    def _is_elsewhere(self, server: str, volume_id: str) -> bool:
        name = self.file(server).name
        return any(
            entry.get("volume_id") == volume_id
            for path in self.instances.glob(f"*/{name}")
            if path.parent.name != server
            for entry in _read_entries(path)
        )

    def _read_serials(self, server: str) -> dict[str, str]:
        """Return the recorded serials of the guest's devices by volume id."""
        return {
            entry["volume_id"]: entry["serial"]
            for entry in _read_entries(self.file(server))
            if entry.get("serial")
        }

    def attach(
        self,
        libvirt: Connection,
        server: str,
        fence: int,
        volume: AttachedVolume,
        context: VerbContext,
    ) -> DomainState:
        """Connect the volume, and attach it to the stored definition, and to the guest if active.

        The volume and the fence are recorded. A recorded volume with this id is replaced.

        Returns:
            The state of the domain.

        Raises:
            VerbFailed: The guest does not exist or is suspended, or the volume is not available or
                cannot be attached. Unless the guest has the volume, the volume is disconnected
                again and removed from the record. A failure to disconnect is only logged.
            Cancelled: The verb was cancelled. The volume stays connected and recorded.
        """
        context.phase(CommandPhase.ATTACHING_VOLUME)
        source = self.connectors.source(volume)
        domain = changeable(libvirt, server)
        if volume.volume_id not in volume_xml.find_disks(libvirt.describe(server)):
            volumes.refuse_cold_bus(volume, domain.power_state)
        recorded_volumes = self.of(server)
        others = [
            recorded for recorded in recorded_volumes if recorded.volume_id != volume.volume_id
        ]
        self._write(server, [*others, volume])
        try:
            self._connect(server, volume)
            if context.cancelled():
                raise Cancelled
            self._plug_in(libvirt, server, domain, volume, source)
        except VerbFailed:
            if not _has_volume(libvirt, server, volume.volume_id):
                self._forget_after_failure(server, volume.volume_id)
            raise
        libvirt.mark(server, fence=fence)
        return power.state(power.find(libvirt, server))

    def _plug_in(
        self,
        libvirt: Connection,
        server: str,
        guest: GuestDomain,
        volume: AttachedVolume,
        source: VolumeSource,
    ) -> None:
        running, stored = libvirt.describe(server), libvirt.describe(server, stored=True)
        name = domain_xml.volume_name(volume, volume_xml.names(running, stored))
        if guest.active and volume.volume_id not in volume_xml.find_disks(running):
            if volume.bus == "scsi" and not volume_xml.has_scsi(running):
                controller = volume_xml.scsi_controller(SCSI_MODEL)
                libvirt.on(
                    server,
                    "give the guest a SCSI controller",
                    lambda domain: domain.attachDeviceFlags(controller, AFFECT_LIVE),
                )
            disk = volume_xml.text(volume_xml.element(volume, source, name))
            libvirt.on(
                server,
                "attach the volume",
                lambda domain: domain.attachDeviceFlags(disk, AFFECT_LIVE),
            )
            running = libvirt.describe(server)
        if volume.volume_id not in volume_xml.find_disks(stored):
            # The guest may already have the volume. Store the name and address from there.
            running_disk = (
                volume_xml.find_disks(running).get(volume.volume_id) if guest.active else None
            )
            name = name if running_disk is None else volume_xml.name_of(running_disk)
            place = volume_xml.addresses(running).get(volume.volume_id) if guest.active else None
            libvirt.define(
                volume_xml.with_disk(
                    libvirt.describe(server, stored=True),
                    volume_xml.element(volume, source, name, place),
                    SCSI_MODEL,
                )
            )

    def detach(
        self,
        libvirt: Connection,
        server: str,
        fence: int,
        volume_id: str,
        context: VerbContext,
        seconds: float = RELEASE_SECONDS,
    ) -> DomainState | None:
        """Detach the volume from the guest and its definition, and disconnect the volume.

        Returns:
            The state of the domain, or None without a guest. Then a recorded volume is only
            disconnected.

        Raises:
            VerbFailed: The guest does not release the volume within ``seconds``, is paused or
                suspended, or the bus does not support hot plug. The volume stays attached. Or the
                volume was detached and cannot be disconnected.
            Cancelled: The verb was cancelled while the guest held the volume.
        """
        volumes.check_id(volume_id)
        context.phase(CommandPhase.DETACHING_VOLUME)
        if libvirt.find(server) is None:
            self._forget(server, volume_id)
            return None
        for volume in self.of(server):
            if volume.volume_id == volume_id:
                volumes.refuse_cold_bus(volume, changeable(libvirt, server).power_state)
        unplug(
            libvirt,
            server,
            "volume",
            lambda: changeable(libvirt, server),
            lambda xml: _read_alias(xml, volume_id),
            lambda domain, refusal: volumes.held(volume_id, domain.power_state, refusal),
            context,
            seconds,
        )
        stored = libvirt.describe(server, stored=True)
        if volume_id in volume_xml.find_disks(stored):
            libvirt.define(volume_xml.without(stored, volume_id))
        self._forget(server, volume_id)
        libvirt.mark(server, fence=fence)
        return power.state(power.find(libvirt, server))

    def disconnect(self, libvirt: Connection, server: str, fence: int) -> None:
        """Detach and disconnect all volumes of a guest, which must be off or not on this host.

        A multiattach volume of another guest of this host stays connected. An existing guest gets
        the fence.

        Raises:
            VerbFailed: The guest is active, or a volume cannot be disconnected.
        """
        power.refuse_active(libvirt, server)
        if libvirt.find(server) is not None:
            for volume in self.of(server):
                stored = libvirt.describe(server, stored=True)
                libvirt.define(volume_xml.without(stored, volume.volume_id))
            libvirt.mark(server, fence=fence)
        self.keep(server, [])

    def extend(self, libvirt: Connection, server: str, volume: AttachedVolume) -> None:
        """Record the new size of a volume that has grown, and show the size to an active guest.

        Raises:
            VerbFailed: The guest does not exist, does not have the volume or is suspended, or this
                host does not see the new size.
        """
        domain, recorded_volumes = changeable(libvirt, server), self.of(server)
        old_volume = next(
            (recorded for recorded in recorded_volumes if recorded.volume_id == volume.volume_id),
            None,
        )
        if old_volume is None:
            raise volumes.unknown(volume.volume_id)
        new_volume = volumes.grown(old_volume, volume.size_gb)
        size = self._connect(server, new_volume)
        disk = volume_xml.find_disks(libvirt.describe(server)).get(volume.volume_id)
        if domain.active and disk is not None:
            name = volume_xml.name_of(disk)
            libvirt.on(
                server,
                "show the guest the volume's new size",
                lambda domain: domain.blockResize(name, size, BLOCK_RESIZE_BYTES),
            )
        self._write(
            server,
            [new_volume if recorded is old_volume else recorded for recorded in recorded_volumes],
        )

    def _forget_after_failure(self, server: str, volume_id: str) -> None:
        """Disconnect a volume that could not be attached, and remove it from the record.

        If the disconnection fails, this is logged. The volume stays in the record, and is
        disconnected when the guest is removed.
        """
        try:
            self._forget(server, volume_id)
        except VerbFailed as problem:
            log.warning(
                "a volume stays connected",
                volume=volume_id,
                problem=problem,
                details=problem.details,
            )

    def _forget(self, server: str, volume_id: str) -> None:
        recorded_volumes = self.of(server)
        other_volumes = [volume for volume in recorded_volumes if volume.volume_id != volume_id]
        for volume in recorded_volumes:
            if volume not in other_volumes:
                self._release(server, volume)
        if other_volumes != recorded_volumes:
            self._write(server, other_volumes)

    def _write(
        self,
        server: str,
        new_volumes: list[AttachedVolume],
        serials: Mapping[str, str] = NO_SERIALS,
    ) -> None:
        """Replace the record by these volumes. [] removes the record.

        ``serials`` are new serials by volume id. Recorded serials of unchanged connections are
        kept.
        """
        path, all_serials = self.file(server), dict(serials)
        for item in _read_entries(path):
            # The serial is valid only for the same connection, because another may lead to another
            # device.
            if item.get("serial") and any(
                _connection_key(from_wire(AttachedVolume, item)) == _connection_key(volume)
                for volume in new_volumes
            ):
                all_serials[item["volume_id"]] = item["serial"]
        _write_entries(
            path,
            [
                {**to_wire(item), "serial": all_serials.get(item.volume_id, "")}
                for item in new_volumes
            ],
        )


def _write_entries(path: Path, entries: list[JsonObject]) -> None:
    if not entries:
        path.unlink(missing_ok=True)
        return
    part = path.with_name(f"{path.name}.part")
    part.unlink(missing_ok=True)
    with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        json.dump(entries, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)


def _read_entries(path: Path) -> list[JsonObject]:
    """Return the entries of a record, or [] without a file."""
    try:
        return list(json.loads(path.read_text()))
    except FileNotFoundError:
        return []


def _connection_key(volume: AttachedVolume) -> str:
    """Return the connection as text, without the id of the attachment, for comparisons."""
    fields = {name: value for name, value in volume.connection.items() if name != "attachment_id"}
    return json.dumps(fields, sort_keys=True)


def changeable(libvirt: Connection, server: str) -> GuestDomain:
    """Return the server's domain, or raise VerbFailed if the domain is suspended or missing."""
    domain = power.find(libvirt, server)
    if domain.saved:
        raise volumes.suspended()
    return domain


def disk_of(libvirt: Connection, server: str, volume_id: str) -> Element:
    """Return the element of the volume's disk in the domain's XML, or raise VerbFailed without one.

    For an active domain this is the live XML.
    """
    disk = volume_xml.find_disks(libvirt.describe(server)).get(volume_id)
    if disk is None:
        raise volumes.unknown(volume_id)
    return disk


def _has_volume(libvirt: Connection, server: str, volume_id: str) -> bool:
    """Return True if the active domain or the stored definition has the volume."""
    return any(
        volume_id in volume_xml.find_disks(libvirt.describe(server, stored=stored))
        for stored in (False, True)
    )


def _read_alias(xml: str, volume_id: str) -> str | None:
    disk = volume_xml.find_disks(xml).get(volume_id)
    return None if disk is None else volume_xml.alias(disk)
