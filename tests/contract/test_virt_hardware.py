# SPDX-License-Identifier: Apache-2.0
"""What a host says that it has, and the hardware that a flavor and an image ask for: on three
hypervisors.

libvirt's mock-up takes every definition and runs nothing; real guests say what they see.
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

TWO = replace(NANO, vcpus=2, extra_specs={"hw:cpu_sockets": "1", "hw:cpu_cores": "2"})
#: Extra specs and properties that every hypervisor here can carry out, and where in the XML each is
#: found.
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
FOUND = {
    "cputune/shares": "512",
    "devices/disk/iotune/read_iops_sec": "100",
    "devices/watchdog@action": "poweroff",
    "devices/rng/rate@bytes": "1024",
    "os/bootmenu@enable": "yes",
    "devices/video/model@type": "cirrus",
    "clock/timer@present": "no",
    "devices/input[@type='tablet']@bus": "usb",
}


def described(rig: Rig, server: str) -> Element:
    """The domain as libvirt tells it: of the active guest, if it is active."""
    from compute_agent.virt.libvirt.driver import LibvirtDriver

    assert isinstance(rig.driver, LibvirtDriver)
    return ElementTree.fromstring(rig.driver._libvirt.describe(server))


def value(domain: Element, where: str) -> str | None:
    """The text, or the attribute behind the last @, of an element."""
    path, attribute = where.rsplit("@", 1) if "@" in where.rsplit("]", 1)[-1] else (where, "")
    found = domain.find(path)
    return None if found is None else found.get(attribute) if attribute else found.text


def flavor(**changed: Any) -> Flavor:
    return replace(NANO, **changed)


def image(rig: Rig, **properties: str) -> ImageRef:
    return replace(rig.image, properties=properties)


# --- what the host has ---
def test_a_host_says_what_it_has_and_says_it_alike(rig: Rig) -> None:
    told = rig.driver.inventory()
    assert told == rig.driver.inventory() == from_wire(HostInventory, to_wire(told))
    assert set(told.traits) <= set(os_traits.get_traits())
    assert told.traits == sorted(set(told.traits))
    assert {"COMPUTE_NODE", "COMPUTE_IMAGE_TYPE_QCOW2", "COMPUTE_NET_ATTACH_INTERFACE"} <= set(
        told.traits
    )
    assert "COMPUTE_STATUS_DISABLED" not in told.traits, "that is the operator's to say"
    assert told.facts["supported_instances"] and all(
        len(one) == 3 for one in told.facts["supported_instances"]
    )
    assert told.vcpus > 0 and told.pcpus == 0 and told.memory_mb > 0
    numbers = [cpu for numa_node in told.numa_nodes for cpu in [*numa_node.cpus, *numa_node.pcpus]]
    assert len(numbers) == len(set(numbers)) and len(numbers) in (0, told.vcpus)
    assert all(
        size.isdecimal() and count > 0
        for numa_node in told.numa_nodes
        for size, count in numa_node.pages.items()
    )


def test_a_real_host_promises_what_its_emulator_has(rig: Rig) -> None:
    if not rig.real:
        pytest.skip("no emulator")
    told = rig.driver.inventory()
    assert {
        "HW_CPU_X86_SSE2",
        "HW_ARCH_X86_64",
        "COMPUTE_STORAGE_BUS_VIRTIO",
        "COMPUTE_STORAGE_BUS_SCSI",
        "COMPUTE_GRAPHICS_MODEL_VGA",
        "COMPUTE_NET_VIF_MODEL_VIRTIO",
    } <= set(told.traits)
    assert ["x86_64", "qemu", "hvm"] in told.facts["supported_instances"]
    assert (
        told.numa_nodes
        and told.numa_nodes[0].memory_mb > 0
        and told.cpu_info["topology"]["cores"] > 0
    )


# --- what a guest gets ---
def spec_of_all(rig: Rig) -> GuestSpec:
    return rig.spec(
        flavor=flavor(extra_specs=SPECS),
        image=image(rig, **PROPERTIES),
        interfaces=[rig.interface()],
    )


def has_it_all(rig: Rig, spec: GuestSpec) -> None:
    """The active guest has all that ``SPECS`` and ``PROPERTIES`` ask for."""
    if isinstance(rig.driver, MemoryDriver):
        options = rig.driver.host.guests[spec.server].options
        assert options["cpu_shares"] == "512" and options["vif_model"] == "e1000"
        return
    domain = described(rig, spec.server)
    assert {where: value(domain, where) for where in FOUND} == FOUND
    models = [model.get("type") for model in domain.iterfind("devices/interface/model")]
    assert models and set(models) == {"e1000"}


def test_hardware_survives_whatever_starts_the_guest_anew(rig: Rig) -> None:
    spec, driver = spec_of_all(rig), rig.driver
    driver.ensure_guest(spec, rig.read_image, QUIET)
    has_it_all(rig, spec)
    driver.ensure_stopped(spec.server, 2, 0, QUIET)
    driver.ensure_running(spec.server, 3, QUIET)
    has_it_all(rig, spec)
    rebuilt = replace(spec, fence=4, image=replace(another(rig), properties=PROPERTIES))
    driver.rebuild(rebuilt, rig.read_image, True, QUIET)
    has_it_all(rig, spec)
    driver.rescue(replace(rebuilt, fence=5), rig.image, rig.read_image, QUIET)
    has_it_all(rig, spec)
    driver.unrescue(replace(rebuilt, fence=6), QUIET)
    has_it_all(rig, spec)
    assert driver.reboot(spec.server, 7, 0, QUIET) == DomainState(spec.server, RUNNING, 7)
    has_it_all(rig, spec)


def test_an_interface_plugged_in_later_is_as_the_first(rig: Rig) -> None:
    if rig.kind == "test":
        pytest.skip("libvirt's mock-up plugs nothing in")
    spec = spec_of_all(rig)
    rig.driver.ensure_guest(spec, rig.read_image, QUIET)
    more = rig.interface()
    rig.driver.attach_interface(spec.server, 2, more, QUIET)
    has_it_all(rig, spec)
    assert rig.nics(spec.server) == [spec.interfaces[0].mac, more.mac]


def test_a_guest_that_asks_for_nothing_has_nothing_of_it(rig: Rig) -> None:
    spec = rig.boot(image=image(rig, os_distro="debian"))
    if isinstance(rig.driver, MemoryDriver):
        assert rig.driver.host.guests[spec.server].options == {}
        return
    domain = described(rig, spec.server)
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


def test_what_no_host_carries_out_is_refused_and_leaves_nothing(rig: Rig) -> None:
    for spec, said in (
        (rig.spec(image=image(rig, hw_firmware_type="uefi")), "hw_firmware_type"),
        (rig.spec(flavor=flavor(extra_specs={"hw:cpu_policy": "dedicated"})), "none are claimed"),
    ):
        with pytest.raises(VerbFailed, match=said):
            rig.driver.ensure_guest(spec, rig.read_image, QUIET)
        assert rig.state(spec.server) is None and rig.files(spec.server) == []


def test_a_rebuild_to_hardware_that_cannot_be_leaves_the_guest_alone(rig: Rig) -> None:
    spec = rig.boot()
    wrong = replace(
        spec, fence=2, image=replace(another(rig), properties={"hw_disk_bus": "floppy"})
    )
    with pytest.raises(VerbFailed, match="hw_disk_bus"):
        rig.driver.rebuild(wrong, rig.read_image, True, QUIET)
    assert rig.state(spec.server) == (RUNNING, 1)


def fitted(rig: Rig, **numa_node: Any) -> GuestSpec:
    """A guest whose two CPUs have one of the host's each, on the host's first NUMA node."""
    own = AssignedNumaNode(
        **{
            "numa_node": 0,
            "cpus": [0, 1],
            "pins": {"0": 1, "1": 0},
            "memory_mb": NANO.memory_mb,
            **numa_node,
        }
    )
    return rig.spec(
        flavor=replace(TWO, extra_specs={"hw:cpu_policy": "dedicated"}),
        assignment=HardwareAssignment([own]),
    )


def test_a_guest_runs_on_the_parts_of_the_host_that_are_its_own(rig: Rig) -> None:
    spec = fitted(rig)
    rig.driver.ensure_guest(spec, rig.read_image, QUIET)
    if isinstance(rig.driver, MemoryDriver):
        assert rig.driver.host.guests[spec.server].assignment == spec.assignment
        assert (
            MemoryHost(state_file=rig.folder / "guests").guests[spec.server].assignment
            == spec.assignment
        )
        return
    domain = described(rig, spec.server)
    assert {pin.get("vcpu"): pin.get("cpuset") for pin in domain.iterfind("cputune/vcpupin")} == {
        "0": "1",
        "1": "0",
    }
    assert value(domain, "cputune/emulatorpin@cpuset") == "0-1"
    assert value(domain, "numatune/memory@nodeset") == "0"
    assert [numa_node.get("cpus") for numa_node in domain.iterfind("cpu/numa/cell")] == ["0-1"]
    rig.driver.rescue(replace(spec, fence=2), rig.image, rig.read_image, QUIET)
    assert len(described(rig, spec.server).findall("cputune/vcpupin")) == 2


def test_guest_cpus_without_one_of_their_own_share_those_of_the_host_s_cell(rig: Rig) -> None:
    spec = fitted(rig, pins={"0": 1})
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
        for pin in described(rig, spec.server).iterfind("cputune/vcpupin")
    }
    shared = rig.driver.inventory().numa_nodes[0].cpus
    assert pins == {"0": "1", "1": f"{shared[0]}-{shared[-1]}"}


@pytest.mark.kvm_or_tcg
@pytest.mark.parametrize("rig", ["qemu"], indirect=True)
def test_huge_pages_that_the_host_does_not_have_are_refused_and_leave_nothing(rig: Rig) -> None:
    if "2048" in rig.driver.inventory().numa_nodes[0].pages:
        pytest.skip("this machine has huge pages")
    spec = fitted(rig, page_kb=2048)
    with pytest.raises(VerbFailed, match="could not start the guest") as refused:
        rig.driver.ensure_guest(spec, rig.read_image, QUIET)
    assert refused.value.retryable
    assert rig.state(spec.server) is None and rig.files(spec.server) == []


LOOK = """#!/bin/sh
echo "cpus: $(grep -c ^processor /proc/cpuinfo), cores: $(sed -n 's/^cpu cores.*: //p' /proc/cpuinfo | head -n 1)"
echo "nodes: $(ls -d /sys/devices/system/node/node* | wc -l)"
echo "disks: $(ls /sys/block | tr '\\n' ' ')end"
"""


@pytest.mark.slice("guests")
@pytest.mark.kvm_or_tcg
@pytest.mark.parametrize("rig", ["qemu"], indirect=True)
def test_a_real_guest_sees_one_socket_with_two_cores(rig: Rig) -> None:
    spec = rig.boot(ready=True, flavor=TWO, user_data=LOOK)
    await_true(
        lambda: "disks: " in rig.console(spec.server),
        BOOT_SECONDS,
        lambda: rig.console(spec.server),
    )
    assert "cpus: 2, cores: 2" in rig.console(spec.server), rig.console(spec.server)


@pytest.mark.slice("guests")
@pytest.mark.kvm_or_tcg
@pytest.mark.parametrize("rig", ["qemu"], indirect=True)
def test_a_real_guest_has_two_cells(rig: Rig) -> None:
    numa_nodes = [AssignedNumaNode(0, [cpu], {}, NANO.memory_mb // 2) for cpu in (0, 1)]
    two = replace(NANO, vcpus=2, extra_specs={"hw:numa_nodes": "2"})
    spec = rig.boot(
        ready=True, flavor=two, assignment=HardwareAssignment(numa_nodes), user_data=LOOK
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
def test_a_real_guest_begins_to_boot_from_it(rig: Rig, properties: dict[str, str]) -> None:
    """The firmware finds the disk on every bus: the kernel's first words come from it."""
    spec = rig.boot(image=image(rig, **properties), interfaces=[rig.interface()])
    await_true(lambda: rig.boots(spec.server) == 1, BOOT_SECONDS, lambda: rig.console(spec.server))


