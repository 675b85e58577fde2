# SPDX-License-Identifier: Apache-2.0
"""Volumes of a guest as libvirt's XML: pure functions.

Called by ``domain_xml`` and ``volumes``. A volume is known by its id, which is the serial of its
disk, so that the guest finds it by that whatever its other name is. Must stay true: a volume's
format is said and never guessed, so that nothing which a guest wrote on it makes QEMU open another
file; a volume that a guest has had keeps its PCI address when the guest is described anew.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from string import ascii_lowercase
from xml.etree import ElementTree
from xml.etree.ElementTree import Element, SubElement

from common.domain import device_names
from common.domain.models import AttachedVolume
from compute_agent.virt.libvirt.xml import hardware_xml

#: What libvirt calls the places where a volume can be.
FILE, BLOCK, NETWORK = "file", "block", "network"
RAW, QCOW2 = "raw", "qcow2"
#: What it calls the protocols that QEMU speaks, and the kind of secret that goes with each.
NBD, ISCSI, RBD = "nbd", "iscsi", "rbd"
SECRETS = {ISCSI: "iscsi", RBD: "ceph"}
DEVICE = re.compile(r"(?:/dev/)?((?:vd|sd|hd|xvd)[a-z]{1,2})", re.ASCII)
SCSI_CONTROLLER = "devices/controller[@type='scsi']"


@dataclass(frozen=True, slots=True)
class VolumeSource:
    """Where QEMU finds a volume: a file or block device of the host (``path``), or what a server
    has under a name (``export``) by a protocol that QEMU speaks. ``beside``: more servers that have
    it, host:port; ``user`` and ``secret``: who asks, and libvirt's secret with his password;
    ``initiator``: this host's name in iSCSI. ``direct``: past the host's cache; ``limits``:
    libvirt's name of a rate -> number; ``block_sizes``: the same of sizes that the guest sees;
    ``format``: of a file."""

    kind: str
    path: str = ""
    host: str = ""
    port: int = 0
    export: str = ""
    tls: bool = False
    direct: bool = True
    limits: Mapping[str, int] = field(default_factory=dict)
    block_sizes: Mapping[str, int] = field(default_factory=dict)
    protocol: str = "nbd"
    beside: Sequence[str] = ()
    user: str = ""
    secret: str = ""
    initiator: str = ""
    format: str = RAW


def element(
    volume: AttachedVolume,
    source: VolumeSource,
    name: str,
    address: Mapping[str, str] | None = None,
) -> Element:
    """The disk, which the domain calls ``name``."""
    root = Element("disk", type=source.kind, device="disk")
    cache = "none" if source.direct else "writeback"
    SubElement(root, "driver", name="qemu", type=source.format, cache=cache, discard="unmap")
    root.append(_source(source))
    SubElement(root, "target", dev=name, bus=volume.bus)
    SubElement(root, "serial").text = volume.volume_id
    if volume.read_only:
        SubElement(root, "readonly")
    if volume.multiattach:
        SubElement(root, "shareable")
    hardware_xml.disk_limits(
        root, {f"disk_{rate}": str(number) for rate, number in source.limits.items()}
    )
    if source.block_sizes:
        sizes = {name: str(number) for name, number in source.block_sizes.items()}
        SubElement(root, "blockio", sizes)
    if address:
        SubElement(root, "address", dict(address))
    return root


def _source(source: VolumeSource) -> Element:
    if source.kind != NETWORK:
        return Element("source", {"file" if source.kind == FILE else "dev": source.path})
    made = Element("source", protocol=source.protocol, name=source.export)
    if source.protocol == NBD:
        made.set("tls", "yes" if source.tls else "no")
    SubElement(made, "host", name=source.host, port=str(source.port))
    for one in source.beside:
        host, _, port = one.rpartition(":")
        SubElement(made, "host", name=host, port=port)
    if source.initiator:
        SubElement(SubElement(made, "initiator"), "iqn", name=source.initiator)
    if source.secret:
        auth = SubElement(made, "auth", username=source.user)
        SubElement(auth, "secret", type=SECRETS[source.protocol], uuid=source.secret)
    return made


def place(source: VolumeSource) -> Element:
    """A disk that is only where QEMU finds it, as a copy's order has it."""
    root = Element("disk", type=source.kind, device="disk")
    cache = "none" if source.direct else "writeback"
    SubElement(root, "driver", name="qemu", type=source.format, cache=cache, discard="unmap")
    root.append(_source(source))
    return root


