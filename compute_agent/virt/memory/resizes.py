# SPDX-License-Identifier: Apache-2.0
"""Resize of guests in memory on their host. The old disks are kept until the resize is settled.

Invariant: repeating a resize under the same fence does not change the kept disks.
"""

from __future__ import annotations

from copy import deepcopy

from common.domain.models import DomainState, GuestSpec
from compute_agent.verb_context import VerbContext
from compute_agent.virt.driver import required_hardware
from compute_agent.virt.memory import power
from compute_agent.virt.memory.state.host import MemoryHost, state_of

_BEFORE = "it is resized"


def resize(host: MemoryHost, spec: GuestSpec, runs: bool, context: VerbContext) -> DomainState:
    """Resize a guest that is off, once for this fence, and start the guest if ``runs``.

    Without ``runs`` a guest that is off stays off. The old disks are kept until ``settle``. A
    suspended guest loses the saved memory.

    Raises:
        VerbFailed: The guest does not exist, or is active and not resized under this fence. Or this
            host does not support the hardware or a volume, or lacks a bridge.
        errors.Unavailable: The guest was resized, and this host may not start guests now.
    """
    required_hardware(spec)
    with host.lock:
        guest = host.guest(spec.server)
        if guest.resized != spec.fence:
            power.refuse_active(guest, _BEFORE)
            guest.take_volumes(spec)
            guest.aside = {
                "disk": dict(guest.disk),
                "root_gb": guest.root_gb,
                "local": deepcopy(guest.ephemeral),
                "resized": spec.fence,
            }
            guest.dress(spec, host.spice)
            guest.resized, guest.saved = spec.fence, False
            host.write(spec.server, guest)
    return power.run_or_stop(host, spec, guest, runs, context)


def settle(host: MemoryHost, spec: GuestSpec, back: bool, resized: int) -> DomainState:
    """Confirm a resize, or with ``back`` restore the disks kept under the fence ``resized``.

    Without ``back`` the kept disks are dropped. With ``back`` the guest also gets the hardware and
    volumes of ``spec``. Disks kept by another resize are dropped in both cases and never restored.

    Raises:
        VerbFailed: The guest does not exist. Or with ``back``, the guest is active, or this host
            does not support a volume or the hardware.
    """
    with host.lock:
        guest = host.guest(spec.server)
        if back:
            power.refuse_active(guest, _BEFORE)
            guest.take_volumes(spec)
            if guest.aside is not None and guest.aside["resized"] == resized:
                guest.disk.clear()
                guest.disk.update(guest.aside["disk"])
                guest.root_gb, guest.saved = guest.aside["root_gb"], False
                swap = {
                    name: disk for name, disk in guest.local.items() if name not in guest.ephemeral
                }
                guest.local = guest.aside.get("local", {}) | swap
            guest.dress(spec, host.spice)
        guest.aside, guest.fence = None, spec.fence
        host.write(spec.server, guest)
        return state_of(spec.server, guest)
