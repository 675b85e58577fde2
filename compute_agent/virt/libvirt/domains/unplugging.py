# SPDX-License-Identifier: Apache-2.0
"""Detaches a device from a running guest.

Called by ``interfaces`` and ``volumes``.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from compute_agent.verb_context import Cancelled, VerbContext, VerbFailed
from compute_agent.virt.driver import PAUSED
from compute_agent.virt.libvirt.domains.connection import AFFECT_LIVE, Connection, GuestDomain

#: Seconds in which a guest must release a device, between two requests, and between two polls. A
#: booting guest answers only when the kernel runs. Nova has the same time limit.
RELEASE_SECONDS, REQUEST_SECONDS, LOOK_SECONDS = 160.0, 4.0, 0.2


def unplug(
    libvirt: Connection,
    server: str,
    kind: str,
    changeable: Callable[[], GuestDomain],
    alias: Callable[[str], str | None],
    held: Callable[[GuestDomain, str], VerbFailed],
    context: VerbContext,
    seconds: float = RELEASE_SECONDS,
) -> None:
    """Request the release of a device from the active guest until the guest has released it.

    Return at once if the guest is off or does not have the device. The request is repeated, because
    a booting guest may miss a request. The stored definition is not changed.

    Args:
        libvirt: Connection to libvirtd.
        server: Id of the server.
        kind: The device in the text of errors, "volume" or "interface".
        changeable: Returns the domain, or raises VerbFailed if changes are not possible.
        alias: Returns libvirt's name of the device in the domain's XML, or None without the device.
        held: Makes the error from the domain and libvirt's last refusal.
        context: Context of the verb.
        seconds: The time limit.

    Raises:
        VerbFailed: The error from ``changeable``, or the error from ``held`` if the guest is paused
            or did not release the device.
        Cancelled: The verb was cancelled before the guest released the device.
    """
    deadline, request_at, refusal = time.monotonic() + seconds, 0.0, ""
    while True:
        domain = changeable()
        device = alias(libvirt.describe(server)) if domain.active else None
        if device is None:
            return
        if context.cancelled():
            raise Cancelled
        now = time.monotonic()
        if now > deadline or domain.power_state == PAUSED:
            raise held(domain, refusal)
        if now >= request_at:
            request_at = now + REQUEST_SECONDS
            try:
                _request(libvirt, server, kind, device)
            except VerbFailed as error:
                # QEMU refuses a second request while the first is in progress. The refusal is
                # reported only if the guest does not release the device.
                refusal = error.details
        time.sleep(LOOK_SECONDS)


def _request(libvirt: Connection, server: str, kind: str, device: str) -> None:
    libvirt.on(
        server,
        f"request the release of the {kind}",
        lambda domain: domain.detachDeviceAlias(device, AFFECT_LIVE),
    )
