# SPDX-License-Identifier: Apache-2.0
"""Builds the XML definition of a server's domain. Pure functions, tested against golden files.

Called by ``virt.libvirt.guests``. For the hardware that flavor and image request, see
``hardware_xml``. All XML is built from elements, so that the library escapes text of tenants.
Characters that XML cannot contain are replaced. The default machine is ``pc``, because every guest
can read the config drive from an IDE CD-ROM (Debian's cloud kernel has no AHCI).

Invariant: the XML has each disk's complete backing chain, so that QEMU never detects a format.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree
from xml.etree.ElementTree import Element, SubElement

from common.domain.hardware import Hardware
from common.domain.models import AttachedVolume
from compute_agent.virt.driver import SPICE, VNC
from compute_agent.virt.interfaces import Plug
from compute_agent.virt.libvirt.xml import hardware_xml, interface_xml, volume_xml
from compute_agent.virt.libvirt.xml.hardware_xml import RATES, HostPlacement
from compute_agent.virt.libvirt.xml.volume_xml import VolumeSource

NAMESPACE = "urn:kilonova:server:1"
PREFIX = "kilonova"
#: The child of our metadata element with the server's facts.
FACTS = "facts"
#: Characters that XML 1.0 cannot contain, and line breaks, which libvirt refuses in a title.
NOT_IN_XML = re.compile("[^\t\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
#: Hardware options recorded in the metadata, because they are needed later: for an interface that
#: is attached, and for a snapshot.
KEPT_OPTIONS = (
    "vif_model",
    "vif_queues",
    *(f"vif_{way}_{rate}" for way in ("inbound", "outbound") for rate in RATES),
    "require_quiesce",
)
#: The numeric attributes of our metadata.
NUMBER_FIELDS = ("fence", "made", "rescue", "started", "moving", "resumes")
#: Buses of a rescue disk that is added to the other disks.
RESCUE_BUSES = ("virtio", "ide", "sata", "scsi", "usb")
RESCUE_DEVICES = ("disk", "cdrom")
#: First letter for the name of an added rescue disk, so that the name of the root disk stays.
FIRST_RESCUE_LETTER = {"virtio": "b", "ide": "b"}
#: Architecture, default machine, and CPU of emulated guests.
ARCH, MACHINE, EMULATED_CPU = "x86_64", "pc", "qemu64"
AGENT_CHANNEL = "org.qemu.guest_agent.0"
#: Name of the serial console's socket, beside the log. The name is short because the path of a
#: socket is limited. During a live migration over shared storage, two QEMUs use the same folder,
#: and the source's QEMU finally removes the socket there. Therefore the destination uses the other
#: name.
SERIAL_SOCKETS = ("tty", "tty2")
#: Seconds between the balloon's reports of memory statistics, as Nova's mem_stats_period_seconds.
MEMORY_STATS_SECONDS = "10"
PRODUCT = {"manufacturer": "Kilonova", "product": "OpenStack Compute", "family": "Virtual Machine"}

ElementTree.register_namespace(PREFIX, NAMESPACE)


@dataclass(frozen=True, slots=True)
class Disk:
    """A qcow2 disk of the server on this host.

    Attributes:
        path: Path of the disk.
        base: Path of the backing file, which is only read. None: no backing file.
        base_format: Format of the backing file.
    """

    path: Path
    base: Path | None = None
    base_format: str = "qcow2"


@dataclass(frozen=True, slots=True)
class DomainMetadata:
    """Kilonova's metadata of a domain.

    Attributes:
        server: Id of the server.
        fence: Fence of the last command.
        made: Fence of the last rebuild, 0 without one.
        rescue: Fence of the present rescue, 0 without one.
        started: Time of the start, in seconds since the epoch.
        moving: Fence of the present live migration, 0 without one.
        resumes: 1 if the CPUs ran when that migration began, so that they must run afterwards.
        options: Hardware options of ``KEPT_OPTIONS``.
        facts: ``server_facts`` as JSON, "" without them.
    """

    server: str
    fence: int
    made: int = 0
    rescue: int = 0
    started: int = 0
    moving: int = 0
    resumes: int = 0
    options: Mapping[str, str] = field(default_factory=dict)
    facts: str = ""


@dataclass(frozen=True, slots=True)
class Rescue:
    """The disk from which a rescued guest boots.

    Without ``bus`` this disk becomes the first, and the root disk the second. With ``bus`` the root
    disk stays the first, and the rescue disk is added on this bus as a ``device`` ("disk" or
    "cdrom").
    """

    disk: Disk
    device: str = "disk"
    bus: str = ""


@dataclass(frozen=True, slots=True)
class Domain:
    """The values in a domain's definition.

    Attributes:
        server: Id of the server.
        fence: Fence of the command.
        name: Name of the server for its user.
        vcpus: Number of the guest's CPUs.
        memory_mb: Memory in MiB.
        virt_type: kvm, qemu (emulated), or test (libvirt's test driver).
        disk: The root disk, or None if the server boots from a volume.
        console_log: Path of the serial console's log. The socket is in the same folder.
        config_drive: Path of the config drive, or None without one.
        made: Fence of the last rebuild, 0 without one.
        rescue: The disk from which a rescued guest boots, or None.
        config_drive_is_disk: True if the config drive is a disk, False for a CD-ROM.
        interfaces: The interfaces, in the order of the guest.
        addresses: Previous PCI addresses of interfaces and volumes, by MAC address or volume id.
        hardware: Requirements of flavor and image.
        place: CPUs, memory and devices of the host for the guest.
        local: Ephemeral and swap disks.
        facts: ``server_facts`` as JSON, "" without them.
        spice: True to add a SPICE screen to VNC.
        volumes: The volumes and where QEMU finds them.
        nova: Nova's metadata element, or None to leave it out.
    """

    server: str
    fence: int
    name: str
    vcpus: int
    memory_mb: int
    virt_type: str
    disk: Disk | None
    console_log: Path
    config_drive: Path | None = None
    made: int = 0
    rescue: Rescue | None = None
    config_drive_is_disk: bool = False
    interfaces: tuple[Plug, ...] = ()
    addresses: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    hardware: Hardware = Hardware()
    place: HostPlacement = HostPlacement()
    local: tuple[Disk, ...] = ()
    facts: str = ""
    spice: bool = False
    volumes: tuple[tuple[AttachedVolume, VolumeSource], ...] = ()
    nova: Element | None = None

    @property
    def orders_disks(self) -> bool:
        """True if the disk elements need a boot order. Else the guest boots from the first disk.

        The order is needed for a volume that ``boots``, for an added rescue disk, and in any rescue
        of a guest with volumes.
        """
        return bool(
            (self.rescue and (self.rescue.bus or self.volumes))
            or any(boots(volume) for volume, _ in self.volumes)
        )

    @property
    def options(self) -> Mapping[str, str]:
        return self.hardware.options

    @property
    def marks(self) -> DomainMetadata:
        kept = {name: self.options[name] for name in KEPT_OPTIONS if name in self.options}
        return DomainMetadata(
            self.server,
            self.fence,
            self.made,
            self.fence if self.rescue else 0,
            options=kept,
            facts=self.facts,
        )


def domain_name(server: str) -> str:
    """Return libvirt's name of the server's domain: "instance-" and the server's id."""
    return f"instance-{server}"


def metadata(marks: DomainMetadata) -> str:
    """Return Kilonova's metadata element as text. libvirt adds the namespace."""
    return ElementTree.tostring(_add_marks(Element("server"), marks), encoding="unicode")


def _add_marks(element: Element, marks: DomainMetadata) -> Element:
    """Add ``marks`` to the element as attributes, and the facts as a child. Return the element.

    Numbers that are 0, except for the fence, and facts that are "" are left out.
    """
    element.attrib.update(_list_attributes(marks))
    if marks.facts:
        _add_text(element, FACTS, marks.facts)
    return element


def _list_attributes(marks: DomainMetadata) -> dict[str, str]:
    numbers = {
        name: str(getattr(marks, name))
        for name in NUMBER_FIELDS
        if name == "fence" or getattr(marks, name)
    }
    return {"id": marks.server, **numbers, **marks.options}


def read_metadata(text: str) -> DomainMetadata:
    """Parse Kilonova's metadata element, as libvirt returns it.

    Raises:
        ValueError: The element has no server id, or no fence that is a number.
    """
    element = ElementTree.fromstring(text)
    server, numbers = element.get("id"), {name: element.get(name, "") for name in NUMBER_FIELDS}
    if not server or not numbers["fence"].isdecimal():
        raise ValueError(
            f"the domain's metadata element has no server id or fence of Kilonova: {text[:200]!r}"
        )
    marks = {name: int(number) for name, number in numbers.items() if number.isdecimal()}
    return DomainMetadata(
        server,
        **marks,
        options={name: element.attrib[name] for name in KEPT_OPTIONS if name in element.attrib},
        facts=element.findtext(FACTS) or "",
    )


def domain_xml(domain: Domain) -> str:
    """Return the complete definition of a domain as XML text."""
    root = Element("domain", type=domain.virt_type)
    _add_text(root, "name", domain_name(domain.server))
    _add_text(root, "uuid", domain.server)
    _add_text(root, "title", replace_unwritable(domain.name))
    metadata_element = SubElement(root, "metadata")
    _add_marks(SubElement(metadata_element, f"{{{NAMESPACE}}}server"), domain.marks)
    if domain.nova is not None:
        metadata_element.append(domain.nova)
    _add_text(root, "memory", str(domain.memory_mb), unit="MiB")
    hardware_xml.memory(root, domain.place)
    hardware_xml.cpus(root, domain.vcpus, domain.options, domain.place)
    _add_machine(root, domain)
    for event, answer in (
        ("on_poweroff", "destroy"),
        ("on_reboot", "restart"),
        ("on_crash", "destroy"),
    ):
        _add_text(root, event, answer)
    _add_devices(SubElement(root, "devices"), domain)
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode") + "\n"


def _add_machine(root: Element, domain: Domain) -> None:
    system = SubElement(SubElement(root, "sysinfo", type="smbios"), "system")
    for name, value in (*PRODUCT.items(), ("uuid", domain.server), ("serial", domain.server)):
        _add_text(system, "entry", value, name=name)
    boot = SubElement(root, "os")
    _add_text(boot, "type", "hvm", arch=ARCH, machine=domain.options.get("machine_type", MACHINE))
    if not domain.orders_disks:
        SubElement(boot, "boot", dev="hd")
    SubElement(boot, "smbios", mode="sysinfo")
    if "boot_menu" in domain.options:
        SubElement(boot, "bootmenu", enable=domain.options["boot_menu"])
    features = SubElement(root, "features")
    SubElement(features, "acpi")
    SubElement(features, "apic")
    hardware_xml.features(features, domain.options, domain.virt_type)
    cpu = None
    if domain.virt_type == "kvm":
        cpu = SubElement(root, "cpu", mode="host-model")
    elif domain.virt_type == "qemu":
        cpu = SubElement(root, "cpu", mode="custom", match="exact", check="none")
        _add_text(cpu, "model", EMULATED_CPU, fallback="forbid")
    hardware_xml.topology(root, cpu, domain.hardware, domain.place)
    hardware_xml.clock(root, domain.options)


def _add_devices(devices: Element, domain: Domain) -> None:
    buses = _add_disks(devices, domain)
    devices.extend(
        interface_xml.element(plug, domain.addresses.get(plug.mac), domain.options)
        for plug in domain.interfaces
    )
    if domain.options.get("pointer_model") == "usbtablet":
        buses.add("usb")
    hardware_xml.controllers(devices, domain.options, buses)
    _add_consoles(devices, domain.console_log, spice=domain.spice)
    hardware_xml.screen(devices, domain.options)
    if domain.options.get("guest_agent") != "no":
        channel = SubElement(devices, "channel", type="unix")
        SubElement(channel, "target", type="virtio", name=AGENT_CHANNEL)
    hardware_xml.rest(devices, domain.options, domain.place)
    balloon = SubElement(devices, "memballoon", model="virtio")
    SubElement(balloon, "stats", period=MEMORY_STATS_SECONDS)


def _add_consoles(devices: Element, log: Path, *, spice: bool) -> None:
    """Add the serial console, a VNC screen, and with ``spice`` a SPICE screen after it.

    The screens listen on no address, because libvirt passes connections. Keyboard and mouse come
    with them on PS/2, which every guest supports. The serial output goes to ``log`` even while a
    reader is connected. SPICE adds no device that a guest could see, so the guest can move to a
    host without SPICE.
    """
    serial = SubElement(devices, "serial", type="unix")
    SubElement(serial, "source", mode="bind", path=str(log.with_name(SERIAL_SOCKETS[0])))
    SubElement(serial, "log", file=str(log), append="on")
    SubElement(serial, "target", port="0")
    for kind in (VNC, SPICE) if spice else (VNC,):
        SubElement(SubElement(devices, "graphics", type=kind), "listen", type="none")


def _add_disks(devices: Element, domain: Domain) -> set[str]:
    """Add the guest's disk elements, and return the names of the buses that they need.

    The result contains the bus of local disks even if the guest has none. The root disk is included
    also during a rescue, so that a snapshot is possible in every state. During a rescue without
    ``bus`` the ephemeral and swap disks are left out.
    """
    options, rescue = domain.options, domain.rescue
    bus = options.get("disk_bus", "virtio")
    taken: set[str] = set()
    boot_disks: list[Element] = []
    if rescue and not rescue.bus:
        boot_disks.append(
            _add_overlay(devices, rescue.disk, volume_xml.free_name(bus, taken), bus, options)
        )
    if domain.disk:
        boot_disks.append(
            _add_overlay(devices, domain.disk, volume_xml.free_name(bus, taken), bus, options)
        )
    other_volumes = sorted(
        domain.volumes, key=lambda volume_and_source: volume_and_source[0].boot_index != 0
    )
    if not domain.disk:
        boot_disks += [
            _add_volume(devices, domain, volume_and_source, taken)
            for volume_and_source in other_volumes[:1]
        ]
        other_volumes = other_volumes[1:]
    for disk in domain.local if rescue is None or rescue.bus else ():
        _add_overlay(devices, disk, volume_xml.free_name(bus, taken), bus, options)
    drive_and_bus = _build_config_drive(domain, bus, taken) if domain.config_drive else None
    buses = {bus} if drive_and_bus is None else {bus, drive_and_bus[1]}
    buses.update(volume.bus for volume, _ in domain.volumes)
    other_disks = [
        (volume_and_source[0], _add_volume(devices, domain, volume_and_source, taken))
        for volume_and_source in other_volumes
    ]
    bootable_disks = [
        (volume.boot_index or 0, disk) for volume, disk in other_disks if boots(volume)
    ]
    boot_disks += [
        disk
        for _, disk in sorted(bootable_disks, key=lambda volume_and_source: volume_and_source[0])
    ]
    if rescue and rescue.bus:
        boot_disks.insert(0, _add_rescue_disk(devices, rescue, taken, options))
        buses.add(rescue.bus)
    if domain.orders_disks:
        for order, boot_disk in enumerate(boot_disks, 1):
            SubElement(boot_disk, "boot", order=str(order))
    if drive_and_bus is not None:
        devices.append(drive_and_bus[0])
    return buses


def boots(volume: AttachedVolume) -> bool:
    """Return True if the guest may boot from the volume: its boot index is 0 or higher."""
    return volume.boot_index is not None and volume.boot_index >= 0


def _add_volume(
    devices: Element, domain: Domain, volume: tuple[AttachedVolume, VolumeSource], taken: set[str]
) -> Element:
    """Add and return the disk element of a volume, with the name from ``volume_name``."""
    attached_volume, source = volume
    address = domain.addresses.get(attached_volume.volume_id)
    disk = volume_xml.element(attached_volume, source, volume_name(attached_volume, taken), address)
    devices.append(disk)
    return disk


def volume_name(volume: AttachedVolume, taken: set[str]) -> str:
    """Return the name for the volume's disk, and add the name to ``taken``.

    This is the name in ``volume.device`` if valid and not in ``taken``, else the first free name on
    the volume's bus.
    """
    name = volume_xml.wanted_name(volume)
    if not name or name in taken:
        return volume_xml.free_name(volume.bus, taken)
    taken.add(name)
    return name


def _add_rescue_disk(
    devices: Element, rescue: Rescue, taken: set[str], options: Mapping[str, str]
) -> Element:
    disk = _add_overlay(
        devices,
        rescue.disk,
        volume_xml.free_name(rescue.bus, taken, FIRST_RESCUE_LETTER.get(rescue.bus, "a")),
        rescue.bus,
        options,
        rescue.device,
    )
    if rescue.device == "cdrom":
        SubElement(disk, "readonly")
    return disk


def _build_config_drive(domain: Domain, disk_bus: str, taken: set[str]) -> tuple[Element, str]:
    """Return the disk element of the config drive and the name of its bus.

    A disk uses ``disk_bus``. A CD-ROM uses the requested cdrom_bus, else SATA on q35 and IDE on
    other machines. The device name is added to ``taken``. The caller adds the element to the
    devices.
    """
    options = domain.options
    if domain.config_drive_is_disk:
        device, bus = "disk", disk_bus
        name = volume_xml.free_name(bus, taken, "z" if bus == "virtio" else "a")
    else:
        device, bus = (
            "cdrom",
            options.get("cdrom_bus", "sata" if options.get("machine_type") == "q35" else "ide"),
        )
        name = volume_xml.free_name(bus, taken)
    drive = Element("disk", type="file", device=device)
    SubElement(drive, "driver", name="qemu", type="raw")
    SubElement(drive, "source", file=str(domain.config_drive))
    SubElement(drive, "target", dev=name, bus=bus)
    SubElement(drive, "readonly")
    return drive, bus


def _add_overlay(
    devices: Element,
    disk: Disk,
    name: str,
    bus: str,
    options: Mapping[str, str],
    device: str = "disk",
) -> Element:
    element = SubElement(devices, "disk", type="file", device=device)
    SubElement(element, "driver", name="qemu", type="qcow2", discard="unmap")
    SubElement(element, "source", file=str(disk.path))
    backing = element
    if disk.base:
        backing = SubElement(element, "backingStore", type="file")
        SubElement(backing, "format", type=disk.base_format)
        source = SubElement(backing, "source", file=str(disk.base))
        # The image must not be owned by QEMU's user. Otherwise the QEMU of one guest could change
        # the data of all others.
        SubElement(source, "seclabel", model="dac", relabel="no")
    SubElement(backing, "backingStore")
    SubElement(element, "target", dev=name, bus=bus)
    hardware_xml.disk_limits(element, options)
    return element


def replace_unwritable(text: str) -> str:
    """Return the text with U+FFFD in place of each character that ``NOT_IN_XML`` matches.

    These are, for example, line breaks and most control characters.
    """
    return NOT_IN_XML.sub("\N{REPLACEMENT CHARACTER}", text)


def _add_text(parent: Element, tag: str, text: str, **attributes: str) -> None:
    SubElement(parent, tag, attributes).text = text