def is_at(disk: Element, source: VolumeSource) -> bool:
    """Is a disk of a domain, or the copy that is made of one, at this place?"""
    found, wanted = disk.find("source"), _source(source)
    if found is None or disk.get("type") != source.kind:
        return False
    if source.kind != NETWORK:
        return all(found.get(name) == value for name, value in wanted.attrib.items())
    there, host = found.find("host"), wanted.find("host")
    return (
        (found.get("protocol"), found.get("name")) == (wanted.get("protocol"), wanted.get("name"))
        and there is not None
        and host is not None
        and (there.get("name"), there.get("port")) == (host.get("name"), host.get("port"))
    )


def files(disk: Element) -> list[str]:
    """The paths of a running disk's files, its own first, then each upon which the one before is
    made."""
    found: list[str] = []
    layer: Element | None = disk
    while layer is not None and (source := layer.find("source")) is not None:
        found.append(source.get("file", ""))
        layer = layer.find("backingStore")
    return found


def snapshot_order(described: str, name: str, source: VolumeSource) -> str:
    """The order that this disk of a domain, and no other, goes on in another file, which is there
    already."""
    root = Element("domainsnapshot")
    disks = SubElement(root, "disks")
    for other in sorted(names(described) - {name}):
        SubElement(disks, "disk", name=other, snapshot="no")
    disk = SubElement(disks, "disk", name=name, snapshot="external", type=source.kind)
    SubElement(disk, "driver", type=source.format)
    disk.append(_source(source))
    return ElementTree.tostring(root, encoding="unicode")


def wanted_name(volume: AttachedVolume) -> str:
    """What its user calls it; "" when that is no name of a disk."""
    found = DEVICE.fullmatch(volume.device)
    return found[1] if found else ""


def text(disk: Element) -> str:
    return ElementTree.tostring(disk, encoding="unicode")


def found(described: str) -> dict[str, Element]:
    """Serial -> disk, of a domain that libvirt described; none when it described nothing."""
    return {
        serial: disk
        for disk in (
            ElementTree.fromstring(described).iterfind("devices/disk") if described else ()
        )
        if (serial := disk.findtext("serial"))
    }


def addresses(described: str) -> dict[str, dict[str, str]]:
    """Volume id -> place on the PCI bus; elsewhere a disk's place follows from its name."""
    return {
        serial: dict(address.attrib)
        for serial, disk in found(described).items()
        if (address := disk.find("address")) is not None and address.get("type") == "pci"
    }


def names(*described: str) -> set[str]:
    """What domains call their disks."""
    return {
        target.get("dev", "")
        for one in described
        if one
        for target in ElementTree.fromstring(one).iterfind("devices/disk/target")
    }


def in_order(described: str) -> str:
    """Return the description of a domain that is off with its disks in the order of their names.

    A guest names its disks by their places, for example on the PCI bus. Detached volumes leave
    gaps in the names, and new disks may get places before older ones. The volumes get the first
    names that are free, and all disks get the same places in the order of these names.
    """
    root = ElementTree.fromstring(described)
    before = ElementTree.tostring(root)
    disks = [disk for disk in root.iterfind("devices/disk") if disk.get("device") == "disk"]
    disks.sort(key=lambda disk: (len(name_of(disk)), name_of(disk)))
    used = {
        name_of(disk) for disk in root.iterfind("devices/disk") if disk.findtext("serial") is None
    }
    for disk in disks:
        target = disk.find("target")
        if target is None or disk.findtext("serial") is None:
            continue
        name = free_name(target.get("bus", ""), used)
        address = disk.find("address")
        if name != name_of(disk) and address is not None and address.get("type") == "drive":
            disk.remove(address)  # libvirt derives it from the name
        target.set("dev", name)
    disks.sort(key=lambda disk: (len(name_of(disk)), name_of(disk)))
    places = [
        place
        for disk in disks
        if (place := disk.find("address")) is not None and place.get("type") == "pci"
    ]
    for place, attributes in zip(
        places, sorted((dict(place.attrib) for place in places), key=_position), strict=True
    ):
        place.attrib.clear()
        place.attrib.update(attributes)
    if ElementTree.tostring(root) == before:
        return described
    return ElementTree.tostring(root, encoding="unicode")


