# SPDX-License-Identifier: Apache-2.0
"""The inventory of a host, and the hardware that a flavor and an image request.

The tests run on a host in memory, libvirt's mock-up and real QEMU guests. The mock-up accepts every
definition and runs no program. Real guests report their hardware.
"""

from __future__ import annotations

import subprocess
import threading
import uuid
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

import os_traits
import pytest

from common.domain.command_progress import CommandPhase, CommandProgress
from common.domain.models import (
    AssignedNumaNode,
    DomainState,
    Flavor,
    GuestSpec,
    HardwareAssignment,
    HostInventory,
    ImageRef,
)
from common.domain.wire import from_wire, to_wire
from compute_agent.verb_context import VerbContext, VerbFailed
from compute_agent.virt.driver import RUNNING
from compute_agent.virt.memory.driver import MemoryDriver
from compute_agent.virt.memory.state.host import MemoryHost
from tests.contract.virt_rigs import BOOT_SECONDS, NANO, QUIET, Rig, another
from tests.phases import Phases
from tests.waiting import await_true

TWO_CORES = replace(NANO, vcpus=2, extra_specs={"hw:cpu_sockets": "1", "hw:cpu_cores": "2"})
#: Extra specs and properties that every hypervisor of the tests supports, and their places in the
#: domain's XML.
SPECS = {
    "quota:cpu_shares": "512",
    "quota:disk_read_iops_sec": "100",
    "hw:watchdog_action": "poweroff",
    "hw_rng:rate_bytes": "1024",
    "hw:boot_menu": "yes",
}
PROPERTIES = {
    "hw_vif_model": "e1000",
    "hw_video_model": "cirrus",
    "hw_cdrom_bus": "ide",
    "hw_time_hpet": "no",
    "hw_pointer_model": "usbtablet",
}
EXPECTED_VALUES = {
    "cputune/shares": "512",
    "devices/disk/iotune/read_iops_sec": "100",
    "devices/watchdog@action": "poweroff",
    "devices/rng/rate@bytes": "1024",
    "os/bootmenu@enable": "yes",
    "devices/video/model@type": "cirrus",
    "clock/timer@present": "no",
    "devices/input[@type='tablet']@bus": "usb",
}


def read_domain(rig: Rig, server: str) -> Element:
    """Return the domain's XML from libvirt, of the active domain if the guest is active."""
    from compute_agent.virt.libvirt.driver import LibvirtDriver

    assert isinstance(rig.driver, LibvirtDriver)
    return ElementTree.fromstring(rig.driver._libvirt.describe(server))


def read_value(domain: Element, where: str) -> str | None:
    """Return the text of an element, or an attribute for a path with ``@attribute``."""
    path, attribute = where.rsplit("@", 1) if "@" in where.rsplit("]", 1)[-1] else (where, "")
    element = domain.find(path)
    return None if element is None else element.get(attribute) if attribute else element.text


def flavor(**changed: Any) -> Flavor:
    return replace(NANO, **changed)


def image(rig: Rig, **properties: str) -> ImageRef:
    return replace(rig.image, properties=properties)


# --- inventory ---
def test_inventory_is_repeatable_and_consistent(rig: Rig) -> None:
    inventory = rig.driver.inventory()
    assert inventory == rig.driver.inventory() == from_wire(HostInventory, to_wire(inventory))
    assert set(inventory.traits) <= set(os_traits.get_traits())
    assert inventory.traits == sorted(set(inventory.traits))
    assert {"COMPUTE_NODE", "COMPUTE_IMAGE_TYPE_QCOW2", "COMPUTE_NET_ATTACH_INTERFACE"} <= set(
        inventory.traits
    )
    assert "COMPUTE_STATUS_DISABLED" not in inventory.traits, "that is the operator's to say"
    assert inventory.facts["supported_instances"] and all(
        len(instance) == 3 for instance in inventory.facts["supported_instances"]
    )
    assert inventory.vcpus > 0 and inventory.pcpus == 0 and inventory.memory_mb > 0
    numbers = [
        cpu for numa_node in inventory.numa_nodes for cpu in [*numa_node.cpus, *numa_node.pcpus]
    ]
    assert len(numbers) == len(set(numbers)) and len(numbers) in (0, inventory.vcpus)
    assert all(
        size.isdecimal() and count > 0
        for numa_node in inventory.numa_nodes
        for size, count in numa_node.pages.items()
    )


