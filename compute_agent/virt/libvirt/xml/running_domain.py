# SPDX-License-Identifier: Apache-2.0
"""Adapts a domain's new definition to the running guest, and reads domain XML.

Pure functions. Called by ``live_migration``, ``incoming_migration``, ``power`` and ``snapshots``.
libvirt assigns device addresses in the order of the devices in the XML. After interfaces were
attached or detached, a new definition may have another order than the running guest.

Invariant: the result keeps everything that the running guest can see: machine type, CPU and device
addresses. Files, bridges, and the CPUs and memory of the host are those of the new definition.
"""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

from compute_agent.virt.libvirt.xml.domain_xml import (
    NAMESPACE,
    SERIAL_SOCKETS,
    Disk,
    DomainMetadata,
    metadata,
)

#: The element with the block sizes that a guest sees.
BLOCK_SIZES = "blockio"
#: The source of the serial console's socket.
SERIAL = "devices/serial[@type='unix']/source"


def with_addresses(xml: str, running: str) -> str:
    """Return the definition ``xml`` with the device addresses of the running guest.

    Controllers that ``xml`` lacks, and the block sizes of disks, are copied too. Devices that have
    an address in ``xml`` keep this address. ``running`` is the XML of the running guest.
    """
    root = ElementTree.fromstring(xml)
    _copy_addresses(root, ElementTree.fromstring(running))
    return ElementTree.tostring(root, encoding="unicode")


def at_destination(xml: str, running: str, marks: DomainMetadata) -> str:
    """Return the destination's definition of a guest that is live-migrated from another host.

    This is ``xml`` with the machine type, CPU, missing device addresses and controllers, and block
    sizes of the running guest. Kilonova's metadata becomes ``marks``. The serial console's socket
    gets another name than at the source.

    Args:
        xml: The destination's definition.
        running: The running domain's XML at the source.
        marks: Kilonova's metadata at the destination.
    """
    root, source_root = ElementTree.fromstring(xml), ElementTree.fromstring(running)
    _copy_addresses(root, source_root)
    # "pc" and "host-model" may mean something else on this host. The running domain's XML has the
    # versioned machine and the complete CPU.
    machine = root.find("os/type")
    if machine is not None:
        machine.attrib.update(
            dict.fromkeys(["machine"], source_root.findall("os/type")[0].get("machine", ""))
        )
    cpu, own_cpu = source_root.find("cpu"), root.find("cpu")
    if cpu is not None and own_cpu is not None:
        root[list(root).index(own_cpu)] = cpu
    metadata_element = root.find("metadata")
    if metadata_element is not None:
        element = ElementTree.fromstring(metadata(marks))
        element.tag = f"{{{NAMESPACE}}}{element.tag}"
        metadata_element[:] = [
            element,
            *(child for child in metadata_element if child.tag != element.tag),
        ]
    _choose_socket(root, source_root)
    return ElementTree.tostring(root, encoding="unicode")


def virt_type(xml: str) -> str:
    """Return the type in the domain's XML: kvm, qemu or test."""
    return ElementTree.fromstring(xml).get("type", "")


def disks(xml: str) -> dict[str, Disk]:
    """Return the domain's qcow2 disks with their backing files, by device name, for example "vda".

    Volumes, which have serials, and the config drive are left out. The result is {} for "".
    """
    disks_by_name: dict[str, Disk] = {}
    for element in ElementTree.fromstring(xml).iterfind("devices/disk") if xml else ():
        driver, source, target = (element.find(part) for part in ("driver", "source", "target"))
        if driver is None or source is None or target is None or driver.get("type") != "qcow2":
            continue
        if element.find("serial") is not None:
            continue
        base, kind = element.find("backingStore/source"), element.find("backingStore/format")
        path, name = Path(source.get("file", "")), target.get("dev", "")
        disks_by_name[name] = (
            Disk(path)
            if base is None or kind is None
            else Disk(path, Path(base.get("file", "")), kind.get("type", ""))
        )
    return disks_by_name


def serial_socket(xml: str) -> str:
    """Return the path of the serial console's socket, or "" if the domain has no such socket."""
    source = ElementTree.fromstring(xml).find(SERIAL) if xml else None
    return "" if source is None else source.get("path", "")


def screens(xml: str) -> list[str]:
    """Return the protocols of the guest's screens, for example ["vnc"].

    The position in the list is libvirt's index of the screen.
    """
    root = ElementTree.fromstring(xml or "<domain/>")
    return [graphics.get("type", "") for graphics in root.iterfind("devices/graphics")]


def _choose_socket(root: Element, source_root: Element) -> None:
    own_socket, source_socket = (parent.find(SERIAL) for parent in (root, source_root))
    if own_socket is not None and source_socket is not None:
        path, used_name = Path(own_socket.get("path", "")), Path(source_socket.get("path", "")).name
        own_socket.set(
            "path", str(path.with_name(next(name for name in SERIAL_SOCKETS if name != used_name)))
        )


def _copy_addresses(root: Element, source_root: Element) -> None:
    source_devices, devices = _index_devices(source_root), root.find("devices")
    if devices is None:
        return
    own_devices = _index_devices(root)
    for identity, device in own_devices.items():
        address = source_devices[identity].find("address") if identity in source_devices else None
        if address is not None and device.find("address") is None:
            device.append(address)
        if device.tag == "disk" and identity in source_devices:
            for sizes in device.findall(BLOCK_SIZES):
                device.remove(sizes)
            device.extend(source_devices[identity].findall(BLOCK_SIZES))
    for identity, device in source_devices.items():
        if device.tag == "controller" and identity not in own_devices:
            # libvirt added this controller, and devices are attached to it.
            for alias in device.findall("alias"):
                device.remove(alias)
            devices.append(device)


def _index_devices(root: Element) -> dict[tuple[str, ...], Element]:
    """Return the devices by identity, by which a device is found in another definition.

    For example, ("interface", MAC address) or ("disk", device name). If several devices have the
    same identity, "another" is appended to that of each further device.
    """
    devices_by_identity: dict[tuple[str, ...], Element] = {}
    for device in root.iterfind("devices/*"):
        identity = (device.tag, *_identify(device))
        while identity in devices_by_identity:
            identity = (*identity, "another")
        devices_by_identity[identity] = device
    return devices_by_identity


def _identify(device: Element) -> tuple[str, ...]:
    match device.tag:
        case "controller":
            return device.get("type", ""), device.get("index", "0")
        case "interface":
            return tuple(mac.get("address", "").lower() for mac in device.iterfind("mac"))
        case "disk":
            return tuple(target.get("dev", "") for target in device.iterfind("target"))
        case _:
            return (device.get("type", ""),)
