# SPDX-License-Identifier: Apache-2.0
"""What another libvirtd's calls become on their way to the local one, and which get nowhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from xml.etree import ElementTree
from xml.etree.ElementTree import Element, SubElement

import libvirt
import pytest

from common.domain.models import Flavor, GuestSpec
from compute_agent.virt.libvirt.migration.incoming import filter as filters
from compute_agent.virt.libvirt.migration.incoming import rpc
from compute_agent.virt.libvirt.migration.incoming.filter import Filter, Refused
from compute_agent.virt.libvirt.migration.incoming.records import Arrival
from compute_agent.virt.libvirt.migration.incoming.rpc import KEEPALIVE, MESSAGE, Packet, Reader
from compute_agent.virt.libvirt.xml import nova_xml, running_domain
from tests.unit.compute_agent.incoming_calls import (
    ANOTHER,
    COOKIE,
    FLAGS,
    SERVER,
    arrival,
    call,
    described,
    finishing,
    opening,
    params,
    preparing,
    running,
    text,
)


def made(**changed: Any) -> Filter:
    expected: dict[str, Arrival] = {SERVER: arrival(**changed)}
    return Filter(expected.get, "qemu:///system")


def passed(packet: bytes, found: Filter | None = None) -> Packet:
    return Packet.read((found or made()).rewrite(packet))


def prepared(packet: Packet) -> tuple[dict[str, list[str]], str, int]:
    """The parameters, the cookie and the flags of what the local libvirtd is told."""
    reader = Reader(packet.body)
    told = {name: [value.decode() for value in values] for name, values in reader.strings().items()}
    cookie, flags = reader.opaque().decode(), reader.number()
    reader.end()
    return told, cookie, flags


def domain_of(packet: bytes, **changed: Any) -> str:
    told, _, _ = prepared(passed(packet, made(**changed)))
    return told["destination_xml"][0]


def test_calls_of_a_migration_pass() -> None:
    found = made()
    calls = [
        call(filters.AUTH_LIST),
        call(filters.SUPPORTS_FEATURE, rpc.number(10)),
        opening(),
        preparing(),
        call(filters.WATCH_CLOSE),
        finishing(),
        call(filters.UNWATCH_CLOSE),
        call(filters.CLOSE),
    ]
    assert [passed(one, found).procedure for one in calls] == [66, 60, 1, 303, 360, 306, 361, 2]
    assert {passed(one, found).serial for one in calls} == {7}
    for ping in (filters.PING, filters.PONG):
        assert passed(call(ping, program=KEEPALIVE, kind=MESSAGE)).procedure == ping


def test_the_domain_is_this_hosts_own_where_the_guest_ran() -> None:
    sent = preparing(None, ("disks_uri", "unix:///run/other"), ("listen_address", "::"))
    told, cookie, flags = prepared(passed(sent))
    assert (set(told), flags) == ({"destination_xml", "migrate_uri", "migrate_disks"}, FLAGS)
    assert (told["migrate_uri"], told["migrate_disks"]) == (["tcp://192.0.2.2"], ["vda"])
    root = ElementTree.fromstring(told["destination_xml"][0])
    assert root.find("os/type").get("machine") == "pc-i440fx-7.2"  # type: ignore[union-attr]
    assert {path.get("file") for path in root.iterfind("devices/disk//source")} == {
        "/here/disk",
        "/here/base",
    }
    assert root.find("devices/disk/address").get("slot") == "0x04"  # type: ignore[union-attr]
    assert root.find("devices/interface/address").get("slot") == "0x09"  # type: ignore[union-attr]
    assert len(root.findall("devices/controller[@type='virtio-serial']")) == 1
    assert running_domain.serial_socket(told["destination_xml"][0]) == "/here/tty2"
    assert root.find("metadata")[0].attrib == {  # type: ignore[index]
        "id": SERVER,
        "fence": "5",
        "started": "1795402416",
        "moving": "5",
        "resumes": "1",
    }
    assert cookie.endswith("</qemu-migration>\0") and "lockstate" not in cookie
    assert all(
        part in cookie
        for part in ("<hostname>h1</hostname>", 'capacity="1073741824"', "qemu64", "xbzrle")
    )


def test_metadata_of_nova_is_this_hosts_own() -> None:
    def nova(name: str) -> Element:
        spec = GuestSpec(SERVER, 5, name, Flavor("1", "m1.nano", 1, 128, 1))
        return nova_xml.qualify(nova_xml.instance(spec))

    sent = running()
    sent.find("metadata").append(nova("there"))  # type: ignore[union-attr]
    arriving = domain_of(preparing(text(sent)), xml=described("/here", nova=nova("here")))
    names = ElementTree.fromstring(arriving).findall(
        "metadata/nova:instance/nova:name", {"nova": nova_xml.NAMESPACE}
    )
    assert [name.text for name in names] == ["here"]


def test_what_is_remembered_of_the_server_is_this_hosts_own() -> None:
    found = ElementTree.fromstring(
        domain_of(preparing(), xml=described("/here", facts='{"name":"here"}'))
    )
    assert found.findtext("metadata/*/facts") == '{"name":"here"}'


def test_storage_that_is_shared_is_not_copied() -> None:
    told, _, flags = prepared(
        passed(preparing(flags=FLAGS & ~(1 << 7) | 1 << 9), made(shared=True))
    )
    assert "migrate_disks" not in told and flags & 1 << 9


def _in(
    path: str,
    tag: str,
    attributes: dict[str, str] | None = None,
    *below: tuple[str, dict[str, str]],
) -> Callable[[Element], None]:
    def change(root: Element) -> None:
        parent = root if path == "." else root.find(path)
        assert parent is not None
        one = SubElement(parent, tag, attributes or {})
        for name, more in below:
            SubElement(one, name, more)

    return change


def _set(path: str, name: str, value: str) -> Callable[[Element], None]:
    def change(root: Element) -> None:
        found = root.find(path)
        assert found is not None
        if name == "text":
            found.text = value
        else:
            found.set(name, value)

    return change


QEMU = "{http://libvirt.org/schemas/domain/qemu/1.0}commandline"
HOSTILE = {
    "a disk": _in(
        "devices",
        "disk",
        {"type": "block", "device": "disk"},
        ("source", {"dev": "/dev/sda"}),
        ("target", {"dev": "vdz", "bus": "virtio"}),
    ),
    "another file": _set("devices/disk/source", "file", "/etc/shadow"),
    "another base": _set("devices/disk/backingStore/source", "file", "/dev/sda"),
    "a device": _in(
        "devices", "hostdev", {"mode": "subsystem", "type": "pci", "managed": "yes"}, ("source", {})
    ),
    "an emulator": _in("devices", "emulator"),
    "QEMU's command line": _in(".", QEMU, {}, ("arg", {"value": "-fsdev"})),
    "a folder": _in(
        "devices",
        "filesystem",
        {"type": "mount"},
        ("source", {"dir": "/"}),
        ("target", {"dir": "all"}),
    ),
    "a bridge": _set("devices/interface/source", "bridge", "br-other"),
    "a script": _in("devices/interface", "script", {"path": "/bin/sh"}),
    "a console's path": _set("devices/serial/source", "path", "/root/.ssh/tty2"),
    "a console's log": _set("devices/serial/log", "file", "/etc/cron.d/x"),
    "a screen that listens": _in(
        "devices", "graphics", {"type": "vnc", "port": "5900", "listen": "0.0.0.0"}
    ),
    "a kernel": _in("os", "kernel"),
    "a loader": _in("os", "loader", {"readonly": "no"}),
    "a label": _in(".", "seclabel", {"type": "none"}),
    "a user's": _in(".", "resource"),
    "more memory": _set("memory", "text", "9999999"),
    "more processors": _set("vcpu", "text", "64"),
    "cells": _in(
        "cpu", "numa", {}, ("cell", {"id": "0", "cpus": "0", "memory": "99", "unit": "GiB"})
    ),
    "sockets": _in("cpu", "topology", {"sockets": "8", "cores": "8", "threads": "1"}),
    "another name": _set("name", "text", "instance-another"),
    "another owner": lambda root: root.find("metadata")[0].set("id", ANOTHER),  # type: ignore[index]
    "another fence": lambda root: root.find("metadata")[0].set("fence", "999"),  # type: ignore[index]
    "a mark": lambda root: root.find("metadata")[0].set("rescue", "5"),  # type: ignore[index]
    "an option": lambda root: root.find("metadata")[0].set("vif_model", "e1000"),  # type: ignore[index]
    "facts": lambda root: setattr(SubElement(root.find("metadata")[0], "facts"), "text", "{}"),  # type: ignore[index]
    "another kind": lambda root: root.set("type", "xen"),
    "a controller's driver": _in("devices/controller", "driver", {"iothread": "1"}),
    "an alias": _in("devices/controller", "alias", {"name": "ua-x"}),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_nothing_that_the_other_host_adds_gets_in(what: str) -> None:
    root = running()
    honest = domain_of(preparing(text(root)))
    HOSTILE[what](root)
    assert text(root) != text(running())
    assert domain_of(preparing(text(root))) == honest


def test_what_the_destination_says_of_the_processor_stays() -> None:
    own = ElementTree.fromstring(described("/here"))
    cpu = own.find("cpu")
    assert cpu is not None
    SubElement(SubElement(cpu, "numa"), "cell", {"id": "0", "memory": "128"})
    found = ElementTree.fromstring(
        domain_of(preparing(), xml=ElementTree.tostring(own, encoding="unicode"))
    )
    assert [cell.attrib for cell in found.iterfind("cpu/numa/cell")] == [
        {"id": "0", "memory": "128"}
    ]
    assert found.findtext("cpu/model") == "qemu64"


def _with(path: str, name: str, value: str) -> bytes:
    root = running()
    _set(path, name, value)(root)
    return text(root)


def _without(path: str, tag: str) -> bytes:
    root = running()
    parent = root if path == "." else root.find(path)
    assert parent is not None
    parent.remove(parent.find(tag))  # type: ignore[arg-type]
    return text(root)


def _controllers(count: int) -> bytes:
    root = running()
    for number in range(count):
        _in("devices", "controller", {"type": "scsi", "index": str(number + 1)})(root)
    return text(root)


REFUSED = {
    "another guest": preparing(text(running(ANOTHER))),
    "no guest": preparing(_without(".", "uuid")),
    "no domain": preparing(b"<network/>"),
    "no XML": preparing(b"<domain>"),
    "two domains": preparing(None, ("destination_xml", text(running()))),
    "an entity": preparing(b'<!DOCTYPE d [<!ENTITY e "e">]>' + text(running())),
    "an encoding": preparing(b'<?xml version="1.0"?>' + text(running())),
    "too much XML": preparing(
        text(running()).replace(b"</domain>", b" " * (256 << 10) + b"</domain>")
    ),
    "XML that is too deep": preparing(b"<domain>" * 20000 + b"</domain>" * 20000),
    "no machine": preparing(_without("os", "type")),
    "no devices": preparing(_without(".", "devices")),
    "a machine that is no word": preparing(_with("os/type", "machine", "pc,accel=kvm")),
    "a model that is no word": preparing(_with("cpu/model", "text", "qemu64,+vmx")),
    "an address that is no word": preparing(_with("devices/disk/address", "slot", "0x04,id=x")),
    "too many controllers": preparing(_controllers(65)),
    "a cookie that is none": preparing(cookie="<domain/>"),
    "a cookie with markup": preparing(cookie=COOKIE.replace("h1", "<![CDATA[h1]]>")),
    "a cookie with another's word": preparing(cookie=COOKIE.replace("xbzrle", "a;b")),
    "a tunnel": preparing(flags=FLAGS | 4),
    "an offline one": preparing(flags=FLAGS | 1 << 10),
    "all of the disk": preparing(flags=FLAGS | 1 << 6),
    "plain text": preparing(flags=FLAGS & ~(1 << 16)),
    "no disks": preparing(flags=FLAGS & ~(1 << 7)),
    "an unsafe one": preparing(flags=FLAGS | 1 << 9),
    "one from a client": preparing(flags=FLAGS & ~2),
    "one that does not stay": preparing(flags=FLAGS & ~8),
    "an end without a beginning": finishing(),
    "a connection that only reads": opening(flags=1),
    "a feature that is none": call(filters.SUPPORTS_FEATURE, rpc.number(1 << 31)),
    "more than a call has": call(filters.CLOSE, b"\0\0\0\0"),
    "less than a call has": call(filters.OPEN),
    "another version": call(filters.AUTH_LIST, version=2),
    "an error": call(filters.AUTH_LIST, status=1),
    "an answer": call(filters.AUTH_LIST, kind=1),
    "a stream": call(filters.AUTH_LIST, kind=3),
    "descriptors": call(filters.AUTH_LIST, kind=4),
    "the monitor": call(1, params(), program=0x20008087),
    "administration": call(1, program=0x06900690),
    "another way to keep alive": call(3, program=KEEPALIVE, kind=MESSAGE),
    "a call that keeps alive": call(1, program=KEEPALIVE),
    "a length that is wrong": call(filters.AUTH_LIST)[:-1] + b"\0\0",
    "a string that is too long": call(filters.OPEN, rpc.number(1) + rpc.number(1 << 30)),
    "too many parameters": call(filters.PREPARE, rpc.number(65)),
    "an unknown parameter": call(filters.PREPARE, rpc.number(1) + rpc.opaque(b"x") + rpc.number(9)),
}


@pytest.mark.parametrize("what", REFUSED)
def test_everything_else_is_refused(what: str) -> None:
    with pytest.raises(Refused):
        made().rewrite(REFUSED[what])


def test_no_other_procedure_passes() -> None:
    known = {1, 2, 60, 66, 70, 303, 306, 360, 361}
    for procedure in set(range(-1, 600)) - known:
        with pytest.raises(Refused):
            made().rewrite(call(procedure))


def test_a_connection_is_about_one_guest() -> None:
    expected = {
        SERVER: arrival(),
        ANOTHER: arrival(server=ANOTHER, xml=described("/here", ANOTHER)),
    }
    found = Filter(expected.get, "qemu:///system")
    found.rewrite(preparing())
    with pytest.raises(Refused, match="not expected"):
        found.rewrite(preparing(text(running(ANOTHER))))
    found.rewrite(preparing())


def test_the_end_is_of_the_guest_that_came() -> None:
    found = made()
    found.rewrite(preparing())
    cookie = COOKIE.replace(
        "</qemu-migration>",
        f"<feature name='persistent'/>{described('/theirs')}"
        "<statistics><time_elapsed>3921</time_elapsed></statistics></qemu-migration>",
    )
    reader = Reader(passed(finishing(cookie, cancelled=5), found).body)
    assert reader.strings() == {"destination_name": [f"instance-{SERVER}".encode()]}
    kept = reader.opaque().decode()
    assert "domain" not in kept and "persistent" not in kept and "3921" in kept
    assert (reader.number(), reader.number()) == (FLAGS, 1)
    with pytest.raises(Refused):
        found.rewrite(finishing(flags=FLAGS | 4))


def test_whatever_is_opened_is_the_local_hypervisor() -> None:
    reader = Reader(passed(opening("qemu+ext:///system?command=/bin/sh")).body)
    assert (reader.optional(), reader.number()) == (b"qemu:///system", 0)


def test_flags_are_those_of_libvirt() -> None:
    assert filters.ALWAYS == (
        libvirt.VIR_MIGRATE_LIVE
        | libvirt.VIR_MIGRATE_PEER2PEER
        | libvirt.VIR_MIGRATE_PERSIST_DEST
        | libvirt.VIR_MIGRATE_UNDEFINE_SOURCE
    )
    assert (
        filters.PAUSED,
        filters.AUTO_CONVERGE,
        filters.POST_COPY,
        filters.WITH_DISKS,
        filters.UNCHECKED,
        filters.ENCRYPTED,
    ) == (
        libvirt.VIR_MIGRATE_PAUSED,
        libvirt.VIR_MIGRATE_AUTO_CONVERGE,
        libvirt.VIR_MIGRATE_POSTCOPY,
        libvirt.VIR_MIGRATE_NON_SHARED_INC,
        libvirt.VIR_MIGRATE_UNSAFE,
        libvirt.VIR_MIGRATE_TLS,
    )