def test_inventory_of_real_host_contains_traits_of_its_emulator(rig: Rig) -> None:
    if not rig.real:
        pytest.skip("no emulator")
    inventory = rig.driver.inventory()
    assert {
        "HW_CPU_X86_SSE2",
        "HW_ARCH_X86_64",
        "COMPUTE_STORAGE_BUS_VIRTIO",
        "COMPUTE_STORAGE_BUS_SCSI",
        "COMPUTE_GRAPHICS_MODEL_VGA",
        "COMPUTE_NET_VIF_MODEL_VIRTIO",
    } <= set(inventory.traits)
    assert ["x86_64", "qemu", "hvm"] in inventory.facts["supported_instances"]
    assert (
        inventory.numa_nodes
        and inventory.numa_nodes[0].memory_mb > 0
        and inventory.cpu_info["topology"]["cores"] > 0
    )


# --- hardware of a guest ---
def spec_with_all_hardware(rig: Rig) -> GuestSpec:
    return rig.spec(
        flavor=flavor(extra_specs=SPECS),
        image=image(rig, **PROPERTIES),
        interfaces=[rig.interface()],
    )


def check_all_hardware(rig: Rig, spec: GuestSpec) -> None:
    """Check that the active guest has everything of ``SPECS`` and ``PROPERTIES``."""
    if isinstance(rig.driver, MemoryDriver):
        options = rig.driver.host.guests[spec.server].options
        assert options["cpu_shares"] == "512" and options["vif_model"] == "e1000"
        return
    domain = read_domain(rig, spec.server)
    assert {where: read_value(domain, where) for where in EXPECTED_VALUES} == EXPECTED_VALUES
    models = [model.get("type") for model in domain.iterfind("devices/interface/model")]
    assert models and set(models) == {"e1000"}


def test_hardware_survives_restart_rebuild_rescue_and_reboot(rig: Rig) -> None:
    spec, driver = spec_with_all_hardware(rig), rig.driver
    driver.ensure_guest(spec, rig.read_image, QUIET)
    check_all_hardware(rig, spec)
    driver.ensure_stopped(spec.server, 2, 0, QUIET)
    driver.ensure_running(spec.server, 3, QUIET)
    check_all_hardware(rig, spec)
    rebuilt = replace(spec, fence=4, image=replace(another(rig), properties=PROPERTIES))
    driver.rebuild(rebuilt, rig.read_image, True, QUIET)
    check_all_hardware(rig, spec)
    driver.rescue(replace(rebuilt, fence=5), rig.image, rig.read_image, QUIET)
    check_all_hardware(rig, spec)
    driver.unrescue(replace(rebuilt, fence=6), QUIET)
    check_all_hardware(rig, spec)
    assert driver.reboot(spec.server, 7, 0, QUIET) == DomainState(spec.server, RUNNING, 7)
    check_all_hardware(rig, spec)


def test_attached_interface_has_vif_model_of_image(rig: Rig) -> None:
    if rig.kind == "test":
        pytest.skip("libvirt's mock-up plugs nothing in")
    spec = spec_with_all_hardware(rig)
    rig.driver.ensure_guest(spec, rig.read_image, QUIET)
    nic = rig.interface()
    rig.driver.attach_interface(spec.server, 2, nic, QUIET)
    check_all_hardware(rig, spec)
    assert rig.nics(spec.server) == [spec.interfaces[0].mac, nic.mac]


def test_guest_without_extra_specs_has_no_optional_hardware(rig: Rig) -> None:
    spec = rig.boot(image=image(rig, os_distro="debian"))
    if isinstance(rig.driver, MemoryDriver):
        assert rig.driver.host.guests[spec.server].options == {}
        return
    domain = read_domain(rig, spec.server)
    assert not [
        where
        for where in (
            "cputune",
            "numatune",
            "memoryBacking",
            "cpu/topology",
            "cpu/numa",
            "devices/watchdog",
            "devices/disk/iotune",
            "os/bootmenu",
            "devices/hostdev",
        )
        if domain.find(where) is not None
    ]


