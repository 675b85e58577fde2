# SPDX-License-Identifier: Apache-2.0
"""A guest's description made to fit the one that runs, on the words of a real libvirt."""

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


def described(folder: str, **changed: Any) -> str:
    home = Path(folder)
    values: dict[str, Any] = {
        "disk": Disk(home / "disk", home / "base"),
        "console_log": home / "console.log",
        "interfaces": (SECOND,),
        "virt_type": "kvm",
    }
    return domain_xml(Domain(SERVER, 5, "web", 1, 128, **{**values, **changed}))


def running() -> ElementTree.Element:
    """What libvirt makes of it: the second interface was plugged in later, and what was first has
    gone."""
    root = ElementTree.fromstring(described("/source"))
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


def text(root: ElementTree.Element) -> str:
    return ElementTree.tostring(root, encoding="unicode")


def slot(root: ElementTree.Element, path: str) -> str | None:
    found = root.find(f"devices/{path}/address")
    return None if found is None else found.get("slot")


def test_devices_are_where_the_running_guest_has_them() -> None:
    made = ElementTree.fromstring(
        running_domain.with_addresses(
            described("/there", interfaces=(FIRST, SECOND)), text(running())
        )
    )
    assert [slot(made, tag) for tag in ("disk", "video", "rng", "memballoon")] == [
        "0x04",
        "0x02",
        "0x07",
        "0x08",
    ]
    nics = {
        nic.find("mac").get("address"): nic.find("address")  # type: ignore[union-attr]
        for nic in made.iterfind("devices/interface")
    }
    assert nics[FIRST.mac] is None
    assert nics[SECOND.mac].get("slot") == "0x09"  # type: ignore[union-attr]
    serial = made.find("devices/controller[@type='virtio-serial']")
    assert (
        serial is not None and serial.find("alias") is None and serial.find("address") is not None
    )
    assert made.find("os/type").get("machine") == "pc"  # type: ignore[union-attr]
    assert made.find("cpu").get("mode") == "host-model"  # type: ignore[union-attr]
    assert running_domain.with_addresses(described("/there"), text(running())).count(
        "<controller"
    ) == text(running()).count("<controller")


def test_place_that_is_known_already_stays() -> None:
    known = {SECOND.mac: {"type": "pci", "slot": "0x0c"}}
    made = ElementTree.fromstring(
        running_domain.with_addresses(described("/there", addresses=known), text(running()))
    )
    assert [nic.get("slot") for nic in made.iterfind("devices/interface/address")] == ["0x0c"]


def test_arriving_guest_keeps_its_machine_and_processor_and_has_files_of_its_new_host() -> None:
    marks = DomainMetadata(SERVER, 6, made=3, started=7, moving=6, resumes=1)
    made = ElementTree.fromstring(
        running_domain.at_destination(described("/there"), text(running()), marks)
    )
    assert made.find("os/type").get("machine") == "pc-i440fx-7.2"  # type: ignore[union-attr]
    assert made.findtext("cpu/model") == "Skylake"
    assert len(made.findall("cpu")) == 1
    assert {source.get("file") for source in made.iterfind("devices/disk/source")} == {
        "/there/disk"
    }
    about = made.find("metadata")
    assert about is not None
    (element,) = about
    assert element.tag == "{urn:kilonova:server:1}server"
    assert read_metadata(text(element)) == marks


@pytest.mark.parametrize("sizes", [{}, {"logical_block_size": 512, "physical_block_size": 4096}])
def test_arriving_guest_keeps_block_sizes_that_it_sees(sizes: dict[str, int]) -> None:
    """A guest that an older agent described sees QEMU's default whatever its volume says."""
    volume = AttachedVolume("5c2d3f64-1f3b-4a4e-9d3c-0b1f6a7d8e90", "/dev/vdb", 1)
    there, here = (
        volume_xml.VolumeSource("file", f"/v/volume-{volume.volume_id}", block_sizes=shown)
        for shown in (sizes, {"logical_block_size": 4096, "physical_block_size": 4096})
    )
    arriving = ElementTree.fromstring(
        running_domain.at_destination(
            described("/there", volumes=((volume, here),)),
            described("/source", volumes=((volume, there),)),
            DomainMetadata(SERVER, 6),
        )
    )
    shown = arriving.find("devices/disk[serial]/blockio")
    assert ({} if shown is None else shown.attrib) == {
        name: str(size) for name, size in sizes.items()
    }


def test_arriving_guest_keeps_metadata_of_nova() -> None:
    spec = GuestSpec(SERVER, 6, "web", Flavor("1", "m1.nano", 1, 128, 1))
    nova = nova_xml.qualify(nova_xml.instance(spec))
    arriving = running_domain.at_destination(
        described("/there", nova=nova), text(running()), DomainMetadata(SERVER, 6)
    )
    about = ElementTree.fromstring(arriving).find("metadata")
    assert about is not None
    tags = [element.tag for element in about]
    assert tags == ["{urn:kilonova:server:1}server", f"{{{nova_xml.NAMESPACE}}}instance"]
    assert about[1].findtext(f"{{{nova_xml.NAMESPACE}}}name") == "web"


def test_two_guests_in_one_folder_have_two_sockets() -> None:
    """On shared storage the one that ends removes its own."""
    marks = DomainMetadata(SERVER, 6)
    second = running_domain.at_destination(described("/shared"), text(running()), marks)
    assert running_domain.serial_socket(text(running())) == "/source/tty"
    assert running_domain.serial_socket(second) == "/shared/tty2"
    assert (
        running_domain.serial_socket(
            running_domain.at_destination(described("/shared"), second, marks)
        )
        == "/shared/tty"
    )
    assert running_domain.serial_socket("") == ""
    assert running_domain.virt_type(second) == "kvm"


def test_host_says_where_it_is_reached_only_when_guests_may_come() -> None:
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
    ("said", "called"),
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
        ("", ""),
    ],
)
def test_only_host_and_port_of_what_another_host_says_count(said: str, called: str) -> None:
    options = MigrationOptions(proof="/own/pki")
    if called:
        assert options.uri({"uri": said}) == called
        return
    with pytest.raises(VerbFailed, match="reports no valid address"):
        options.uri({"uri": said})


def test_volumes_are_none_of_its_own_disks() -> None:
    """Whatever their format is: own disks travel with the server, volumes stay where they are."""
    root = ElementTree.fromstring(described("/source"))
    volume = AttachedVolume("00000000-0000-4000-8000-000000000001", "/dev/vdb", 1, {})
    source = volume_xml.VolumeSource(volume_xml.FILE, "/export/volume", format=volume_xml.QCOW2)
    devices = root.find("devices")
    assert devices is not None
    devices.append(volume_xml.element(volume, source, "vdb"))
    own = running_domain.disks(ElementTree.tostring(root, encoding="unicode"))
    assert own == running_domain.disks(described("/source")) and list(own) == ["vda"]
