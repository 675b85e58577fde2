# SPDX-License-Identifier: Apache-2.0
"""The filter for calls of another host's libvirtd: rewritten calls, and refused calls."""

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
    COOKIE,
    FLAGS,
    OTHER_SERVER,
    SERVER,
    describe_domain,
    describe_running_domain,
    encode_params,
    new_arrival,
    new_call,
    new_finish_call,
    new_open_call,
    new_prepare_call,
    serialize,
)


def new_filter(**changed: Any) -> Filter:
    expected: dict[str, Arrival] = {SERVER: new_arrival(**changed)}
    return Filter(expected.get, "qemu:///system")


def rewrite_packet(packet: bytes, call_filter: Filter | None = None) -> Packet:
    return Packet.read((call_filter or new_filter()).rewrite(packet))


def read_prepare_call(packet: Packet) -> tuple[dict[str, list[str]], str, int]:
    """Return the parameters, the cookie and the flags of a rewritten prepare call."""
    reader = Reader(packet.body)
    parameters = {
        name: [value.decode() for value in values] for name, values in reader.strings().items()
    }
    cookie, flags = reader.opaque().decode(), reader.number()
    reader.end()
    return parameters, cookie, flags


def rewrite_domain(packet: bytes, **changed: Any) -> str:
    parameters, _, _ = read_prepare_call(rewrite_packet(packet, new_filter(**changed)))
    return parameters["destination_xml"][0]


def test_incoming_filter_passes_calls_of_migration() -> None:
    call_filter = new_filter()
    calls = [
        new_call(filters.AUTH_LIST),
        new_call(filters.SUPPORTS_FEATURE, rpc.number(10)),
        new_open_call(),
        new_prepare_call(),
        new_call(filters.WATCH_CLOSE),
        new_finish_call(),
        new_call(filters.UNWATCH_CLOSE),
        new_call(filters.CLOSE),
    ]
    assert [rewrite_packet(packet, call_filter).procedure for packet in calls] == [
        66,
        60,
        1,
        303,
        360,
        306,
        361,
        2,
    ]
    assert {rewrite_packet(packet, call_filter).serial for packet in calls} == {7}
    for ping in (filters.PING, filters.PONG):
        assert rewrite_packet(new_call(ping, program=KEEPALIVE, kind=MESSAGE)).procedure == ping


def test_incoming_filter_forwards_own_domain_xml_with_addresses_of_source() -> None:
    sent = new_prepare_call(None, ("disks_uri", "unix:///run/other"), ("listen_address", "::"))
    parameters, cookie, flags = read_prepare_call(rewrite_packet(sent))
    assert (set(parameters), flags) == ({"destination_xml", "migrate_uri", "migrate_disks"}, FLAGS)
    assert (parameters["migrate_uri"], parameters["migrate_disks"]) == (
        ["tcp://192.0.2.2"],
        ["vda"],
    )
    root = ElementTree.fromstring(parameters["destination_xml"][0])
    assert root.find("os/type").get("machine") == "pc-i440fx-7.2"  # type: ignore[union-attr]
    assert {path.get("file") for path in root.iterfind("devices/disk//source")} == {
        "/here/disk",
        "/here/base",
    }
    assert root.find("devices/disk/address").get("slot") == "0x04"  # type: ignore[union-attr]
    assert root.find("devices/interface/address").get("slot") == "0x09"  # type: ignore[union-attr]
    assert len(root.findall("devices/controller[@type='virtio-serial']")) == 1
    assert running_domain.serial_socket(parameters["destination_xml"][0]) == "/here/tty2"
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


def test_incoming_filter_replaces_nova_metadata_of_source_by_its_own() -> None:
    def nova(name: str) -> Element:
        spec = GuestSpec(SERVER, 5, name, Flavor("1", "m1.nano", 1, 128, 1))
        return nova_xml.qualify(nova_xml.instance(spec))

    sent = describe_running_domain()
    sent.find("metadata").append(nova("there"))  # type: ignore[union-attr]
    arriving = rewrite_domain(
        new_prepare_call(serialize(sent)), xml=describe_domain("/here", nova=nova("here"))
    )
    names = ElementTree.fromstring(arriving).findall(
        "metadata/nova:instance/nova:name", {"nova": nova_xml.NAMESPACE}
    )
    assert [name.text for name in names] == ["here"]


