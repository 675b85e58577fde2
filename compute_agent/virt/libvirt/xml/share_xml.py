# SPDX-License-Identifier: Apache-2.0
"""Shares of a guest as libvirt's XML. Pure functions.

Called by ``shares``. A share is a virtiofs device: virtiofsd, a process on the host, serves a
folder of the host to the guest. virtiofsd accesses the guest's memory, which must therefore be
shared memory.

Invariant: a guest without shares has the same definition as a guest that never had any.
"""

from __future__ import annotations

from collections.abc import Mapping
from xml.etree import ElementTree
from xml.etree.ElementTree import Element, SubElement

# The import registers our namespace's prefix, so that our metadata stays readable.
from compute_agent.virt.libvirt.xml import domain_xml  # noqa: F401

VIRTIOFS = "virtiofs"
#: The elements of <memoryBacking> that shares need.
BACKING = {"source": {"type": "memfd"}, "access": {"mode": "shared"}}


def with_shares(xml: str, folders: Mapping[str, str]) -> str:
    """Return the domain's XML with exactly these shares, and the shared memory that shares need.

    The devices of other shares are removed, and without shares also the shared memory.

    Args:
        xml: The domain's XML.
        folders: Folders on the host by tag of the share.

    Raises:
        ValueError: The XML has no devices.
    """
    root = ElementTree.fromstring(xml)
    devices = root.find("devices")
    if devices is None:
        raise ValueError("the domain's XML has no element <devices>")
    for device in devices.findall("filesystem"):
        driver = device.find("driver")
        if (
            driver is not None
            and driver.get("type") == VIRTIOFS
            and _read_share(device) not in folders.items()
        ):
            devices.remove(device)
    present_shares = {_read_share(device) for device in devices.findall("filesystem")}
    for tag, folder in folders.items():
        if (tag, folder) not in present_shares:
            devices.append(_build_device(tag, folder))
    _set_shared_memory(root, bool(folders))
    return ElementTree.tostring(root, encoding="unicode")


def _read_share(device: Element) -> tuple[str, str]:
    """Return the device's tag in the guest and the folder on the host, each "" if missing."""
    target, source = device.find("target"), device.find("source")
    return "" if target is None else target.get("dir", ""), "" if source is None else source.get(
        "dir", ""
    )


def _build_device(tag: str, folder: str) -> Element:
    device = Element("filesystem", type="mount", accessmode="passthrough")
    SubElement(device, "driver", type=VIRTIOFS)
    SubElement(device, "source", dir=folder)
    SubElement(device, "target", dir=tag)
    return device


def _set_shared_memory(root: Element, shared: bool) -> None:
    backing = root.find("memoryBacking")
    if backing is None:
        if not shared:
            return
        backing = SubElement(root, "memoryBacking")
    for name, attributes in BACKING.items():
        for old in backing.findall(name):
            backing.remove(old)
        if shared:
            SubElement(backing, name, attributes)
    if not len(backing):
        root.remove(backing)
