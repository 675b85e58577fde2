# SPDX-License-Identifier: Apache-2.0
"""Domain XML that is adapted to a running guest, with XML in the form of a real libvirt."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from common.domain.models import AttachedVolume, Flavor, GuestSpec
from common.security.tls import Tls
from compute_agent.verb_context import VerbFailed
from compute_agent.virt.interfaces import Plug
from compute_agent.virt.libvirt.migration.live_migration import MigrationOptions
from compute_agent.virt.libvirt.xml import nova_xml, running_domain, volume_xml
from compute_agent.virt.libvirt.xml.domain_xml import (
    Disk,
    Domain,
    DomainMetadata,
    domain_xml,
    read_metadata,
)

SERVER = "7a1f5c8e-3c55-4a0b-9e0a-3f1f4c1f6f10"
FIRST, SECOND = (
    Plug("p1", "fa:16:3e:00:00:01", "br-a", "tap1"),
    Plug("p2", "fa:16:3e:00:00:02", "br-b", "tap2"),
)


def describe_domain(folder: str, **changed: Any) -> str:
    home = Path(folder)
    values: dict[str, Any] = {
        "disk": Disk(home / "disk", home / "base"),
        "console_log": home / "console.log",
        "interfaces": (SECOND,),
        "virt_type": "kvm",
    }
    return domain_xml(Domain(SERVER, 5, "web", 1, 128, **{**values, **changed}))


def describe_running_domain() -> ElementTree.Element:
    """Return the XML of a running guest. The second interface was attached later."""
    root = ElementTree.fromstring(describe_domain("/source"))
    root.find("os/type").set("machine", "pc-i440fx-7.2")  # type: ignore[union-attr]
    root.remove(root.find("cpu"))  # type: ignore[arg-type]
    root.append(
        ElementTree.fromstring('<cpu mode="custom" match="exact"><model>Skylake</model></cpu>')
    )
    slots = {
        "disk": "0x04",
        "interface": "0x09",
        "video": "0x02",
        "rng": "0x07",
        "memballoon": "0x08",
    }
    for tag, slot in slots.items():
        place = {"type": "pci", "domain": "0x0000", "bus": "0x00", "slot": slot, "function": "0x0"}
        ElementTree.SubElement(root.find(f"devices/{tag}"), "address", place)  # type: ignore[arg-type]
    root.find("devices").append(
        ElementTree.fromstring(  # type: ignore[union-attr]
            '<controller type="virtio-serial" index="0"><alias name="virtio-serial0"/><address type="pci" slot="0x05"/>'
            "</controller>"
        )
    )
    return root


def serialize(root: ElementTree.Element) -> str:
    return ElementTree.tostring(root, encoding="unicode")


def find_slot(root: ElementTree.Element, path: str) -> str | None:
    address = root.find(f"devices/{path}/address")
    return None if address is None else address.get("slot")


def test_with_addresses_copies_device_addresses_of_running_guest() -> None:
    root = ElementTree.fromstring(
        running_domain.with_addresses(
            describe_domain("/there", interfaces=(FIRST, SECOND)),
            serialize(describe_running_domain()),
        )
    )
    assert [find_slot(root, tag) for tag in ("disk", "video", "rng", "memballoon")] == [
        "0x04",
        "0x02",
        "0x07",
        "0x08",
    ]
    nics = {
        nic.find("mac").get("address"): nic.find("address")  # type: ignore[union-attr]
        for nic in root.iterfind("devices/interface")
    }
    assert nics[FIRST.mac] is None
    assert nics[SECOND.mac].get("slot") == "0x09"  # type: ignore[union-attr]
    serial = root.find("devices/controller[@type='virtio-serial']")
    assert (
        serial is not None and serial.find("alias") is None and serial.find("address") is not None
    )
    assert root.find("os/type").get("machine") == "pc"  # type: ignore[union-attr]
    assert root.find("cpu").get("mode") == "host-model"  # type: ignore[union-attr]
    assert running_domain.with_addresses(
        describe_domain("/there"), serialize(describe_running_domain())
    ).count("<controller") == serialize(describe_running_domain()).count("<controller")


def test_with_addresses_keeps_known_device_addresses() -> None:
    addresses = {SECOND.mac: {"type": "pci", "slot": "0x0c"}}
    root = ElementTree.fromstring(
        running_domain.with_addresses(
            describe_domain("/there", addresses=addresses), serialize(describe_running_domain())
        )
    )
    assert [nic.get("slot") for nic in root.iterfind("devices/interface/address")] == ["0x0c"]


def test_arriving_guest_keeps_machine_and_cpu_and_uses_files_of_new_host() -> None:
    marks = DomainMetadata(SERVER, 6, made=3, started=7, moving=6, resumes=1)
    root = ElementTree.fromstring(
        running_domain.at_destination(
            describe_domain("/there"), serialize(describe_running_domain()), marks
        )
    )
    assert root.find("os/type").get("machine") == "pc-i440fx-7.2"  # type: ignore[union-attr]
    assert root.findtext("cpu/model") == "Skylake"
    assert len(root.findall("cpu")) == 1
    assert {source.get("file") for source in root.iterfind("devices/disk/source")} == {
        "/there/disk"
    }
    about = root.find("metadata")
    assert about is not None
    (element,) = about
    assert element.tag == "{urn:kilonova:server:1}server"
    assert read_metadata(serialize(element)) == marks


@pytest.mark.parametrize("sizes", [{}, {"logical_block_size": 512, "physical_block_size": 4096}])
def test_arriving_guest_keeps_block_sizes_of_source(sizes: dict[str, int]) -> None:
    """A guest defined by an older agent has QEMU's default sizes, not the volume's."""
    volume = AttachedVolume("5c2d3f64-1f3b-4a4e-9d3c-0b1f6a7d8e90", "/dev/vdb", 1)
    there, here = (
        volume_xml.VolumeSource("file", f"/v/volume-{volume.volume_id}", block_sizes=block_sizes)
        for block_sizes in (sizes, {"logical_block_size": 4096, "physical_block_size": 4096})
    )
    arriving = ElementTree.fromstring(
        running_domain.at_destination(
            describe_domain("/there", volumes=((volume, here),)),
            describe_domain("/source", volumes=((volume, there),)),
            DomainMetadata(SERVER, 6),
        )
    )
    block_sizes = arriving.find("devices/disk[serial]/blockio")
    assert ({} if block_sizes is None else block_sizes.attrib) == {
        name: str(size) for name, size in sizes.items()
    }


def test_arriving_guest_has_nova_metadata_of_destination() -> None:
    spec = GuestSpec(SERVER, 6, "web", Flavor("1", "m1.nano", 1, 128, 1))
    nova = nova_xml.qualify(nova_xml.instance(spec))
    arriving = running_domain.at_destination(
        describe_domain("/there", nova=nova),
        serialize(describe_running_domain()),
        DomainMetadata(SERVER, 6),
    )
    about = ElementTree.fromstring(arriving).find("metadata")
    assert about is not None
    tags = [element.tag for element in about]
    assert tags == ["{urn:kilonova:server:1}server", f"{{{nova_xml.NAMESPACE}}}instance"]
    assert about[1].findtext(f"{{{nova_xml.NAMESPACE}}}name") == "web"


def test_serial_socket_alternates_between_tty_and_tty2_on_each_migration() -> None:
    """On shared storage, the source removes its own socket after the migration."""
    marks = DomainMetadata(SERVER, 6)
    second = running_domain.at_destination(
        describe_domain("/shared"), serialize(describe_running_domain()), marks
    )
    assert running_domain.serial_socket(serialize(describe_running_domain())) == "/source/tty"
    assert running_domain.serial_socket(second) == "/shared/tty2"
    assert (
        running_domain.serial_socket(
            running_domain.at_destination(describe_domain("/shared"), second, marks)
        )
        == "/shared/tty"
    )
    assert running_domain.serial_socket("") == ""
    assert running_domain.virt_type(second) == "kvm"


def test_migration_facts_have_uri_only_when_port_is_configured() -> None:
    tls = Tls("cert", "key", "ca")
    assert MigrationOptions(16598, "192.0.2.7", tls=tls).facts == {
        "uri": "qemu+tls://192.0.2.7:16598/system",
        "address": "192.0.2.7",
    }
    assert MigrationOptions(16598, "2001:db8::7").facts == {
        "uri": "qemu+tcp://[2001:db8::7]:16598/system",
        "address": "2001:db8::7",
    }
    assert MigrationOptions(0, "192.0.2.7", tls=tls).facts == {"uri": "", "address": ""}


@pytest.mark.parametrize(
    ("uri", "expected"),
    [
        ("qemu+tls://192.0.2.7:16598/system", "qemu+tls://192.0.2.7:16598/system?pkipath=/own/pki"),
        ("qemu+tcp://[2001:db8::7]:16598/system", "qemu+tcp://[2001:db8::7]:16598/system"),
        (
            "qemu+tls://192.0.2.7/system?no_verify=1&pkipath=/theirs",
            "qemu+tls://192.0.2.7:16514/system?pkipath=/own/pki",
        ),
        ("qemu+ext:///system?command=/bin/sh", ""),
        ("qemu+ssh://192.0.2.7/system?command=/bin/sh", ""),
        ("qemu+unix:///system?socket=/run/other", ""),
        ("qemu+tls:///system", ""),
        ("qemu+tls://h;x/system", ""),
        ("qemu+tls://h:99999/system", ""),
        ("unknown://192.0.2.7:16509/system", ""),
        ("", ""),
    ],
)
def test_migration_uri_takes_host_and_port_of_tls_or_tcp_uri_else_fails(
    uri: str, expected: str
) -> None:
    options = MigrationOptions(proof="/own/pki")
    if expected:
        assert options.uri({"uri": uri}) == expected
        return
    with pytest.raises(VerbFailed, match="reports no valid address"):
        options.uri({"uri": uri})


def test_running_domain_disks_exclude_volumes() -> None:
    """Own disks move with the server. Volumes of any format do not."""
    root = ElementTree.fromstring(describe_domain("/source"))
    volume = AttachedVolume("00000000-0000-4000-8000-000000000001", "/dev/vdb", 1, {})
    source = volume_xml.VolumeSource(volume_xml.FILE, "/export/volume", format=volume_xml.QCOW2)
    devices = root.find("devices")
    assert devices is not None
    devices.append(volume_xml.element(volume, source, "vdb"))
    own = running_domain.disks(ElementTree.tostring(root, encoding="unicode"))
    assert own == running_domain.disks(describe_domain("/source")) and list(own) == ["vda"]
