# SPDX-License-Identifier: Apache-2.0
"""Builds the description of an incoming guest for the local libvirtd. Pure functions.

Called by ``filter``. The domain is this host's own, made from the spec in the command that
announced the guest. From the XML of the other host only those parts are copied that must not change
under a running guest: machine type, CPU model and features, device addresses, controllers, and some
of our marks. Of libvirt's migration cookie only the elements in ``COOKIE`` are kept.

Invariant: no XML of the other host is forwarded. Only single words are copied into new XML.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

from compute_agent.virt.libvirt.xml import running_domain
from compute_agent.virt.libvirt.xml.domain_xml import (
    FACTS,
    KEPT_OPTIONS,
    NAMESPACE,
    SERIAL_SOCKETS,
    DomainMetadata,
    domain_name,
)

#: A value that may be copied: a number, an address or a name of libvirt.
WORD = re.compile(r"[\w.:+ -]{0,128}", re.ASCII)
NUMBER = re.compile(r"\d{1,18}", re.ASCII)
#: Limits: bytes of a domain or cookie, and controllers of a guest.
MOST_XML, MOST_CONTROLLERS = 256 << 10, 64
#: Marks copied from the source's XML. The other marks follow from the spec.
NUMBERS = ("made", "started", "moving", "resumes")
MARKS = f"metadata/{{{NAMESPACE}}}server"


class Unfit(Exception):
    """The XML from the other host is malformed or contains values that are not permitted."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The parts of an element that are copied.

    Attributes:
        attributes: Names of the attributes.
        children: Shapes of the children, by tag.
        text: True if the text is copied too.
        any: Shape of all children that are not in ``children``, or None to leave them out.
    """

    attributes: frozenset[str] = frozenset()
    children: Mapping[str, Shape] = field(default_factory=dict)
    text: bool = False
    any: Shape | None = None


def _make_shape(
    attributes: str = "",
    children: Mapping[str, Shape] | None = None,
    *,
    text: bool = False,
    any_child: Shape | None = None,
) -> Shape:
    return Shape(frozenset(attributes.split()), children or {}, text, any_child)


_ADDRESS = _make_shape(
    "type domain bus slot function multifunction controller target unit port devno cssid ssid iobase irq "
    "base slot reg"
)
_CPU = {
    "model": _make_shape("fallback vendor_id", text=True),
    "vendor": _make_shape(text=True),
    "feature": _make_shape("policy name"),
    "maxphysaddr": _make_shape("mode bits limit"),
    "cache": _make_shape("level mode"),
}
_DEVICE = _make_shape(
    "type index model ports",
    {
        "model": _make_shape("name type"),
        "mac": _make_shape("address"),
        "address": _ADDRESS,
        "blockio": _make_shape("logical_block_size physical_block_size"),
        "master": _make_shape("startport"),
        "target": _make_shape("dev chassis chassisNr port busNr index hotplug"),
    },
)
DOMAIN = _make_shape(
    children={
        "os": _make_shape(children={"type": _make_shape("machine")}),
        "cpu": _make_shape("mode match check", _CPU),
        "devices": _make_shape(any_child=_DEVICE),
    }
)
COOKIE = _make_shape(
    children={
        "hostname": _make_shape(text=True),
        "hostuuid": _make_shape(text=True),
        "nbd": _make_shape(children={"disk": _make_shape("target capacity")}),
        "cpu": _make_shape(
            "mode match check", {**_CPU, "topology": _make_shape("sockets dies cores threads")}
        ),
        "capabilities": _make_shape(children={"cap": _make_shape("name auto")}),
        "statistics": _make_shape(any_child=_make_shape(text=True)),
    }
)


def domain(own_xml: str, sent: bytes, server: str, fence: int) -> str:
    """Return this host's definition of the guest, completed with values of the running guest.

    The values are the machine type, the CPU, the device addresses, and some marks of the metadata.

    Args:
        own_xml: This host's definition of the guest, from the record of the arrival.
        sent: The domain XML from the other host.
        server: Id of the server.
        fence: Fence for the metadata.

    Raises:
        Unfit: ``sent`` is malformed or too large, has too many controllers or a value that is not
            permitted, or lacks a machine type or devices.
    """
    root = _parse(sent, "domain")
    copied = _copy_shape(root, DOMAIN)
    if copied.find("os/type") is None or copied.find("devices") is None:
        raise Unfit("the domain has no machine type or no devices")
    if len(copied.findall("devices/controller")) > MOST_CONTROLLERS:
        raise Unfit(f"the domain has more than {MOST_CONTROLLERS} controllers")
    own_root = ElementTree.fromstring(own_xml)
    _complete_cpu(copied, own_root)
    _swap_socket_name(copied, root)
    marks = DomainMetadata(
        server,
        fence,
        **_read_numbers(root),
        options=_read_options(own_root),
        facts=_read_facts(own_root),
    )
    return running_domain.at_destination(
        own_xml, ElementTree.tostring(copied, encoding="unicode"), marks
    )


def uuid_of(sent: bytes) -> str:
    """Return the text of the UUID in the other host's domain XML, unchecked, or "" without a UUID.

    Raises:
        Unfit: ``sent`` is not the XML of a domain, or is too large.
    """
    return (_parse(sent, "domain").findtext("uuid") or "").strip()


def cookie(sent: bytes, server: str) -> bytes:
    """Return libvirt's migration cookie, reduced to the elements of ``COOKIE``.

    The name and the id of the guest are written anew from ``server``. Empty data (b"") is returned
    unchanged.

    Raises:
        Unfit: ``sent`` is malformed or too large, or has a value that is not permitted.
    """
    if not sent:
        return b""
    root = _copy_shape(_parse(sent.removesuffix(b"\0"), "qemu-migration"), COOKIE)
    for position, (tag, text) in enumerate((("name", domain_name(server)), ("uuid", server))):
        element = Element(tag)
        element.text = text
        root.insert(position, element)
    return ElementTree.tostring(root) + b"\0"


def _parse(sent: bytes, tag: str) -> Element:
    if len(sent) > MOST_XML:
        raise Unfit(f"the XML has more than {MOST_XML} bytes")
    try:
        text = sent.decode()
        if "<!" in text or "<?" in text:
            # Declarations could define entities.
            raise Unfit("the XML contains declarations or processing instructions")
        root = ElementTree.fromstring(text)
    except (ValueError, ElementTree.ParseError) as problem:
        raise Unfit(f"the data for <{tag}> is not XML: {problem}") from problem
    if root.tag != tag:
        raise Unfit(f"the root element is not <{tag}>")
    return root


def _copy_shape(element: Element, shape: Shape) -> Element:
    """Return a new element with only the parts of ``element`` that the shape permits.

    Raises:
        Unfit: A copied value or the tag of a copied child does not match ``WORD``.
    """
    copy = Element(
        element.tag,
        {
            name: _check_word(value)
            for name, value in element.attrib.items()
            if name in shape.attributes
        },
    )
    if shape.text:
        copy.text = _check_word((element.text or "").strip())
    for child in element:
        child_shape = shape.children.get(child.tag, shape.any)
        if child_shape is not None:
            _check_word(child.tag)
            copy.append(_copy_shape(child, child_shape))
    return copy


def _check_word(value: str) -> str:
    if not WORD.fullmatch(value):
        raise Unfit(f"the XML contains a value that is not permitted: {value[:40]!r}")
    return value


def _complete_cpu(copied: Element, own: Element) -> None:
    """Add topology and NUMA memory of the CPU in ``own``, this host's definition, to ``copied``.

    If one of the two has no CPU, nothing is changed.
    """
    cpu, own_cpu = copied.find("cpu"), own.find("cpu")
    if cpu is not None and own_cpu is not None:
        cpu.extend(part for part in own_cpu if part.tag in ("topology", "numa"))


def _swap_socket_name(copied: Element, sent: Element) -> None:
    """Name the serial console's socket in ``copied`` differently than in ``sent``.

    ``SERIAL_SOCKETS`` has the two possible names.

    Why: ``running_domain.at_destination`` gives the result the name that the copied domain does not
    have. So the result gets the name in ``sent``, which the source chose for the destination.
    """
    source, devices = sent.find(running_domain.SERIAL), copied.find("devices")
    name = "" if source is None else source.get("path", "").rpartition("/")[2]
    other_name = next(
        (candidate for candidate in SERIAL_SOCKETS if candidate != name), SERIAL_SOCKETS[0]
    )
    if devices is not None:
        for device in devices.findall("serial[@type='unix']"):
            device.append(Element("source", path=other_name))


def _read_numbers(sent: Element) -> dict[str, int]:
    marks = sent.find(MARKS)
    return (
        {}
        if marks is None
        else {
            name: int(marks.attrib[name])
            for name in NUMBERS
            if NUMBER.fullmatch(marks.get(name, ""))
        }
    )


def _read_options(own: Element) -> dict[str, str]:
    marks = own.find(MARKS)
    return (
        {}
        if marks is None
        else {name: marks.attrib[name] for name in KEPT_OPTIONS if name in marks.attrib}
    )


def _read_facts(own: Element) -> str:
    return own.findtext(f"{MARKS}/{FACTS}") or ""