def test_filter_of_incoming_migration_replaces_server_facts_of_source_by_those_of_destination() -> (
    None
):
    root = ElementTree.fromstring(
        rewrite_domain(new_prepare_call(), xml=describe_domain("/here", facts='{"name":"here"}'))
    )
    assert root.findtext("metadata/*/facts") == '{"name":"here"}'


def test_incoming_filter_copies_no_disk_on_shared_storage() -> None:
    parameters, _, flags = read_prepare_call(
        rewrite_packet(new_prepare_call(flags=FLAGS & ~(1 << 7) | 1 << 9), new_filter(shared=True))
    )
    assert "migrate_disks" not in parameters and flags & 1 << 9


def _add_element(
    path: str,
    tag: str,
    attributes: dict[str, str] | None = None,
    *below: tuple[str, dict[str, str]],
) -> Callable[[Element], None]:
    def change(root: Element) -> None:
        parent = root if path == "." else root.find(path)
        assert parent is not None
        element = SubElement(parent, tag, attributes or {})
        for name, more in below:
            SubElement(element, name, more)

    return change


def _set_value(path: str, name: str, value: str) -> Callable[[Element], None]:
    def change(root: Element) -> None:
        element = root.find(path)
        assert element is not None
        if name == "text":
            element.text = value
        else:
            element.set(name, value)

    return change


QEMU = "{http://libvirt.org/schemas/domain/qemu/1.0}commandline"
HOSTILE = {
    "a disk": _add_element(
        "devices",
        "disk",
        {"type": "block", "device": "disk"},
        ("source", {"dev": "/dev/sda"}),
        ("target", {"dev": "vdz", "bus": "virtio"}),
    ),
    "another file": _set_value("devices/disk/source", "file", "/etc/shadow"),
    "another base": _set_value("devices/disk/backingStore/source", "file", "/dev/sda"),
    "a device": _add_element(
        "devices", "hostdev", {"mode": "subsystem", "type": "pci", "managed": "yes"}, ("source", {})
    ),
    "an emulator": _add_element("devices", "emulator"),
    "QEMU's command line": _add_element(".", QEMU, {}, ("arg", {"value": "-fsdev"})),
    "a folder": _add_element(
        "devices",
        "filesystem",
        {"type": "mount"},
        ("source", {"dir": "/"}),
        ("target", {"dir": "all"}),
    ),
    "a bridge": _set_value("devices/interface/source", "bridge", "br-other"),
    "a script": _add_element("devices/interface", "script", {"path": "/bin/sh"}),
    "a console's path": _set_value("devices/serial/source", "path", "/root/.ssh/tty2"),
    "a console's log": _set_value("devices/serial/log", "file", "/etc/cron.d/x"),
    "a listening screen": _add_element(
        "devices", "graphics", {"type": "vnc", "port": "5900", "listen": "0.0.0.0"}
    ),
    "a kernel": _add_element("os", "kernel"),
    "a loader": _add_element("os", "loader", {"readonly": "no"}),
    "a label": _add_element(".", "seclabel", {"type": "none"}),
    "a resource partition": _add_element(".", "resource"),
    "more memory": _set_value("memory", "text", "9999999"),
    "more processors": _set_value("vcpu", "text", "64"),
    "cells": _add_element(
        "cpu", "numa", {}, ("cell", {"id": "0", "cpus": "0", "memory": "99", "unit": "GiB"})
    ),
    "sockets": _add_element("cpu", "topology", {"sockets": "8", "cores": "8", "threads": "1"}),
    "another name": _set_value("name", "text", "instance-another"),
    "another owner": lambda root: root.find("metadata")[0].set("id", OTHER_SERVER),  # type: ignore[index]
    "another fence": lambda root: root.find("metadata")[0].set("fence", "999"),  # type: ignore[index]
    "a mark": lambda root: root.find("metadata")[0].set("rescue", "5"),  # type: ignore[index]
    "an option": lambda root: root.find("metadata")[0].set("vif_model", "e1000"),  # type: ignore[index]
    "facts": lambda root: setattr(SubElement(root.find("metadata")[0], "facts"), "text", "{}"),  # type: ignore[index]
    "another kind": lambda root: root.set("type", "xen"),
    "a controller's driver": _add_element("devices/controller", "driver", {"iothread": "1"}),
    "an alias": _add_element("devices/controller", "alias", {"name": "ua-x"}),
}


