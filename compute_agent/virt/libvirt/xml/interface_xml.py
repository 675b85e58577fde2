# SPDX-License-Identifier: Apache-2.0
"""Network interfaces as libvirt's XML: pure functions, tested against golden files.

Called by ``domain_xml``, ``interfaces`` and ``connection``. An interface is known by its MAC
address. Must stay true: an interface that a guest has had keeps its PCI address when the guest is
described anew, because guests name their interfaces after it; new ones get theirs from libvirt, in
the order in which they stand.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from xml.etree import ElementTree
from xml.etree.ElementTree import Element, SubElement

from compute_agent.virt.interfaces import Plug
from compute_agent.virt.libvirt.xml import hardware_xml


def element(plug: Plug, address: Mapping[str, str] | None, options: Mapping[str, str]) -> Element:
    """One interface; ``address``: its place on the PCI bus, when it has one; ``options``: those of
    the hardware."""
    root = Element("interface", type="bridge")
    SubElement(root, "mac", address=plug.mac)
    SubElement(root, "source", bridge=plug.bridge)
    if plug.ovs:
        SubElement(
            SubElement(root, "virtualport", type="openvswitch"), "parameters", interfaceid=plug.port
        )
    SubElement(root, "target", dev=plug.device)
    SubElement(root, "model", type=options.get("vif_model", "virtio"))
    hardware_xml.interface(root, options)
    if plug.mtu:
        SubElement(root, "mtu", size=str(plug.mtu))
    # Nothing boots from the network, and its ROM would cost a second of each boot.
    SubElement(root, "rom", enabled="no")
    if address:
        SubElement(root, "address", dict(address))
    return root


def text(interface: Element) -> str:
    return ElementTree.tostring(interface, encoding="unicode")


def alias(interface: Element) -> str:
    """What libvirt calls an interface of a running domain."""
    element = interface.find("alias")
    return "" if element is None else element.get("name", "")


def alias_of(described: str, mac: str) -> str | None:
    """The same of the interface with this MAC address; None when there is none."""
    interface = found(described).get(mac)
    return None if interface is None else alias(interface)


def found(described: str) -> dict[str, Element]:
    """MAC address -> interface, of a domain that libvirt described; none when it described
    nothing."""
    return {
        mac.get("address", "").lower(): interface
        for interface in _interfaces(described)
        if (mac := interface.find("mac")) is not None
    }


def addresses(described: str) -> dict[str, dict[str, str]]:
    """MAC address -> place on the PCI bus."""
    return {
        mac: dict(address.attrib)
        for mac, interface in found(described).items()
        if (address := interface.find("address")) is not None
    }


def bridges(described: str) -> set[str]:
    """The bridges that a domain, or one interface alone, needs."""
    return {
        source.get("bridge", "")
        for interface in _interfaces(described)
        if (source := interface.find("source")) is not None
    }


def _interfaces(described: str) -> Iterator[Element]:
    return ElementTree.fromstring(described).iter("interface") if described else iter(())
