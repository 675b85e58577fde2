# SPDX-License-Identifier: Apache-2.0
"""The domain of a server as libvirt's XML: pure functions, tested against golden files.

Called by ``virt.libvirt.driver``. Everything is built as elements, so that what a tenant wrote is escaped by the
library; characters that XML cannot hold are replaced. The machine is ``pc``: its IDE CD-ROM is the one that every
guest (Debian's cloud kernel has no AHCI) can read the config drive from.
Must stay true: each disk's whole backing chain is spelled out, so nothing ever probes a disk's format.
"""
from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree
from xml.etree.ElementTree import Element, SubElement

NAMESPACE = "urn:kilonova:server:1"
PREFIX = "kilonova"
#: What XML 1.0 cannot hold, and the line breaks that libvirt refuses in a title.
UNSPEAKABLE = re.compile("[^\t\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
PRODUCT = {"manufacturer": "Kilonova", "product": "OpenStack Compute", "family": "Virtual Machine"}

ElementTree.register_namespace(PREFIX, NAMESPACE)


@dataclass(frozen=True, slots=True)
class Disk:
    """The server's root disk: a qcow2 file over ``base``, which nobody writes."""

    path: Path
    base: Path | None = None
    base_format: str = "qcow2"


@dataclass(frozen=True, slots=True)
class Domain:
    """All that stands in the XML. ``virt_type``: kvm, qemu (emulated) or test (libvirt's own mock-up)."""

    server: str
    fence: int
    name: str
    vcpus: int
    memory_mb: int
    virt_type: str
    disk: Disk
    console_log: Path
    config_drive: Path | None = None


def domain_name(server: str) -> str:
    """What virsh calls the server's domain."""
    return f"instance-{server}"


def metadata(server: str, fence: int) -> str:
    """Our element of ``<metadata>``: whose domain it is and which fence started it. libvirt adds the namespace."""
    return ElementTree.tostring(Element("server", id=server, fence=str(fence)), encoding="unicode")


def read_metadata(text: str) -> tuple[str, int]:
    """(server, fence) of our element. ValueError when it is not ours."""
    element = ElementTree.fromstring(text)
    server, fence = element.get("id"), element.get("fence", "")
    if not server or not fence.isdecimal():
        raise ValueError(f"not a domain of ours: {text[:200]!r}")
    return server, int(fence)


def domain_xml(domain: Domain) -> str:
    """The whole definition."""
    root = Element("domain", type=domain.virt_type)
    _text(root, "name", domain_name(domain.server))
    _text(root, "uuid", domain.server)
    _text(root, "title", UNSPEAKABLE.sub("\N{REPLACEMENT CHARACTER}", domain.name))
    SubElement(SubElement(root, "metadata"), f"{{{NAMESPACE}}}server", id=domain.server, fence=str(domain.fence))
    _text(root, "memory", str(domain.memory_mb), unit="MiB")
    _text(root, "vcpu", str(domain.vcpus))
    _machine(root, domain)
    for event, answer in (("on_poweroff", "destroy"), ("on_reboot", "restart"), ("on_crash", "destroy")):
        _text(root, event, answer)
    _devices(SubElement(root, "devices"), domain)
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode") + "\n"


def _machine(root: Element, domain: Domain) -> None:
    system = SubElement(SubElement(root, "sysinfo", type="smbios"), "system")
    for name, value in (*PRODUCT.items(), ("uuid", domain.server), ("serial", domain.server)):
        _text(system, "entry", value, name=name)
    boot = SubElement(root, "os")
    _text(boot, "type", "hvm", arch="x86_64", machine="pc")
    SubElement(boot, "boot", dev="hd")
    SubElement(boot, "smbios", mode="sysinfo")
    features = SubElement(root, "features")
    SubElement(features, "acpi")
    SubElement(features, "apic")
    if domain.virt_type == "kvm":
        SubElement(root, "cpu", mode="host-model")
    elif domain.virt_type == "qemu":
        cpu = SubElement(root, "cpu", mode="custom", match="exact", check="none")
        _text(cpu, "model", "qemu64", fallback="forbid")
    SubElement(root, "clock", offset="utc")


def _devices(devices: Element, domain: Domain) -> None:
    _root_disk(devices, domain.disk)
    if domain.config_drive:
        drive = SubElement(devices, "disk", type="file", device="cdrom")
        SubElement(drive, "driver", name="qemu", type="raw")
        SubElement(drive, "source", file=str(domain.config_drive))
        SubElement(drive, "target", dev="hda", bus="ide")
        SubElement(drive, "readonly")
    SubElement(devices, "controller", type="usb", model="none")
    serial = SubElement(devices, "serial", type="pty")
    SubElement(serial, "log", file=str(domain.console_log), append="on")
    SubElement(serial, "target", port="0")
    random = SubElement(devices, "rng", model="virtio")
    _text(random, "backend", "/dev/urandom", model="random")
    SubElement(devices, "memballoon", model="virtio")


def _root_disk(devices: Element, disk: Disk) -> None:
    element = SubElement(devices, "disk", type="file", device="disk")
    SubElement(element, "driver", name="qemu", type="qcow2", discard="unmap")
    SubElement(element, "source", file=str(disk.path))
    backing = element
    if disk.base:
        backing = SubElement(element, "backingStore", type="file")
        SubElement(backing, "format", type=disk.base_format)
        source = SubElement(backing, "source", file=str(disk.base))
        # The image stays the agent's: owned by QEMU's user, one guest's QEMU could write what the others read.
        SubElement(source, "seclabel", model="dac", relabel="no")
    SubElement(backing, "backingStore")
    SubElement(element, "target", dev="vda", bus="virtio")


def _text(parent: Element, tag: str, text: str, **attributes: str) -> None:
    SubElement(parent, tag, attributes).text = text
