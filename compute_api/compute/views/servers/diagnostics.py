# SPDX-License-Identifier: Apache-2.0
"""Diagnostics as answers: the standard shape of 2.48, and before it the flat one, made of the same
figures.

Hosts answer in the standard shape. What a host does not know is null there and missing in the flat
one.
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
_KIB = 1024  # the flat shape counts memory in KiB, the standard one in MiB

#: Of one disk or interface: the end of the flat key, and the standard one.
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


def diagnostics(found: JsonObject, version: int) -> JsonObject:
    """What the host found, as this version shows it."""
    return _standard(found) if version in _STANDARD else dict(_flat(found))


def _standard(found: JsonObject) -> JsonObject:
    memory = found.get("memory_details") or {}
    return {
        **{key: found.get(key) for key in KEYS},
        "memory_details": {key: memory.get(key) for key in _MEMORY},
        **{
            name: [{key: item.get(key) for key in keys} for item in found.get(name) or ()]
            for name, keys in DETAILS.items()
        },
    }


def _flat(found: JsonObject) -> Iterator[tuple[str, Any]]:
    for number, cpu in enumerate(found.get("cpu_details") or ()):
        if cpu.get("time") is not None:
            yield f"cpu{cpu.get('id', number)}_time", cpu["time"]
    memory = found.get("memory_details") or {}
    for key, name in (("memory", "maximum"), ("memory-rss", "used")):
        if memory.get(name) is not None:
            yield key, memory[name] * _KIB
    for details, names, prefix in (
        ("disk_details", _FLAT_DISK, _disk),
        ("nic_details", _FLAT_NIC, _nic),
    ):
        for number, item in enumerate(found.get(details) or ()):
            for end, key in names:
                if item.get(key) is not None:
                    yield f"{prefix(number)}_{end}", item[key]


def _disk(number: int) -> str:
    return "vd" + string.ascii_lowercase[number % 26]


def _nic(number: int) -> str:
    return f"vnet{number}"