def test_ensure_guest_refuses_unsupported_hardware_and_leaves_no_files(rig: Rig) -> None:
    for spec, message in (
        (rig.spec(image=image(rig, hw_firmware_type="uefi")), "hw_firmware_type"),
        (
            rig.spec(flavor=flavor(extra_specs={"hw:cpu_policy": "dedicated"})),
            "no claim assigns them",
        ),
    ):
        with pytest.raises(VerbFailed, match=message):
            rig.driver.ensure_guest(spec, rig.read_image, QUIET)
        assert rig.state(spec.server) is None and rig.files(spec.server) == []


def test_rebuild_with_unsupported_hardware_leaves_guest_running(rig: Rig) -> None:
    spec = rig.boot()
    wrong = replace(
        spec, fence=2, image=replace(another(rig), properties={"hw_disk_bus": "floppy"})
    )
    with pytest.raises(VerbFailed, match="hw_disk_bus"):
        rig.driver.rebuild(wrong, rig.read_image, True, QUIET)
    assert rig.state(spec.server) == (RUNNING, 1)


def pinned_spec(rig: Rig, **numa_node: Any) -> GuestSpec:
    """Return a spec with two CPUs, each pinned to a CPU of the host's first NUMA node."""
    assigned_node = AssignedNumaNode(
        **{
            "numa_node": 0,
            "cpus": [0, 1],
            "pins": {"0": 1, "1": 0},
            "memory_mb": NANO.memory_mb,
            **numa_node,
        }
    )
    return rig.spec(
        flavor=replace(TWO_CORES, extra_specs={"hw:cpu_policy": "dedicated"}),
        assignment=HardwareAssignment([assigned_node]),
    )


def test_guest_is_pinned_to_assigned_cpus_and_numa_node(rig: Rig) -> None:
    spec = pinned_spec(rig)
    rig.driver.ensure_guest(spec, rig.read_image, QUIET)
    if isinstance(rig.driver, MemoryDriver):
        assert rig.driver.host.guests[spec.server].assignment == spec.assignment
        assert (
            MemoryHost(state_file=rig.folder / "guests").guests[spec.server].assignment
            == spec.assignment
        )
        return
    domain = read_domain(rig, spec.server)
    assert {pin.get("vcpu"): pin.get("cpuset") for pin in domain.iterfind("cputune/vcpupin")} == {
        "0": "1",
        "1": "0",
    }
    assert read_value(domain, "cputune/emulatorpin@cpuset") == "0-1"
    assert read_value(domain, "numatune/memory@nodeset") == "0"
    assert [numa_node.get("cpus") for numa_node in domain.iterfind("cpu/numa/cell")] == ["0-1"]
    rig.driver.rescue(replace(spec, fence=2), rig.image, rig.read_image, QUIET)
    assert len(read_domain(rig, spec.server).findall("cputune/vcpupin")) == 2


def test_unpinned_cpus_of_mixed_policy_share_cpus_of_numa_node(rig: Rig) -> None:
    spec = pinned_spec(rig, pins={"0": 1})
    spec = replace(
        spec,
        flavor=replace(
            spec.flavor, extra_specs={"hw:cpu_policy": "mixed", "hw:cpu_dedicated_mask": "0"}
        ),
    )
    rig.driver.ensure_guest(spec, rig.read_image, QUIET)
    if rig.kind == "memory":
        return
    pins = {
        pin.get("vcpu"): pin.get("cpuset")
        for pin in read_domain(rig, spec.server).iterfind("cputune/vcpupin")
    }
    shared = rig.driver.inventory().numa_nodes[0].cpus
    assert pins == {"0": "1", "1": f"{shared[0]}-{shared[-1]}"}


@pytest.mark.kvm_or_tcg
@pytest.mark.parametrize("rig", ["qemu"], indirect=True)
def test_ensure_guest_without_huge_pages_fails_and_leaves_no_files(rig: Rig) -> None:
    if "2048" in rig.driver.inventory().numa_nodes[0].pages:
        pytest.skip("this machine has huge pages")
    spec = pinned_spec(rig, page_kb=2048)
    with pytest.raises(VerbFailed, match="could not start the guest") as failure:
        rig.driver.ensure_guest(spec, rig.read_image, QUIET)
    assert failure.value.retryable
    assert rig.state(spec.server) is None and rig.files(spec.server) == []


