# SPDX-License-Identifier: Apache-2.0
"""What the local libvirtd is told of a guest that comes: pure functions.

Called by ``filter``. The domain is this host's own, made of the spec of the command that announced
the guest; nothing of the XML that the other host sends gets into it but what a running guest must
find as it was: its machine, the model and features of its processor, the addresses of its devices,
the controllers that libvirt gave it, and our marks on it. Of libvirt's cookie only what the
destination needs is kept. Must stay true: what the other host wrote is never passed on; values of
it that are words are put into XML of ours.
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

#: A value that can be taken over: a number, an address, a name of libvirt's.
WORD = re.compile(r"[\w.:+ -]{0,128}", re.ASCII)
NUMBER = re.compile(r"\d{1,18}", re.ASCII)
#: Bytes of a domain or a cookie, and controllers of a guest.
MOST_XML, MOST_CONTROLLERS = 256 << 10, 64
#: What our marks tell of the running guest; the rest of them follows from the spec.
NUMBERS = ("made", "started", "moving", "resumes")
MARKS = f"metadata/{{{NAMESPACE}}}server"


class Unfit(Exception):
    """It cannot be made a description of."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Which attributes and children of an element are taken, and whether its text is; any: of which
    children all."""

    attributes: frozenset[str] = frozenset()
    children: Mapping[str, Shape] = field(default_factory=dict)
    text: bool = False
    any: Shape | None = None


def _shape(
    attributes: str = "",
    children: Mapping[str, Shape] | None = None,
    *,
    text: bool = False,
    any_child: Shape | None = None,
) -> Shape:
    return Shape(frozenset(attributes.split()), children or {}, text, any_child)


_ADDRESS = _shape(
    "type domain bus slot function multifunction controller target unit port devno cssid ssid iobase irq "
    "base slot reg"
)
_CPU = {
    "model": _shape("fallback vendor_id", text=True),
    "vendor": _shape(text=True),
    "feature": _shape("policy name"),
    "maxphysaddr": _shape("mode bits limit"),
    "cache": _shape("level mode"),
}
_DEVICE = _shape(
    "type index model ports",
    {
        "model": _shape("name type"),
        "mac": _shape("address"),
        "address": _ADDRESS,
        "blockio": _shape("logical_block_size physical_block_size"),
        "master": _shape("startport"),
        "target": _shape("dev chassis chassisNr port busNr index hotplug"),
    },
)
DOMAIN = _shape(
    children={
        "os": _shape(children={"type": _shape("machine")}),
        "cpu": _shape("mode match check", _CPU),
        "devices": _shape(any_child=_DEVICE),
    }
)
COOKIE = _shape(
    children={
        "hostname": _shape(text=True),
        "hostuuid": _shape(text=True),
        "nbd": _shape(children={"disk": _shape("target capacity")}),
        "cpu": _shape(
            "mode match check", {**_CPU, "topology": _shape("sockets dies cores threads")}
        ),
        "capabilities": _shape(children={"cap": _shape("name auto")}),
        "statistics": _shape(any_child=_shape(text=True)),
    }
)


def domain(own: str, sent: bytes, server: str, fence: int) -> str:
    """The domain as this host describes it in ``own``, for the guest that the other host describes
    as ``sent``. Raises Unfit."""
    root = _parsed(sent, "domain")
    there = _taken(root, DOMAIN)
    if there.find("os/type") is None or there.find("devices") is None:
        raise Unfit("a domain without a machine or without devices")
    if len(there.findall("devices/controller")) > MOST_CONTROLLERS:
        raise Unfit("too many controllers")
    ours = ElementTree.fromstring(own)
    _complete_cpu(there, ours)
    _name_socket(there, root)
    marks = DomainMetadata(
        server, fence, **_numbers(root), options=_options(ours), facts=_facts(ours)
    )
    return running_domain.at_destination(
        own, ElementTree.tostring(there, encoding="unicode"), marks
    )


def uuid_of(sent: bytes) -> str:
    """Which guest the other host means. Raises Unfit."""
    return (_parsed(sent, "domain").findtext("uuid") or "").strip()


def cookie(sent: bytes, server: str) -> bytes:
    """libvirt's cookie, of which the parts are kept that ``COOKIE`` has; libvirt ends it with a
    zero. Raises Unfit."""
    if not sent:
        return b""
    made = _taken(_parsed(sent.removesuffix(b"\0"), "qemu-migration"), COOKIE)
    for at, (tag, text) in enumerate((("name", domain_name(server)), ("uuid", server))):
        named = Element(tag)
        named.text = text
        made.insert(at, named)
    return ElementTree.tostring(made) + b"\0"


def _parsed(sent: bytes, tag: str) -> Element:
    if len(sent) > MOST_XML:
        raise Unfit(f"more than {MOST_XML} bytes of XML")
    try:
        text = sent.decode()
        if "<!" in text or "<?" in text:
            raise Unfit("XML with declarations")  # entities are declared so
        root = ElementTree.fromstring(text)
    except (ValueError, ElementTree.ParseError) as problem:
        raise Unfit(f"no XML: {problem}") from problem
    if root.tag != tag:
        raise Unfit(f"no <{tag}>")
    return root


def _taken(element: Element, shape: Shape) -> Element:
    """What a shape has of an element, made anew."""
    made = Element(
        element.tag,
        {name: _word(value) for name, value in element.attrib.items() if name in shape.attributes},
    )
    if shape.text:
        made.text = _word((element.text or "").strip())
    for child in element:
        found = shape.children.get(child.tag, shape.any)
        if found is not None:
            _word(child.tag)
            made.append(_taken(child, found))
    return made


def _word(value: str) -> str:
    if not WORD.fullmatch(value):
        raise Unfit(f"an unexpected value: {value[:40]!r}")
    return value


def _complete_cpu(there: Element, own: Element) -> None:
    """How many sockets and which memory the guest has is ours to say."""
    cpu, ours = there.find("cpu"), own.find("cpu")
    if cpu is not None and ours is not None:
        cpu.extend(part for part in ours if part.tag in ("topology", "numa"))


def _name_socket(there: Element, sent: Element) -> None:
    """``running_domain.is_incoming`` takes the name of the serial console's socket that the other
    host has not; here the domain that came has it already."""
    source, devices = sent.find(running_domain.SERIAL), there.find("devices")
    name = "" if source is None else source.get("path", "").rpartition("/")[2]
    other = next((one for one in SERIAL_SOCKETS if one != name), SERIAL_SOCKETS[0])
    if devices is not None:
        for device in devices.findall("serial[@type='unix']"):
            device.append(Element("source", path=other))


def _numbers(sent: Element) -> dict[str, int]:
    about = sent.find(MARKS)
    return (
        {}
        if about is None
        else {
            name: int(about.attrib[name])
            for name in NUMBERS
            if NUMBER.fullmatch(about.get(name, ""))
        }
    )


def _options(own: Element) -> dict[str, str]:
    about = own.find(MARKS)
    return (
        {}
        if about is None
        else {name: about.attrib[name] for name in KEPT_OPTIONS if name in about.attrib}
    )


def _facts(own: Element) -> str:
    return own.findtext(f"{MARKS}/{FACTS}") or ""