@pytest.mark.parametrize("change", HOSTILE)
def test_incoming_filter_ignores_hostile_changes_in_domain_xml_of_source(change: str) -> None:
    root = describe_running_domain()
    honest = rewrite_domain(new_prepare_call(serialize(root)))
    HOSTILE[change](root)
    assert serialize(root) != serialize(describe_running_domain())
    assert rewrite_domain(new_prepare_call(serialize(root))) == honest


def test_incoming_filter_keeps_numa_cells_of_destination() -> None:
    own = ElementTree.fromstring(describe_domain("/here"))
    cpu = own.find("cpu")
    assert cpu is not None
    SubElement(SubElement(cpu, "numa"), "cell", {"id": "0", "memory": "128"})
    root = ElementTree.fromstring(
        rewrite_domain(new_prepare_call(), xml=ElementTree.tostring(own, encoding="unicode"))
    )
    assert [cell.attrib for cell in root.iterfind("cpu/numa/cell")] == [
        {"id": "0", "memory": "128"}
    ]
    assert root.findtext("cpu/model") == "qemu64"


def _change_value(path: str, name: str, value: str) -> bytes:
    root = describe_running_domain()
    _set_value(path, name, value)(root)
    return serialize(root)


def _remove_element(path: str, tag: str) -> bytes:
    root = describe_running_domain()
    parent = root if path == "." else root.find(path)
    assert parent is not None
    parent.remove(parent.find(tag))  # type: ignore[arg-type]
    return serialize(root)


def _add_controllers(count: int) -> bytes:
    root = describe_running_domain()
    for number in range(count):
        _add_element("devices", "controller", {"type": "scsi", "index": str(number + 1)})(root)
    return serialize(root)


