# SPDX-License-Identifier: Apache-2.0
"""Volumes of a guest as libvirt's XML. Pure functions.

Called by ``domain_xml`` and ``volumes``. A volume is identified by the id, which is the serial of
the disk. So the guest can find the disk by serial, whatever the device name is.

Invariant: the XML has each volume's format, so that data written by a guest cannot make QEMU open
another file. An existing volume keeps the PCI address in a new definition.
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

#: libvirt's types of disks.
FILE, BLOCK, NETWORK = "file", "block", "network"
RAW, QCOW2 = "raw", "qcow2"
#: libvirt's names of the protocols that QEMU speaks, and of their types of secrets.
NBD, ISCSI, RBD = "nbd", "iscsi", "rbd"
SECRETS = {ISCSI: "iscsi", RBD: "ceph"}
DEVICE = re.compile(r"(?:/dev/)?((?:vd|sd|hd|xvd)[a-z]{1,2})", re.ASCII)
SCSI_CONTROLLER = "devices/controller[@type='scsi']"


@dataclass(frozen=True, slots=True)
class VolumeSource:
    """Where QEMU finds a volume: a file or block device (``path``), or an export of a server.

    Attributes:
        kind: FILE, BLOCK or NETWORK.
        path: Path of the file or block device, "" for NETWORK.
        host: Host of the server.
        port: Port of the server.
        export: Name of the volume at the server.
        tls: True if QEMU connects over TLS.
        direct: True to bypass the host's page cache.
        limits: QoS limits by libvirt's names.
        block_sizes: Block sizes that the guest sees, by libvirt's names.
        protocol: libvirt's name of the protocol, for NETWORK.
        beside: Further servers of the volume, as host:port.
        user: User name at the server.
        secret: UUID of libvirt's secret with that user's password, or "" without a password.
        initiator: This host's iSCSI name, or "" for other protocols.
        format: Format of a file.
    """

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
    """Return the disk element of a volume.

    Args:
        volume: The volume.
        source: Where QEMU finds the volume.
        name: Device name in the guest, for example "vdb".
        address: The PCI address, or None if libvirt assigns an address.
    """
    root = Element("disk", type=source.kind, device="disk")
    cache = "none" if source.direct else "writeback"
    SubElement(root, "driver", name="qemu", type=source.format, cache=cache, discard="unmap")
    root.append(_build_source(source))
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


def _build_source(source: VolumeSource) -> Element:
    if source.kind != NETWORK:
        return Element("source", {"file" if source.kind == FILE else "dev": source.path})
    root = Element("source", protocol=source.protocol, name=source.export)
    if source.protocol == NBD:
        root.set("tls", "yes" if source.tls else "no")
    SubElement(root, "host", name=source.host, port=str(source.port))
    for server in source.beside:
        host, _, port = server.rpartition(":")
        SubElement(root, "host", name=host, port=port)
    if source.initiator:
        SubElement(SubElement(root, "initiator"), "iqn", name=source.initiator)
    if source.secret:
        auth = SubElement(root, "auth", username=source.user)
        SubElement(auth, "secret", type=SECRETS[source.protocol], uuid=source.secret)
    return root


def place(source: VolumeSource) -> Element:
    """Return a disk element with only the driver (with the format) and the source of a volume."""
    root = Element("disk", type=source.kind, device="disk")
    cache = "none" if source.direct else "writeback"
    SubElement(root, "driver", name="qemu", type=source.format, cache=cache, discard="unmap")
    root.append(_build_source(source))
    return root


def is_at(disk: Element, source: VolumeSource) -> bool:
    """Return True if the disk element, or the mirror element of a block copy, has this source.

    For a volume on a server, only protocol, export and first server are compared. For other
    volumes, only kind and path are compared.
    """
    present, expected = disk.find("source"), _build_source(source)
    if present is None or disk.get("type") != source.kind:
        return False
    if source.kind != NETWORK:
        return all(present.get(name) == value for name, value in expected.attrib.items())
    present_host, expected_host = present.find("host"), expected.find("host")
    return (
        (present.get("protocol"), present.get("name"))
        == (expected.get("protocol"), expected.get("name"))
        and present_host is not None
        and expected_host is not None
        and (present_host.get("name"), present_host.get("port"))
        == (expected_host.get("name"), expected_host.get("port"))
    )


def files(disk: Element) -> list[str]:
    """Return the paths of a disk's active file and of its backing files, from top to bottom.

    The path of a source that is not a file is "".

    Args:
        disk: The disk element of an active domain.
    """
    paths: list[str] = []
    layer: Element | None = disk
    while layer is not None and (source := layer.find("source")) is not None:
        paths.append(source.get("file", ""))
        layer = layer.find("backingStore")
    return paths


def snapshot_order(xml: str, name: str, source: VolumeSource) -> str:
    """Return the XML of a snapshot that switches the disk ``name`` to the file ``source``.

    The other disks in the domain's XML ``xml`` are excluded from the snapshot.
    """
    root = Element("domainsnapshot")
    disks = SubElement(root, "disks")
    for other in sorted(names(xml) - {name}):
        SubElement(disks, "disk", name=other, snapshot="no")
    disk = SubElement(disks, "disk", name=name, snapshot="external", type=source.kind)
    SubElement(disk, "driver", type=source.format)
    disk.append(_build_source(source))
    return ElementTree.tostring(root, encoding="unicode")


def wanted_name(volume: AttachedVolume) -> str:
    """Return ``volume.device`` without "/dev/", or "" if that is not a valid name of a disk."""
    match = DEVICE.fullmatch(volume.device)
    return match[1] if match else ""


def text(disk: Element) -> str:
    """Return the element as XML text."""
    return ElementTree.tostring(disk, encoding="unicode")


def find_disks(xml: str) -> dict[str, Element]:
    """Return the volumes' disk elements in a domain's XML, by volume id.

    The id is the serial of the disk. Disks without a serial are left out. For the XML "" the result
    is {}.
    """
    return {
        serial: disk
        for disk in (ElementTree.fromstring(xml).iterfind("devices/disk") if xml else ())
        if (serial := disk.findtext("serial"))
    }


def addresses(xml: str) -> dict[str, dict[str, str]]:
    """Return the attributes of the volumes' PCI addresses, by volume id.

    Volumes on other buses are left out, because their names determine their addresses.
    """
    return {
        serial: dict(address.attrib)
        for serial, disk in find_disks(xml).items()
        if (address := disk.find("address")) is not None and address.get("type") == "pci"
    }


def names(*xmls: str) -> set[str]:
    """Return the device names of all disks in these definitions. An empty definition has none."""
    return {
        target.get("dev", "")
        for xml in xmls
        if xml
        for target in ElementTree.fromstring(xml).iterfind("devices/disk/target")
    }


def in_order(xml: str) -> str:
    """Return the definition of a domain that is off, with disk names and addresses in order.

    A guest names its disks by their addresses, for example on the PCI bus. Detached volumes leave
    gaps in the names, and new disks may have addresses before older disks. The volumes get the
    first free names of their buses, and the disks' present PCI addresses are assigned anew in the
    order of the names. CD-ROMs are not changed. If all is in order, the result is ``xml`` itself.
    """
    root = ElementTree.fromstring(xml)
    original = ElementTree.tostring(root)
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
            # libvirt derives this address from the name.
            disk.remove(address)
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
    if ElementTree.tostring(root) == original:
        return xml
    return ElementTree.tostring(root, encoding="unicode")


def free_name(bus: str, taken: set[str], begin: str = "a") -> str:
    """Return the first free device name on a bus, and add the name to ``taken``.

    For example, "vda" on virtio. The letters begin at ``begin``, and aa follows z.
    """
    suffixes: list[str] = [
        *ascii_lowercase[ascii_lowercase.index(begin) :],
        *(first + second for first in ascii_lowercase for second in ascii_lowercase),
    ]
    names = (device_names.PREFIXES[bus] + end for end in suffixes)
    name = next(candidate for candidate in names if candidate not in taken)
    taken.add(name)
    return name


def _position(address: Mapping[str, str]) -> list[int]:
    return [int(address.get(part, "0"), 16) for part in ("domain", "bus", "slot", "function")]


def name_of(disk: Element) -> str:
    """Return the device name of a disk, for example "vdb", or "" without a target."""
    target = disk.find("target")
    return "" if target is None else target.get("dev", "")


def alias(disk: Element) -> str:
    """Return libvirt's alias of a disk of an active domain, or "" if the alias is missing."""
    element = disk.find("alias")
    return "" if element is None else element.get("name", "")


