# SPDX-License-Identifier: Apache-2.0
"""A running guest's counters, in the format of the Compute API's microversion 2.48.

Called by ``virt.libvirt.driver``. Memory is in MiB, CPU time in nanoseconds, uptime in seconds
since QEMU started. A counter that libvirt does not have is None.
"""

from __future__ import annotations

import time
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

from common.domain.json_types import JsonObject
from compute_agent.virt.driver import CRASHED, PAUSED, RUNNING, SUSPENDED
from compute_agent.virt.libvirt.domains import power
from compute_agent.virt.libvirt.domains.connection import Connection, Domain

STATES = {RUNNING: "running", PAUSED: "paused", CRASHED: "crashed", SUSPENDED: "suspended"}
DISK_COUNTERS = ("read_requests", "read_bytes", "write_requests", "write_bytes", "errors_count")
NIC_COUNTERS = (
    "rx_octets",
    "rx_packets",
    "rx_errors",
    "rx_drop",
    "tx_octets",
    "tx_packets",
    "tx_errors",
    "tx_drop",
)


def of(libvirt: Connection, server: str, config_drive: str) -> JsonObject:
    """Return the diagnostics of an active guest, in the format of microversion 2.48.

    Args:
        libvirt: Connection to libvirtd.
        server: Id of the server.
        config_drive: Path of the server's config drive, which need not exist.

    Raises:
        VerbFailed: The guest is off or does not exist.
    """
    guest = power.find_active(libvirt, server)
    counters = libvirt.on(server, "read the guest's counters", _read_counters)
    root, (_, maximum, used, cpus, _), times, disks, nics = counters or (
        Element("domain"),
        (0, 0, 0, 0, 0),
        [],
        [],
        [],
    )
    sources = {source.get("file") for source in root.iterfind("devices/disk/source")}
    return {
        "state": STATES.get(guest.power_state, "running"),
        "driver": "libvirt",
        "hypervisor": root.get("type"),
        "hypervisor_os": "linux",
        "uptime": max(0, int(time.time()) - guest.marks.started),
        "config_drive": config_drive in sources,
        "num_cpus": cpus,
        "num_disks": len(disks),
        "num_nics": len(nics),
        "memory_details": {"maximum": maximum // 1024, "used": used // 1024},
        "cpu_details": [
            {"id": number, "time": nanoseconds, "utilisation": None}
            for number, nanoseconds in times
        ],
        "disk_details": disks,
        "nic_details": nics,
    }


def _read_counters(
    domain: Domain,
) -> tuple[Element, tuple[int, ...], list[tuple[int, int]], list[JsonObject], list[JsonObject]]:
    root = ElementTree.fromstring(domain.XMLDesc(0))
    times = [(number, nanoseconds) for number, _, nanoseconds, *_ in domain.vcpus()[0]]
    disks = [
        _name_counters(DISK_COUNTERS, domain.blockStats(target.get("dev")))
        for target in root.iterfind("devices/disk/target")
    ]
    nics = [
        {
            "mac_address": _read_attribute(nic, "mac", "address"),
            "rx_rate": None,
            "tx_rate": None,
            **_name_counters(
                NIC_COUNTERS, domain.interfaceStats(_read_attribute(nic, "target", "dev"))
            ),
        }
        for nic in root.iterfind("devices/interface[target]")
    ]
    return root, tuple(domain.info()), times, disks, nics


def _read_attribute(parent: Element, tag: str, name: str) -> str:
    child = parent.find(tag)
    return "" if child is None else child.get(name, "")


def _name_counters(names: tuple[str, ...], numbers: tuple[int, ...]) -> dict[str, int | None]:
    """Return the counters by name, with None for -1, which libvirt reports if unknown."""
    return {
        name: number if number >= 0 else None for name, number in zip(names, numbers, strict=True)
    }
