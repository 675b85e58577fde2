# SPDX-License-Identifier: Apache-2.0
"""A guest's description made to fit the guest that runs, and what it says of its disks: pure
functions.

Called by ``live_migration``, ``power`` and ``snapshots``. What a running guest sees may not change
under it: its machine, its processor, and where its devices are. libvirt gives devices their places
in the order in which it meets them, and a guest that was given an interface, or lost one, has met
them in another order than a new description has them. Must stay true: what a guest can see is as it
was; files, bridges, CPUs and memory of the host are as the description says.
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

#: The sizes of a disk's blocks that a guest sees.
BLOCK_SIZES = "blockio"
#: Where the serial console's socket is said.
SERIAL = "devices/serial[@type='unix']/source"


def placed(described: str, running: str) -> str:
    """The description with every device where the running guest has it."""
    root = ElementTree.fromstring(described)
    _place(root, ElementTree.fromstring(running))
    return ElementTree.tostring(root, encoding="unicode")


def at_destination(described: str, running: str, marks: DomainMetadata) -> str:
    """The description of a guest that comes from another host while it runs there: its machine and
    processor too."""
    root, there = ElementTree.fromstring(described), ElementTree.fromstring(running)
    _place(root, there)
    # "pc" and "host-model" mean other things elsewhere; the running guest's XML spells out what
    # they meant.
    machine = root.find("os/type")
    if machine is not None:
        machine.attrib.update(
            dict.fromkeys(["machine"], there.findall("os/type")[0].get("machine", ""))
        )
    cpu, own = there.find("cpu"), root.find("cpu")
    if cpu is not None and own is not None:
        root[list(root).index(own)] = cpu
    about = root.find("metadata")
    if about is not None:
        element = ElementTree.fromstring(metadata(marks))
        element.tag = f"{{{NAMESPACE}}}{element.tag}"
        about[:] = [element, *(one for one in about if one.tag != element.tag)]
    _give_socket(root, there)
    return ElementTree.tostring(root, encoding="unicode")


def virt_type(described: str) -> str:
    """What a domain runs under."""
    return ElementTree.fromstring(described).get("type", "")


def disks(described: str) -> dict[str, Disk]:
    """The disks of its own that a domain writes, with what lies under them, by the names that it
    gives them. Volumes, which have serials, are none of them, whatever their format."""
    found: dict[str, Disk] = {}
    for element in ElementTree.fromstring(described).iterfind("devices/disk") if described else ():
        driver, source, target = (element.find(part) for part in ("driver", "source", "target"))
        if driver is None or source is None or target is None or driver.get("type") != "qcow2":
            continue
        if element.find("serial") is not None:
            continue
        base, kind = element.find("backingStore/source"), element.find("backingStore/format")
        path, name = Path(source.get("file", "")), target.get("dev", "")
        found[name] = (
            Disk(path)
            if base is None or kind is None
            else Disk(path, Path(base.get("file", "")), kind.get("type", ""))
        )
    return found


def serial_socket(described: str) -> str:
    """The path of the serial console's socket; empty when there is none."""
    source = ElementTree.fromstring(described).find(SERIAL) if described else None
    return "" if source is None else source.get("path", "")


def screens(described: str) -> list[str]:
    """The protocols that its screen speaks, in the order by which libvirt numbers them."""
    root = ElementTree.fromstring(described or "<domain/>")
    return [one.get("type", "") for one in root.iterfind("devices/graphics")]


def _give_socket(root: Element, there: Element) -> None:
    ours, theirs = (one.find(SERIAL) for one in (root, there))
    if ours is not None and theirs is not None:
        path, taken = Path(ours.get("path", "")), Path(theirs.get("path", "")).name
        ours.set(
            "path", str(path.with_name(next(name for name in SERIAL_SOCKETS if name != taken)))
        )


def _place(root: Element, there: Element) -> None:
    known, devices = _known(there), root.find("devices")
    if devices is None:
        return
    mine = _known(root)
    for identity, device in mine.items():
        address = known[identity].find("address") if identity in known else None
        if address is not None and device.find("address") is None:
            device.append(address)
        if device.tag == "disk" and identity in known:
            for sizes in device.findall(BLOCK_SIZES):
                device.remove(sizes)
            device.extend(known[identity].findall(BLOCK_SIZES))
    for identity, device in known.items():
        if device.tag == "controller" and identity not in mine:
            # libvirt added it, and things are on it.
            for alias in device.findall("alias"):
                device.remove(alias)
            devices.append(device)


def _known(root: Element) -> dict[tuple[str, ...], Element]:
    """The devices by what they are."""
    found: dict[tuple[str, ...], Element] = {}
    for device in root.iterfind("devices/*"):
        identity = (device.tag, *_name(device))
        while identity in found:
            identity = (*identity, "another")
        found[identity] = device
    return found


def _name(device: Element) -> tuple[str, ...]:
    match device.tag:
        case "controller":
            return device.get("type", ""), device.get("index", "0")
        case "interface":
            return tuple(mac.get("address", "").lower() for mac in device.iterfind("mac"))
        case "disk":
            return tuple(target.get("dev", "") for target in device.iterfind("target"))
        case _:
            return (device.get("type", ""),)
