# SPDX-License-Identifier: Apache-2.0
"""The domain's XML against golden files, and the escaping of server names.

After an intended change, write ``domain_xml(DOMAINS[name])`` into ``golden/<name>.xml`` and review
the difference.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from common.domain.hardware import Hardware, NumaNodeRequest
from common.domain.hardware.options import OPTIONS
from common.domain.models import AssignedNumaNode, AttachedVolume
from compute_agent.virt.interfaces import Plug
from compute_agent.virt.libvirt.xml.domain_xml import (
    KEPT_OPTIONS,
    Disk,
    Domain,
    DomainMetadata,
    Rescue,
    domain_name,
    domain_xml,
    metadata,
    read_metadata,
)
from compute_agent.virt.libvirt.xml.hardware_xml import (
    DISK_BUSES,
    VIDEO_MODELS,
    VIF_MODELS,
    HostPlacement,
)
from compute_agent.virt.libvirt.xml.volume_xml import VolumeSource

GOLDEN = Path(__file__).parent / "golden"
SERVER = "6a1f9e5c-0c4b-4d53-9f1e-2f5f6f0a7b11"
HOME = Path("/var/lib/kilonova/instances") / SERVER
HOSTILE = "</title><devices>&amp;\"'\x00\x1b[2J\n\ud800\ufffe é 漢 ]]>"

EMULATED = Domain(
    SERVER,
    7,
    "web-1",
    1,
    128,
    "qemu",
    Disk(HOME / "disk", HOME / "base"),
    HOME / "console.log",
    HOME / "config",
)
RESCUE = Disk(HOME / "rescue", HOME / "rescue.base", "raw")
LOCAL = (Disk(HOME / "ephemeral0"), Disk(HOME / "swap"))
PLACE = {"type": "pci", "domain": "0x0000", "bus": "0x00", "slot": "0x08", "function": "0x0"}
DATA = AttachedVolume("5c2d3f64-1f3b-4a4e-9d3c-0b1f6a7d8e90", "/dev/vdb", 1, multiattach=True)
OTHER = AttachedVolume(
    "7e8f9a0b-2c3d-4e5f-8a9b-0c1d2e3f4a5b", "/dev/sdx", 1, bus="scsi", read_only=True
)
ROOT = AttachedVolume("1b2c3d4e-5f6a-4b7c-8d9e-0f1a2b3c4d5e", "/dev/vda", 1, boot_index=0)
ON_FILE = VolumeSource("file", f"/volumes/volume-{DATA.volume_id}", direct=False)
ON_NBD = VolumeSource(
    "network",
    host="192.0.2.9",
    port=10809,
    export=ROOT.volume_id,
    tls=True,
    limits={"total_iops_sec": 500},
)
EVERY_OPTION = {
    "cpu_shares": "512",
    "cpu_period": "100000",
    "cpu_quota": "50000",
    "disk_total_bytes_sec": "1000000",
    "disk_read_iops_sec": "100",
    "disk_write_iops_sec": "50",
    "disk_total_iops_sec": "300",
    "disk_read_bytes_sec": "600000",
    "disk_write_bytes_sec": "700000",
    "vif_inbound_average": "1000",
    "vif_inbound_peak": "2000",
    "vif_inbound_burst": "64",
    "vif_outbound_average": "500",
    "vif_outbound_peak": "900",
    "vif_outbound_burst": "32",
    "watchdog_action": "reset",
    "rng_bytes": "1024",
    "rng_period": "2000",
    "boot_menu": "yes",
    "hide_hypervisor": "yes",
    "pmu": "no",
    "hpet": "yes",
    "vif_queues": "2",
    "video_model": "qxl",
    "video_ram_mb": "32",
    "disk_bus": "sata",
    "cdrom_bus": "scsi",
    "scsi_model": "lsilogic",
    "vif_model": "virtio",
    "machine_type": "pc",
    "pointer_model": "usbtablet",
    "guest_agent": "yes",
    "require_quiesce": "yes",
    "os_type": "windows",
    "pci_policy": "legacy",
}
DOMAINS = {
    "emulated": EMULATED,
    "kvm_raw_base": replace(
        EMULATED,
        virt_type="kvm",
        vcpus=4,
        memory_mb=8192,
        config_drive=None,
        disk=Disk(HOME / "disk", HOME / "base", "raw"),
    ),
    "hostile_name": replace(EMULATED, name=HOSTILE),
    "blank_disk": replace(EMULATED, virt_type="test", disk=Disk(HOME / "disk")),
    "interfaces": replace(
        EMULATED,
        interfaces=(
            Plug(
                "0f6b4a52-7c1d-4f0e-9a3b-1c2d3e4f5a6b",
                "fa:16:3e:00:00:01",
                "brq9b8a7c6d-5e",
                "tap0f6b4a52-7c",
                1450,
            ),
            Plug(
                "1f6b4a52-7c1d-4f0e-9a3b-1c2d3e4f5a6b",
                "fa:16:3e:00:00:02",
                "br-int",
                "tap1f6b4a52-7c",
                ovs=True,
            ),
        ),
        addresses={"fa:16:3e:00:00:02": PLACE, "fa:16:3e:00:00:03": PLACE},
    ),
    "rescued": replace(EMULATED, made=5, rescue=Rescue(RESCUE)),
    "rescued_from_cdrom": replace(EMULATED, rescue=Rescue(RESCUE, "cdrom", "ide")),
    "rescued_from_usb": replace(EMULATED, rescue=Rescue(RESCUE, "disk", "usb")),
    "fitted": replace(
        EMULATED,
        vcpus=4,
        memory_mb=3072,
        hardware=Hardware(
            sockets=1,
            cores=2,
            threads_per_core=2,
            dedicated=frozenset({0, 1}),
            page_kb=2048,
            numa_nodes=(NumaNodeRequest((0, 1, 2), 2048), NumaNodeRequest((3,), 1024)),
            options={"cpu_shares": "20000"},
        ),
        place=HostPlacement(
            (
                AssignedNumaNode(1, [0, 1, 2], {"0": 8, "1": 10}, 2048, 2048),
                AssignedNumaNode(0, [3], {}, 1024, 4),
            ),
            ("0000:81:00.1",),
            {0: (0, 1, 2), 1: (9, 12)},
            (0, 1, 2, 9, 12),
            10000,
        ),
    ),
    "shared_set": replace(EMULATED, place=HostPlacement(cpus=(0, 1, 3))),
    "every_option": replace(
        EMULATED,
        virt_type="kvm",
        vcpus=2,
        interfaces=(
            Plug(
                "0f6b4a52-7c1d-4f0e-9a3b-1c2d3e4f5a6b",
                "fa:16:3e:00:00:01",
                "brq9b8a7c6d-5e",
                "tap0f6b4a52-7c",
                1450,
            ),
        ),
        hardware=Hardware(options=EVERY_OPTION),
    ),
    "q35_on_scsi": replace(
        EMULATED,
        rescue=Rescue(RESCUE),
        hardware=Hardware(
            options={
                "machine_type": "q35",
                "disk_bus": "scsi",
                "guest_agent": "no",
                "rng": "no",
                "video_model": "none",
            }
        ),
    ),
    "ide_rescued_from_ide": replace(
        EMULATED,
        rescue=Rescue(RESCUE, "cdrom", "ide"),
        hardware=Hardware(
            options={"disk_bus": "ide", "vif_model": "e1000", "require_quiesce": "yes"}
        ),
    ),
    "local_disks": replace(
        EMULATED,
        local=LOCAL,
        config_drive_is_disk=True,
        hardware=Hardware(options={"disk_total_iops_sec": "300"}),
    ),
    "local_disks_rescued_from_usb": replace(
        EMULATED, local=LOCAL, rescue=Rescue(RESCUE, "disk", "usb")
    ),
    "volumes": replace(EMULATED, local=LOCAL, volumes=((DATA, ON_FILE), (OTHER, ON_NBD))),
    "boots_from_volume": replace(
        EMULATED,
        disk=None,
        local=LOCAL,
        volumes=((DATA, ON_FILE), (ROOT, ON_NBD)),
        addresses={DATA.volume_id: PLACE},
    ),
    "boots_from_several": replace(
        EMULATED,
        volumes=((replace(DATA, boot_index=2), ON_FILE), (replace(OTHER, boot_index=1), ON_NBD)),
    ),
    "boots_from_volume_rescued": replace(
        EMULATED, disk=None, rescue=Rescue(RESCUE), volumes=((ROOT, ON_NBD), (DATA, ON_FILE))
    ),
    "usb_with_a_disk_as_config_drive": replace(
        EMULATED, config_drive_is_disk=True, hardware=Hardware(options={"disk_bus": "usb"})
    ),
}


@pytest.mark.parametrize("name", DOMAINS)
def test_domain_xml_matches_golden_file(name: str) -> None:
    assert domain_xml(DOMAINS[name]) == (GOLDEN / f"{name}.xml").read_text()


@pytest.mark.parametrize("name", [HOSTILE, "", "a" * 255, "\t", "\x7f\x9f", "<!--", "${x}"])
def test_domain_xml_keeps_hostile_server_name_as_text(name: str) -> None:
    plain = ElementTree.fromstring(domain_xml(EMULATED))
    named = ElementTree.fromstring(domain_xml(replace(EMULATED, name=name)))
    assert [element.tag for element in named.iter()] == [element.tag for element in plain.iter()]
    title = named.findtext("title") or ""
    assert len(title) == len(name) and "\n" not in title and "\x00" not in title


def test_domain_metadata_is_read_back_unchanged() -> None:
    options = dict.fromkeys(KEPT_OPTIONS, "1")
    assert read_metadata(metadata(DomainMetadata(SERVER, 1, options=options))) == DomainMetadata(
        SERVER, 1, options=options
    )
    for marks in (
        DomainMetadata(SERVER, 42),
        DomainMetadata(SERVER, 42, made=7, rescue=9, started=1_800_000_000),
        DomainMetadata(SERVER, 42, facts='{"name":"</server>&\\u0000"}'),
    ):
        assert read_metadata(metadata(marks)) == marks


@pytest.mark.parametrize("text", ["<x/>", f"<x id='{SERVER}' fence='-1'/>", "<x fence='1'/>"])
def test_read_metadata_refuses_foreign_metadata(text: str) -> None:
    with pytest.raises(ValueError, match="no server id or fence of Kilonova"):
        read_metadata(text)


def test_golden_domains_cover_every_hardware_option() -> None:
    assert {option.key for option in OPTIONS if option.key} | {"watchdog_action"} == {
        *EVERY_OPTION,
        "rng",
    }


@pytest.mark.parametrize(
    ("key", "names"),
    [("disk_bus", DISK_BUSES), ("vif_model", VIF_MODELS), ("video_model", VIDEO_MODELS)],
)
def test_disk_bus_vif_model_and_video_model_accept_exactly_supported_names(
    key: str, names: tuple[str, ...]
) -> None:
    [option] = [option for option in OPTIONS if option.key == key]
    assert [option.parse(name) for name in names] == list(names)
    with pytest.raises(ValueError, match=", ".join(sorted(names)[:1])):
        option.parse("nothing-of-the-kind")


def test_domain_xml_ends_backing_chain_of_every_disk() -> None:
    for domain in DOMAINS.values():
        disks = [
            disk
            for disk in ElementTree.fromstring(domain_xml(domain)).iterfind("devices/disk")
            if disk.find("driver").get("type") == "qcow2"
        ]
        assert len(disks) == sum(map(bool, (domain.disk, domain.rescue, *domain.local)))
        for disk in disks:
            while (backing := disk.find("backingStore")) is not None:
                disk = backing
            assert len(disk) == 0 and not disk.attrib


def test_domain_rescued_without_stable_device_has_no_local_disks() -> None:
    rescued = DOMAINS["rescued"]
    assert domain_xml(replace(rescued, local=LOCAL)) == domain_xml(rescued)


@pytest.mark.parametrize("name", DOMAINS)
def test_spice_adds_only_second_graphics_element_without_listener(name: str) -> None:
    plain = domain_xml(DOMAINS[name])
    vnc = next(line for line in plain.splitlines(True) if "<graphics" in line)
    screen = plain[plain.index(vnc) :].partition("</graphics>\n")
    both = screen[0] + screen[1]
    assert '<listen type="none" />' in both and "port" not in both
    assert domain_xml(replace(DOMAINS[name], spice=True)) == plain.replace(
        both, both + both.replace('"vnc"', '"spice"')
    )


def test_domain_name_contains_whole_server_id() -> None:
    assert domain_name(SERVER) == f"instance-{SERVER}"