def has_scsi(xml: str) -> bool:
    """Return True if the domain has a SCSI controller."""
    return ElementTree.fromstring(xml).find(SCSI_CONTROLLER) is not None


def scsi_controller(model: str) -> str:
    """Return the XML of the controller that a running guest gets before the first SCSI disk."""
    return text(Element("controller", type="scsi", index="0", model=model))


def with_disk(xml: str, disk: Element, scsi_model: str) -> str:
    """Return the domain's XML with this disk, in place of a disk with the same serial.

    A SCSI disk also gets a controller of ``scsi_model`` if the domain has no SCSI controller.

    Raises:
        ValueError: The XML has no devices.
    """
    root = ElementTree.fromstring(without(xml, disk.findtext("serial") or ""))
    devices = root.find("devices")
    if devices is None:
        raise ValueError("the domain's XML has no element <devices>")
    target = disk.find("target")
    if target is not None and target.get("bus") == "scsi" and root.find(SCSI_CONTROLLER) is None:
        SubElement(devices, "controller", type="scsi", index="0", model=scsi_model)
    last = max(
        (position for position, device in enumerate(devices) if device.tag == "disk"), default=-1
    )
    devices.insert(last + 1, disk)
    return ElementTree.tostring(root, encoding="unicode")


def with_place(xml: str, volume_id: str, source: VolumeSource) -> str:
    """Return the domain's XML with ``source`` as source of this volume, and the driver's format.

    Name, address and limits stay. Without the volume the definition is not changed.
    """
    root = ElementTree.fromstring(xml)
    for disk in root.iterfind("devices/disk"):
        if disk.findtext("serial") != volume_id:
            continue
        disk.set("type", source.kind)
        for old, new in zip(("driver", "source"), place(source), strict=True):
            child = disk.find(old)
            if child is not None:
                child.clear()
                child.attrib.update(new.attrib)
                child.extend(new)
    return ElementTree.tostring(root, encoding="unicode")


