# SPDX-License-Identifier: Apache-2.0
"""A copy of a server's disk as one moment saw it: one qcow2 file that refers to nothing.

Called by ``virt.libvirt.driver``. Of a domain that runs or is paused QEMU itself copies the disk,
by a backup job, while the guest goes on; of one that is off qemu-img does, told the format of each
file. Must stay true: the guest's own disk is only read, and a copy that was cut short is made anew.
"""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree
from xml.etree.ElementTree import Element, SubElement

from common.domain.command_progress import CommandPhase
from compute_agent.verb_context import Cancelled, VerbContext, VerbFailed
from compute_agent.virt.driver import quiesce_failed
from compute_agent.virt.libvirt.disks import disks
from compute_agent.virt.libvirt.domains import guest_agent, jobs, power
from compute_agent.virt.libvirt.domains.connection import Connection
from compute_agent.virt.libvirt.xml import running_domain
from compute_agent.virt.libvirt.xml.domain_xml import Disk


def copy(libvirt: Connection, server: str, own: Path, target: Path, context: VerbContext) -> None:
    """Copy the disk ``own`` of the server's domain into ``target``, which may be what an earlier
    try has left."""
    found = power.find(libvirt, server)
    jobs.abort(libvirt, server)
    target.unlink(missing_ok=True)
    name, disk = own_disk(libvirt.describe(server), own)
    context.phase(CommandPhase.COPYING_DISK, 0)
    if context.cancelled():
        raise Cancelled
    if not found.active:
        disks.convert(disk, target, context)
        return
    with guest_agent.frozen(libvirt, server) as still:
        if not still and found.marks.options.get("require_quiesce") == "yes":
            raise quiesce_failed()
        order = backup_xml(name, target)
        libvirt.on(
            server, "copy the guest's disk", lambda domain: domain.backupBegin(order, None, 0)
        )
    jobs.backup(libvirt, server, context)


def own_disk(described: str, own: Path) -> tuple[str, Disk]:
    """(what the domain calls it, the disk with its base) as the domain's XML says. VerbFailed when
    it has none."""
    for name, disk in running_domain.disks(described).items():
        if disk.path == own:
            return name, disk
    raise VerbFailed(
        "The server has no disk of its own on this host.", details=f"no disk {own} in its domain"
    )


def backup_xml(name: str, target: Path) -> str:
    """The order to copy one disk, and no other, into a new file."""
    root = Element("domainbackup", mode="push")
    disk = SubElement(SubElement(root, "disks"), "disk", name=name, type="file")
    SubElement(disk, "target", file=str(target))
    SubElement(disk, "driver", type="qcow2")
    return ElementTree.tostring(root, encoding="unicode")
