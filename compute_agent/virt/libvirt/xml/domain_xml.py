# SPDX-License-Identifier: Apache-2.0
"""The domain of a server as libvirt's XML: pure functions, tested against golden files.

Called by ``virt.libvirt.guests``; what flavor and image ask for stands in ``hardware_xml``.
Everything is built as elements, so that what a tenant wrote is escaped by the library; characters
that XML cannot hold are replaced. Unless the image says otherwise the machine is ``pc``: its IDE
CD-ROM is the one that every guest (Debian's cloud kernel has no AHCI) can read the config drive
from. Must stay true: each disk's whole backing chain is spelled out, so nothing ever probes a
disk's format.
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
#: The child of our element with what is remembered of the server.
FACTS = "facts"
#: What XML 1.0 cannot hold, and the line breaks that libvirt refuses in a title.
NOT_IN_XML = re.compile("[^\t\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
#: Options of the hardware that are written on the domain: for an interface that is plugged in, for
#: a snapshot.
KEPT_OPTIONS = (
    "vif_model",
    "vif_queues",
    *(f"vif_{way}_{rate}" for way in ("inbound", "outbound") for rate in RATES),
    "require_quiesce",
)
#: The marks that are numbers.
NUMBER_FIELDS = ("fence", "made", "rescue", "started", "moving", "resumes")
#: Where a rescue disk may be added.
RESCUE_BUSES = ("virtio", "ide", "sata", "scsi", "usb")
RESCUE_DEVICES = ("disk", "cdrom")
#: How disks are called on a bus, before the letter; where a second one that boots the guest begins.
FIRST_RESCUE_LETTER = {"virtio": "b", "ide": "b"}
#: The machine unless the image names one, and the processor of those that are emulated.
ARCH, MACHINE, EMULATED_CPU = "x86_64", "pc", "qemu64"
AGENT_CHANNEL = "org.qemu.guest_agent.0"
#: The socket of the serial console, beside its log; short, as the path of a socket must be. Two
#: QEMUs have a guest for a moment when it moves while it runs, on shared storage in one folder, and
#: the one that ends removes its socket: so the one that begins takes the other name.
SERIAL_SOCKETS = ("tty", "tty2")
#: How often the guest's balloon reports the use of memory: Nova's mem_stats_period_seconds.
MEMORY_STATS_SECONDS = "10"
PRODUCT = {"manufacturer": "Kilonova", "product": "OpenStack Compute", "family": "Virtual Machine"}

ElementTree.register_namespace(PREFIX, NAMESPACE)


@dataclass(frozen=True, slots=True)
class Disk:
    """A disk of the server: a qcow2 file over ``base``, which nobody writes."""

    path: Path
    base: Path | None = None
    base_format: str = "qcow2"


@dataclass(frozen=True, slots=True)
class DomainMetadata:
    """What we write on a domain: whose it is, the fence that started it; the fences of its last
    rebuild and of the rescue that lasts (0: none); when it was started (seconds since the epoch);
    the fence of the live migration that it is in, and whether its CPUs ran when that began (1), so
    that they go on at its end; the hardware options that count when it is changed later, those of
    ``KEPT_OPTIONS``; and ``server_facts`` as JSON, "" for none."""

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
    """The disk to boot from instead of the own one. Without ``bus`` it is the first disk and the
    own one is the second; with it the own disk stays the first, and this one is added as a
    ``device`` (disk or cdrom) there."""

    disk: Disk
    device: str = "disk"
    bus: str = ""


@dataclass(frozen=True, slots=True)
class Domain:
    """All that stands in the XML. ``virt_type``: kvm, qemu (emulated) or test (libvirt's own
    mock-up). ``disk``: None where a volume takes its place. ``addresses``: where on the PCI bus
    interfaces and volumes have been so far, by MAC address or id. ``local``: the disks beside the
    own one. ``spice``: the screen speaks SPICE beside VNC. ``volumes``: each with its place.
    ``nova``: Nova's element of the metadata."""

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
        """Do the disks themselves say which is booted, because it is not just the first?"""
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
    """What virsh calls the server's domain."""
    return f"instance-{server}"


def metadata(marks: DomainMetadata) -> str:
    """Our element of ``<metadata>``. libvirt adds the namespace."""
    return ElementTree.tostring(_marked(Element("server"), marks), encoding="unicode")


