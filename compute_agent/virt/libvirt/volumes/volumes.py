# SPDX-License-Identifier: Apache-2.0
"""The volumes of guests on this host: which each has, and how they come and go.

Called by ``virt.libvirt.driver`` and ``guests``. Which volumes a guest has, with their connections,
stands in a file of its folder, readable by this agent alone: written before a volume is connected,
and without it only after the host has let go, so that whatever is killed in between nothing is
connected that no file names. Must stay true: no guest sees a volume that was not verified; a volume
leaves the stored definition only when the running guest has let go of it.
"""

from __future__ import annotations

import json
import logging
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

log = logging.getLogger(__name__)
FILE, COPIED_FILE = "volumes{}.json", "volume-copied{}.json"
NOT_IN_NAME = re.compile(r"[^\w.-]", re.ASCII)
#: The controller that a guest gets with its first disk on SCSI.
SCSI_MODEL = "virtio-scsi"
NO_SERIALS: Mapping[str, str] = {}


@dataclass(frozen=True)
class GuestVolumes:
    """``instances``: the folders of guests; hosts that share them have a file each there, since
    each has connections of its own."""

    instances: Path
    connectors: Connectors = field(default_factory=Connectors)
    _locks: defaultdict[str, threading.Lock] = field(
        default_factory=lambda: defaultdict(threading.Lock)
    )

    def file(self, server: str, name: str = FILE) -> Path:
        """Where the guest's volumes on this host stand."""
        host = NOT_IN_NAME.sub("_", str(self.connectors.about.get("host", "")))
        return self.instances / server / name.format(f".{host}" if host else "")

    def of(self, server: str) -> list[AttachedVolume]:
        """A guest's, in the order in which it got them."""
        return [from_wire(AttachedVolume, one) for one in _entries(self.file(server))]

    def copied(self, server: str) -> list[AttachedVolume]:
        """Where the host copies one of them to, as it is to be: none, or one. See
        ``volume_copies``."""
        return [from_wire(AttachedVolume, one) for one in _entries(self.file(server, COPIED_FILE))]

    def keep_copied(self, server: str, wanted: list[AttachedVolume]) -> None:
        """This is being copied; none: nothing is."""
        _put(self.file(server, COPIED_FILE), [to_wire(one) for one in wanted])

    def placed(
        self, wanted: Iterable[AttachedVolume]
    ) -> tuple[tuple[AttachedVolume, VolumeSource], ...]:
        """Volumes with where QEMU finds them. VerbFailed when this host cannot reach one."""
        return tuple((one, self.connectors.source(one)) for one in wanted)

    def keep(self, server: str, wanted: Iterable[AttachedVolume]) -> None:
        """The guest has these volumes and no others, in its folder if that is there; the host lets
        go of the others. VerbFailed when it does not."""
        if not (self.instances / server).exists():
            return
        wanted = list(wanted)
        reached = {(one.volume_id, _way(one)) for one in wanted}
        for one in self.of(server):
            if (one.volume_id, _way(one)) not in reached:
                self._let_go(server, one)
        self._write(server, wanted)

    def relocate(
        self, libvirt: Connection, server: str, volume: AttachedVolume, source: VolumeSource
    ) -> None:
        """The guest's next start finds its volume at ``source``, and the host lets go of where it
        was before. VerbFailed when it does not."""
        stored = libvirt.describe(server, stored=True)
        libvirt.define(volume_xml.with_place(stored, volume.volume_id, source))
        self.keep(
            server,
            [volume if one.volume_id == volume.volume_id else one for one in self.of(server)],
        )

    def keep_only(self, libvirt: Connection, server: str, ids: Collection[str]) -> None:
        """Before the guest is started: one that is off has no other volumes than these any more.
        VerbFailed for one that would go on with another."""
        found = power.find(libvirt, server)
        stored = libvirt.describe(server, stored=True)
        known = {*volume_xml.found(stored), *(one.volume_id for one in self.of(server))}
        others = sorted(known - set(ids))
        if not others or found.power_state == RUNNING:
            return
        if found.active or found.saved:
            raise volumes.foreign(others)
        for volume_id in others:
            log.warning("server %s starts without volume %s, which it lost", server, volume_id)
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
        """Before the guest is started: one that is off gets those of these volumes that it lacks.
        VerbFailed when this host cannot connect one."""
        found = power.find(libvirt, server)
        if found.active or found.saved:
            return
        here = volume_xml.found(libvirt.describe(server, stored=True))
        lacks = [one for one in needed if one.volume_id not in here]
        self.placed(lacks)
        for volume in lacks:
            log.warning("server %s lacks volume %s, and gets it", server, volume.volume_id)
            self.attach(libvirt, server, found.fence, volume, context)
        if booted := [one for one in needed if domain_xml.boots(one)]:
            stored = libvirt.describe(server, stored=True)
            if (ordered := volume_xml.booted_from(stored, booted)) != stored:
                libvirt.define(ordered)

    def connect(self, server: str, context: VerbContext) -> None:
        """Before the guest is started: VerbFailed when one is not there, or not the one. A copy of
        one is not the same any more when the guest writes."""
        self.keep_copied(server, [])
        for volume in self.of(server):
            context.phase(CommandPhase.CONNECTING_VOLUMES)
            if context.cancelled():
                raise Cancelled
            self._connect(server, volume)

    def _connect(self, server: str, volume: AttachedVolume) -> int:
        """Its bytes. VerbFailed when it is not there, or another device than it was before."""
        with self._locks[volume.volume_id]:
            found = self.connectors.connect(volume)
        known = self._serials(server).get(volume.volume_id, "")
        if known and found.serial and found.serial != known:
            raise VerbFailed(
                f"What this host found as volume {volume.volume_id} is another device than before. The server "
                "does not get it; see the volume service.",
                details=f"its serial is {found.serial[:100]!r}, and was {known[:100]!r}",
            )
        if found.serial and not known:
            self._write(server, self.of(server), {volume.volume_id: found.serial})
        return found.size_bytes

    def _let_go(self, server: str, volume: AttachedVolume) -> None:
        """The host has it connected no more, unless another guest here has it too."""
        with self._locks[volume.volume_id]:
            if not (volume.multiattach and self._is_elsewhere(server, volume.volume_id)):
                self.connectors.disconnect(volume)

    def _is_elsewhere(self, server: str, volume_id: str) -> bool:
        name = self.file(server).name
        return any(
            one.get("volume_id") == volume_id
            for path in self.instances.glob(f"*/{name}")
            if path.parent.name != server
            for one in _entries(path)
        )

    def _serials(self, server: str) -> dict[str, str]:
        """By what the devices of a guest's volumes were known when they came."""
        return {
            one["volume_id"]: one["serial"]
            for one in _entries(self.file(server))
            if one.get("serial")
        }

    def attach(
        self,
        libvirt: Connection,
        server: str,
        fence: int,
        volume: AttachedVolume,
        context: VerbContext,
    ) -> DomainState:
        """The guest has the volume: at once when it is active, else from its next start on."""
        context.phase(CommandPhase.ATTACHING_VOLUME)
        source = self.connectors.source(volume)
        found = changeable(libvirt, server)
        if volume.volume_id not in volume_xml.found(libvirt.describe(server)):
            volumes.refuse_cold_bus(volume, found.power_state)
        before = self.of(server)
        others = [one for one in before if one.volume_id != volume.volume_id]
        self._write(server, [*others, volume])
        try:
            self._connect(server, volume)
            if context.cancelled():
                raise Cancelled
            self._plug(libvirt, server, found, volume, source)
        except VerbFailed:
            if not _has(libvirt, server, volume.volume_id):
                self._forget_after_failure(server, volume.volume_id)
            raise
        libvirt.mark(server, fence=fence)
        return power.state(power.find(libvirt, server))

    def _plug(
        self,
        libvirt: Connection,
        server: str,
        found: GuestDomain,
        volume: AttachedVolume,
        source: VolumeSource,
    ) -> None:
        running, stored = libvirt.describe(server), libvirt.describe(server, stored=True)
        name = domain_xml.volume_name(volume, volume_xml.names(running, stored))
        if found.active and volume.volume_id not in volume_xml.found(running):
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
        if volume.volume_id not in volume_xml.found(stored):
            # One that the guest has already is stored with the name and the place that it has.
            there = volume_xml.found(running).get(volume.volume_id) if found.active else None
            name = name if there is None else volume_xml.name_of(there)
            place = volume_xml.addresses(running).get(volume.volume_id) if found.active else None
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
        """The guest has the volume no more, nor is it connected here. VerbFailed when the guest
        does not let go of it in time: then it stays."""
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
            lambda described: _alias(described, volume_id),
            lambda found, refusal: volumes.held(volume_id, found.power_state, refusal),
            context,
            seconds,
        )
        stored = libvirt.describe(server, stored=True)
        if volume_id in volume_xml.found(stored):
            libvirt.define(volume_xml.without(stored, volume_id))
        self._forget(server, volume_id)
        libvirt.mark(server, fence=fence)
        return power.state(power.find(libvirt, server))

    def disconnect(self, libvirt: Connection, server: str, fence: int) -> None:
        """All of them, of a guest that is off; one that is not here has none."""
        power.refuse_active(libvirt, server)
        if libvirt.find(server) is not None:
            for volume in self.of(server):
                stored = libvirt.describe(server, stored=True)
                libvirt.define(volume_xml.without(stored, volume.volume_id))
            libvirt.mark(server, fence=fence)
        self.keep(server, [])

    def extend(self, libvirt: Connection, server: str, volume: AttachedVolume) -> None:
        """The guest sees the new size of a volume that has grown."""
        found, kept = changeable(libvirt, server), self.of(server)
        known = next((one for one in kept if one.volume_id == volume.volume_id), None)
        if known is None:
            raise volumes.unknown(volume.volume_id)
        wanted = volumes.grown(known, volume.size_gb)
        size = self._connect(server, wanted)
        disk = volume_xml.found(libvirt.describe(server)).get(volume.volume_id)
        if found.active and disk is not None:
            name = volume_xml.name_of(disk)
            libvirt.on(
                server,
                "tell the guest the volume's new size",
                lambda domain: domain.blockResize(name, size, BLOCK_RESIZE_BYTES),
            )
        self._write(server, [wanted if one is known else one for one in kept])

    def _forget_after_failure(self, server: str, volume_id: str) -> None:
        """What the host does not let go of stays in the file, and is let go of with the guest."""
        try:
            self._forget(server, volume_id)
        except VerbFailed as problem:
            log.warning("volume %s stays connected: %s %s", volume_id, problem, problem.details)

    def _forget(self, server: str, volume_id: str) -> None:
        kept = self.of(server)
        left = [one for one in kept if one.volume_id != volume_id]
        for one in kept:
            if one not in left:
                self._let_go(server, one)
        if left != kept:
            self._write(server, left)

    def _write(
        self, server: str, wanted: list[AttachedVolume], serials: Mapping[str, str] = NO_SERIALS
    ) -> None:
        """``serials``: those that are new."""
        path, known = self.file(server), dict(serials)
        for one in _entries(path):
            # Reached otherwise, it may have moved to another device.
            if one.get("serial") and any(
                _way(from_wire(AttachedVolume, one)) == _way(each) for each in wanted
            ):
                known[one["volume_id"]] = one["serial"]
        _put(path, [{**to_wire(one), "serial": known.get(one.volume_id, "")} for one in wanted])