def free_name(bus: str, taken: set[str], begin: str = "a") -> str:
    """Take the next name on a bus from this letter on; after z comes aa."""
    ends: list[str] = [
        *ascii_lowercase[ascii_lowercase.index(begin) :],
        *(first + second for first in ascii_lowercase for second in ascii_lowercase),
    ]
    names = (device_names.PREFIXES[bus] + end for end in ends)
    name = next(one for one in names if one not in taken)
    taken.add(name)
    return name


def _position(address: Mapping[str, str]) -> list[int]:
    return [int(address.get(part, "0"), 16) for part in ("domain", "bus", "slot", "function")]


def name_of(disk: Element) -> str:
    target = disk.find("target")
    return "" if target is None else target.get("dev", "")


def alias(disk: Element) -> str:
    """What libvirt calls a disk of a running domain."""
    found = disk.find("alias")
    return "" if found is None else found.get("name", "")


def has_scsi(described: str) -> bool:
    """Has the domain a controller for disks on SCSI?"""
    return ElementTree.fromstring(described).find(SCSI_CONTROLLER) is not None


def scsi_controller(model: str) -> str:
    """The one that a running guest gets before its first disk on SCSI."""
    return text(Element("controller", type="scsi", index="0", model=model))


def with_disk(described: str, disk: Element, scsi_model: str) -> str:
    """The domain with this disk, in place of the one with its serial."""
    root = ElementTree.fromstring(without(described, disk.findtext("serial") or ""))
    devices = root.find("devices")
    if devices is None:
        raise ValueError("no domain: it has no devices")
    target = disk.find("target")
    if target is not None and target.get("bus") == "scsi" and root.find(SCSI_CONTROLLER) is None:
        SubElement(devices, "controller", type="scsi", index="0", model=scsi_model)
    last = max((at for at, device in enumerate(devices) if device.tag == "disk"), default=-1)
    devices.insert(last + 1, disk)
    return ElementTree.tostring(root, encoding="unicode")


def with_place(described: str, volume_id: str, source: VolumeSource) -> str:
    """The domain with this volume at this place; all else of its disk stays."""
    root = ElementTree.fromstring(described)
    for disk in root.iterfind("devices/disk"):
        if disk.findtext("serial") != volume_id:
            continue
        disk.set("type", source.kind)
        for old, new in zip(("driver", "source"), place(source), strict=True):
            known = disk.find(old)
            if known is not None:
                known.clear()
                known.attrib.update(new.attrib)
                known.extend(new)
    return ElementTree.tostring(root, encoding="unicode")


def booted_from(described: str, wanted: Sequence[AttachedVolume]) -> str:
    """The domain booted from these volumes in their order, too; as it is where it is already. What
    takes the place of its own disk comes first, the others after those that are booted from."""
    disks, root = found(described), ElementTree.fromstring(described)
    if all((disk := disks.get(one.volume_id)) is None or has_order(disk) for one in wanted):
        return described
    for system in root.iterfind("os"):
        for boot in system.findall("boot"):
            system.remove(boot)
    mine = {one.volume_id: one.boot_index or 0 for one in wanted}

    def rank(disk: Element) -> tuple[int, int]:
        index, boot = mine.get(disk.findtext("serial") or ""), disk.find("boot")
        if index is not None:
            return (0 if index == 0 else 2, index)
        return (1, int(boot.get("order", "0")) if boot is not None else 0)

    booted = [
        disk
        for disk in root.iterfind("devices/disk")
        if disk.findtext("serial") in mine or has_order(disk)
    ]
    for order, disk in enumerate(sorted(booted, key=rank), 1):
        for old in disk.findall("boot"):
            disk.remove(old)
        SubElement(disk, "boot", order=str(order))
    return ElementTree.tostring(root, encoding="unicode")


def has_order(disk: Element) -> bool:
    """Does the disk say when it is booted from?"""
    return disk.find("boot") is not None


def without(described: str, volume_id: str) -> str:
    """The domain without this volume."""
    root = ElementTree.fromstring(described)
    for devices in root.iterfind("devices"):
        for disk in devices.findall("disk"):
            if volume_id and disk.findtext("serial") == volume_id:
                devices.remove(disk)
    return ElementTree.tostring(root, encoding="unicode")