def booted_from(xml: str, boot_volumes: Sequence[AttachedVolume]) -> str:
    """Return the domain's XML with these volumes in the boot order.

    A volume with boot index 0 comes first, then the other disks of the present order, then the
    other given volumes by boot index. The boot devices in <os> are removed. Volumes that the XML
    lacks are ignored. If all other volumes have a position already, the XML is not changed.
    """
    disks, root = find_disks(xml), ElementTree.fromstring(xml)
    if all(
        (disk := disks.get(volume.volume_id)) is None or has_order(disk) for volume in boot_volumes
    ):
        return xml
    for system in root.iterfind("os"):
        for boot in system.findall("boot"):
            system.remove(boot)
    boot_indexes = {volume.volume_id: volume.boot_index or 0 for volume in boot_volumes}

    def rank(disk: Element) -> tuple[int, int]:
        index, boot = boot_indexes.get(disk.findtext("serial") or ""), disk.find("boot")
        if index is not None:
            return (0 if index == 0 else 2, index)
        return (1, int(boot.get("order", "0")) if boot is not None else 0)

    boot_disks = [
        disk
        for disk in root.iterfind("devices/disk")
        if disk.findtext("serial") in boot_indexes or has_order(disk)
    ]
    for order, disk in enumerate(sorted(boot_disks, key=rank), 1):
        for old in disk.findall("boot"):
            disk.remove(old)
        SubElement(disk, "boot", order=str(order))
    return ElementTree.tostring(root, encoding="unicode")


def has_order(disk: Element) -> bool:
    """Return True if the disk has a position in the boot order."""
    return disk.find("boot") is not None


def without(xml: str, volume_id: str) -> str:
    """Return the domain's XML without this volume."""
    root = ElementTree.fromstring(xml)
    for devices in root.iterfind("devices"):
        for disk in devices.findall("disk"):
            if volume_id and disk.findtext("serial") == volume_id:
                devices.remove(disk)
    return ElementTree.tostring(root, encoding="unicode")