@pytest.mark.slice("guests")
@pytest.mark.kvm_or_tcg
@pytest.mark.parametrize("rig", ["qemu"], indirect=True)
def test_a_bandwidth_is_a_rule_of_the_host_s_kernel(rig: Rig) -> None:
    limited = flavor(
        extra_specs={"quota:vif_outbound_average": "1000", "quota:vif_inbound_average": "2000"}
    )
    nic = rig.interface()
    try:
        spec = rig.boot(flavor=limited, interfaces=[nic])
    except VerbFailed as refused:
        assert "tc" in refused.details, refused.details
        pytest.skip(f"this kernel limits no bandwidth: {refused.details[:200]}")
    told = subprocess.run(
        ["tc", "-s", "qdisc", "show", "dev", nic.device], capture_output=True, text=True, check=True
    )
    assert "htb" in told.stdout and "ingress" in told.stdout, told.stdout
    assert (
        value(described(rig, spec.server), "devices/interface/bandwidth/outbound@average") == "1000"
    )


def test_an_image_that_demands_stillness_is_not_copied_from_a_guest_without_agent(rig: Rig) -> None:
    if rig.kind == "test":
        pytest.skip("libvirt's mock-up answers for every agent")
    spec = rig.boot(image=image(rig, os_require_quiesce="yes"))
    if isinstance(rig.driver, MemoryDriver):
        rig.driver.host.guests[spec.server].has_agent = False
    with pytest.raises(VerbFailed, match="os_require_quiesce"):
        rig.driver.snapshot(spec.server, 2, list, QUIET)
    rig.driver.ensure_stopped(spec.server, 3, 0, QUIET)
    assert rig.driver.snapshot(spec.server, 4, list, QUIET) > 0


