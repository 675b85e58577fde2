# SPDX-License-Identifier: Apache-2.0
"""Diagnostics in responses: the standard format since 2.48, and the flat format before.

Hosts report the standard format. The flat format has the same figures. Values that the host does
not report are null in the standard format, and missing in the flat format.
"""

from __future__ import annotations

import string
from collections.abc import Iterator
from typing import Any

from common.domain.json_types import JsonObject
from compute_api.http.microversions import Range

KEYS = (
    "state",
    "driver",
    "hypervisor",
    "hypervisor_os",
    "uptime",
    "config_drive",
    "num_cpus",
    "num_nics",
    "num_disks",
)
DETAILS: dict[str, tuple[str, ...]] = {
    "cpu_details": ("id", "time", "utilisation"),
    "disk_details": (
        "read_bytes",
        "read_requests",
        "write_bytes",
        "write_requests",
        "errors_count",
    ),
    "nic_details": (
        "mac_address",
        "rx_octets",
        "rx_errors",
        "rx_drop",
        "rx_packets",
        "rx_rate",
        "tx_octets",
        "tx_errors",
        "tx_drop",
        "tx_packets",
        "tx_rate",
    ),
}
_MEMORY = ("maximum", "used")
_STANDARD = Range("2.48")
#: The flat format has memory in KiB, the standard format in MiB.
_KIB = 1024

#: Suffix of the flat key, and the standard key, for each disk and for each interface.
_FLAT_DISK = (
    ("read", "read_bytes"),
    ("read_req", "read_requests"),
    ("write", "write_bytes"),
    ("write_req", "write_requests"),
    ("errors", "errors_count"),
)
_FLAT_NIC = (
    ("rx", "rx_octets"),
    ("rx_packets", "rx_packets"),
    ("rx_errors", "rx_errors"),
    ("rx_drop", "rx_drop"),
    ("tx", "tx_octets"),
    ("tx_packets", "tx_packets"),
    ("tx_errors", "tx_errors"),
    ("tx_drop", "tx_drop"),
)


def diagnostics(report: JsonObject, version: int) -> JsonObject:
    """Convert the diagnostics that a host reports to the format of this microversion.

    Before 2.48 this is the flat format, in which values that the host does not report are missing.
    Since 2.48 such values are null.
    """
    return _build_standard(report) if version in _STANDARD else dict(_build_flat(report))


def _build_standard(report: JsonObject) -> JsonObject:
    memory = report.get("memory_details") or {}
    return {
        **{key: report.get(key) for key in KEYS},
        "memory_details": {key: memory.get(key) for key in _MEMORY},
        **{
            name: [{key: item.get(key) for key in keys} for item in report.get(name) or ()]
            for name, keys in DETAILS.items()
        },
    }


def _build_flat(report: JsonObject) -> Iterator[tuple[str, Any]]:
    for number, cpu in enumerate(report.get("cpu_details") or ()):
        if cpu.get("time") is not None:
            yield f"cpu{cpu.get('id', number)}_time", cpu["time"]
    memory = report.get("memory_details") or {}
    for key, name in (("memory", "maximum"), ("memory-rss", "used")):
        if memory.get(name) is not None:
            yield key, memory[name] * _KIB
    for details, names, prefix in (
        ("disk_details", _FLAT_DISK, _name_disk),
        ("nic_details", _FLAT_NIC, _name_nic),
    ):
        for number, item in enumerate(report.get(details) or ()):
            for end, key in names:
                if item.get(key) is not None:
                    yield f"{prefix(number)}_{end}", item[key]


def _name_disk(number: int) -> str:
    return "vd" + string.ascii_lowercase[number % 26]


def _name_nic(number: int) -> str:
    return f"vnet{number}"
