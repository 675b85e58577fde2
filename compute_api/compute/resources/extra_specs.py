# SPDX-License-Identifier: Apache-2.0
"""The known extra specs and their values, checked when an admin writes them (since 2.86).

Called by ``resources.flavors``. Names and types are Nova's, all of them: a flavor may be for hosts
that can do more than ours. ``common.domain.hardware`` decides what our hosts can do when a server
is made. Must stay true: a name in a namespace of this table is known or refused; other namespaces
are not checked."""

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

Check = Callable[[str], str]  # what is wrong with a value; "": nothing
_MAX_SHOWN = 80
_GROUP = "(?:[a-zA-Z0-9_-]{1,64})?"


def _text(text: str) -> str:
    return ""


def _truth(text: str) -> str:
    return "" if text.strip().lower() in TRUE | FALSE else "is neither true nor false"


def _whole(least: int | None = None, most: int | None = None) -> Check:
    def check(text: str) -> str:
        if not re.fullmatch(r"\s*[+-]?\d{1,19}\s*", text, re.ASCII):
            return "is not a whole number"
        if least is not None and int(text) < least:
            return f"is less than {least}"
        return f"is more than {most}" if most is not None and int(text) > most else ""

    return check


def _words(*words: str) -> Check:
    return lambda text: "" if text in words else f"is not one of {', '.join(words)}"


def _form(pattern: str, words: str) -> Check:
    compiled = re.compile(pattern, re.ASCII)
    return lambda text: "" if compiled.fullmatch(text) else f"is not {words}"


_cpu_list = _form(
    r"\s*\^?\d{1,9}(-\d{1,9})?\s*(,\s*\^?\d{1,9}(-\d{1,9})?\s*)*", "a list of CPUs like 0-3,^2,8"
)
_some, _count = _whole(0), _whole(1)
#: name -> check of its value.
KNOWN: dict[str, Check] = {
    "hide_hypervisor_id": _truth,
    "group_policy": _words("isolate", "none"),
    "accel:device_profile": _text,
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
        _truth,
    ),
    **dict.fromkeys(
        (
            f"hw:cpu_{most}{kind}"
            for most in ("", "max_")
            for kind in ("sockets", "cores", "threads")
        ),
        _count,
    ),
    "hw:cpu_realtime_mask": _cpu_list,
    "hw:cpu_dedicated_mask": _cpu_list,
    "hw:cpu_policy": _words("shared", "dedicated", "mixed"),
    "hw:cpu_thread_policy": _words("prefer", "isolate", "require"),
    "hw:emulator_threads_policy": _words("share", "isolate"),
    "hw:ephemeral_encryption_format": _words("plain", "luks", "luksv2"),
    "hw:maxphysaddr_bits": _some,
    "hw:maxphysaddr_mode": _words("emulate", "passthrough"),
    "hw:mem_encryption_model": _words("amd-sev", "amd-sev-es", "amd-sev-snp"),
    "hw:mem_page_size": _form(
        r"large|small|any|\d{1,12}([kKMGT]i?)?(b|bit|B)?", "small, large, any or a size"
    ),
    "hw:numa_nodes": _count,
    "hw:pci_numa_affinity_policy": _words("required", "preferred", "legacy", "socket"),
    "hw:pmem": _form("[a-zA-Z0-9_]+(,[a-zA-Z0-9_]+)*,?", "a list of labels"),
    "hw:redirected_usb_ports": _whole(0, 15),
    "hw:serial_port_count": _some,
    "hw:sound_model": _words("sb16", "es1370", "pcspk", "ac97", "ich6", "ich9", "usb", "virtio"),
    "hw:tpm_model": _words("tpm-tis", "tpm-crb"),
    "hw:tpm_version": _words("1.2", "2.0"),
    "hw:tpm_secret_security": _words("user", "host", "deployment"),
    "hw:usb_model": _words("none", "qemu-xhci", "nec-xhci"),
    "hw:viommu_model": _words("intel", "smmuv3", "virtio", "auto"),
    "hw:watchdog_action": _words("none", "pause", "poweroff", "reset", "disabled"),
    "hw_rng:allowed": _truth,
    "hw_rng:rate_bytes": _some,
    "hw_rng:rate_period": _some,
    "hw_video:ram_max_mb": _some,
    "os:secure_boot": _words("disabled", "required"),
    "pci_passthrough:alias": _form(
        r"[^:,]+:\d{1,9}(\s*,\s*[^:,]+:\d{1,9})*", "name:count, or several of these"
    ),
    **{
        f"quota:{what}_{limit}": check
        for what in ("cpu", "memory", "disk_io", "vif")
        for limit, check in (
            ("limit", _whole()),
            ("reservation", _whole()),
            ("shares_level", _text),
            ("shares_share", _whole()),
        )
    },
    **dict.fromkeys((f"quota:cpu_{what}" for what in ("shares", "period", "quota")), _some),
    **dict.fromkeys(
        (
            f"quota:disk_{way}_{what}_sec"
            for way in ("read", "write", "total")
            for what in ("bytes", "iops")
        ),
        _some,
    ),
    **dict.fromkeys(
        (
            f"quota:vif_{way}_{what}"
            for way in ("inbound", "outbound")
            for what in ("average", "peak", "burst")
        ),
        _some,
    ),
    "vmware:hw_version": _text,
    "vmware:storage_policy": _text,
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
        _text,
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
def _patterns() -> tuple[tuple[re.Pattern[str], Check], ...]:
    """Names with a part that anybody chooses, and the check of their values."""
    classes, traits = "|".join(os_resource_classes.STANDARDS), "|".join(os_traits.get_traits())
    return tuple(
        (re.compile(pattern, re.ASCII), check)
        for pattern, check in (
            (r"hw:numa_cpus\.\d{1,9}", _cpu_list),
            (r"hw:numa_mem\.\d{1,9}", _count),
            (r"aggregate_instance_extra_specs:.+", _text),
            (rf"capabilities:(?:{'|'.join(_NESTED)})(?::\w+)*", _text),
            (rf"resources{_GROUP}:(?:{classes}|CUSTOM_[A-Z0-9_]+)", _whole()),
            (rf"trait{_GROUP}:(?:{traits}|CUSTOM_[A-Z0-9_]+)", _words("required", "forbidden")),
        )
    )


def check_names(specs: Iterable[str]) -> None:
    """Raises BadRequest when one is a name that only Kilonova writes."""
    for name in specs:
        if name.startswith(OWN_SPECS):
            raise errors.BadRequest(
                f"Extra specs that begin with {OWN_SPECS} are Kilonova's own: {name[:_MAX_SHOWN]!r}."
            )


def check(specs: JsonMapping) -> None:
    """Raises BadRequest that names the first extra spec that is unknown, or whose value is not of
    its kind."""
    for name, value in specs.items():
        known = KNOWN.get(name) or next(
            (each for pattern, each in _patterns() if pattern.fullmatch(name)), None
        )
        if known is None:
            space, colon, _ = name.partition(":")
            if colon and NAMESPACES.fullmatch(space):
                raise errors.BadRequest(
                    f"Validation failed; extra spec {name[:_MAX_SHOWN]!r} does not exist. See "
                    f"docs/flavors.md for those in {space}:."
                )
        elif wrong := known(str(value)):
            raise errors.BadRequest(
                f"Validation failed; extra spec {name[:_MAX_SHOWN]}: {str(value)[:_MAX_SHOWN]!r} {wrong}."
            )