def test_a_guest_is_held_still_for_others(rig: Rig) -> None:
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
def test_an_image_fetched_ahead_is_not_fetched_for_the_guest(rig: Rig) -> None:
    if rig.kind == "memory":
        pytest.skip("memory keeps no images")
    for _ in range(2):
        rig.driver.ensure_image(rig.image, rig.read_image, QUIET)
    phases = Phases()

    def nothing(image: str) -> Iterator[bytes]:
        raise AssertionError("fetched again")

    spec = rig.spec()
    assert (
        rig.driver.ensure_guest(spec, nothing, VerbContext(phases, lambda: False)).power_state
        == RUNNING
    )
    assert not [phase for phase in phases if "fetching" in phase]


def test_who_must_wait_to_fetch_says_so(rig: Rig) -> None:
    """Two images are fetched at a time; a third waits until one of them is there."""
    if rig.real:
        pytest.skip("the mock-up fetches as the real one does")
    gate, waits, third = threading.Event(), threading.Event(), []
    images = [
        ImageRef(f"0000000{number}-0000-4000-8000-000000000000", "raw", 7) for number in range(3)
    ]

    def slow(image: str) -> Iterator[bytes]:
        assert gate.wait(10)
        yield b"content"

    def report(progress: CommandProgress) -> None:
        third.append(progress.phase)
        if progress.phase is CommandPhase.WAITING_TO_FETCH:
            waits.set()

    fetching = threading.Barrier(3)

    def meet(progress: CommandProgress) -> None:
        if progress == CommandProgress(CommandPhase.FETCHING_IMAGE):
            fetching.wait(10)

    first = [
        threading.Thread(
            target=rig.driver.ensure_image, args=(one, slow, VerbContext(meet, lambda: False))
        )
        for one in images[:2]
    ]
    for thread in first:
        thread.start()
    fetching.wait(10)
    last = threading.Thread(
        target=rig.driver.ensure_image, args=(images[2], slow, VerbContext(report, lambda: False))
    )
    last.start()
    assert waits.wait(10)
    assert third == [CommandPhase.WAITING_TO_FETCH]
    gate.set()
    for thread in (*first, last):
        thread.join(10)
    assert third[:2] == [CommandPhase.WAITING_TO_FETCH, "fetching image"]
