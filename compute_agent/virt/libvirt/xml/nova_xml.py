# SPDX-License-Identifier: Apache-2.0
"""Nova's metadata element of a domain, by which Ceilometer and exporters recognize guests.

Called by ``guests`` and ``connection``. The layout is that of Nova 2025.2. Kilonova reads only its
own element (``domain_xml.metadata``). Pure functions. Elements are built without a namespace, as
libvirt returns them, and ``qualify`` adds the namespace for a complete definition.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from xml.etree import ElementTree
from xml.etree.ElementTree import Element, SubElement

from common import __version__
from common.domain.clock import SECOND
from common.domain.models import Flavor, GuestSpec, ImageRef, Interface
from compute_agent.virt.libvirt.xml.domain_xml import replace_unwritable

NAMESPACE, PREFIX = "http://openstack.org/xmlns/libvirt/nova/1.1", "nova"
#: Prefixes of the image properties that Nova writes, which describe the guest.
PROPERTY_PREFIXES = ("hw_", "os_", "img_")
#: Maximum length of a property's value. Longer values do not describe hardware.
MOST_VALUE = 255
#: The name of a user or project without a recorded name, as in Nova.
NO_NAME = "N/A"

ElementTree.register_namespace(PREFIX, NAMESPACE)


def instance(spec: GuestSpec) -> Element:
    """Return Nova's metadata element of a server, without a namespace."""
    element = Element("instance")
    SubElement(element, "package", version=__version__)
    _add_text(element, "name", spec.name)
    created_at = spec.record.get("created_at")
    if created_at:
        created = datetime.fromtimestamp(created_at // SECOND, UTC)
        _add_text(element, "creationTime", created.strftime("%Y-%m-%d %H:%M:%S"))
    _add_flavor(element, spec.flavor)
    _add_image(element, spec.image)
    owner = SubElement(element, "owner")
    for name, owner_id in (
        ("user", spec.record.get("user_id")),
        ("project", spec.instance.get("project_id")),
    ):
        _add_text(owner, name, NO_NAME, uuid=owner_id or "")
    kind = "image" if spec.image else "volume"
    SubElement(element, "root", type=kind, uuid=spec.image.id if spec.image else "")
    ports = SubElement(element, "ports")
    ports.extend(_build_port(interface) for interface in spec.interfaces)
    return element


def with_interface(text: str, interface: Interface) -> str:
    """Return Nova's metadata element ``text`` with the port of the interface added or replaced."""
    return _change_ports(text, interface.port, [_build_port(interface)])


def without_interface(text: str, port_id: str) -> str:
    """Return Nova's metadata element ``text`` without this port."""
    return _change_ports(text, port_id, [])


def write(element: Element) -> str:
    """Return the element as text for libvirt, which adds the namespace."""
    return ElementTree.tostring(element, encoding="unicode")


def qualify(element: Element) -> Element:
    """Return a copy of the element and of all elements inside, in Nova's namespace."""
    copy = Element(f"{{{NAMESPACE}}}{element.tag}", element.attrib)
    copy.text = element.text
    copy.extend(qualify(child) for child in element)
    return copy


def _change_ports(text: str, port_id: str, new: Iterable[Element]) -> str:
    element = ElementTree.fromstring(text)
    ports = element.find("ports")
    if ports is None:
        ports = SubElement(element, "ports")
    for port in ports.findall("port"):
        if port.get("uuid") == port_id:
            ports.remove(port)
    ports.extend(new)
    return write(element)


def _add_flavor(parent: Element, flavor: Flavor) -> None:
    name, flavor_id = (replace_unwritable(value) for value in (flavor.name, flavor.id))
    element = SubElement(parent, "flavor", name=name, id=flavor_id)
    for tag, number in (
        ("memory", flavor.memory_mb),
        ("disk", flavor.root_gb),
        ("swap", flavor.swap_mb),
        ("ephemeral", flavor.ephemeral_gb),
        ("vcpus", flavor.vcpus),
    ):
        _add_text(element, tag, str(number))
    specs = SubElement(element, "extraSpecs")
    for key, value in sorted(flavor.extra_specs.items()):
        _add_text(specs, "extraSpec", value, name=key)


def _add_image(parent: Element, image: ImageRef | None) -> None:
    element = SubElement(parent, "image", uuid=image.id if image else "")
    if image and image.disk_format:
        _add_text(element, "diskFormat", image.disk_format)
    properties = SubElement(element, "properties")
    for key, value in sorted(image.properties.items()) if image else ():
        if key.startswith(PROPERTY_PREFIXES) and len(value) <= MOST_VALUE:
            _add_text(properties, "property", value, name=key)


def _build_port(interface: Interface) -> Element:
    element = Element("port", uuid=interface.port)
    for address in interface.addresses:
        SubElement(
            element,
            "ip",
            type="fixed",
            address=str(address["address"]),
            ipVersion=str(address["version"]),
        )
    return element


def _add_text(parent: Element, tag: str, text: str, **attributes: str) -> None:
    attribute_texts = {name: replace_unwritable(value) for name, value in attributes.items()}
    SubElement(parent, tag, attribute_texts).text = replace_unwritable(text)
