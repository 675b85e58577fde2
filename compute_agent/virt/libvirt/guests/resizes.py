# SPDX-License-Identifier: Apache-2.0
"""Resizes a guest in place, with copies of the disks until the resize is settled.

Called by ``virt.libvirt.driver``. The name of a copy has the fence of the resize.

Invariant: a copy is the complete disk before that resize, however often a verb is repeated. The
copy is removed when the resize is settled, or by the next resize.
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
    """Resize a guest that is off to ``spec``, start the guest if ``runs``, and return the state.

    The root disk and the ephemeral disks are copied before they grow. The copies have the fence of
    ``spec`` in their names. If the guest is active with this fence, an earlier call has resized the
    disks, and they are not changed.

    Raises:
        VerbFailed: The guest does not exist or is active with another fence, the host cannot make
            the new hardware, a disk cannot be copied or grown, or the start failed.
        Cancelled: The verb was cancelled.
        Unavailable: This host may not start guests now.
    """
    if power.find(libvirt, spec.server).fence != spec.fence:
        power.refuse_active(libvirt, spec.server)
    if not power.find(libvirt, spec.server).active:
        guests.check(spec)
        folder = guests.folder(spec.server)
        for disk in _list_kept_disks(folder, spec):
            disks.keep(disk, str(spec.fence), context)
        if (own := root_disk(folder, spec)) is not None:
            disks.grow(own, spec.flavor.root_gb)
        guests.local.fit(folder, spec, new=True)
    return guests.install(spec, runs, context)


def _list_kept_disks(folder: Path, spec: GuestSpec) -> list[Disk]:
    """Return the disks that a resize copies: the root disk and the ephemeral disks, not swap.

    A server that boots from a volume has no root disk.

    Raises:
        VerbFailed: The root disk is missing or malformed.
    """
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
    """Confirm or revert a resize, as ``Driver.settle_resize``, and return the guest's state.

    With ``back`` False the copies of the disks are removed, and the guest gets the fence of
    ``spec``.

    With ``back`` True the guest must be off and stays off. The copies made under the fence
    ``resized`` replace the disks that exist, and all other copies of these disks are removed. A
    disk without such a copy is not changed. The domain is defined by ``spec``.

    In both cases ephemeral and swap disks that ``spec`` does not contain are removed.

    Raises:
        VerbFailed: The guest does not exist, or the root disk is missing or malformed. With
            ``back`` True also: the guest is active or cannot be defined.
        Cancelled: The verb was cancelled, and ``back`` is True.
    """
    power.find(libvirt, spec.server)
    folder = guests.folder(spec.server)
    if back:
        power.refuse_active(libvirt, spec.server)
        for disk in _list_kept_disks(folder, spec):
            disks.take_back(disk, str(resized))
        state = guests.install(spec, False, context)
        local_disks.drop_others(folder, spec)
        return state
    for disk in _list_kept_disks(folder, spec):
        disks.forget(disk)
    local_disks.drop_others(folder, spec)
    libvirt.mark(spec.server, fence=spec.fence)
    return power.state(power.find(libvirt, spec.server))
