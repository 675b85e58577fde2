# SPDX-License-Identifier: Apache-2.0
"""Validation of extra specs, which administrators write (since 2.86).

The table has all names and types of Nova, including those that hosts of Kilonova do not support.
``common.domain.hardware`` checks the support when a server is created.

Invariant: in the namespaces of this table only names of the table are valid. Other namespaces are
not checked.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable

import os_resource_classes
import os_traits

from common.domain import errors
from common.domain.hardware import OWN_SPECS
from common.domain.hardware.specs import FALSE, TRUE
from common.domain.json_types import JsonMapping

#: Returns the error of a value, or "" for a valid value.
Check = Callable[[str], str]
_MAX_SHOWN = 80
_GROUP = "(?:[a-zA-Z0-9_-]{1,64})?"


def _accept_text(text: str) -> str:
    return ""


def _check_boolean(text: str) -> str:
    return "" if text.strip().lower() in TRUE | FALSE else "is neither true nor false"


def _make_integer_check(least: int | None = None, most: int | None = None) -> Check:
    def check(text: str) -> str:
        if not re.fullmatch(r"\s*[+-]?\d{1,19}\s*", text, re.ASCII):
            return "is not a whole number"
        if least is not None and int(text) < least:
            return f"is less than {least}"
        return f"is more than {most}" if most is not None and int(text) > most else ""

    return check


def _make_choice_check(*words: str) -> Check:
    return lambda text: "" if text in words else f"is not one of {', '.join(words)}"


def _make_pattern_check(pattern: str, words: str) -> Check:
    compiled = re.compile(pattern, re.ASCII)
    return lambda text: "" if compiled.fullmatch(text) else f"is not {words}"


_check_cpu_list = _make_pattern_check(
    r"\s*\^?\d{1,9}(-\d{1,9})?\s*(,\s*\^?\d{1,9}(-\d{1,9})?\s*)*", "a list of CPUs like 0-3,^2,8"
)
_check_natural, _check_positive = _make_integer_check(0), _make_integer_check(1)
#: Name -> check of the value.
KNOWN: dict[str, Check] = {
    "hide_hypervisor_id": _check_boolean,
    "group_policy": _make_choice_check("isolate", "none"),
    "accel:device_profile": _accept_text,
    **dict.fromkeys(
        (
            f"hw:{name}"
            for name in (
                "boot_menu",
                "cpu_realtime",
                "ephemeral_encryption",
                "hide_hypervisor_id",
                "locked_memory",
                "mem_encryption",
                "pmu",
                "vif_multiqueue_enabled",
                "virtio_packed_ring",
            )
        ),
        _check_boolean,
    ),
    **dict.fromkeys(
        (
            f"hw:cpu_{most}{kind}"
            for most in ("", "max_")
            for kind in ("sockets", "cores", "threads")
        ),
        _check_positive,
    ),
    "hw:cpu_realtime_mask": _check_cpu_list,
    "hw:cpu_dedicated_mask": _check_cpu_list,
    "hw:cpu_policy": _make_choice_check("shared", "dedicated", "mixed"),
    "hw:cpu_thread_policy": _make_choice_check("prefer", "isolate", "require"),
    "hw:emulator_threads_policy": _make_choice_check("share", "isolate"),
    "hw:ephemeral_encryption_format": _make_choice_check("plain", "luks", "luksv2"),
    "hw:maxphysaddr_bits": _check_natural,
    "hw:maxphysaddr_mode": _make_choice_check("emulate", "passthrough"),
    "hw:mem_encryption_model": _make_choice_check("amd-sev", "amd-sev-es", "amd-sev-snp"),
    "hw:mem_page_size": _make_pattern_check(
        r"large|small|any|\d{1,12}([kKMGT]i?)?(b|bit|B)?", "small, large, any or a size"
    ),
    "hw:numa_nodes": _check_positive,
    "hw:pci_numa_affinity_policy": _make_choice_check("required", "preferred", "legacy", "socket"),
    "hw:pmem": _make_pattern_check("[a-zA-Z0-9_]+(,[a-zA-Z0-9_]+)*,?", "a list of labels"),
    "hw:redirected_usb_ports": _make_integer_check(0, 15),
    "hw:serial_port_count": _check_natural,
    "hw:sound_model": _make_choice_check(
        "sb16", "es1370", "pcspk", "ac97", "ich6", "ich9", "usb", "virtio"
    ),
    "hw:tpm_model": _make_choice_check("tpm-tis", "tpm-crb"),
    "hw:tpm_version": _make_choice_check("1.2", "2.0"),
    "hw:tpm_secret_security": _make_choice_check("user", "host", "deployment"),
    "hw:usb_model": _make_choice_check("none", "qemu-xhci", "nec-xhci"),
    "hw:viommu_model": _make_choice_check("intel", "smmuv3", "virtio", "auto"),
    "hw:watchdog_action": _make_choice_check("none", "pause", "poweroff", "reset", "disabled"),
    "hw_rng:allowed": _check_boolean,
    "hw_rng:rate_bytes": _check_natural,
    "hw_rng:rate_period": _check_natural,
    "hw_video:ram_max_mb": _check_natural,
    "os:secure_boot": _make_choice_check("disabled", "required"),
    "pci_passthrough:alias": _make_pattern_check(
        r"[^:,]+:\d{1,9}(\s*,\s*[^:,]+:\d{1,9})*", "name:count, or several of these"
    ),
    **{
        f"quota:{what}_{limit}": check
        for what in ("cpu", "memory", "disk_io", "vif")
        for limit, check in (
            ("limit", _make_integer_check()),
            ("reservation", _make_integer_check()),
            ("shares_level", _accept_text),
            ("shares_share", _make_integer_check()),
        )
    },
    **dict.fromkeys(
        (f"quota:cpu_{what}" for what in ("shares", "period", "quota")), _check_natural
    ),
    **dict.fromkeys(
        (
            f"quota:disk_{way}_{what}_sec"
            for way in ("read", "write", "total")
            for what in ("bytes", "iops")
        ),
        _check_natural,
    ),
    **dict.fromkeys(
        (
            f"quota:vif_{way}_{what}"
            for way in ("inbound", "outbound")
            for what in ("average", "peak", "burst")
        ),
        _check_natural,
    ),
    "vmware:hw_version": _accept_text,
    "vmware:storage_policy": _accept_text,
    **dict.fromkeys(
        (
            f"capabilities:{name}"
            for name in (
                "id",
                "uuid",
                "service_id",
                "host",
                "vcpus",
                "memory_mb",
                "local_gb",
                "vcpus_used",
                "memory_mb_used",
                "local_gb_used",
                "hypervisor_type",
                "hypervisor_version",
                "hypervisor_hostname",
                "free_ram_mb",
                "free_disk_gb",
                "current_workload",
                "running_vms",
                "disk_available_least",
                "host_ip",
                "mapped",
                "cpu_allocation_ratio",
                "ram_allocation_ratio",
                "disk_allocation_ratio",
                "total_usable_ram_mb",
                "total_usable_disk_gb",
                "disk_mb_used",
                "free_disk_mb",
                "vcpus_total",
                "num_instances",
                "num_io_ops",
                "failed_builds",
                "aggregates",
                "cell_uuid",
                "updated",
            )
        ),
        _accept_text,
    ),
}
_NESTED = (
    "cpu_info",
    "metrics",
    "stats",
    "numa_topology",
    "supported_hv_specs",
    "pci_device_pools",
    "nodename",
    "pci_stats",
    "supported_instances",
    "limits",
    "instances",
)
NAMESPACES = re.compile(
    rf"accel|aggregate_instance_extra_specs|capabilities|hw|hw_rng|hw_video|os|pci_passthrough"
    rf"|quota|resources{_GROUP}|trait{_GROUP}|vmware"
)


@functools.cache
def _list_patterns() -> tuple[tuple[re.Pattern[str], Check], ...]:
    """Return patterns for names with a variable part, each with the check of its values."""
    classes, traits = "|".join(os_resource_classes.STANDARDS), "|".join(os_traits.get_traits())
    return tuple(
        (re.compile(pattern, re.ASCII), check)
        for pattern, check in (
            (r"hw:numa_cpus\.\d{1,9}", _check_cpu_list),
            (r"hw:numa_mem\.\d{1,9}", _check_positive),
            (r"aggregate_instance_extra_specs:.+", _accept_text),
            (rf"capabilities:(?:{'|'.join(_NESTED)})(?::\w+)*", _accept_text),
            (rf"resources{_GROUP}:(?:{classes}|CUSTOM_[A-Z0-9_]+)", _make_integer_check()),
            (
                rf"trait{_GROUP}:(?:{traits}|CUSTOM_[A-Z0-9_]+)",
                _make_choice_check("required", "forbidden"),
            ),
        )
    )


def check_names(specs: Iterable[str]) -> None:
    """Raise BadRequest for names of extra specs that are reserved for Kilonova."""
    for name in specs:
        if name.startswith(OWN_SPECS):
            raise errors.BadRequest(
                f"Extra spec {name[:_MAX_SHOWN]!r} is reserved for Kilonova, like all names that "
                f"begin with {OWN_SPECS}; use another name."
            )


def check(specs: JsonMapping) -> None:
    """Raise BadRequest for the first extra spec with an unknown name or an invalid value.

    Unknown names outside of ``NAMESPACES`` are accepted with any value.
    """
    for name, value in specs.items():
        check_value = KNOWN.get(name) or next(
            (candidate for pattern, candidate in _list_patterns() if pattern.fullmatch(name)), None
        )
        if check_value is None:
            space, colon, _ = name.partition(":")
            if colon and NAMESPACES.fullmatch(space):
                raise errors.BadRequest(
                    f"Validation failed; extra spec {name[:_MAX_SHOWN]!r} does not exist. See "
                    f"docs/flavors.md for the names that begin with {space}:."
                )
        elif error := check_value(str(value)):
            raise errors.BadRequest(
                f"Validation failed; extra spec {name[:_MAX_SHOWN]}: {str(value)[:_MAX_SHOWN]!r} {error}."
            )