def _put(path: Path, entries: list[JsonObject]) -> None:
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


def _entries(path: Path) -> list[JsonObject]:
    """What the file says; a guest without volumes has none."""
    try:
        return list(json.loads(path.read_text()))
    except FileNotFoundError:
        return []


def _way(volume: AttachedVolume) -> str:
    """How it is reached, whichever attachment says so."""
    said = {name: value for name, value in volume.connection.items() if name != "attachment_id"}
    return json.dumps(said, sort_keys=True)


def changeable(libvirt: Connection, server: str) -> GuestDomain:
    """The domain, unless it is suspended."""
    found = power.find(libvirt, server)
    if found.saved:
        raise volumes.suspended()
    return found


def disk_of(libvirt: Connection, server: str, volume_id: str) -> Element:
    """The guest's disk that is this volume. VerbFailed: it has none."""
    disk = volume_xml.found(libvirt.describe(server)).get(volume_id)
    if disk is None:
        raise volumes.unknown(volume_id)
    return disk


def _has(libvirt: Connection, server: str, volume_id: str) -> bool:
    """Has the domain the volume, running or stored?"""
    return any(
        volume_id in volume_xml.found(libvirt.describe(server, stored=stored))
        for stored in (False, True)
    )


def _alias(described: str, volume_id: str) -> str | None:
    disk = volume_xml.found(described).get(volume_id)
    return None if disk is None else volume_xml.alias(disk)
