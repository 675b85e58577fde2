# SPDX-License-Identifier: Apache-2.0
"""Hardware requirements in extra specs and image properties: results, precedence and refusals."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.domain import errors
from common.domain.hardware import (
    ON_VOLUME,
    DeviceRequest,
    Hardware,
    NumaNodeRequest,
    hardware,
    on_host,
    resources,
    traits,
    with_aliases,
)
from common.domain.hardware.options import IMAGES, OPTIONS, READ, SPECS
from common.domain.models import Flavor

Texts = dict[str, str]


def flavor(specs: Texts | None = None, vcpus: int = 4, memory_mb: int = 4096) -> Flavor:
    return Flavor("1", "f", vcpus, memory_mb, 10, extra_specs=specs or {})


def parse_hardware(specs: Texts | None = None, image: Texts | None = None, **size: int) -> Hardware:
    return hardware(flavor(specs, **size), image or {})


def parse_refusal(specs: Texts | None = None, image: Texts | None = None, **size: int) -> str:
    with pytest.raises(errors.BadRequest) as refusal:
        parsed_flavor = flavor(specs, **size)
        hardware(parsed_flavor, image or {})
        resources(parsed_flavor, image or {})
        traits(parsed_flavor, image or {})
    return refusal.value.text


def test_hardware_without_requirements_is_empty() -> None:
    assert parse_hardware() == Hardware()
    others = {"aggregate_instance_extra_specs:ssd": "true", "other:x": "1", "n": "1"}
    assert parse_hardware(others, {"owner": "x"}) == Hardware()
    assert not parse_hardware().needs_assignment
    assert resources(flavor(), {}) == {"VCPU": 4, "MEMORY_MB": 4096, "DISK_GB": 10}


# --- topology ---
@pytest.mark.parametrize(
    ("specs", "image", "vcpus", "expected"),
    [
        ({"hw:cpu_sockets": "1"}, {}, 4, (1, 4, 1)),
        ({"hw:cpu_cores": "2"}, {}, 4, (2, 2, 1)),
        ({"hw:cpu_threads": "2"}, {}, 4, (2, 1, 2)),
        ({"hw:cpu_sockets": "1", "hw:cpu_cores": "2", "hw:cpu_threads": "2"}, {}, 4, (1, 2, 2)),
        ({"hw:cpu_max_sockets": "2"}, {}, 8, (2, 4, 1)),
        ({"hw:cpu_max_sockets": "1"}, {"hw_cpu_cores": "4"}, 8, (1, 4, 2)),
        ({}, {"hw_cpu_max_sockets": "1"}, 6, (1, 6, 1)),
        # The flavor's preferences have precedence over those of the image.
        (
            {"hw:cpu_sockets": "2"},
            {"hw_cpu_sockets": "4"},
            8,
            (2, 4, 1),
        ),
        # 4 CPUs cannot be divided into sockets of 3 cores, so the preference is ignored.
        ({"hw:cpu_cores": "3"}, {}, 4, (4, 1, 1)),
        ({"hw:cpu_max_sockets": "4"}, {"hw_cpu_max_sockets": "2"}, 8, (2, 4, 1)),
    ],
)
def test_cpu_topology_follows_flavor_and_image(
    specs: Texts, image: Texts, vcpus: int, expected: tuple[int, int, int]
) -> None:
    topology = parse_hardware(specs, image, vcpus=vcpus)
    assert (topology.sockets, topology.cores, topology.threads_per_core) == expected


@pytest.mark.parametrize(
    ("specs", "image", "words"),
    [
        (
            {"hw:cpu_max_sockets": "1", "hw:cpu_max_cores": "2", "hw:cpu_max_threads": "1"},
            {},
            "hw:cpu_max_sockets:",
        ),
        (
            {"hw:cpu_max_sockets": "2"},
            {"hw_cpu_max_sockets": "4"},
            "hw_cpu_max_sockets: 4 is more than",
        ),
        ({"hw:cpu_max_sockets": "2"}, {"hw_cpu_sockets": "4"}, "hw_cpu_sockets: 4 is more than"),
        ({"hw:cpu_sockets": "0"}, {}, "hw:cpu_sockets: '0' is not between"),
        ({"hw:cpu_sockets": "nan"}, {}, "hw:cpu_sockets: 'nan' is not a whole number"),
        ({"hw:cpu_sockets": "1" * 5000}, {}, "hw:cpu_sockets: "),
        ({}, {"hw_cpu_cores": "٣"}, "hw_cpu_cores: "),
    ],
)
def test_impossible_or_malformed_cpu_topology_is_refused(
    specs: Texts, image: Texts, words: str
) -> None:
    assert parse_refusal(specs, image).startswith(words)


# --- dedicated CPUs, NUMA nodes, pages ---
def test_dedicated_cpus_take_pcpu_and_one_numa_node() -> None:
    requirement = parse_hardware({"hw:cpu_policy": "dedicated", "hw:cpu_thread_policy": "isolate"})
    assert (requirement.dedicated, requirement.threads) == (frozenset(range(4)), "isolate")
    assert (
        requirement.numa_nodes == (NumaNodeRequest((0, 1, 2, 3), 4096),)
        and requirement.needs_assignment
    )
    assert resources(flavor({"hw:cpu_policy": "dedicated"}), {}) == {
        "PCPU": 4,
        "MEMORY_MB": 4096,
        "DISK_GB": 10,
    }
    assert parse_hardware({}, {"hw_cpu_policy": "dedicated"}).dedicated == {0, 1, 2, 3}
    assert parse_hardware({"resources:PCPU": "4"}).dedicated == {0, 1, 2, 3}
    assert resources(flavor({"resources:PCPU": "4"}), {}) == {
        "PCPU": 4,
        "MEMORY_MB": 4096,
        "DISK_GB": 10,
    }


def test_mixed_cpus_take_vcpu_and_pcpu() -> None:
    specs = {"hw:cpu_policy": "mixed", "hw:cpu_dedicated_mask": "0-2,^1"}
    assert parse_hardware(specs).dedicated == {0, 2}
    assert resources(flavor(specs), {}) == {"VCPU": 2, "PCPU": 2, "MEMORY_MB": 4096, "DISK_GB": 10}


def test_cpus_and_memory_are_split_among_numa_nodes_evenly_or_as_listed() -> None:
    assert parse_hardware({"hw:numa_nodes": "2"}).numa_nodes == (
        NumaNodeRequest((0, 1), 2048),
        NumaNodeRequest((2, 3), 2048),
    )
    listed = {
        "hw:numa_nodes": "2",
        "hw:numa_cpus.0": "0",
        "hw:numa_cpus.1": "1-3",
        "hw:numa_mem.0": "1024",
        "hw:numa_mem.1": "3072",
    }
    assert parse_hardware(listed).numa_nodes == (
        NumaNodeRequest((0,), 1024),
        NumaNodeRequest((1, 2, 3), 3072),
    )
    image = {key.replace("hw:", "hw_"): value for key, value in listed.items()}
    assert parse_hardware({}, image) == parse_hardware(listed) == parse_hardware(listed, image)


@pytest.mark.parametrize(
    ("text", "page"),
    [
        ("small", 4),
        ("large", -1),
        ("any", -2),
        ("2048", 2048),
        ("2MB", 2048),
        ("2MiB", 2048),
        ("1GB", 1 << 20),
        ("1G", 1 << 20),
        ("4096B", 4),
        ("16777216b", 2048),
        ("4k", 4),
    ],
)
def test_mem_page_size_accepts_names_and_units(text: str, page: int) -> None:
    requirement = parse_hardware({"hw:mem_page_size": text})
    assert (requirement.page_kb, len(requirement.numa_nodes)) == (page, 1)


@pytest.mark.parametrize(
    ("flavors", "images", "page"),
    [
        ("any", "2MB", 2048),
        ("any", "large", -1),
        ("any", "small", 4),
        ("large", "1GB", 1 << 20),
        ("2MB", "2048", 2048),
    ],
)
def test_image_page_size_is_used_when_flavor_allows_this_size(
    flavors: str, images: str, page: int
) -> None:
    assert (
        parse_hardware({"hw:mem_page_size": flavors}, {"hw_mem_page_size": images}).page_kb == page
    )


@pytest.mark.parametrize(
    ("specs", "image", "words"),
    [
        (
            {"hw:cpu_policy": "dedicated"},
            {"hw_cpu_policy": "shared"},
            "hw_cpu_policy: the flavor's hw:cpu_policy is",
        ),
        ({"hw:cpu_policy": "shared"}, {"hw_cpu_policy": "dedicated"}, "hw_cpu_policy: "),
        (
            {"hw:cpu_policy": "own"},
            {},
            "hw:cpu_policy: 'own' is not one of shared, dedicated, mixed",
        ),
        ({"hw:cpu_policy": "mixed"}, {}, "hw:cpu_dedicated_mask: "),
        ({"hw:cpu_policy": "mixed", "hw:cpu_dedicated_mask": "0-3"}, {}, "hw:cpu_dedicated_mask: "),
        ({"hw:cpu_policy": "mixed", "hw:cpu_dedicated_mask": "7"}, {}, "hw:cpu_dedicated_mask: "),
        ({"hw:cpu_dedicated_mask": "0"}, {}, "hw:cpu_dedicated_mask: only allowed with"),
        ({"hw:cpu_thread_policy": "isolate"}, {}, "hw:cpu_thread_policy: only for dedicated"),
        ({}, {"hw_cpu_thread_policy": "prefer"}, "hw_cpu_thread_policy: only for dedicated"),
        (
            {"hw:cpu_policy": "dedicated", "hw:cpu_thread_policy": "prefer"},
            {"hw_cpu_thread_policy": "require"},
            "hw_cpu_thread_policy: the flavor's",
        ),
        (
            {"hw:cpu_policy": "dedicated", "resources:VCPU": "2"},
            {},
            "resources:VCPU: cannot be combined",
        ),
        (
            {"hw:cpu_policy": "dedicated", "resources:PCPU": "4"},
            {},
            "resources:PCPU: cannot be combined",
        ),
        ({"resources:PCPU": "2"}, {}, "resources:PCPU: must be the flavor's CPUs"),
        ({"resources:PCPU": "4"}, {"hw_cpu_policy": "shared"}, "hw_cpu_policy: "),
        ({"hw:numa_nodes": "3"}, {}, "hw:numa_nodes: 4 CPUs cannot be split"),
        ({"hw:numa_nodes": "8"}, {}, "hw:numa_nodes: 4 CPUs cannot be split"),
        ({"hw:numa_nodes": "99999999"}, {}, "hw:numa_nodes: '99999999' is not between 1 and 64"),
        ({"hw:numa_nodes": "2"}, {"hw_numa_nodes": "4"}, "hw_numa_nodes: the flavor's"),
        ({"hw:numa_cpus.0": "0"}, {}, "hw:numa_cpus.0: hw:numa_nodes requests no NUMA nodes"),
        (
            {"hw:numa_nodes": "2", "hw:numa_cpus.2": "0"},
            {},
            "hw:numa_cpus.2: hw:numa_nodes requests 2 NUMA nodes",
        ),
        ({"hw:numa_nodes": "2", "hw:numa_cpus.00": "0"}, {}, "hw:numa_cpus.00: "),
        ({"hw:numa_nodes": "2"}, {"hw_numa_mem.x": "0"}, "hw_numa_mem.x: "),
        ({"hw:numa_nodes": "2", "hw:numa_cpus.0": "0-3"}, {}, "hw:numa_cpus.1: is missing"),
        (
            {"hw:numa_nodes": "2", "hw:numa_cpus.0": "0-3", "hw:numa_cpus.1": "3"},
            {},
            "hw:numa_cpus.0: each of the CPUs",
        ),
        (
            {"hw:numa_nodes": "2", "hw:numa_cpus.0": "0-3", "hw:numa_cpus.1": "^0"},
            {},
            "hw:numa_cpus.0: each NUMA node needs",
        ),
        (
            {"hw:numa_nodes": "2", "hw:numa_cpus.0": "0-99999999", "hw:numa_cpus.1": "3"},
            {},
            "hw:numa_cpus.0: '0-999",
        ),
        (
            {"hw:numa_nodes": "2", "hw:numa_mem.0": "1", "hw:numa_mem.1": "1"},
            {},
            "hw:numa_mem.0: the NUMA nodes have 2 MiB",
        ),
        ({"hw:mem_page_size": "3MB"}, {}, "hw:mem_page_size: '3MB' is not the size"),
        ({"hw:mem_page_size": "5000B"}, {}, "hw:mem_page_size: '5000B' is not the size"),
        ({"hw:mem_page_size": "32769b"}, {}, "hw:mem_page_size: '32769b' is not the size"),
        ({"hw:mem_page_size": "huge"}, {}, "hw:mem_page_size: 'huge' is not small"),
        (
            {
                "hw:mem_page_size": "1GB",
                "hw:numa_nodes": "2",
                "hw:numa_mem.0": "512",
                "hw:numa_mem.1": "3584",
            },
            {},
            "hw:mem_page_size: a NUMA node's memory",
        ),
        ({}, {"hw_mem_page_size": "2MB"}, "hw_mem_page_size: an image may choose"),
        ({"hw:mem_page_size": "large"}, {"hw_mem_page_size": "small"}, "hw_mem_page_size: "),
        ({"hw:mem_page_size": "2MB"}, {"hw_mem_page_size": "1GB"}, "hw_mem_page_size: "),
    ],
)
def test_invalid_cpu_policy_numa_nodes_or_page_size_is_refused(
    specs: Texts, image: Texts, words: str
) -> None:
    assert parse_refusal(specs, image).startswith(words)


def test_hardware_of_flavor_above_1024_cpus_is_refused() -> None:
    for specs in ({"hw:cpu_policy": "dedicated"}, {"hw:numa_nodes": "1"}, {"hw:cpu_cores": "2"}):
        assert "at most 1024 CPUs" in parse_refusal(specs, vcpus=2**31 - 1)


# --- options ---
@pytest.mark.parametrize(
    ("specs", "image", "expected"),
    [
        ({"quota:cpu_shares": "2048", "quota:cpu_quota": "0"}, {}, {"cpu_shares": "2048"}),
        ({"quota:disk_read_bytes_sec": "1000"}, {}, {"disk_read_bytes_sec": "1000"}),
        (
            {"quota:vif_inbound_average": "10", "quota:vif_inbound_peak": "20"},
            {},
            {"vif_inbound_average": "10", "vif_inbound_peak": "20"},
        ),
        ({"hw:watchdog_action": "RESET"}, {}, {"watchdog_action": "reset"}),
        ({"hw:watchdog_action": "reset"}, {"hw_watchdog_action": "disabled"}, {}),
        ({"hw_rng:allowed": "False", "hw_rng:rate_bytes": "5"}, {}, {"rng": "no"}),
        (
            {"hw_rng:allowed": "True", "hw_rng:rate_bytes": "5"},
            {"hw_rng_model": "virtio"},
            {"rng_bytes": "5", "rng_period": "1000"},
        ),
        ({"hw:boot_menu": "yes"}, {"hw_boot_menu": "True"}, {"boot_menu": "yes"}),
        ({"hide_hypervisor_id": "true"}, {}, {"hide_hypervisor": "yes"}),
        ({}, {"img_hide_hypervisor_id": "true"}, {"hide_hypervisor": "yes"}),
        ({}, {"hw_vif_multiqueue_enabled": "true"}, {"vif_queues": "4"}),
        (
            {"hw_video:ram_max_mb": "64"},
            {"hw_video_ram": "32", "hw_video_model": "qxl"},
            {"video_ram_mb": "32", "video_model": "qxl"},
        ),
        (
            {},
            {
                "hw_disk_bus": "scsi",
                "hw_scsi_model": "virtio-scsi",
                "hw_machine_type": "q35",
                "os_type": "Windows",
            },
            {
                "disk_bus": "scsi",
                "scsi_model": "virtio-scsi",
                "machine_type": "q35",
                "os_type": "windows",
            },
        ),
        (
            {
                "hw:serial_port_count": "1",
                "hw:mem_encryption": "false",
                "os:secure_boot": "disabled",
            },
            {"hw_firmware_type": "bios", "os_secure_boot": "optional", "kernel_id": ""},
            {},
        ),
    ],
)
def test_hardware_options_follow_flavor_and_image(
    specs: Texts, image: Texts, expected: dict[str, str]
) -> None:
    assert parse_hardware(specs, image).options == expected


@pytest.mark.parametrize(
    ("specs", "image", "words"),
    [
        ({"quota:cpu_shares": "1"}, {}, "quota:cpu_shares: '1' is less than 2."),
        ({"quota:cpu_shares": "1e3"}, {}, "quota:cpu_shares: "),
        (
            {"quota:disk_total_iops_sec": "1", "quota:disk_read_iops_sec": "1"},
            {},
            "quota:disk_total_iops_sec: cannot be combined",
        ),
        ({"quota:vif_outbound_burst": "1"}, {}, "quota:vif_outbound_burst: only allowed with"),
        ({"hw_rng:rate_period": "1"}, {}, "hw_rng:rate_period: only allowed with"),
        ({"hw_rng:allowed": "false"}, {"hw_rng_model": "virtio"}, "hw_rng_model: "),
        ({"hw:boot_menu": "false"}, {"hw_boot_menu": "true"}, "hw_boot_menu: the flavor's"),
        ({}, {"hw_video_ram": "16"}, "hw_video_ram: at most 0 MiB"),
        (
            {"hw_video:ram_max_mb": "64"},
            {"hw_video_ram": "16", "hw_video_model": "virtio"},
            "hw_video_ram: hw_video_model",
        ),
        ({}, {"hw_disk_bus": "fdc"}, "hw_disk_bus: 'fdc' is not one of"),
        ({}, {"hw_disk_bus": "ide", "hw_machine_type": "q35"}, "hw_disk_bus: "),
        (
            {},
            {"hw_vif_model": "e1000", "hw_vif_multiqueue_enabled": "yes"},
            "hw_vif_multiqueue_enabled: ",
        ),
        ({}, {"hw_machine_type": "virt-7.2"}, "hw_machine_type: "),
        ({}, {"os_require_quiesce": "yes", "hw_qemu_guest_agent": "no"}, "os_require_quiesce: "),
        ({}, {"os_type": "x" * 65}, "os_type: "),
        ({"hw:serial_port_count": "2"}, {}, "hw:serial_port_count: "),
        ({"hw:nothing": "1"}, {}, "hw:nothing: hosts of this cloud do not support this"),
        ({"resources1:VCPU": "1"}, {}, "resources1:VCPU: "),
        ({"trait_a:X": "required"}, {}, "trait_a:X: "),
        ({"group_policy": "none"}, {}, "group_policy: "),
        ({"resources:VGPU": "1"}, {}, "resources:VGPU: hosts of this cloud have no such resource"),
        ({"resources:VCPU": "-1"}, {}, "resources:VCPU: "),
        ({"resources:custom": "1"}, {}, "resources:custom: "),
        ({"trait:X": "maybe"}, {}, "trait:X: "),
        ({"trait:x y": "required"}, {}, "trait:x y: "),
        ({}, {"trait:X": "forbidden"}, "trait:X: "),
        ({"trait:X": "forbidden"}, {"trait:X": "required"}, "trait:X: required and forbidden"),
    ],
)
def test_invalid_or_unsupported_hardware_option_is_refused(
    specs: Texts, image: Texts, words: str
) -> None:
    assert parse_refusal(specs, image).startswith(words)


@pytest.mark.parametrize("name", sorted(SPECS))
def test_unsupported_extra_spec_is_refused_unless_it_requests_nothing(name: str) -> None:
    assert parse_refusal({name: "true"}).startswith(
        f"{name}: hosts of this cloud do not support 'true'"
    )
    for empty_value in SPECS[name]:
        assert parse_hardware({name: empty_value}) == Hardware()


@pytest.mark.parametrize("name", sorted(IMAGES))
def test_unsupported_image_property_is_refused_unless_it_requests_nothing(name: str) -> None:
    assert parse_refusal({}, {name: "true"}).startswith(
        f"{name}: hosts of this cloud do not support 'true'"
    )
    for empty_value in IMAGES[name]:
        assert parse_hardware({}, {name: empty_value}) == Hardware()


def test_supported_hardware_options_are_not_in_the_unsupported_lists() -> None:
    assert not READ & SPECS.keys()
    assert not {option.image for option in OPTIONS} & IMAGES.keys()


# --- resources and traits ---
def test_resources_extra_specs_override_add_and_remove_amounts() -> None:
    specs = {
        "resources:VCPU": "0",
        "resources:MEMORY_MB": "1",
        "resources:CUSTOM_GOLD": "2",
        "resources:VGPU": "0",
    }
    assert resources(flavor(specs), {}) == {"MEMORY_MB": 1, "DISK_GB": 10, "CUSTOM_GOLD": 2}


def test_resources_of_zero_in_all_classes_are_refused() -> None:
    zeros = dict.fromkeys(("resources:VCPU", "resources:MEMORY_MB", "resources:DISK_GB"), "0")
    with pytest.raises(errors.BadRequest, match="resources:VCPU: a server must use at least one"):
        resources(flavor(zeros), {})
    assert resources(flavor({**zeros, "resources:CUSTOM_GOLD": "1"}), {}) == {"CUSTOM_GOLD": 1}


def test_traits_combine_flavor_and_image() -> None:
    specs = {"trait:HW_CPU_X86_AVX2": "required", "trait:CUSTOM_SLOW": "forbidden"}
    assert traits(flavor(specs), {"trait:CUSTOM_A": "required"}) == (
        ["CUSTOM_A", "HW_CPU_X86_AVX2"],
        ["CUSTOM_SLOW"],
    )


def test_image_device_models_become_required_traits() -> None:
    image = {
        "hw_disk_bus": "SCSI",
        "hw_cdrom_bus": "sata",
        "hw_video_model": "qxl",
        "hw_vif_model": "ne2k_pci",
    }
    assert traits(flavor(), image) == (
        [
            "COMPUTE_GRAPHICS_MODEL_QXL",
            "COMPUTE_NET_VIF_MODEL_NE2K_PCI",
            "COMPUTE_STORAGE_BUS_SATA",
            "COMPUTE_STORAGE_BUS_SCSI",
        ],
        [],
    )
    assert traits(flavor(), {"hw_video_model": "none", "hw_rng_model": "virtio"}) == ([], [])


# --- PCI devices ---
ALIASES = {"gpu": [("10de", "1db4"), ("10de", "1db5")], "nic": [("8086", "154c")]}


def test_with_aliases_stores_device_types_of_pci_aliases_in_the_flavor() -> None:
    frozen = with_aliases(
        flavor({"pci_passthrough:alias": "gpu:2, nic:1", "kilonova:devices": "x"}), ALIASES
    )
    assert frozen.extra_specs == {
        "pci_passthrough:alias": "gpu:2, nic:1",
        "kilonova:devices": "gpu=10de:1db4|10de:1db5:2,nic=8086:154c:1",
    }
    assert with_aliases(frozen, ALIASES) == frozen
    requirement = hardware(frozen, {})
    assert requirement.devices == (
        DeviceRequest("gpu", 2, (("10de", "1db4"), ("10de", "1db5"))),
        DeviceRequest("nic", 1, (("8086", "154c"),)),
    )
    assert requirement.needs_assignment and not requirement.numa_nodes
    assert with_aliases(flavor({"kilonova:devices": "x"}), ALIASES) == flavor()


@pytest.mark.parametrize(
    "text", ["gpu", "gpu:0", "gpu:1,", "gpu:-1", "gpu:99999", "other:1", "gpu:60,nic:60", ""]
)
def test_unknown_or_malformed_pci_alias_is_refused(text: str) -> None:
    with pytest.raises(errors.BadRequest, match="pci_passthrough:alias"):
        with_aliases(flavor({"pci_passthrough:alias": text}), ALIASES)
    assert parse_refusal({"pci_passthrough:alias": text}).startswith("pci_passthrough:alias: ")


# --- hostile values ---
NAMES = sorted(
    READ | SPECS.keys() | {"hw:numa_cpus.0", "hw:numa_mem.1", "resources:VCPU", "trait:X", "hw:"}
)
VALUES = st.one_of(
    st.sampled_from(
        ["0", "1", "2", "true", "dedicated", "any", "large", "0-3", "nan", "inf", "-1"]
    ),
    st.text(max_size=40),
    st.integers().map(str),
    st.just("9" * 10000),
)


@given(
    specs=st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=4),
    image=st.dictionaries(
        st.one_of(
            st.sampled_from(
                [*(option.image for option in OPTIONS), *IMAGES, "hw_numa_nodes", "hw_numa_cpus.0"]
            ),
            st.text(max_size=20),
        ),
        VALUES,
        max_size=4,
    ),
    vcpus=st.integers(1, 2**31 - 1),
)
def test_arbitrary_flavor_and_image_values_raise_only_bad_request(
    specs: Texts, image: Texts, vcpus: int
) -> None:
    parsed_flavor: Any = flavor(specs, vcpus=vcpus)
    for parse in (hardware, resources, traits):
        try:
            parse(parsed_flavor, image)
        except errors.BadRequest as problem:
            assert ":" in problem.text and len(problem.text) < 500


def test_resources_leave_out_root_disk_on_a_volume() -> None:
    server_flavor = flavor()
    for image in (None, {}, {ON_VOLUME: False}):
        assert resources(on_host(server_flavor, image), {})["DISK_GB"] == 10
    assert "DISK_GB" not in resources(on_host(server_flavor, {ON_VOLUME: True}), {})
