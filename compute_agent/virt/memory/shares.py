# SPDX-License-Identifier: Apache-2.0
"""Shares of guests in memory. Which are mounted is written on the guest."""

from __future__ import annotations

from common.domain.models import AttachedShare, DomainState
from compute_agent.virt.memory.power import refuse_active
from compute_agent.virt.memory.state.host import MemoryHost, state_of


def attach(host: MemoryHost, server: str, fence: int, share: AttachedShare) -> DomainState:
    with host.lock:
        guest = host.guest(server)
        refuse_active(guest, "its shares are changed")
        guest.shares = [one for one in guest.shares if one.share_id != share.share_id] + [share]
        guest.fence = fence
        host.write(server, guest)
        return state_of(server, guest)


def detach(host: MemoryHost, server: str, fence: int, share: AttachedShare) -> None:
    """A guest that is not here has no share."""
    with host.lock:
        if server not in host.guests:
            return
        guest = host.guest(server)
        refuse_active(guest, "its shares are changed")
        guest.shares = [one for one in guest.shares if one.share_id != share.share_id]
        guest.fence = fence
        host.write(server, guest)
