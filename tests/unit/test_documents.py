# SPDX-License-Identifier: Apache-2.0
"""The files, definitions, tests and options in pages of docs/ exist."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from common.domain.hardware.options import IMAGES, OPTIONS
from deploy.one_machine.services.identity.bootstrap import SERVICES

ROOT = Path(__file__).resolve().parents[2]


def test_architecture_page_names_existing_files_and_definitions() -> None:
    table = (ROOT / "docs/architecture.md").read_text().split("## Find a part")[1]
    # A file or folder, and the name in it, if the page has one.
    places = re.findall(r"`([a-z_]+/[\w./]+)`(?: \(`(\w+)`\))?", table)
    assert places
    assert [place for place in places if not is_defined(*place)] == []


def is_defined(path: str, name: str) -> bool:
    """Return True if the path exists and, unless the name is empty, defines it."""
    defined = rf"^(def|class) {name}\b|^{name}\b[^=\n]*=|^\w+(, \w+)*, {name}\b.* = "
    return (ROOT / path).exists() and (
        not name or re.search(defined, (ROOT / path).read_text(), re.MULTILINE) is not None
    )


def test_how_to_add_page_names_existing_files() -> None:
    paths = re.findall(r"`([a-z_]+/[\w./]+)`", (ROOT / "docs/how-to-add.md").read_text())
    assert paths
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_security_page_names_existing_tests_of_each_property() -> None:
    text = (ROOT / "docs/security.md").read_text()
    rows = re.findall(r"^\| (ST-\d+) \| [^|]+ \| ([^|]+) \|$", text, re.MULTILINE)
    assert [name for name, _ in rows] == [f"ST-{number}" for number in range(1, 41)]
    assert [name for name, tests in rows if not names_existing_tests(tests)] == []


def names_existing_tests(text: str) -> bool:
    """Return True if a row names at least one test file or test and all of them exist."""
    if text.startswith("not applicable: "):
        return True
    references = re.findall(r"`([^`]+)`", text)
    for reference in references:
        path, _, test = reference.partition("::")
        tests = function_names(path)
        if not (test in tests if test else any(name.startswith("test_") for name in tests)):
            return False
    return bool(references)


@cache
def function_names(path: str) -> set[str]:
    """Return the names of the functions in a file, methods included."""
    return set(re.findall(r"^ *def (\w+)\(", (ROOT / path).read_text(), re.MULTILINE))


def test_docs_name_catalogue_services_as_embedded_bootstrap_does() -> None:
    text = "".join(path.read_text() for path in (ROOT / "docs").rglob("*.md"))
    names = re.findall(r"openstack service create --name (\S+) (\S+)", text)
    assert names
    assert [(kind, name) for name, kind in names] == [(kind, SERVICES[kind]) for _, kind in names]


#: The properties of images that Nova 33 reads (nova.objects.ImageMetaProps), then their old names.
NOVA_IMAGE_PROPERTIES = (
    "hw_architecture hw_emulation_architecture hw_auto_disk_config hw_boot_menu hw_cdrom_bus "
    "hw_cpu_cores hw_cpu_sockets hw_cpu_max_cores hw_cpu_max_sockets hw_cpu_max_threads "
    "hw_cpu_policy hw_cpu_thread_policy hw_cpu_realtime_mask hw_cpu_threads hw_device_id "
    "hw_disk_bus hw_disk_type hw_floppy_bus hw_firmware_type hw_firmware_stateless "
    "hw_input_bus hw_ipxe_boot hw_locked_memory hw_machine_type hw_mem_encryption "
    "hw_mem_encryption_model hw_mem_page_size hw_numa_nodes hw_numa_cpus hw_numa_mem "
    "hw_pci_numa_affinity_policy hw_pointer_model hw_pmu hw_qemu_guest_agent hw_rescue_bus "
    "hw_rescue_device hw_rng_model hw_time_hpet hw_serial_port_count hw_scsi_model "
    "hw_video_model hw_video_ram hw_vif_model hw_viommu_model hw_vm_mode hw_watchdog_action "
    "hw_vif_multiqueue_enabled hw_tpm_model hw_tpm_version hw_ephemeral_encryption "
    "hw_ephemeral_encryption_secret_uuid hw_virtio_packed_ring hw_maxphysaddr_mode "
    "hw_maxphysaddr_bits hw_sound_model hw_usb_model hw_redirected_usb_ports img_bittorrent "
    "img_bdm_v2 img_cache_in_nova img_compression_level img_hv_requested_version img_hv_type "
    "img_config_drive img_linked_clone img_mappings img_owner_id img_root_device_name "
    "img_use_agent img_version img_signature img_signature_hash_method "
    "img_signature_certificate_uuid img_signature_key_type img_hide_hypervisor_id "
    "os_admin_user os_command_line os_distro os_require_quiesce os_secure_boot "
    "os_skip_agent_inject_files_at_boot os_skip_agent_inject_ssh os_type "
)
OLD_IMAGE_PROPERTIES = (
    "architecture owner_id vmware_disktype vmware_image_version vmware_ostype "
    "auto_disk_config ipxe_boot xenapi_device_id xenapi_image_compression_level "
    "vmware_linked_clone xenapi_use_agent xenapi_skip_agent_inject_ssh cache_in_nova vm_mode "
    "bittorrent mappings block_device_mapping bdm_v2 root_device_name "
    "hypervisor_version_requires hypervisor_type "
)


def test_flavors_page_or_options_cover_the_image_properties_of_nova() -> None:
    """A property is supported, refused by name, or listed as a description without effect."""
    text = (ROOT / "docs/flavors.md").read_text()
    decided = {option.image for option in OPTIONS} | IMAGES.keys()
    decided |= set(re.findall(r"`(\w+)(?:\.N)?`", text))
    names = (NOVA_IMAGE_PROPERTIES + OLD_IMAGE_PROPERTIES).split()
    assert [name for name in names if name not in decided] == []
