# SPDX-License-Identifier: Apache-2.0
"""Inventories built from libvirt capabilities: NUMA nodes, CPUs, traits and guest types."""

from __future__ import annotations

import os
import uuid
from dataclasses import replace
from pathlib import Path

import os_traits
import pytest

from common.domain.models import Device, NumaNode
from compute_agent.virt import traits
from compute_agent.virt.cpu_sets import CpuSets, read_cpu_sets
from compute_agent.virt.libvirt.host import capabilities
from compute_agent.virt.libvirt.host.host import (
    HostCapabilities,
    HostOptions,
    close_to_others,
    inventory,
    storage_id,
)
from compute_agent.virt.libvirt.xml.hardware_xml import DISK_BUSES, VIDEO_MODELS, VIF_MODELS

CPUS = "".join(
    f"<cpu id='{number}' siblings='{number % 2}-{number % 2 + 2}'/>".replace("-", ",")
    for number in (0, 1, 2, 3)
)
CAPABILITIES = f"""<capabilities>
  <host>
    <cpu><arch>x86_64</arch><model>EPYC</model><vendor>AMD</vendor>
      <topology sockets='1' dies='1' cores='2' threads='2'/><feature name='vme'/><feature name='avx2'/></cpu>
    <topology><cells num='2'>
      <cell id='0'><memory unit='KiB'>8388608</memory><pages unit='KiB' size='4'>1048576</pages>
        <pages unit='KiB' size='2048'>1024</pages><pages unit='KiB' size='1048576'>0</pages>
        <cpus num='4'>{CPUS}</cpus></cell>
      <cell id='1'><memory unit='MiB'>512</memory><cpus num='2'><cpu id='4'/><cpu id='5' siblings='5'/></cpus></cell>
    </cells></topology>
  </host>
  <guest><os_type>hvm</os_type><arch name='i686'><domain type='qemu'/><domain type='kvm'/></arch></guest>
  <guest><os_type>hvm</os_type><arch name='x86_64'><domain type='qemu'/><domain type='kvm'/></arch></guest>
</capabilities>"""
DOMAIN_CAPABILITIES = """<domainCapabilities>
  <cpu><mode name='custom'/><mode name='host-model' supported='yes'><model fallback='forbid'>EPYC</model>
    <feature policy='require' name='avx2'/><feature policy='disable' name='sha-ni'/></mode></cpu>
  <devices>
    <disk><enum name='bus'><value>ide</value><value>fdc</value><value>virtio</value></enum></disk>
    <video><enum name='modelType'><value>vga</value><value>ramfb</value></enum></video>
  </devices>
</domainCapabilities>"""
MODEL = "<cpu><model>EPYC</model><feature name='sse4.1'/><feature name='sha-ni'/></cpu>"
FACTS = HostCapabilities(
    "QEMU", 7_002_000, "node-1", 6, 8704, CAPABILITIES, DOMAIN_CAPABILITIES, ("sse4.1", "pni")
)


def test_numa_nodes_contain_cpus_thread_siblings_and_pages() -> None:
    assert capabilities.numa_nodes(CAPABILITIES, CpuSets()) == [
        NumaNode(0, [0, 1, 2, 3], [], 8192, [[0, 2], [1, 3]], {"4": 1048576, "2048": 1024}),
        NumaNode(1, [4, 5], [], 512, [], {}),
    ]
    split = capabilities.numa_nodes(CAPABILITIES, read_cpu_sets("0-1", "2-5,^4"))
    assert [(numa_node.cpus, numa_node.pcpus) for numa_node in split] == [
        ([0, 1], [2, 3]),
        ([], [5]),
    ]
    assert capabilities.numa_nodes("<capabilities><host/></capabilities>", CpuSets()) == []


@pytest.mark.parametrize(
    ("model", "label", "user"),
    [
        ("dac", "+64055:+110", (64055, 110)),
        ("apparmor", "+64055:+110", None),
        ("dac", "libvirt-qemu:kvm", None),
    ],
)
def test_guests_user_is_read_only_from_numeric_dac_base_label(
    model: str, label: str, user: tuple[int, int] | None
) -> None:
    xml = (
        f"<capabilities><host><secmodel><model>{model}</model><doi>0</doi><baselabel type='kvm'>{label}</baselabel>"
        "</secmodel></host></capabilities>"
    )
    assert (capabilities.guests_user(xml), capabilities.guests_user(CAPABILITIES)) == (user, None)


def test_close_to_others_closes_folder_except_to_known_group_of_guests(tmp_path: Path) -> None:
    xml = (
        f"<capabilities><host><secmodel><model>dac</model><baselabel>+0:+{os.getgid()}</baselabel></secmodel>"
        "</host></capabilities>"
    )
    tmp_path.chmod(0o711)
    close_to_others(tmp_path, CAPABILITIES)
    assert tmp_path.stat().st_mode & 0o777 == 0o711
    close_to_others(tmp_path, xml)
    assert (tmp_path.stat().st_mode & 0o777, tmp_path.stat().st_gid) == (0o710, os.getgid())


def test_supported_instances_include_kvm_only_with_virt_type_kvm() -> None:
    emulated = [["i686", "qemu", "hvm"], ["x86_64", "qemu", "hvm"]]
    assert capabilities.supported_instances(CAPABILITIES, "qemu") == emulated
    assert capabilities.supported_instances(CAPABILITIES, "kvm") == [
        ["i686", "kvm", "hvm"],
        emulated[0],
        ["x86_64", "kvm", "hvm"],
        emulated[1],
    ]


