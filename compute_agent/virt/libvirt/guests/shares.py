# SPDX-License-Identifier: Apache-2.0
"""The shares of guests on this host: which each has, and when they are mounted.

Called by ``virt.libvirt.driver`` and ``guests``. Which shares a guest has stands in a file of its
folder, so that a guest that is described anew, to be rescued, keeps them. They are mounted in a
folder of their own for each guest, so that no guest's end concerns another's:
``<shares>/<server>/<share>``. Must stay true: nothing of a share is ever removed from here, so what
is mounted never lies below what is removed.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Collection
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from common.domain.command_progress import CommandPhase
from common.domain.models import AttachedShare, DomainState
from common.domain.wire import from_wire
from compute_agent.verb_context import VerbContext, VerbFailed
from compute_agent.virt.libvirt.domains import power
from compute_agent.virt.libvirt.domains.connection import Connection
from compute_agent.virt.libvirt.xml import share_xml
from compute_agent.virt.mounts import Mounts, host_mounts

log = logging.getLogger(__name__)
FILE = "shares.json"


@dataclass(frozen=True)
class GuestShares:
    """``instances``: the folders of guests; ``folder``: where their shares are mounted."""

    instances: Path
    folder: Path
    mounts: Mounts = field(default_factory=host_mounts)

    def of(self, server: str) -> list[AttachedShare]:
        """A guest's, in the order in which it got them."""
        try:
            return [
                from_wire(AttachedShare, one)
                for one in json.loads((self.instances / server / FILE).read_text())
            ]
        except FileNotFoundError:
            return []

    def attach(
        self, libvirt: Connection, server: str, fence: int, share: AttachedShare
    ) -> DomainState:
        """The guest, which is off, has the share."""
        power.refuse_active(libvirt, server)
        power.find(libvirt, server)
        kept = [one for one in self.of(server) if one.share_id != share.share_id]
        self._write(libvirt, server, fence, [*kept, share])
        return power.state(power.find(libvirt, server))

    def detach(self, libvirt: Connection, server: str, fence: int, share_id: str) -> None:
        """It has it no more, nor is it mounted for it."""
        power.refuse_active(libvirt, server)
        self.mounts.unmount(self._place(server, share_id))
        if libvirt.find(server) is not None:
            self._write(
                libvirt, server, fence, [one for one in self.of(server) if one.share_id != share_id]
            )
        self._leave(server)

    def keep_only(self, libvirt: Connection, server: str, ids: Collection[str]) -> None:
        """Before the guest is started: one that is off has no other shares than these any more."""
        found = power.find(libvirt, server)
        if found.active or all(one.share_id in ids for one in self.of(server)):
            return
        self._write(libvirt, server, found.fence, self._kept(server, ids))

    def keep(self, server: str, ids: Collection[str]) -> None:
        """The same of a guest that is about to be described anew."""
        if any(one.share_id not in ids for one in self.of(server)):
            self._note(server, self._kept(server, ids))

    def _kept(self, server: str, ids: Collection[str]) -> list[AttachedShare]:
        for one in self.of(server):
            if one.share_id not in ids:
                log.warning(
                    "server %s starts without share %s, which it lost", server, one.share_id
                )
                self.mounts.unmount(self._place(server, one.share_id))
        return [one for one in self.of(server) if one.share_id in ids]

    def dress(self, server: str, described: str) -> str:
        """The guest's description with its shares."""
        found = self.of(server)
        if not found:
            return described
        return share_xml.dressed(
            described, {one.tag: str(self._place(server, one.share_id)) for one in found}
        )

    def mount(self, server: str, context: VerbContext) -> None:
        """Before the guest is started: VerbFailed when one cannot be mounted."""
        for share in self.of(server):
            context.phase(CommandPhase.MOUNTING_SHARES)
            try:
                self.mounts.mount(
                    share.protocol, share.export_location, self._place(server, share.share_id)
                )
            except VerbFailed as failed:
                raise VerbFailed(
                    f"The host could not mount share {share.share_id} of the server; detach it or try "
                    "again.",
                    details=f"{failed} {failed.details}",
                    retryable=False,
                ) from failed

    def unmount(self, server: str) -> None:
        """When the guest is off."""
        for place in self._places(server):
            self.mounts.unmount(place)
        self._leave(server)

    def _places(self, server: str) -> list[Path]:
        """Where something may be mounted for the guest, whatever its file says."""
        with suppress(FileNotFoundError):
            return sorted(self.folder / server / name for name in os.listdir(self.folder / server))
        return []

    def _place(self, server: str, share_id: str) -> Path:
        return self.folder / server / share_id

    def _leave(self, server: str) -> None:
        with suppress(OSError):  # another share is still there
            (self.folder / server).rmdir()

    def _write(
        self, libvirt: Connection, server: str, fence: int, shares: list[AttachedShare]
    ) -> None:
        """The file first: a guest that is described anew meanwhile has what it is to have."""
        self._note(server, shares)
        tags = {one.tag: str(self._place(server, one.share_id)) for one in shares}
        libvirt.define(share_xml.dressed(libvirt.describe(server, stored=True), tags))
        libvirt.mark(server, fence=fence)

    def _note(self, server: str, shares: list[AttachedShare]) -> None:
        path = self.instances / server / FILE
        part = path.with_name(f"{FILE}.part")
        part.write_text(json.dumps([asdict(one) for one in shares]))
        os.replace(part, path)
