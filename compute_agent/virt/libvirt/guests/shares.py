# SPDX-License-Identifier: Apache-2.0
"""Records which shares each guest on this host has, and mounts them while the guest runs.

Called by ``virt.libvirt.driver`` and ``guests``. The record is a file in the guest's folder, so
that a new definition of the guest, for example for a rescue, has the same shares. Each guest has
separate mount points, ``<shares>/<server>/<share>``, so that the removal of one guest does not
affect another.

Invariant: data of a share is never deleted from here. Therefore no mount point is inside a folder
that is removed with all content.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from common.domain.command_progress import CommandPhase
from common.domain.models import AttachedShare, DomainState
from common.domain.wire import from_wire
from common.service.log import get_logger
from compute_agent.verb_context import VerbContext, VerbFailed
from compute_agent.virt.libvirt.domains import power
from compute_agent.virt.libvirt.domains.connection import Connection
from compute_agent.virt.libvirt.xml import share_xml
from compute_agent.virt.mounts import Mounts, host_mounts

log = get_logger(__name__)
FILE = "shares.json"


@dataclass(frozen=True)
class GuestShares:
    """The shares of all guests.

    Attributes:
        instances: Folder of the guests' folders.
        folder: Folder of the mount points.
        mounts: Mounts and unmounts shares on this host.
    """

    instances: Path
    folder: Path
    mounts: Mounts = field(default_factory=host_mounts)

    def of(self, server: str) -> list[AttachedShare]:
        """Return the guest's recorded shares, in the order of their attachment.

        The list is empty without a record.
        """
        try:
            return [
                from_wire(AttachedShare, fields)
                for fields in json.loads((self.instances / server / FILE).read_text())
            ]
        except FileNotFoundError:
            return []

    def attach(
        self, libvirt: Connection, server: str, fence: int, share: AttachedShare
    ) -> DomainState:
        """Add the share to record and definition of a guest that is off, and return the state.

        A recorded share with this id is replaced. The fence is written to the domain's metadata.
        The share is not mounted. ``mount`` does this before the guest starts.

        Raises:
            VerbFailed: The guest is active or does not exist.
        """
        power.refuse_active(libvirt, server)
        power.find(libvirt, server)
        others = [other for other in self.of(server) if other.share_id != share.share_id]
        self._update_guest(libvirt, server, fence, [*others, share])
        return power.state(power.find(libvirt, server))

    def detach(self, libvirt: Connection, server: str, fence: int, share_id: str) -> None:
        """Unmount the share. If the guest exists, remove the share from record and definition.

        An existing guest also gets the fence.

        Raises:
            VerbFailed: The guest is active, or the share cannot be unmounted.
        """
        power.refuse_active(libvirt, server)
        self.mounts.unmount(self._mount_point(server, share_id))
        if libvirt.find(server) is not None:
            self._update_guest(
                libvirt,
                server,
                fence,
                [share for share in self.of(server) if share.share_id != share_id],
            )
        self._remove_folder(server)

    def keep_only(self, libvirt: Connection, server: str, ids: Collection[str]) -> None:
        """Unmount all recorded shares that are not in ``ids``, before the guest starts.

        These shares are removed from record and definition. An active guest and its shares are not
        changed.

        Raises:
            VerbFailed: The guest does not exist, or a share cannot be unmounted.
        """
        domain = power.find(libvirt, server)
        if domain.active or all(share.share_id in ids for share in self.of(server)):
            return
        self._update_guest(libvirt, server, domain.fence, self._drop_others(server, ids))

    def keep(self, server: str, ids: Collection[str]) -> None:
        """Unmount all shares that are not in ``ids``, and remove them from the guest's record.

        The definition is not changed. The caller then defines the guest anew with ``dress``.

        Raises:
            VerbFailed: A share cannot be unmounted.
        """
        if any(share.share_id not in ids for share in self.of(server)):
            self._write_record(server, self._drop_others(server, ids))

    def _drop_others(self, server: str, ids: Collection[str]) -> list[AttachedShare]:
        for share in self.of(server):
            if share.share_id not in ids:
                log.warning(
                    "a server starts without a share, which was detached",
                    server=server,
                    share=share.share_id,
                )
                self.mounts.unmount(self._mount_point(server, share.share_id))
        return [share for share in self.of(server) if share.share_id in ids]

    def dress(self, server: str, xml: str) -> str:
        """Return ``xml``, a new definition of the guest, with the recorded shares added."""
        shares = self.of(server)
        if not shares:
            return xml
        return share_xml.with_shares(
            xml, {share.tag: str(self._mount_point(server, share.share_id)) for share in shares}
        )

    def mount(self, server: str, context: VerbContext) -> None:
        """Mount the recorded shares of a guest that are not mounted yet, before the guest starts.

        Raises:
            VerbFailed: A share cannot be mounted.
        """
        for share in self.of(server):
            context.phase(CommandPhase.MOUNTING_SHARES)
            try:
                self.mounts.mount(
                    share.protocol, share.export_location, self._mount_point(server, share.share_id)
                )
            except VerbFailed as error:
                raise VerbFailed(
                    f"The host could not mount share {share.share_id} of the server; try again, or detach the "
                    "share.",
                    details=f"{error} {error.details}",
                    retryable=False,
                ) from error

    def unmount(self, server: str) -> None:
        """Unmount all shares of a guest that is off, and remove the mount points.

        The record is not changed. Mounted shares that the record does not list are unmounted too.

        Raises:
            VerbFailed: A share cannot be unmounted.
        """
        for place in self._list_mount_points(server):
            self.mounts.unmount(place)
        self._remove_folder(server)

    def _list_mount_points(self, server: str) -> list[Path]:
        """Return the folders of all mount points of the guest, also folders not in the record."""
        with suppress(FileNotFoundError):
            return sorted(self.folder / server / name for name in os.listdir(self.folder / server))
        return []

    def _mount_point(self, server: str, share_id: str) -> Path:
        return self.folder / server / share_id

    def _remove_folder(self, server: str) -> None:
        # The folder stays while another share is mounted there.
        with suppress(OSError):
            (self.folder / server).rmdir()

    def _update_guest(
        self, libvirt: Connection, server: str, fence: int, shares: list[AttachedShare]
    ) -> None:
        """Record the shares, then update the stored definition and the fence.

        Why this order: after a crash in between, the next definition has the recorded shares.
        """
        self._write_record(server, shares)
        tags = {share.tag: str(self._mount_point(server, share.share_id)) for share in shares}
        libvirt.define(share_xml.with_shares(libvirt.describe(server, stored=True), tags))
        libvirt.mark(server, fence=fence)

    def _write_record(self, server: str, shares: list[AttachedShare]) -> None:
        path = self.instances / server / FILE
        part = path.with_name(f"{FILE}.part")
        part.write_text(json.dumps([asdict(share) for share in shares]))
        os.replace(part, path)
