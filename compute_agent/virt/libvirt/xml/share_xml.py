# SPDX-License-Identifier: Apache-2.0
"""Shares of a guest as libvirt's XML: pure functions.

Called by ``shares``. A share is a virtiofs device: a process of the host, virtiofsd, serves a
folder of the host's to the guest, and reads the guest's memory for that, which must therefore be
shared memory. Must stay true: a guest without shares looks as if it never had one.
"""

from __future__ import annotations

from collections.abc import Mapping
from xml.etree import ElementTree
from xml.etree.ElementTree import Element, SubElement

from compute_agent.virt.libvirt.xml import domain_xml  # noqa: F401 - it names our namespace, so that our marks stay readable

VIRTIOFS = "virtiofs"
#: What of <memoryBacking> is ours.
BACKING = {"source": {"type": "memfd"}, "access": {"mode": "shared"}}


def dressed(described: str, folders: Mapping[str, str]) -> str:
    """The domain with these folders of its host, by tag, and no others."""
    root = ElementTree.fromstring(described)
    devices = root.find("devices")
    if devices is None:
        raise ValueError("no domain: it has no devices")
    for device in devices.findall("filesystem"):
        driver = device.find("driver")
        if (
            driver is not None
            and driver.get("type") == VIRTIOFS
            and _what(device) not in folders.items()
        ):
            devices.remove(device)
    there = {_what(device) for device in devices.findall("filesystem")}
    for tag, folder in folders.items():
        if (tag, folder) not in there:
            devices.append(_device(tag, folder))
    _share_memory(root, bool(folders))
    return ElementTree.tostring(root, encoding="unicode")


def _what(device: Element) -> tuple[str, str]:
    """By what tag the guest mounts it, and which folder of the host it is."""
    target, source = device.find("target"), device.find("source")
    return "" if target is None else target.get("dir", ""), "" if source is None else source.get(
        "dir", ""
    )


def _device(tag: str, folder: str) -> Element:
    device = Element("filesystem", type="mount", accessmode="passthrough")
    SubElement(device, "driver", type=VIRTIOFS)
    SubElement(device, "source", dir=folder)
    SubElement(device, "target", dir=tag)
    return device


def _share_memory(root: Element, shared: bool) -> None:
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