def _marked(element: Element, marks: DomainMetadata) -> Element:
    """What stands on the element, and in it, as marks say."""
    element.attrib.update(_attributes(marks))
    if marks.facts:
        _text(element, FACTS, marks.facts)
    return element


def _attributes(marks: DomainMetadata) -> dict[str, str]:
    numbers = {
        name: str(getattr(marks, name))
        for name in NUMBER_FIELDS
        if name == "fence" or getattr(marks, name)
    }
    return {"id": marks.server, **numbers, **marks.options}


def read_metadata(text: str) -> DomainMetadata:
    """What our element says. ValueError when it is not ours."""
    element = ElementTree.fromstring(text)
    server, numbers = element.get("id"), {name: element.get(name, "") for name in NUMBER_FIELDS}
    if not server or not numbers["fence"].isdecimal():
        raise ValueError(f"not a domain of ours: {text[:200]!r}")
    found = {name: int(number) for name, number in numbers.items() if number.isdecimal()}
    return DomainMetadata(
        server,
        **found,
        options={name: element.attrib[name] for name in KEPT_OPTIONS if name in element.attrib},
        facts=element.findtext(FACTS) or "",
    )


def domain_xml(domain: Domain) -> str:
    """The whole definition."""
    root = Element("domain", type=domain.virt_type)
    _text(root, "name", domain_name(domain.server))
    _text(root, "uuid", domain.server)
    _text(root, "title", replace_unwritable(domain.name))
    about = SubElement(root, "metadata")
    _marked(SubElement(about, f"{{{NAMESPACE}}}server"), domain.marks)
    if domain.nova is not None:
        about.append(domain.nova)
    _text(root, "memory", str(domain.memory_mb), unit="MiB")
    hardware_xml.memory(root, domain.place)
    hardware_xml.cpus(root, domain.vcpus, domain.options, domain.place)
    _machine(root, domain)
    for event, answer in (
        ("on_poweroff", "destroy"),
        ("on_reboot", "restart"),
        ("on_crash", "destroy"),
    ):
        _text(root, event, answer)
    _devices(SubElement(root, "devices"), domain)
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode") + "\n"


def _machine(root: Element, domain: Domain) -> None:
    system = SubElement(SubElement(root, "sysinfo", type="smbios"), "system")
    for name, value in (*PRODUCT.items(), ("uuid", domain.server), ("serial", domain.server)):
        _text(system, "entry", value, name=name)
    boot = SubElement(root, "os")
    _text(boot, "type", "hvm", arch=ARCH, machine=domain.options.get("machine_type", MACHINE))
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
        _text(cpu, "model", EMULATED_CPU, fallback="forbid")
    hardware_xml.topology(root, cpu, domain.hardware, domain.place)
    hardware_xml.clock(root, domain.options)


def _devices(devices: Element, domain: Domain) -> None:
    buses = _disks(devices, domain)
    devices.extend(
        interface_xml.element(plug, domain.addresses.get(plug.mac), domain.options)
        for plug in domain.interfaces
    )
    if domain.options.get("pointer_model") == "usbtablet":
        buses.add("usb")
    hardware_xml.controllers(devices, domain.options, buses)
    _consoles(devices, domain.console_log, spice=domain.spice)
    hardware_xml.screen(devices, domain.options)
    if domain.options.get("guest_agent") != "no":
        channel = SubElement(devices, "channel", type="unix")
        SubElement(channel, "target", type="virtio", name=AGENT_CHANNEL)
    hardware_xml.rest(devices, domain.options, domain.place)
    balloon = SubElement(devices, "memballoon", model="virtio")
    SubElement(balloon, "stats", period=MEMORY_STATS_SECONDS)


def _consoles(devices: Element, log: Path, *, spice: bool) -> None:
    """The screen listens nowhere: libvirt hands over a connection to it. Keyboard and mouse come
    with it, on PS/2, which every guest can read. What is written to the serial console goes to its
    log whoever else reads it. VNC is always the first screen. SPICE adds nothing that a guest could
    see, so that a guest may move to a host without it."""
    serial = SubElement(devices, "serial", type="unix")
    SubElement(serial, "source", mode="bind", path=str(log.with_name(SERIAL_SOCKETS[0])))
    SubElement(serial, "log", file=str(log), append="on")
    SubElement(serial, "target", port="0")
    for kind in (VNC, SPICE) if spice else (VNC,):
        SubElement(SubElement(devices, "graphics", type=kind), "listen", type="none")


