# SPDX-License-Identifier: Apache-2.0
"""A guest that is resized where it is: what its disk was is kept aside until that is settled.

Called by ``virt.libvirt.driver``. Must stay true: what is kept aside is the disk as it was before the resize whose
fence it carries, whole, however often a verb is repeated; it is given up by settling, or by the next resize.
"""
from __future__ import annotations

from common.models import DomainState, GuestSpec
from compute_agent.virt.driver import Run
from compute_agent.virt.libvirt import disks, power
from compute_agent.virt.libvirt.connection import Connection
from compute_agent.virt.libvirt.guests import Guests


def resize(libvirt: Connection, guests: Guests, spec: GuestSpec, runs: bool, run: Run) -> DomainState:
    """The guest as ``spec`` says; one that runs already is so."""
    if power.find(libvirt, spec.server).fence != spec.fence:
        power.refuse_active(libvirt, spec.server)
    if not power.find(libvirt, spec.server).active:
        guests.check(spec)
        disk = disks.existing(guests.folder(spec.server))
        disks.keep(disk, str(spec.fence), run)
        disks.grow(disk, spec.flavor.root_gb)
    return guests.install(spec, runs, run)


def settle(libvirt: Connection, guests: Guests, spec: GuestSpec, back: bool, resized: int, run: Run
           ) -> DomainState:
    """Forget what was kept aside, or take ``back`` what the resize under the fence ``resized`` has kept."""
    power.find(libvirt, spec.server)
    disk = disks.existing(guests.folder(spec.server))
    if back:
        power.refuse_active(libvirt, spec.server)
        disks.take_back(disk, str(resized))
        return guests.install(spec, False, run)
    disks.forget(disk)
    libvirt.mark(spec.server, fence=spec.fence)
    return power.state(power.find(libvirt, spec.server))