def test_host_model_features_exclude_those_hidden_from_guests() -> None:
    cpu = capabilities.host_model(DOMAIN_CAPABILITIES)
    assert cpu is not None and cpu.model == "EPYC"
    assert cpu.features(MODEL) == ["avx2", "sse4.1"]
    assert capabilities.host_model("<domainCapabilities><cpu/></domainCapabilities>") is None


def test_inventory_combines_capabilities_and_options(tmp_path: Path) -> None:
    device = Device("0000:81:00.1", "8086", "1521", 1)
    about = HostOptions(reserved_memory_mb=512, cpus=read_cpu_sets("0-1", "2-3"), devices=[device])
    host_inventory = inventory(FACTS, tmp_path, "qemu", about)
    assert (
        host_inventory.hypervisor_type,
        host_inventory.hypervisor_hostname,
        host_inventory.vcpus,
        host_inventory.pcpus,
    ) == (
        "QEMU",
        "node-1",
        2,
        2,
    )
    assert (
        host_inventory.memory_mb,
        host_inventory.reserved_memory_mb,
        host_inventory.devices,
    ) == (8704, 512, [device])
    assert host_inventory.numa_nodes == capabilities.numa_nodes(CAPABILITIES, about.cpus)
    assert host_inventory.cpu_info == {
        "arch": "x86_64",
        "model": "EPYC",
        "vendor": "AMD",
        "features": ["avx2", "vme"],
        "topology": {"sockets": 1, "cells": 1, "cores": 2, "threads": 2},
    }
    assert host_inventory == inventory(FACTS, tmp_path, "qemu", about), (
        "told alike, or it would be told again every minute"
    )
    assert inventory(replace(FACTS, cpus=8), tmp_path, "qemu", HostOptions()).vcpus == 8


def test_storage_id_is_equal_for_hosts_with_shared_folder(tmp_path: Path) -> None:
    for name in ("one", "another"):
        (tmp_path / name).mkdir()
    (tmp_path / "shared").symlink_to(tmp_path / "one")
    first_id = storage_id(tmp_path / "one")
    assert (
        storage_id(tmp_path / "one")
        == storage_id(tmp_path / "shared")
        == first_id
        != storage_id(tmp_path / "another")
    )
    assert uuid.UUID(first_id) and [path.name for path in (tmp_path / "one").iterdir()] == [
        ".storage-id"
    ]


def test_traits_contain_only_device_models_of_both_emulator_and_driver(tmp_path: Path) -> None:
    host_traits = inventory(FACTS, tmp_path, "qemu", HostOptions()).traits
    assert {
        "HW_CPU_X86_SSE41",
        "HW_CPU_X86_SSE3",
        "HW_CPU_HYPERTHREADING",
        "COMPUTE_STORAGE_BUS_VIRTIO",
        "COMPUTE_STORAGE_BUS_IDE",
        "COMPUTE_GRAPHICS_MODEL_VGA",
        "COMPUTE_NET_VIF_MODEL_E1000",
    } <= set(host_traits)
    assert not {"HW_CPU_X86_AVX2", "COMPUTE_STORAGE_BUS_FDC", "COMPUTE_STORAGE_BUS_SCSI"} & set(
        host_traits
    )
    assert host_traits == sorted(host_traits)


def test_share_traits_require_virtiofs_in_emulator_and_on_host(tmp_path: Path) -> None:
    xml = DOMAIN_CAPABILITIES.replace(
        "<devices>",
        """
        <memoryBacking><enum name='sourceType'><value>memfd</value></enum></memoryBacking><devices>
        <filesystem><enum name='driverType'><value>virtiofs</value></enum></filesystem>""",
    )
    assert set(os_traits.get_traits()) >= traits.SHARES
    for facts, expected in (
        (replace(FACTS, domain_capabilities=xml, serves_folders=True), traits.SHARES),
        (replace(FACTS, domain_capabilities=xml), {"COMPUTE_MEM_BACKING_FILE"}),
        (replace(FACTS, serves_folders=True), set()),
    ):
        assert (
            traits.SHARES & set(inventory(facts, tmp_path, "qemu", HostOptions()).traits)
            == expected
        )


def test_traits_are_all_defined_in_os_traits() -> None:
    known_traits = set(os_traits.get_traits())
    assert known_traits >= traits.COMMON
    for feature, ends in traits.OTHER_NAMES.items():
        assert (
            traits.of_processor([feature]) == {traits.PREFIX + end for end in ends} <= known_traits
        )
    for prefix, names in (
        ("COMPUTE_STORAGE_BUS", DISK_BUSES),
        ("COMPUTE_GRAPHICS_MODEL", VIDEO_MODELS),
        ("COMPUTE_NET_VIF_MODEL", VIF_MODELS),
    ):
        assert {f"{prefix}_{name.upper()}" for name in names} <= known_traits
    facts = replace(FACTS, cpu_features=tuple(traits.OTHER_NAMES))
    assert set(inventory(facts, Path("/"), "kvm", HostOptions()).traits) <= known_traits


def test_cpu_feature_unknown_to_os_traits_is_no_trait() -> None:
    assert traits.of_processor(["vme", "x2apic", "3dnow", "avx512-vpopcntdq", "sse4.2"]) == {
        "HW_CPU_X86_3DNOW",
        "HW_CPU_X86_AVX512VPOPCNTDQ",
        "HW_CPU_X86_SSE42",
    }
