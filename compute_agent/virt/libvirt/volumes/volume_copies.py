# SPDX-License-Identifier: Apache-2.0
"""A guest's volume is copied to another place while the guest uses it, and goes on there.

Called by ``virt.libvirt.volume_verbs``. QEMU copies, as a job of its own that outlives this agent
and libvirtd; when both are the same it goes on to write to both, and tells the guest that something
is written when it is on both. A file of the guest's folder names the other place from before it is
connected until the guest is there, or is not going there. Must stay true: the guest has one of the
two; it goes over to the other one only in ``switch``, and never before both are the same.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from common.domain.command_progress import CommandPhase
from common.domain.models import AttachedVolume, DomainState
from compute_agent.verb_context import Cancelled, VerbContext, VerbFailed
from compute_agent.virt import volumes
from compute_agent.virt.libvirt.domains import power
from compute_agent.virt.libvirt.domains.connection import (
    BLOCK_COPY_FLAGS,
    BLOCK_JOB_PIVOT,
    STATE_CHANGED_ERRORS,
    Connection,
)
from compute_agent.virt.libvirt.volumes.volumes import GuestVolumes, changeable, disk_of
from compute_agent.virt.libvirt.xml import volume_xml
from compute_agent.virt.libvirt.xml.volume_xml import VolumeSource

LOOK_SECONDS, END_SECONDS = 0.25, 20.0


@dataclass(frozen=True)
class VolumeCopies:
    """Copies of the volumes of one guest; ``kept``: which volumes it has."""

    libvirt: Connection
    kept: GuestVolumes
    server: str

    def copy(self, fence: int, volume: AttachedVolume, context: VerbContext) -> DomainState:
        """Both are the same when this returns, and stay so while the guest is active."""
        source = self.kept.connectors.source(volume)
        found = changeable(self.libvirt, self.server)
        volumes.copyable(volume, self.kept.of(self.server), found.power_state)
        if not volume_xml.is_at(disk_of(self.libvirt, self.server, volume.volume_id), source):
            try:
                self._mirror(volume, source, context)
            except (VerbFailed, Cancelled):
                self.keep(None, volume)
                raise
        self.libvirt.mark(self.server, fence=fence)
        return power.state(power.find(self.libvirt, self.server))

    def switch(
        self, fence: int, volume: AttachedVolume, context: VerbContext
    ) -> DomainState | None:
        """The guest is at the new place. One that went off with both the same begins there; a copy
        that broke off is made again, since the guest has written where it was."""
        if self.libvirt.find(self.server) is None:
            return None
        source = self.kept.connectors.source(volume)
        if changeable(self.libvirt, self.server).active:
            disk = disk_of(self.libvirt, self.server, volume.volume_id)
            if not volume_xml.is_at(disk, source):
                self._mirror(volume, source, context)
                self._end_job(volume_xml.name_of(disk), BLOCK_JOB_PIVOT)
        elif not any(_is_same(one, volume) for one in self._known(volume.volume_id)):
            raise VerbFailed(
                f"The server went off before the copy of volume {volume.volume_id} was whole; start it, and "
                "the copy goes on.",
                retryable=True,
            )
        self.kept.relocate(self.libvirt, self.server, volume, source)
        self.kept.keep_copied(self.server, [])
        self.libvirt.mark(self.server, fence=fence)
        return power.state(power.find(self.libvirt, self.server))

    def keep(self, fence: int | None, volume: AttachedVolume) -> DomainState | None:
        """The guest stays where it is, and nothing is copied."""
        volumes.check_id(volume.volume_id)
        if self.libvirt.find(self.server) is None:
            self.kept.connectors.disconnect(volume)
            self.kept.keep_copied(self.server, [])
            return None
        disk = volume_xml.found(self.libvirt.describe(self.server)).get(volume.volume_id)
        if disk is not None and disk.find("mirror") is not None:
            self._end_job(volume_xml.name_of(disk), 0)
        self.kept.connectors.disconnect(volume)
        self.kept.keep_copied(self.server, [])
        if fence is not None:
            self.libvirt.mark(self.server, fence=fence)
        return power.state(power.find(self.libvirt, self.server))

    def _known(self, volume_id: str) -> list[AttachedVolume]:
        """As the guest has it, and as it was copied when both were the same."""
        both = [*self.kept.of(self.server), *self.kept.copied(self.server)]
        return [one for one in both if one.volume_id == volume_id]

    def _mirror(self, volume: AttachedVolume, source: VolumeSource, context: VerbContext) -> None:
        """Until both are the same."""
        disk = disk_of(self.libvirt, self.server, volume.volume_id)
        name, mirror = volume_xml.name_of(disk), disk.find("mirror")
        if mirror is not None and not volume_xml.is_at(mirror, source):
            self._end_job(name, 0)  # of an earlier try, to a place that is given up
            mirror = None
        if mirror is None:
            self.kept.keep_copied(self.server, [])  # what it said of an earlier copy is over
            context.phase(CommandPhase.COPYING_VOLUME, 0)
            if context.cancelled():
                raise Cancelled
            self._refuse_size(volume, name, self.kept.connectors.connect(volume).size_bytes)
            order = volume_xml.text(volume_xml.place(source))
            self.libvirt.on(
                self.server,
                "copy the volume",
                lambda domain: domain.blockCopy(name, order, None, BLOCK_COPY_FLAGS),
            )
        while not self._is_ready(volume):
            context.phase(CommandPhase.COPYING_VOLUME, self._percent(name))
            if context.cancelled():
                raise Cancelled
            time.sleep(LOOK_SECONDS)
        self.kept.keep_copied(self.server, [volume])

    def _refuse_size(self, volume: AttachedVolume, name: str, size: int) -> None:
        """VerbFailed when the other place has another size, with which QEMU copies nothing."""
        answer = self.libvirt.on(
            self.server, "report the volume's size", lambda domain: domain.blockInfo(name)
        )
        if answer and answer[0] != size:
            raise volumes.another_size(volume.volume_id, f"{answer[0]} bytes, and {size} there")

    def _is_ready(self, volume: AttachedVolume) -> bool:
        mirror = disk_of(self.libvirt, self.server, volume.volume_id).find("mirror")
        if mirror is None:
            raise VerbFailed(
                f"Volume {volume.volume_id} could not be copied to its end; see the volume service and the "
                "host's log, and migrate it again. The server has it as before.",
                retryable=True,
                details="the block job has ended",
            )
        return mirror.get("ready") == "yes"

    def _percent(self, name: str) -> int:
        answer = (
            self.libvirt.on(
                self.server,
                "report the copy of the volume",
                lambda domain: domain.blockJobInfo(name, 0),
                STATE_CHANGED_ERRORS,
            )
            or {}
        )
        end = int(answer.get("end") or 0)
        return min(99, 100 * int(answer.get("cur") or 0) // end) if end else 0

    def _end_job(self, name: str, flags: int) -> None:
        """The guest goes on at the new place, or where it was; in both cases at one alone."""
        self.libvirt.on(
            self.server,
            "end the copy of the volume",
            lambda domain: domain.blockJobAbort(name, flags),
        )
        deadline = time.monotonic() + END_SECONDS
        while self._has_mirror(name):
            if time.monotonic() > deadline:
                raise VerbFailed(
                    "The copy of the volume does not end; see the host's log, virsh blockjob and its storage.",
                    retryable=True,
                )
            time.sleep(LOOK_SECONDS)

    def _has_mirror(self, name: str) -> bool:
        disks = volume_xml.found(self.libvirt.describe(self.server)).values()
        return any(
            volume_xml.name_of(disk) == name and disk.find("mirror") is not None for disk in disks
        )


def _is_same(one: AttachedVolume, other: AttachedVolume) -> bool:
    return (one.volume_id, one.stored_id) == (other.volume_id, other.stored_id)