def _disks(devices: Element, domain: Domain) -> set[str]:
    """The own disk or the volume in its place, local disks and volumes beside it, the rescue disk,
    the config drive; the buses that they are on. The own disk is always described in full, so that
    a snapshot of it can be taken from any state; a rescue disk that takes its place has no other
    local one beside it."""
    options, rescue = domain.options, domain.rescue
    bus = options.get("disk_bus", "virtio")
    taken: set[str] = set()
    booted: list[Element] = []
    if rescue and not rescue.bus:
        booted.append(
            _overlay(devices, rescue.disk, volume_xml.free_name(bus, taken), bus, options)
        )
    if domain.disk:
        booted.append(
            _overlay(devices, domain.disk, volume_xml.free_name(bus, taken), bus, options)
        )
    beside = sorted(domain.volumes, key=lambda one: one[0].boot_index != 0)
    if not domain.disk:
        booted += [_volume(devices, domain, one, taken) for one in beside[:1]]
        beside = beside[1:]
    for disk in domain.local if rescue is None or rescue.bus else ():
        _overlay(devices, disk, volume_xml.free_name(bus, taken), bus, options)
    drive = _config_drive(domain, bus, taken) if domain.config_drive else None
    buses = {bus} if drive is None else {bus, drive[1]}
    buses.update(volume.bus for volume, _ in domain.volumes)
    made = [(one[0], _volume(devices, domain, one, taken)) for one in beside]
    later = [(volume.boot_index or 0, disk) for volume, disk in made if boots(volume)]
    booted += [disk for _, disk in sorted(later, key=lambda one: one[0])]
    if rescue and rescue.bus:
        booted.insert(0, _added_rescue(devices, rescue, taken, options))
        buses.add(rescue.bus)
    if domain.orders_disks:
        for order, first in enumerate(booted, 1):
            SubElement(first, "boot", order=str(order))
    if drive is not None:
        devices.append(drive[0])
    return buses


def boots(volume: AttachedVolume) -> bool:
    """May the guest be booted from it?"""
    return volume.boot_index is not None and volume.boot_index >= 0


def _volume(
    devices: Element, domain: Domain, volume: tuple[AttachedVolume, VolumeSource], taken: set[str]
) -> Element:
    """A volume, by the name that its user gave it unless another disk has that."""
    about, source = volume
    address = domain.addresses.get(about.volume_id)
    made = volume_xml.element(about, source, volume_name(about, taken), address)
    devices.append(made)
    return made


def volume_name(volume: AttachedVolume, taken: set[str]) -> str:
    """What the domain calls a volume, where these names are taken."""
    name = volume_xml.wanted_name(volume)
    if not name or name in taken:
        return volume_xml.free_name(volume.bus, taken)
    taken.add(name)
    return name


def _added_rescue(
    devices: Element, rescue: Rescue, taken: set[str], options: Mapping[str, str]
) -> Element:
    added = _overlay(
        devices,
        rescue.disk,
        volume_xml.free_name(rescue.bus, taken, FIRST_RESCUE_LETTER.get(rescue.bus, "a")),
        rescue.bus,
        options,
        rescue.device,
    )
    if rescue.device == "cdrom":
        SubElement(added, "readonly")
    return added


def _config_drive(domain: Domain, disk_bus: str, taken: set[str]) -> tuple[Element, str]:
    """The drive and its bus; as a disk it is where the other disks are, as a CD-ROM where the
    machine has one."""
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


def _overlay(
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
        # The image stays the agent's: owned by QEMU's user, one guest's QEMU could write what the
        # others read.
        SubElement(source, "seclabel", model="dac", relabel="no")
    SubElement(backing, "backingStore")
    SubElement(element, "target", dev=name, bus=bus)
    hardware_xml.disk_limits(element, options)
    return element


def replace_unwritable(text: str) -> str:
    """Return the text with a replacement character for each that the XML cannot hold."""
    return NOT_IN_XML.sub("\N{REPLACEMENT CHARACTER}", text)


def _text(parent: Element, tag: str, text: str, **attributes: str) -> None:
    SubElement(parent, tag, attributes).text = text
