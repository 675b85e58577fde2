# SPDX-License-Identifier: Apache-2.0
"""Shares of guests in memory.

The guest's record contains the shares that the host has mounted.
"""

from __future__ import annotations

from common.domain.models import AttachedShare, DomainState
from compute_agent.virt.memory.power import refuse_active
from compute_agent.virt.memory.state.host import MemoryHost, state_of


def attach(host: MemoryHost, server: str, fence: int, share: AttachedShare) -> DomainState:
    """Attach a share to a guest that is off, in place of a share with the same id.

    Raises:
        VerbFailed: The guest is active or does not exist.
    """
    with host.lock:
        guest = host.guest(server)
        refuse_active(guest, "its shares are changed")
        guest.shares = [other for other in guest.shares if other.share_id != share.share_id] + [
            share
        ]
        guest.fence = fence
        host.write(server, guest)
        return state_of(server, guest)


def detach(host: MemoryHost, server: str, fence: int, share: AttachedShare) -> None:
    """Detach a share from a guest that is off. A missing guest is ignored.

    Raises:
        VerbFailed: The guest is active.
    """
    with host.lock:
        if server not in host.guests:
            return
        guest = host.guest(server)
        refuse_active(guest, "its shares are changed")
        guest.shares = [other for other in guest.shares if other.share_id != share.share_id]
        guest.fence = fence
        host.write(server, guest)
