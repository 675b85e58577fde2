# SPDX-License-Identifier: Apache-2.0
"""Snapshots of volumes that are files, taken by the host on request of the volume service.

Called by ``virt.libvirt.guests.volume_verbs`` for a volume that a guest has, for example on NFS.

To take a snapshot, the volume service makes a new, empty file whose backing file is the present
file of the guest. Until the guest writes, both files show the same data. Therefore the stored
definition and the record in the guest's folder name the new file before the active guest switches
to this file. After a crash in between, a guest that starts has all data.

To delete a snapshot, QEMU merges files in a block job that outlives this agent. A repeated command
joins the running job.

Invariant: QEMU writes to a backing file only to merge the file above into this file. Only files of
the volume are opened, never a path from a header.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.domain.command_progress import CommandPhase
from common.domain.models import AttachedVolume, DomainState
from compute_agent.verb_context import Cancelled, VerbContext, VerbFailed
from compute_agent.virt import volumes
from compute_agent.virt.driver import VolumeMerge
from compute_agent.virt.libvirt.disks import qcow2
from compute_agent.virt.libvirt.domains import guest_agent, power
from compute_agent.virt.libvirt.domains.connection import (
    COMMIT_RELATIVE,
    REBASE_RELATIVE,
    SNAPSHOT_FLAGS,
    STATE_CHANGED_ERRORS,
    Connection,
)
from compute_agent.virt.libvirt.domains.still_guests import MARK
from compute_agent.virt.libvirt.volumes.volumes import GuestVolumes, changeable, disk_of
from compute_agent.virt.libvirt.xml import volume_xml
from compute_agent.virt.libvirt.xml.volume_xml import VolumeSource

LOOK_SECONDS, END_SECONDS = 0.25, 20.0
#: The time that Cinder waits for a merge.
MERGE_SECONDS = 7200.0


@dataclass(frozen=True)
class AssistedSnapshots:
    """Takes and merges snapshots of the volumes of one guest.

    Attributes:
        libvirt: Connection to libvirtd.
        kept: Records which volumes each guest has.
        server: Id of the guest's server.
    """

    libvirt: Connection
    kept: GuestVolumes
    server: str

    def take(self, fence: int, volume: AttachedVolume, context: VerbContext) -> DomainState:
        """Switch the guest to the new file that ``volume`` names, and return the guest's state.

        The file systems of an active guest are frozen meanwhile, if the guest's agent can do that.
        For a guest that is off, only the stored definition and the record change. If libvirt
        refuses the switch, both name the old file again. Repeatable.

        Raises:
            VerbFailed: The guest is suspended or does not have the volume, the volume is not a
                file, the new file is not based on the present file, or libvirt refuses.
            Cancelled: The verb was cancelled before the guest was changed.
        """
        context.phase(CommandPhase.SNAPSHOTTING_VOLUME)
        domain = changeable(self.libvirt, self.server)
        old_volume = volumes.snapshotted(volume, self.kept.of(self.server))
        old, new = (self.kept.connectors.source(attached) for attached in (old_volume, volume))
        disk = disk_of(self.libvirt, self.server, volume.volume_id) if domain.active else None
        if old.path != new.path:
            self._check_new_file(volume, old, new)
        if context.cancelled():
            raise Cancelled
        self.kept.relocate(self.libvirt, self.server, volume, new)
        if disk is not None and not volume_xml.is_at(disk, new):
            try:
                self._switch_file(volume_xml.name_of(disk), new)
            except VerbFailed:
                if not volume_xml.is_at(disk_of(self.libvirt, self.server, volume.volume_id), new):
                    self.kept.relocate(self.libvirt, self.server, old_volume, old)
                    raise
        self.libvirt.mark(self.server, fence=fence)
        return power.state(power.find(self.libvirt, self.server))

    def _check_new_file(self, volume: AttachedVolume, old: VolumeSource, new: VolumeSource) -> None:
        """Connect the volume, and check that the new file is based on the guest's file.

        The new file's header must name the guest's file and its format. Why: without a recorded
        format, QEMU would detect the format from data that the guest wrote.

        Raises:
            VerbFailed: The volume cannot be connected, or the check failed.
        """
        self.kept.connectors.connect(volume)
        try:
            header = qcow2.read(Path(new.path))
        except (OSError, ValueError) as problem:
            raise _unusable_file(volume.volume_id, f"{new.path}: {problem}") from problem
        if (header.backing, header.backing_format) != (Path(old.path).name, old.format):
            raise _unusable_file(
                volume.volume_id,
                f"{new.path} has the backing file {header.backing[:200]!r} of format "
                f"{header.backing_format!r}, and the guest has {old.path} of format {old.format}",
            )

    def _switch_file(self, name: str, new: VolumeSource) -> None:
        xml = volume_xml.snapshot_order(self.libvirt.describe(self.server), name, new)
        # The guest's file systems are frozen already, for a snapshot of several volumes.
        if (self.kept.instances / self.server / MARK).exists():
            self._snapshot(xml)
            return
        with guest_agent.frozen(self.libvirt, self.server):
            self._snapshot(xml)

    def _snapshot(self, xml: str) -> None:
        self.libvirt.on(
            self.server,
            "take a snapshot of the volume",
            lambda domain: domain.snapshotCreateXML(xml, SNAPSHOT_FLAGS),
        )

    def merge(
        self, fence: int, volume: AttachedVolume, merge: VolumeMerge, context: VerbContext
    ) -> DomainState:
        """Merge files of the volume of an active guest, and wait for the end of the block job.

        The guest's active file stays in use. A running job on this disk is joined. If the files are
        merged already, only the fence is recorded. The result is the guest's state.

        Raises:
            VerbFailed: The guest is off or suspended or lacks the volume, the volume is not a file,
                the files do not fit ``merge``, or the merge failed. The files are as before or
                partly copied. The guest's data is the same.
            Cancelled: The verb was cancelled. A running block job was aborted.
        """
        context.phase(CommandPhase.MERGING_VOLUME, 0)
        domain = changeable(self.libvirt, self.server)
        volumes.mergeable(volume, self.kept.of(self.server), domain.power_state)
        disk = disk_of(self.libvirt, self.server, volume.volume_id)
        name, paths = volume_xml.name_of(disk), volume_xml.files(disk)
        if not is_merged(paths, merge):
            refuse_merge(volume.volume_id, paths, merge)
            if self._read_job(name) is None:
                if context.cancelled():
                    raise Cancelled
                self._start_job(name, paths, merge)
            self._await_job(name, context)
            self._await_merged(volume.volume_id, merge)
        self.libvirt.mark(self.server, fence=fence)
        return power.state(power.find(self.libvirt, self.server))

    def _start_job(self, name: str, paths: Sequence[str], merge: VolumeMerge) -> None:
        by_name = {Path(path).name: path for path in paths}
        if merge.into is None:
            base = by_name[merge.file] if merge.file is not None else None
            flags = 0 if base is None else REBASE_RELATIVE
            self.libvirt.on(
                self.server,
                "merge the volume's files",
                lambda domain: domain.blockRebase(name, base, 0, flags),
            )
            return
        top, into = by_name[str(merge.file)], by_name[merge.into]
        self.libvirt.on(
            self.server,
            "merge the volume's files",
            lambda domain: domain.blockCommit(name, into, top, 0, COMMIT_RELATIVE),
        )

    def _await_job(self, name: str, context: VerbContext) -> None:
        """Block until QEMU has no job on the disk ``name``, and report progress.

        Raises:
            VerbFailed: The job ran longer than ``MERGE_SECONDS`` and was aborted, or the job cannot
                be aborted.
            Cancelled: The verb was cancelled, and the job was aborted.
        """
        deadline = time.monotonic() + MERGE_SECONDS
        while (job := self._read_job(name)) is not None:
            end = int(job.get("end") or 0)
            percent = min(99, 100 * int(job.get("cur") or 0) // end) if end else 0
            context.phase(CommandPhase.MERGING_VOLUME, percent)
            is_late = time.monotonic() > deadline
            if is_late or context.cancelled():
                self._abort_job(name)
                if not is_late:
                    raise Cancelled
                raise VerbFailed(
                    f"The host did not merge the files of disk {name} of the server in {MERGE_SECONDS:.0f} seconds; "
                    "check the storage of the host, and delete the snapshot again."
                )
            time.sleep(LOOK_SECONDS)

    def _abort_job(self, name: str) -> None:
        """Abort the block job on the disk, and wait for its end.

        Data copied so far does not change the guest's data.

        Raises:
            VerbFailed: The job does not end within ``END_SECONDS``.
        """
        self.libvirt.on(
            self.server,
            "abort the merge of the volume's files",
            lambda domain: domain.blockJobAbort(name, 0),
            STATE_CHANGED_ERRORS,
        )
        deadline = time.monotonic() + END_SECONDS
        while self._read_job(name) is not None:
            if time.monotonic() > deadline:
                raise VerbFailed(
                    f"The host could not abort the merge of files of disk {name} of the server; see the log of the "
                    "host, its storage, and virsh blockjob."
                )
            time.sleep(LOOK_SECONDS)

    def _await_merged(self, volume_id: str, merge: VolumeMerge) -> None:
        """Block until libvirt reports the merged files.

        Why: libvirt updates the list of files a moment after the job has ended.

        Raises:
            VerbFailed: The files are not merged ``END_SECONDS`` after the end of the job.
        """
        deadline = time.monotonic() + END_SECONDS
        while not is_merged(volume_xml.files(disk_of(self.libvirt, self.server, volume_id)), merge):
            if time.monotonic() > deadline:
                raise VerbFailed(
                    f"The files of volume {volume_id} could not be merged. The server has the volume as before. See "
                    "the log and the storage of the host, and delete the snapshot again.",
                    retryable=True,
                    details="the block job has ended",
                )
            time.sleep(LOOK_SECONDS)

    def _read_job(self, name: str) -> dict[str, Any] | None:
        """Return libvirt's data about the block job on the disk.

        None without a job, or if the guest is off.
        """
        job = self.libvirt.on(
            self.server,
            "report the merge of the volume's files",
            lambda domain: domain.blockJobInfo(name, 0),
            STATE_CHANGED_ERRORS,
        )
        return job or None


def is_merged(paths: Sequence[str], merge: VolumeMerge) -> bool:
    """Return True if the disk's files are those after ``merge``.

    Args:
        paths: The disk's files, from the active file down to the last backing file.
        merge: The requested merge.
    """
    names = [Path(path).name for path in paths]
    if merge.into is None:
        return names[1:2] == ([] if merge.file is None else [merge.file])
    return merge.file not in names and merge.into in names[1:]


def refuse_merge(volume_id: str, paths: Sequence[str], merge: VolumeMerge) -> None:
    """Raise VerbFailed unless ``merge`` is possible with the disk's files.

    Without ``merge.into``, ``merge.file`` must be a backing file or None. Otherwise ``merge.into``
    must be the file directly below the backing file ``merge.file``.
    """
    names = [Path(path).name for path in paths]
    backing_names = names[1:]
    if merge.into is None:
        is_possible = merge.file is None or merge.file in backing_names
    else:
        # A file is merged into the file below, and never into the file that the guest writes to.
        is_possible = (merge.file, merge.into) in list(itertools.pairwise(backing_names))
    if not is_possible:
        raise VerbFailed(
            f"The requested merge does not fit the files of volume {volume_id}. The server has the volume as before. "
            "Compare the snapshots at the volume service.",
            details=f"requested {merge}, files {', '.join(names)[:1000]}",
        )


def _unusable_file(volume_id: str, details: str) -> VerbFailed:
    return VerbFailed(
        f"The new file for the snapshot of volume {volume_id} is missing or not based on the volume's present file. "
        "The server has the volume as before. See the log of the volume service.",
        details=details,
    )
