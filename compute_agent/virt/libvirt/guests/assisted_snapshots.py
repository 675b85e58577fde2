# SPDX-License-Identifier: Apache-2.0
"""Snapshots of volumes that are files, which a host takes for the volume service while a guest has
them, and merges again when they are deleted.

Called by ``virt.libvirt.volume_verbs``. The service has made the new file, empty and upon the one
that the guest has: until the guest writes into it, the one is as good as the other. So the stored
definition and the guest's folder name it first, and whatever is killed in between, a guest that
starts finds all that it wrote. QEMU merges as a job of its own that outlives this agent, and is
joined when asked again. Must stay true: no file is written upon which another one lies that is not
merged with it; nothing that a header names is opened but files of the volume beside it.
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
#: As long as Cinder waits for a merge.
MERGE_SECONDS = 7200.0


@dataclass(frozen=True)
class AssistedSnapshots:
    """Those of the volumes of one guest; ``kept``: which volumes it has."""

    libvirt: Connection
    kept: GuestVolumes
    server: str

    def take(self, fence: int, volume: AttachedVolume, context: VerbContext) -> DomainState:
        """The guest goes on in the file that ``volume`` names."""
        context.phase(CommandPhase.SNAPSHOTTING_VOLUME)
        found = changeable(self.libvirt, self.server)
        known = volumes.snapshotted(volume, self.kept.of(self.server))
        old, new = (self.kept.connectors.source(one) for one in (known, volume))
        disk = disk_of(self.libvirt, self.server, volume.volume_id) if found.active else None
        if old.path != new.path:
            self._refuse_foreign(volume, old, new)
        if context.cancelled():
            raise Cancelled
        self.kept.relocate(self.libvirt, self.server, volume, new)
        if disk is not None and not volume_xml.is_at(disk, new):
            try:
                self._go_over(volume_xml.name_of(disk), new)
            except VerbFailed:
                if not volume_xml.is_at(disk_of(self.libvirt, self.server, volume.volume_id), new):
                    self.kept.relocate(self.libvirt, self.server, known, old)
                    raise
        self.libvirt.mark(self.server, fence=fence)
        return power.state(power.find(self.libvirt, self.server))

    def _refuse_foreign(self, volume: AttachedVolume, old: VolumeSource, new: VolumeSource) -> None:
        """VerbFailed unless the new file is made upon the one that the guest has, and says its
        format: what a guest wrote is never taken for a header."""
        self.kept.connectors.connect(volume)
        try:
            header = qcow2.read(Path(new.path))
        except (OSError, ValueError) as problem:
            raise _unusable(volume.volume_id, f"{new.path}: {problem}") from problem
        if (header.backing, header.backing_format) != (Path(old.path).name, old.format):
            raise _unusable(
                volume.volume_id,
                f"{new.path} is made upon {header.backing[:200]!r} of format "
                f"{header.backing_format!r}, and the guest has {old.path} of format {old.format}",
            )

    def _go_over(self, name: str, new: VolumeSource) -> None:
        order = volume_xml.snapshot_order(self.libvirt.describe(self.server), name, new)
        if (self.kept.instances / self.server / MARK).exists():  # it is held still already
            self._snapshot(order)
            return
        with guest_agent.frozen(self.libvirt, self.server):
            self._snapshot(order)

    def _snapshot(self, order: str) -> None:
        self.libvirt.on(
            self.server,
            "take a snapshot of the volume",
            lambda domain: domain.snapshotCreateXML(order, SNAPSHOT_FLAGS),
        )

    def merge(
        self, fence: int, volume: AttachedVolume, merge: VolumeMerge, context: VerbContext
    ) -> DomainState:
        """One file less; the guest goes on in the one that it has."""
        context.phase(CommandPhase.MERGING_VOLUME, 0)
        found = changeable(self.libvirt, self.server)
        volumes.mergeable(volume, self.kept.of(self.server), found.power_state)
        disk = disk_of(self.libvirt, self.server, volume.volume_id)
        name, paths = volume_xml.name_of(disk), volume_xml.files(disk)
        if not is_merged(paths, merge):
            refuse_merge(volume.volume_id, paths, merge)
            if self._job(name) is None:
                if context.cancelled():
                    raise Cancelled
                self._start(name, paths, merge)
            self._await(name, context)
            self._await_merged(volume.volume_id, merge)
        self.libvirt.mark(self.server, fence=fence)
        return power.state(power.find(self.libvirt, self.server))

    def _start(self, name: str, paths: Sequence[str], merge: VolumeMerge) -> None:
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

    def _await(self, name: str, context: VerbContext) -> None:
        """Until QEMU has no job with the disk any more."""
        deadline = time.monotonic() + MERGE_SECONDS
        while (job := self._job(name)) is not None:
            end = int(job.get("end") or 0)
            done = min(99, 100 * int(job.get("cur") or 0) // end) if end else 0
            context.phase(CommandPhase.MERGING_VOLUME, done)
            is_late = time.monotonic() > deadline
            if is_late or context.cancelled():
                self._end(name)
                if not is_late:
                    raise Cancelled
                raise VerbFailed(
                    f"The volume's files were not merged within {MERGE_SECONDS:.0f} seconds; see the host's "
                    "storage, and delete the snapshot again."
                )
            time.sleep(LOOK_SECONDS)

    def _end(self, name: str) -> None:
        """What was copied so far changes nothing of what the guest reads."""
        self.libvirt.on(
            self.server,
            "end the merge of the volume's files",
            lambda domain: domain.blockJobAbort(name, 0),
            STATE_CHANGED_ERRORS,
        )
        deadline = time.monotonic() + END_SECONDS
        while self._job(name) is not None:
            if time.monotonic() > deadline:
                raise VerbFailed(
                    "The merge of the volume's files does not end; see the host's log, virsh blockjob and its "
                    "storage."
                )
            time.sleep(LOOK_SECONDS)

    def _await_merged(self, volume_id: str, merge: VolumeMerge) -> None:
        """Of a job that has just ended libvirt tells a moment later which files there are."""
        deadline = time.monotonic() + END_SECONDS
        while not is_merged(volume_xml.files(disk_of(self.libvirt, self.server, volume_id)), merge):
            if time.monotonic() > deadline:
                raise VerbFailed(
                    f"The files of volume {volume_id} could not be merged; see the host's log and its storage, "
                    "and delete the snapshot again. The server has the volume as before.",
                    retryable=True,
                    details="the block job has ended",
                )
            time.sleep(LOOK_SECONDS)

    def _job(self, name: str) -> dict[str, Any] | None:
        """What QEMU does with the disk; None: nothing."""
        found = self.libvirt.on(
            self.server,
            "report the merge of the volume's files",
            lambda domain: domain.blockJobInfo(name, 0),
            STATE_CHANGED_ERRORS,
        )
        return found or None


def is_merged(paths: Sequence[str], merge: VolumeMerge) -> bool:
    """Are a disk's files as they are after this? ``paths``: its own first."""
    there = [Path(path).name for path in paths]
    if merge.into is None:
        return there[1:2] == ([] if merge.file is None else [merge.file])
    return merge.file not in there and merge.into in there[1:]


def refuse_merge(volume_id: str, paths: Sequence[str], merge: VolumeMerge) -> None:
    """VerbFailed for files that do not lie so one upon the other."""
    there = [Path(path).name for path in paths]
    under = there[1:]
    if merge.into is None:
        fits = merge.file is None or merge.file in under
    else:
        # Into the file below, and never the one into which the guest writes.
        fits = (merge.file, merge.into) in list(itertools.pairwise(under))
    if not fits:
        raise VerbFailed(
            f"The files of volume {volume_id} are not such that they could be merged so; see the volume "
            "service. The server has the volume as before.",
            details=f"{merge} of {', '.join(there)[:1000]}",
        )


def _unusable(volume_id: str, details: str) -> VerbFailed:
    return VerbFailed(
        f"The file in which volume {volume_id} was to go on is not one for its snapshot; see the volume "
        "service. The server has the volume as before.",
        details=details,
    )
