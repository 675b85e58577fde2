# SPDX-License-Identifier: Apache-2.0
"""The agent inside a guest in memory, which sets passwords and freezes file systems."""

from __future__ import annotations

import time

from compute_agent.verb_context import VerbFailed
from compute_agent.virt.driver import RUNNING
from compute_agent.virt.memory.state.guest import MemoryGuest
from compute_agent.virt.memory.state.host import MemoryHost


def set_password(host: MemoryHost, server: str, user: str, password: str) -> None:
    """Set the password of a user in the guest.

    Raises:
        VerbFailed: The guest does not exist, does not run (also if paused), or has no agent.
    """
    with host.lock:
        guest = _require_agent(host, server)
        guest.set_password(user, password)
        host.write(server, guest)


def quiesce(host: MemoryHost, server: str, seconds: float) -> None:
    """Freeze the guest's file systems for at most ``seconds``.

    Raises:
        VerbFailed: The guest does not exist, does not run (also if paused), or has no agent.
    """
    with host.lock:
        _require_agent(host, server).still_until = time.monotonic() + seconds


def _require_agent(host: MemoryHost, server: str) -> MemoryGuest:
    guest = host.active_guest(server)
    if not guest.has_agent or guest.power_state != RUNNING:
        raise VerbFailed(
            "The agent in the guest does not answer; install and start qemu-guest-agent in the guest."
        )
    return guest