REPORT_HARDWARE = """#!/bin/sh
echo "cpus: $(grep -c ^processor /proc/cpuinfo), cores: $(sed -n 's/^cpu cores.*: //p' /proc/cpuinfo | head -n 1)"
echo "nodes: $(ls -d /sys/devices/system/node/node* | wc -l)"
echo "disks: $(ls /sys/block | tr '\\n' ' ')end"
"""


@pytest.mark.slice("guests")
@pytest.mark.kvm_or_tcg
@pytest.mark.parametrize("rig", ["qemu"], indirect=True)
def test_real_guest_sees_one_socket_with_two_cores(rig: Rig) -> None:
    spec = rig.boot(ready=True, flavor=TWO_CORES, user_data=REPORT_HARDWARE)
    await_true(
        lambda: "disks: " in rig.console(spec.server),
        BOOT_SECONDS,
        lambda: rig.console(spec.server),
    )
    assert "cpus: 2, cores: 2" in rig.console(spec.server), rig.console(spec.server)


@pytest.mark.slice("guests")
@pytest.mark.kvm_or_tcg
@pytest.mark.parametrize("rig", ["qemu"], indirect=True)
def test_real_guest_sees_two_numa_nodes(rig: Rig) -> None:
    numa_nodes = [AssignedNumaNode(0, [cpu], {}, NANO.memory_mb // 2) for cpu in (0, 1)]
    two = replace(NANO, vcpus=2, extra_specs={"hw:numa_nodes": "2"})
    spec = rig.boot(
        ready=True, flavor=two, assignment=HardwareAssignment(numa_nodes), user_data=REPORT_HARDWARE
    )
    await_true(
        lambda: "disks: " in rig.console(spec.server),
        BOOT_SECONDS,
        lambda: rig.console(spec.server),
    )
    assert "nodes: 2" in rig.console(spec.server), rig.console(spec.server)


@pytest.mark.kvm_or_tcg
@pytest.mark.parametrize("rig", ["qemu"], indirect=True)
@pytest.mark.parametrize(
    "properties",
    [
        {"hw_machine_type": "q35", "hw_cdrom_bus": "scsi", "hw_vif_model": "e1000e"},
        {"hw_disk_bus": "usb", "hw_cdrom_bus": "usb", "hw_video_model": "none"},
        *(
            pytest.param(properties, marks=pytest.mark.slice("guests"))
            for properties in (
                {
                    "hw_machine_type": "q35",
                    "hw_disk_bus": "sata",
                    "hw_video_model": "qxl",
                    "hw_vif_model": "vmxnet3",
                },
                {"hw_disk_bus": "scsi", "hw_video_model": "virtio", "hw_vif_model": "rtl8139"},
                {
                    "hw_disk_bus": "scsi",
                    "hw_scsi_model": "lsilogic",
                    "hw_video_model": "bochs",
                    "hw_vif_model": "ne2k_pci",
                },
                {"hw_disk_bus": "ide", "hw_qemu_guest_agent": "no", "hw_vif_model": "pcnet"},
                {"hw_disk_bus": "sata", "hw_cdrom_bus": "sata", "os_type": "windows"},
                {"hw_pmu": "no", "img_hide_hypervisor_id": "yes"},
            )
        ),
    ],
    ids=lambda properties: "-".join(properties.values()),
)
def test_real_guest_boots_with_hardware_of_image_properties(
    rig: Rig, properties: dict[str, str]
) -> None:
    """The first kernel messages show that the firmware found the disk on this bus."""
    spec = rig.boot(image=image(rig, **properties), interfaces=[rig.interface()])
    await_true(lambda: rig.boots(spec.server) == 1, BOOT_SECONDS, lambda: rig.console(spec.server))


@pytest.mark.slice("guests")
@pytest.mark.kvm_or_tcg
@pytest.mark.parametrize("rig", ["qemu"], indirect=True)
def test_vif_bandwidth_limits_are_set_in_host_kernel(rig: Rig) -> None:
    limited = flavor(
        extra_specs={"quota:vif_outbound_average": "1000", "quota:vif_inbound_average": "2000"}
    )
    nic = rig.interface()
    try:
        spec = rig.boot(flavor=limited, interfaces=[nic])
    except VerbFailed as failure:
        assert "tc" in failure.details, failure.details
        pytest.skip(f"this kernel limits no bandwidth: {failure.details[:200]}")
    process = subprocess.run(
        ["tc", "-s", "qdisc", "show", "dev", nic.device], capture_output=True, text=True, check=True
    )
    assert "htb" in process.stdout and "ingress" in process.stdout, process.stdout
    assert (
        read_value(read_domain(rig, spec.server), "devices/interface/bandwidth/outbound@average")
        == "1000"
    )


def test_snapshot_with_os_require_quiesce_fails_without_guest_agent(rig: Rig) -> None:
    if rig.kind == "test":
        pytest.skip("libvirt's mock-up answers for every agent")
    spec = rig.boot(image=image(rig, os_require_quiesce="yes"))
    if isinstance(rig.driver, MemoryDriver):
        rig.driver.host.guests[spec.server].has_agent = False
    with pytest.raises(VerbFailed, match="os_require_quiesce"):
        rig.driver.snapshot(spec.server, 2, list, QUIET)
    rig.driver.ensure_stopped(spec.server, 3, 0, QUIET)
    assert rig.driver.snapshot(spec.server, 4, list, QUIET) > 0


def test_quiesce_needs_running_guest_and_unquiesce_never_fails(rig: Rig) -> None:
    spec = rig.boot()
    if rig.real:
        with pytest.raises(VerbFailed, match="qemu-guest-agent"):
            rig.driver.quiesce(spec.server, 30)
    else:
        rig.driver.quiesce(spec.server, 30)
        rig.driver.unquiesce(spec.server)
    for server in (spec.server, str(uuid.uuid4())):
        rig.driver.unquiesce(server)
    assert not [path for path in rig.files(spec.server) if path.name == "still"]
    rig.driver.ensure_stopped(spec.server, 2, 0, QUIET)
    with pytest.raises(VerbFailed):
        rig.driver.quiesce(spec.server, 30)


# --- images ---
def test_ensure_guest_uses_image_fetched_by_ensure_image(rig: Rig) -> None:
    if rig.kind == "memory":
        pytest.skip("memory keeps no images")
    for _ in range(2):
        rig.driver.ensure_image(rig.image, rig.read_image, QUIET)
    phases = Phases()

    def fail(image: str) -> Iterator[bytes]:
        raise AssertionError("fetched again")

    spec = rig.spec()
    assert (
        rig.driver.ensure_guest(spec, fail, VerbContext(phases, lambda: False)).power_state
        == RUNNING
    )
    assert not [phase for phase in phases if "fetching" in phase]


def test_ensure_image_reports_waiting_while_two_images_are_fetched(rig: Rig) -> None:
    """Two images are fetched at a time. A third image waits until a fetch is complete."""
    if rig.real:
        pytest.skip("the mock-up fetches as the real one does")
    gate, is_waiting, reported_phases = threading.Event(), threading.Event(), []
    images = [
        ImageRef(f"0000000{number}-0000-4000-8000-000000000000", "raw", 7) for number in range(3)
    ]

    def read_slowly(image: str) -> Iterator[bytes]:
        assert gate.wait(10)
        yield b"content"

    def report(progress: CommandProgress) -> None:
        reported_phases.append(progress.phase)
        if progress.phase is CommandPhase.WAITING_TO_FETCH:
            is_waiting.set()

    fetching = threading.Barrier(3)

    def await_both(progress: CommandProgress) -> None:
        if progress == CommandProgress(CommandPhase.FETCHING_IMAGE):
            fetching.wait(10)

    first = [
        threading.Thread(
            target=rig.driver.ensure_image,
            args=(image_ref, read_slowly, VerbContext(await_both, lambda: False)),
        )
        for image_ref in images[:2]
    ]
    for thread in first:
        thread.start()
    fetching.wait(10)
    last = threading.Thread(
        target=rig.driver.ensure_image,
        args=(images[2], read_slowly, VerbContext(report, lambda: False)),
    )
    last.start()
    assert is_waiting.wait(10)
    assert reported_phases == [CommandPhase.WAITING_TO_FETCH]
    gate.set()
    for thread in (*first, last):
        thread.join(10)
    assert reported_phases[:2] == [CommandPhase.WAITING_TO_FETCH, "fetching image"]
