# SPDX-License-Identifier: Apache-2.0
"""The agent inside a guest in memory: it sets passwords."""

from __future__ import annotations

from compute_agent.virt.driver import RUNNING, VerbFailed
from compute_agent.virt.memory.host import MemoryHost


def set_password(host: MemoryHost, server: str, user: str, password: str) -> None:
    with host.lock:
        guest = host.active_guest(server)
        if not guest.has_agent or guest.power_state != RUNNING:
            raise VerbFailed(
                "The guest has no agent that answers; install and start qemu-guest-agent in it."
            )
        guest.set_password(user, password)
        host.write(server, guest)
