# SPDX-License-Identifier: Apache-2.0
"""Copies a volume that a guest uses to a new place, and switches the guest to the copy.

A place is where QEMU finds the data of a volume (``VolumeSource``).

Called by ``virt.libvirt.guests.volume_verbs``. A block job of QEMU copies the data, and outlives
this agent and libvirtd. When source and copy are identical, the job mirrors: a write of the guest
completes when both have the data. A file in the guest's folder records the new place once the copy
is complete, until the switch or until the copy is dropped.

Invariant: the guest uses one of the two places. Only ``switch`` changes the place, and only when
both are identical.
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
    """Copies volumes of one guest, and switches the guest to the copies.

    Attributes:
        libvirt: Connection to libvirtd.
        kept: Records which volumes each guest has.
        server: Id of the guest's server.
    """

    libvirt: Connection
    kept: GuestVolumes
    server: str

    def copy(self, fence: int, volume: AttachedVolume, context: VerbContext) -> DomainState:
        """Copy the volume to the place in ``volume``, and return when the copy is complete.

        Source and copy then stay identical while the guest is active. If the guest uses the new
        place already, only the fence is recorded.

        Returns:
            The state of the domain.

        Raises:
            VerbFailed: The guest does not exist, is off or suspended, or lacks the volume, the
                sizes differ, or the copy failed. Or a failed or cancelled copy could not be
                dropped. The guest keeps the present place.
            Cancelled: The verb was cancelled, and the copy was dropped.
        """
        source = self.kept.connectors.source(volume)
        domain = changeable(self.libvirt, self.server)
        volumes.copyable(volume, self.kept.of(self.server), domain.power_state)
        if not volume_xml.is_at(disk_of(self.libvirt, self.server, volume.volume_id), source):
            try:
                self._mirror_volume(volume, source, context)
            except (VerbFailed, Cancelled):
                self.keep(None, volume)
                raise
        self.libvirt.mark(self.server, fence=fence)
        return power.state(power.find(self.libvirt, self.server))

    def switch(
        self, fence: int, volume: AttachedVolume, context: VerbContext
    ) -> DomainState | None:
        """Switch the guest to the new place, and disconnect the old one.

        If the copy of an active guest was interrupted, the copy is made again first, because the
        guest may have written meanwhile. A guest that went off with a complete copy is switched
        too.

        Returns:
            The state of the domain. None without a guest. Then nothing is changed.

        Raises:
            VerbFailed: The guest is off and the copy is not complete, the guest is suspended or
                lacks the volume, the repeated copy failed, or the old place stays connected.
            Cancelled: The verb was cancelled during the repeated copy.
        """
        if self.libvirt.find(self.server) is None:
            return None
        source = self.kept.connectors.source(volume)
        if changeable(self.libvirt, self.server).active:
            disk = disk_of(self.libvirt, self.server, volume.volume_id)
            if not volume_xml.is_at(disk, source):
                self._mirror_volume(volume, source, context)
                self._end_job(volume_xml.name_of(disk), BLOCK_JOB_PIVOT)
        elif not any(
            _has_same_place(recorded, volume) for recorded in self._list_recorded(volume.volume_id)
        ):
            raise VerbFailed(
                f"The server was stopped before the copy of volume {volume.volume_id} was complete; start the server, "
                "and the copy continues.",
                retryable=True,
            )
        self.kept.relocate(self.libvirt, self.server, volume, source)
        self.kept.keep_copied(self.server, [])
        self.libvirt.mark(self.server, fence=fence)
        return power.state(power.find(self.libvirt, self.server))

    def keep(self, fence: int | None, volume: AttachedVolume) -> DomainState | None:
        """Drop the copy and disconnect the new place. The guest keeps the present place.

        Args:
            fence: Fence to record, or None to leave the recorded fence.
            volume: The volume with the connection of the new place.

        Returns:
            The state of the domain, or None without a guest. Then the new place is disconnected
            too.

        Raises:
            VerbFailed: The block job does not end, or the new place stays connected.
        """
        volumes.check_id(volume.volume_id)
        if self.libvirt.find(self.server) is None:
            self.kept.connectors.disconnect(volume)
            self.kept.keep_copied(self.server, [])
            return None
        disk = volume_xml.find_disks(self.libvirt.describe(self.server)).get(volume.volume_id)
        if disk is not None and disk.find("mirror") is not None:
            self._end_job(volume_xml.name_of(disk), 0)
        self.kept.connectors.disconnect(volume)
        self.kept.keep_copied(self.server, [])
        if fence is not None:
            self.libvirt.mark(self.server, fence=fence)
        return power.state(power.find(self.libvirt, self.server))

    def _list_recorded(self, volume_id: str) -> list[AttachedVolume]:
        """Return the records of the guest's volume and of its complete copy, if they exist."""
        recorded_volumes = [*self.kept.of(self.server), *self.kept.copied(self.server)]
        return [recorded for recorded in recorded_volumes if recorded.volume_id == volume_id]

    def _mirror_volume(
        self, volume: AttachedVolume, source: VolumeSource, context: VerbContext
    ) -> None:
        """Copy the volume until source and copy are identical, and record the complete copy.

        A running block job to the same place is joined. A job to another place is aborted.

        Raises:
            VerbFailed: The sizes differ, the new place is not available, or the copy failed. The
                block job may still run.
            Cancelled: The verb was cancelled. The block job may still run.
        """
        disk = disk_of(self.libvirt, self.server, volume.volume_id)
        name, mirror = volume_xml.name_of(disk), disk.find("mirror")
        if mirror is not None and not volume_xml.is_at(mirror, source):
            # The job of an earlier attempt copies to a place that was given up.
            self._end_job(name, 0)
            mirror = None
        if mirror is None:
            # The record is about an earlier copy.
            self.kept.keep_copied(self.server, [])
            context.phase(CommandPhase.COPYING_VOLUME, 0)
            if context.cancelled():
                raise Cancelled
            self._check_size(volume, name, self.kept.connectors.connect(volume).size_bytes)
            xml = volume_xml.text(volume_xml.place(source))
            self.libvirt.on(
                self.server,
                "copy the volume",
                lambda domain: domain.blockCopy(name, xml, None, BLOCK_COPY_FLAGS),
            )
        while not self._is_ready(volume):
            context.phase(CommandPhase.COPYING_VOLUME, self._read_percent(name))
            if context.cancelled():
                raise Cancelled
            time.sleep(LOOK_SECONDS)
        self.kept.keep_copied(self.server, [volume])

    def _check_size(self, volume: AttachedVolume, name: str, size: int) -> None:
        """Raise VerbFailed unless the guest's disk ``name`` has ``size`` bytes, like the new place.

        QEMU cannot copy to another size. Without a domain nothing is checked.
        """
        sizes = self.libvirt.on(
            self.server, "report the volume's size", lambda domain: domain.blockInfo(name)
        )
        if sizes and sizes[0] != size:
            raise volumes.another_size(
                volume.volume_id,
                f"the present place has {sizes[0]} bytes, and the new place {size} bytes",
            )

    def _is_ready(self, volume: AttachedVolume) -> bool:
        mirror = disk_of(self.libvirt, self.server, volume.volume_id).find("mirror")
        if mirror is None:
            raise VerbFailed(
                f"The copy of volume {volume.volume_id} failed. The server has the volume as before. See the volume "
                "service and the log of the host, and migrate the volume again.",
                retryable=True,
                details="the block job has ended",
            )
        return mirror.get("ready") == "yes"

    def _read_percent(self, name: str) -> int:
        job = (
            self.libvirt.on(
                self.server,
                "report the copy of the volume",
                lambda domain: domain.blockJobInfo(name, 0),
                STATE_CHANGED_ERRORS,
            )
            or {}
        )
        end = int(job.get("end") or 0)
        return min(99, 100 * int(job.get("cur") or 0) // end) if end else 0

    def _end_job(self, name: str, flags: int) -> None:
        """End the block job on the disk ``name``, and wait for the end.

        The flag BLOCK_JOB_PIVOT switches the guest to the new place. With 0 the copy is dropped.

        Raises:
            VerbFailed: libvirt refuses to end the job, or the job does not end within
                ``END_SECONDS``.
        """
        self.libvirt.on(
            self.server,
            "end the copy of the volume",
            lambda domain: domain.blockJobAbort(name, flags),
        )
        deadline = time.monotonic() + END_SECONDS
        while self._has_mirror(name):
            if time.monotonic() > deadline:
                raise VerbFailed(
                    f"The block job that copies disk {name} of the server does not end; see the log of the host, its "
                    "storage, and virsh blockjob.",
                    retryable=True,
                )
            time.sleep(LOOK_SECONDS)

    def _has_mirror(self, name: str) -> bool:
        disks = volume_xml.find_disks(self.libvirt.describe(self.server)).values()
        return any(
            volume_xml.name_of(disk) == name and disk.find("mirror") is not None for disk in disks
        )


def _has_same_place(volume: AttachedVolume, other: AttachedVolume) -> bool:
    return (volume.volume_id, volume.stored_id) == (other.volume_id, other.stored_id)
