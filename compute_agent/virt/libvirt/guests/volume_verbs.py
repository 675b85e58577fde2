# SPDX-License-Identifier: Apache-2.0
"""The libvirt driver's verbs about volumes.

``virt.libvirt.driver`` inherits them. Each verb is passed to a class: ``GuestVolumes`` attaches,
detaches and extends volumes, ``VolumeCopies`` copies a volume to another place, and
``AssistedSnapshots`` takes and merges snapshots of volumes that are files.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TypeVar

from common.domain.models import AttachedVolume, DomainState
from compute_agent.verb_context import VerbContext
from compute_agent.virt.driver import VolumeMerge
from compute_agent.virt.libvirt.domains.connection import Connection
from compute_agent.virt.libvirt.guests.assisted_snapshots import AssistedSnapshots
from compute_agent.virt.libvirt.guests.guests import LibvirtGuests
from compute_agent.virt.libvirt.volumes.volume_copies import VolumeCopies

Answer = TypeVar("Answer")
QUIET = VerbContext(report_progress=lambda progress: None, cancelled=lambda: False)


class VolumeVerbs(ABC):
    """The verbs of ``Driver`` about volumes. The subclass sets the attributes."""

    _libvirt: Connection
    _guests: LibvirtGuests

    @abstractmethod
    def _retry(self, context: VerbContext, work: Callable[[], Answer]) -> Answer:
        """Call ``work`` until it does not raise NoAnswer, and return the result.

        For the time limit and the exceptions see ``LibvirtDriver._retry``.
        """

    def attach_volume(
        self, server: str, fence: int, volume: AttachedVolume, context: VerbContext
    ) -> DomainState:
        self._guests.folder(server)
        return self._retry(
            context,
            lambda: self._guests.volumes.attach(self._libvirt, server, fence, volume, context),
        )

    def detach_volume(
        self, server: str, fence: int, volume: AttachedVolume, context: VerbContext
    ) -> DomainState | None:
        self._guests.folder(server)
        return self._retry(
            context,
            lambda: self._guests.volumes.detach(
                self._libvirt, server, fence, volume.volume_id, context
            ),
        )

    def disconnect_volumes(self, server: str, fence: int) -> None:
        self._guests.folder(server)
        self._retry(QUIET, lambda: self._guests.volumes.disconnect(self._libvirt, server, fence))

    def extend_volume(self, server: str, volume: AttachedVolume, context: VerbContext) -> None:
        self._guests.folder(server)
        self._retry(context, lambda: self._guests.volumes.extend(self._libvirt, server, volume))

    def copy_volume(
        self, server: str, fence: int, volume: AttachedVolume, context: VerbContext
    ) -> DomainState:
        copies = self._copies(server)
        return self._retry(context, lambda: copies.copy(fence, volume, context))

    def switch_volume(
        self, server: str, fence: int, volume: AttachedVolume, context: VerbContext
    ) -> DomainState | None:
        copies = self._copies(server)
        return self._retry(context, lambda: copies.switch(fence, volume, context))

    def keep_volume(
        self, server: str, fence: int, volume: AttachedVolume, context: VerbContext
    ) -> DomainState | None:
        copies = self._copies(server)
        return self._retry(context, lambda: copies.keep(fence, volume))

    def _copies(self, server: str) -> VolumeCopies:
        self._guests.folder(server)
        return VolumeCopies(self._libvirt, self._guests.volumes, server)

    def snapshot_volume(
        self, server: str, fence: int, volume: AttachedVolume, context: VerbContext
    ) -> DomainState:
        snapshots = self._snapshots(server)
        return self._retry(context, lambda: snapshots.take(fence, volume, context))

    def merge_volume(
        self,
        server: str,
        fence: int,
        volume: AttachedVolume,
        merge: VolumeMerge,
        context: VerbContext,
    ) -> DomainState:
        snapshots = self._snapshots(server)
        return self._retry(context, lambda: snapshots.merge(fence, volume, merge, context))

    def _snapshots(self, server: str) -> AssistedSnapshots:
        self._guests.folder(server)
        return AssistedSnapshots(self._libvirt, self._guests.volumes, server)
