# SPDX-License-Identifier: Apache-2.0
"""Copies a server's disk, as of one moment, to a single qcow2 file without a backing file.

Called by ``virt.libvirt.driver``. The disk of an active domain is copied by a backup job of QEMU
while the guest runs. The disk of a domain that is off is copied by qemu-img, which gets the format
of each file as an argument.

Invariant: the guest's own disk is only read. An incomplete copy is discarded and made anew.
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
    """Copy the server's disk ``own`` to ``target``, replacing the result of an earlier attempt.

    An earlier job of the domain is aborted first. The file systems of a running guest are frozen
    while the copy begins, provided that an agent in the guest can freeze them.

    Raises:
        VerbFailed: The server has no domain or no such disk, an earlier job cannot be aborted, the
            copy failed, or the image requires a freeze of the file systems, which failed.
        Cancelled: The verb was cancelled. The copy is missing or incomplete.
    """
    guest = power.find(libvirt, server)
    jobs.abort(libvirt, server)
    target.unlink(missing_ok=True)
    name, disk = own_disk(libvirt.describe(server), own)
    context.phase(CommandPhase.COPYING_DISK, 0)
    if context.cancelled():
        raise Cancelled
    if not guest.active:
        disks.convert(disk, target, context)
        return
    with guest_agent.frozen(libvirt, server) as is_frozen:
        if not is_frozen and guest.marks.options.get("require_quiesce") == "yes":
            raise quiesce_failed()
        xml = backup_xml(name, target)
        libvirt.on(server, "copy the guest's disk", lambda domain: domain.backupBegin(xml, None, 0))
    jobs.backup(libvirt, server, context)


def own_disk(described: str, own: Path) -> tuple[str, Disk]:
    """Return libvirt's name of the disk ``own``, such as "vda", and the disk with its backing file.

    Args:
        described: The domain's XML.
        own: Path of the disk.

    Raises:
        VerbFailed: The domain has no such disk.
    """
    for name, disk in running_domain.disks(described).items():
        if disk.path == own:
            return name, disk
    raise VerbFailed(
        "The server has no root disk on this host, so no image can be made of it.",
        details=f"the domain has no disk {own}",
    )


def backup_xml(name: str, target: Path) -> str:
    """Return the XML of a backup job that copies only the disk ``name``, to a new qcow2 file.

    Args:
        name: libvirt's name of the disk, for example "vda".
        target: Path of the new file.
    """
    root = Element("domainbackup", mode="push")
    disk = SubElement(SubElement(root, "disks"), "disk", name=name, type="file")
    SubElement(disk, "target", file=str(target))
    SubElement(disk, "driver", type="qcow2")
    return ElementTree.tostring(root, encoding="unicode")
