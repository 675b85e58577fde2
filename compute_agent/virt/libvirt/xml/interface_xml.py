# SPDX-License-Identifier: Apache-2.0
"""Network interfaces as libvirt's XML. Pure functions, tested against golden files.

Called by ``domain_xml``, ``interfaces`` and ``connection``. An interface is identified by the MAC
address.

Invariant: an existing interface keeps the PCI address in a new definition, because guests name
interfaces by PCI address. libvirt assigns the addresses of new interfaces in the order of the XML.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from xml.etree import ElementTree
from xml.etree.ElementTree import Element, SubElement

from compute_agent.virt.interfaces import Plug
from compute_agent.virt.libvirt.xml import hardware_xml


def element(plug: Plug, address: Mapping[str, str] | None, options: Mapping[str, str]) -> Element:
    """Return the element of an interface.

    Args:
        plug: The connection of the interface on this host.
        address: The PCI address, or None if libvirt assigns an address.
        options: Hardware options of flavor and image.
    """
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
    # Guests do not boot from the network, and the option ROM would delay each boot by a second.
    SubElement(root, "rom", enabled="no")
    if address:
        SubElement(root, "address", dict(address))
    return root


def text(interface: Element) -> str:
    """Return the interface as XML text."""
    return ElementTree.tostring(interface, encoding="unicode")


def alias(interface: Element) -> str:
    """Return libvirt's alias of an interface of an active domain, or "" if the alias is missing."""
    element = interface.find("alias")
    return "" if element is None else element.get("name", "")


def alias_of(xml: str, mac: str) -> str | None:
    """Return libvirt's alias of the interface with this MAC address.

    None if the domain has no such interface, "" if the interface has no alias.

    Args:
        xml: The active domain's XML.
        mac: MAC address in lower case.
    """
    interface = find_interfaces(xml).get(mac)
    return None if interface is None else alias(interface)


def find_interfaces(xml: str) -> dict[str, Element]:
    """Return the interface elements in a domain's XML, by MAC address in lower case.

    For the XML "" the result is {}.
    """
    return {
        mac.get("address", "").lower(): interface
        for interface in _iterate_interfaces(xml)
        if (mac := interface.find("mac")) is not None
    }


def addresses(xml: str) -> dict[str, dict[str, str]]:
    """Return the attributes of the interfaces' PCI addresses, by MAC address in lower case.

    Interfaces without an address are left out.
    """
    return {
        mac: dict(address.attrib)
        for mac, interface in find_interfaces(xml).items()
        if (address := interface.find("address")) is not None
    }


def bridges(xml: str) -> set[str]:
    """Return the names of the bridges in the XML of a domain or of an interface."""
    return {
        source.get("bridge", "")
        for interface in _iterate_interfaces(xml)
        if (source := interface.find("source")) is not None
    }


def _iterate_interfaces(xml: str) -> Iterator[Element]:
    return ElementTree.fromstring(xml).iter("interface") if xml else iter(())
