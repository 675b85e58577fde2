# SPDX-License-Identifier: Apache-2.0
"""A running guest's counters, in the shape of the API's microversion 2.48.

Called by ``virt.libvirt.driver``. Memory is in MiB, CPU time in nanoseconds, uptime in seconds
since QEMU started. What libvirt does not count is None.
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
    """VerbFailed when the server does not run. ``config_drive`` is the file that would be one."""
    found = power.find_active(libvirt, server)
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
        "state": STATES.get(found.power_state, "running"),
        "driver": "libvirt",
        "hypervisor": root.get("type"),
        "hypervisor_os": "linux",
        "uptime": max(0, int(time.time()) - found.marks.started),
        "config_drive": config_drive in sources,
        "num_cpus": cpus,
        "num_disks": len(disks),
        "num_nics": len(nics),
        "memory_details": {"maximum": maximum // 1024, "used": used // 1024},
        "cpu_details": [
            {"id": number, "time": spent, "utilisation": None} for number, spent in times
        ],
        "disk_details": disks,
        "nic_details": nics,
    }


def _read_counters(
    domain: Domain,
) -> tuple[Element, tuple[int, ...], list[tuple[int, int]], list[JsonObject], list[JsonObject]]:
    root = ElementTree.fromstring(domain.XMLDesc(0))
    times = [(number, spent) for number, _, spent, *_ in domain.vcpus()[0]]
    disks = [
        _counted(DISK_COUNTERS, domain.blockStats(target.get("dev")))
        for target in root.iterfind("devices/disk/target")
    ]
    nics = [
        {
            "mac_address": _attribute(nic, "mac", "address"),
            "rx_rate": None,
            "tx_rate": None,
            **_counted(NIC_COUNTERS, domain.interfaceStats(_attribute(nic, "target", "dev"))),
        }
        for nic in root.iterfind("devices/interface[target]")
    ]
    return root, tuple(domain.info()), times, disks, nics


def _attribute(parent: Element, tag: str, name: str) -> str:
    child = parent.find(tag)
    return "" if child is None else child.get(name, "")


def _counted(names: tuple[str, ...], numbers: tuple[int, ...]) -> dict[str, int | None]:
    """libvirt says -1 for what it does not know."""
    return {
        name: number if number >= 0 else None for name, number in zip(names, numbers, strict=True)
    }
