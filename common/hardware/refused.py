# SPDX-License-Identifier: Apache-2.0
"""What flavors and images can ask for elsewhere, and hosts of ours do not carry out: refused, never passed over.

A line is a name and the values of it that ask for nothing. Carrying one out means taking its line from here and adding
it to where it is read.
"""
from __future__ import annotations

import re

from common.hardware.asked import Asked, refusal
from common.hardware.devices import ALIAS
from common.hardware.options import OPTIONS
from common.hardware.values import FALSE

_NO, _NEVER = FALSE, frozenset[str]()
_NONE, _ZERO = frozenset(("none", "disabled", "")), frozenset(("0",))

SPECS: dict[str, frozenset[str]] = {
    **dict.fromkeys(("hw:mem_encryption", "hw:cpu_realtime", "hw:locked_memory", "hw:virtio_packed_ring",
                     "hw:ephemeral_encryption"), _NO),
    **dict.fromkeys(("hw:mem_encryption_model", "hw:pmem", "hw:tpm_model", "hw:tpm_version", "hw:tpm_secret_security",
                     "hw:cpu_realtime_mask", "hw:emulator_threads_policy", "hw:viommu_model", "hw:maxphysaddr_mode",
                     "hw:maxphysaddr_bits", "hw:sound_model", "hw:usb_model",
                     "hw:ephemeral_encryption_format", "accel:device_profile"), _NEVER),
    "hw:redirected_usb_ports": _ZERO, "os:secure_boot": _NONE,
    **dict.fromkeys((f"quota:{what}_{limit}" for what in ("cpu", "memory", "disk_io", "vif")
                     for limit in ("limit", "reservation", "shares_level", "shares_share")), _NEVER)}
IMAGES: dict[str, frozenset[str]] = {
    **dict.fromkeys(("hw_mem_encryption", "hw_locked_memory", "hw_virtio_packed_ring", "hw_firmware_stateless",
                     "hw_ephemeral_encryption", "hw_ipxe_boot"), _NO),
    **dict.fromkeys(("hw_mem_encryption_model", "hw_tpm_model", "hw_tpm_version", "hw_tpm_secret_security",
                     "hw_cpu_realtime_mask", "hw_maxphysaddr_mode", "hw_maxphysaddr_bits", "hw_usb_model",
                     "hw_input_bus", "hw_sound_model", "hw_ephemeral_encryption_format"), _NEVER),
    **dict.fromkeys(("hw_viommu_model", "hw_emulation_architecture", "kernel_id", "ramdisk_id", "os_command_line"),
                    _NONE),
    "hw_redirected_usb_ports": _ZERO, "os_secure_boot": _NONE | {"optional"}, "hw_firmware_type": frozenset(("bios",))}
#: Namespaces that speak of hardware: a name there that nobody reads is refused.
NAMESPACES = ("hw:", "hw_rng:", "hw_video:", "quota:", "os:", "accel:", "pci_passthrough:", "vmware:")
READ = frozenset((
    *(option.spec for option in OPTIONS), "hw:watchdog_action", "hw_video:ram_max_mb", ALIAS, "hw:cpu_policy",
    "hw:cpu_dedicated_mask", "hw:cpu_thread_policy", "hw:numa_nodes", "hw:mem_page_size",
    *(f"hw:{limit}cpu_{kind}" for limit in ("", "max_") for kind in ("sockets", "cores", "threads"))))
_GROUPED = re.compile("(resources|trait)[a-zA-Z0-9_-]{1,64}:|group_policy$")
_NUMBERED = re.compile("hw:numa_(cpus|mem)[.]")


def check(asked: Asked) -> None:
    """Raises BadRequest that names the first extra spec or property that hosts do not carry out."""
    for name, value in asked.specs.items():
        if name in SPECS:
            _refuse(name, value, SPECS[name])
        elif _GROUPED.match(name):
            raise refusal(name, "hosts of this cloud give all of a server's resources from one provider; use "
                                "resources: and trait: without a group.")
        elif name.startswith(NAMESPACES) and name not in READ and not _NUMBERED.match(name):
            raise refusal(name, "hosts of this cloud know no such extra spec.")
    for name in sorted(IMAGES.keys() & asked.properties.keys()):
        _refuse(name, asked.properties[name], IMAGES[name])


def _refuse(name: str, value: str, nothing: frozenset[str]) -> None:
    if str(value).strip().lower() not in nothing:
        raise refusal(name, f"hosts of this cloud do not carry out {str(value)[:80]!r}.")
