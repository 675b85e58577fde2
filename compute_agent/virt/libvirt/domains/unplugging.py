# SPDX-License-Identifier: Apache-2.0
"""A device that a running guest is asked to let go of.

Called by ``interfaces`` and ``volumes``.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from compute_agent.verb_context import Cancelled, VerbContext, VerbFailed
from compute_agent.virt.driver import PAUSED
from compute_agent.virt.libvirt.domains.connection import AFFECT_LIVE, Connection, GuestDomain

#: Seconds in which a guest must let go of a device: one that boots answers only when it has, and
#: Nova waits as long; between two requests; and between two looks.
RELEASE_SECONDS, REQUEST_SECONDS, LOOK_SECONDS = 160.0, 4.0, 0.2


def unplug(
    libvirt: Connection,
    server: str,
    what: str,
    changeable: Callable[[], GuestDomain],
    alias: Callable[[str], str | None],
    held: Callable[[GuestDomain, str], VerbFailed],
    context: VerbContext,
    seconds: float = RELEASE_SECONDS,
) -> None:
    """Ask the running guest, again and again, until it has let go; a request may be missed by one
    that boots. ``alias``: what libvirt calls the device in a description of the guest, None when it
    has none. Raises what ``held`` makes of libvirt's refusal when the guest does not let go in
    time."""
    deadline, ask_at, refusal = time.monotonic() + seconds, 0.0, ""
    while True:
        found = changeable()
        device = alias(libvirt.describe(server)) if found.active else None
        if device is None:
            return
        if context.cancelled():
            raise Cancelled
        now = time.monotonic()
        if now > deadline or found.power_state == PAUSED:
            raise held(found, refusal)
        if now >= ask_at:
            ask_at = now + REQUEST_SECONDS
            try:
                _request(libvirt, server, what, device)
            except VerbFailed as refused:
                # QEMU refuses a second request while it deals with the first; told if nothing comes
                # of either.
                refusal = refused.details
        time.sleep(LOOK_SECONDS)


def _request(libvirt: Connection, server: str, what: str, device: str) -> None:
    libvirt.on(
        server,
        f"pull out the {what}",
        lambda domain: domain.detachDeviceAlias(device, AFFECT_LIVE),
    )