REFUSED = {
    "another guest": new_prepare_call(serialize(describe_running_domain(OTHER_SERVER))),
    "no guest": new_prepare_call(_remove_element(".", "uuid")),
    "no domain": new_prepare_call(b"<network/>"),
    "no XML": new_prepare_call(b"<domain>"),
    "two domains": new_prepare_call(
        None, ("destination_xml", serialize(describe_running_domain()))
    ),
    "an entity": new_prepare_call(
        b'<!DOCTYPE d [<!ENTITY e "e">]>' + serialize(describe_running_domain())
    ),
    "an encoding": new_prepare_call(
        b'<?xml version="1.0"?>' + serialize(describe_running_domain())
    ),
    "too much XML": new_prepare_call(
        serialize(describe_running_domain()).replace(
            b"</domain>", b" " * (256 << 10) + b"</domain>"
        )
    ),
    "XML too deep": new_prepare_call(b"<domain>" * 20000 + b"</domain>" * 20000),
    "no machine": new_prepare_call(_remove_element("os", "type")),
    "no devices": new_prepare_call(_remove_element(".", "devices")),
    "an invalid machine": new_prepare_call(_change_value("os/type", "machine", "pc,accel=kvm")),
    "an invalid model": new_prepare_call(_change_value("cpu/model", "text", "qemu64,+vmx")),
    "an invalid address": new_prepare_call(
        _change_value("devices/disk/address", "slot", "0x04,id=x")
    ),
    "too many controllers": new_prepare_call(_add_controllers(65)),
    "another element as cookie": new_prepare_call(cookie="<domain/>"),
    "a cookie with markup": new_prepare_call(cookie=COOKIE.replace("h1", "<![CDATA[h1]]>")),
    "a cookie with an invalid capability": new_prepare_call(cookie=COOKIE.replace("xbzrle", "a;b")),
    "a tunnel": new_prepare_call(flags=FLAGS | 4),
    "an offline migration": new_prepare_call(flags=FLAGS | 1 << 10),
    "all of the disk": new_prepare_call(flags=FLAGS | 1 << 6),
    "plain text": new_prepare_call(flags=FLAGS & ~(1 << 16)),
    "no disks": new_prepare_call(flags=FLAGS & ~(1 << 7)),
    "an unsafe migration": new_prepare_call(flags=FLAGS | 1 << 9),
    "a migration not peer to peer": new_prepare_call(flags=FLAGS & ~2),
    "a transient domain": new_prepare_call(flags=FLAGS & ~8),
    "an end without a beginning": new_finish_call(),
    "a read-only connection": new_open_call(flags=1),
    "an invalid feature": new_call(filters.SUPPORTS_FEATURE, rpc.number(1 << 31)),
    "extra arguments": new_call(filters.CLOSE, b"\0\0\0\0"),
    "missing arguments": new_call(filters.OPEN),
    "another version": new_call(filters.AUTH_LIST, version=2),
    "an error": new_call(filters.AUTH_LIST, status=1),
    "an answer": new_call(filters.AUTH_LIST, kind=1),
    "a stream": new_call(filters.AUTH_LIST, kind=3),
    "descriptors": new_call(filters.AUTH_LIST, kind=4),
    "the monitor": new_call(1, encode_params(), program=0x20008087),
    "administration": new_call(1, program=0x06900690),
    "an unknown keepalive message": new_call(3, program=KEEPALIVE, kind=MESSAGE),
    "a keepalive call": new_call(1, program=KEEPALIVE),
    "a wrong length": new_call(filters.AUTH_LIST)[:-1] + b"\0\0",
    "a too long string": new_call(filters.OPEN, rpc.number(1) + rpc.number(1 << 30)),
    "too many parameters": new_call(filters.PREPARE, rpc.number(65)),
    "an unknown parameter": new_call(
        filters.PREPARE, rpc.number(1) + rpc.opaque(b"x") + rpc.number(9)
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_incoming_filter_refuses_malformed_or_forbidden_call(name: str) -> None:
    with pytest.raises(Refused):
        new_filter().rewrite(REFUSED[name])


def test_incoming_filter_refuses_every_other_procedure() -> None:
    permitted = {1, 2, 60, 66, 70, 303, 306, 360, 361}
    for procedure in set(range(-1, 600)) - permitted:
        with pytest.raises(Refused):
            new_filter().rewrite(new_call(procedure))


def test_incoming_filter_accepts_one_guest_per_connection() -> None:
    expected = {
        SERVER: new_arrival(),
        OTHER_SERVER: new_arrival(server=OTHER_SERVER, xml=describe_domain("/here", OTHER_SERVER)),
    }
    call_filter = Filter(expected.get, "qemu:///system")
    call_filter.rewrite(new_prepare_call())
    with pytest.raises(Refused, match="not expected"):
        call_filter.rewrite(new_prepare_call(serialize(describe_running_domain(OTHER_SERVER))))
    call_filter.rewrite(new_prepare_call())


def test_incoming_filter_rewrites_finish_call_for_prepared_guest() -> None:
    call_filter = new_filter()
    call_filter.rewrite(new_prepare_call())
    cookie = COOKIE.replace(
        "</qemu-migration>",
        f"<feature name='persistent'/>{describe_domain('/theirs')}"
        "<statistics><time_elapsed>3921</time_elapsed></statistics></qemu-migration>",
    )
    reader = Reader(rewrite_packet(new_finish_call(cookie, cancelled=5), call_filter).body)
    assert reader.strings() == {"destination_name": [f"instance-{SERVER}".encode()]}
    rest = reader.opaque().decode()
    assert "domain" not in rest and "persistent" not in rest and "3921" in rest
    assert (reader.number(), reader.number()) == (FLAGS, 1)
    with pytest.raises(Refused):
        call_filter.rewrite(new_finish_call(flags=FLAGS | 4))


def test_incoming_filter_opens_local_hypervisor_for_any_uri() -> None:
    reader = Reader(rewrite_packet(new_open_call("qemu+ext:///system?command=/bin/sh")).body)
    assert (reader.optional(), reader.number()) == (b"qemu:///system", 0)


def test_incoming_filter_flags_equal_libvirt_constants() -> None:
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
