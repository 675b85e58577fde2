# SPDX-License-Identifier: Apache-2.0
"""A guest that is resized where it is: what its disks were is kept aside until that is settled.

Called by ``virt.libvirt.driver``. Must stay true: what is kept aside are the disks as they were
before the resize whose fence it carries, whole, however often a verb is repeated; it is given up by
settling, or by the next resize.
"""

from __future__ import annotations

from pathlib import Path

from common.domain.models import DomainState, GuestSpec
from compute_agent.verb_context import VerbContext
from compute_agent.virt.libvirt.disks import disks, local_disks
from compute_agent.virt.libvirt.domains import power
from compute_agent.virt.libvirt.domains.connection import Connection
from compute_agent.virt.libvirt.guests.guests import LibvirtGuests, root_disk
from compute_agent.virt.libvirt.xml.domain_xml import Disk


def resize(
    libvirt: Connection, guests: LibvirtGuests, spec: GuestSpec, runs: bool, context: VerbContext
) -> DomainState:
    """The guest as ``spec`` says; one that runs already is so."""
    if power.find(libvirt, spec.server).fence != spec.fence:
        power.refuse_active(libvirt, spec.server)
    if not power.find(libvirt, spec.server).active:
        guests.check(spec)
        folder = guests.folder(spec.server)
        for disk in _all(folder, spec):
            disks.keep(disk, str(spec.fence), context)
        if (own := root_disk(folder, spec)) is not None:
            disks.grow(own, spec.flavor.root_gb)
        guests.local.fit(folder, spec, new=True)
    return guests.install(spec, runs, context)


def _all(folder: Path, spec: GuestSpec) -> list[Disk]:
    """The disks whose content counts."""
    own = root_disk(folder, spec)
    return [
        *([own] if own else []),
        *(disk for disk in local_disks.present(folder) if local_disks.is_ephemeral(disk.path.name)),
    ]


def settle(
    libvirt: Connection,
    guests: LibvirtGuests,
    spec: GuestSpec,
    back: bool,
    resized: int,
    context: VerbContext,
) -> DomainState:
    """Forget what was kept aside, or take ``back`` what the resize under the fence ``resized`` has
    kept."""
    power.find(libvirt, spec.server)
    folder = guests.folder(spec.server)
    if back:
        power.refuse_active(libvirt, spec.server)
        for disk in _all(folder, spec):
            disks.take_back(disk, str(resized))
        state = guests.install(spec, False, context)
        local_disks.drop_others(folder, spec)
        return state
    for disk in _all(folder, spec):
        disks.forget(disk)
    local_disks.drop_others(folder, spec)
    libvirt.mark(spec.server, fence=spec.fence)
    return power.state(power.find(libvirt, spec.server))
