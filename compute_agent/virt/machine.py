# SPDX-License-Identifier: Apache-2.0
"""Data about the host's machine: uptime, CPU load and PCI devices.

The agent's queries and the libvirt driver use this. All data comes from files of the kernel, and no
program is started. Tests pass another ``root`` with their own files.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path

from common.domain.errors import ConfigError
from common.domain.models import Device
from compute_agent.virt.cpu_sets import parse

ROOT = Path("/")
#: Columns of /proc/stat's line of all CPUs.
USER, NICE, KERNEL, IDLE, IOWAIT, IRQ, SOFTIRQ, STOLEN = range(8)
#: Length of a record in /run/utmp, and the type of a record for a user's session.
UTMP_BYTES, USER_PROCESS = 384, 7
ADDRESS = re.compile(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")


def uptime(now: datetime, root: Path = ROOT) -> str:
    """Return the uptime in the format of the command ``uptime``.

    For example, " 14:03:12 up 3 days,  2:15,  1 user,  load average: 0.10, 0.20, 0.30".

    Args:
        now: Time on this host's clock.
        root: Folder that contains proc and run.
    """
    minutes = int(float((root / "proc/uptime").read_text().split()[0])) // 60
    load = ", ".join((root / "proc/loadavg").read_text().split()[:3])
    users = _users(root / "run/utmp")
    return (
        f" {now:%H:%M:%S} up {_lasting(minutes)},  {users} user{'' if users == 1 else 's'},  "
        f"load average: {load}"
    )


def _lasting(minutes: int) -> str:
    days, minutes = divmod(minutes, 24 * 60)
    hours, minutes = divmod(minutes, 60)
    clock = f"{hours:2d}:{minutes:02d}" if hours else f"{minutes} min"
    return f"{days} day{'' if days == 1 else 's'}, {clock}" if days else clock


def _users(utmp: Path) -> int:
    """Count the sessions of users in a utmp file. Without this file the count is 0."""
    records = utmp.read_bytes() if utmp.exists() else b""
    return sum(
        struct.unpack_from("=h", records, at)[0] == USER_PROCESS
        for at in range(0, len(records) - UTMP_BYTES + 1, UTMP_BYTES)
    )


class Monitor:
    """Measures the host's CPU load, under the names of Nova's monitor cpu.virt_driver.

    Each call of ``read`` covers the time since the last call, and the first call the time since the
    boot.
    """

    def __init__(self, root: Path = ROOT) -> None:
        self._root = root
        self._last = [0] * 8

    def read(self) -> dict[str, float]:
        """Return the metrics by name: percentages (0 to 100) of all CPUs, and the frequency in MHz.

        The percentages cover the time since the last call. The first call covers the time since the
        boot. The frequency is left out if the kernel does not report it.
        """
        line = (self._root / "proc/stat").read_text().split("\n", 1)[0]
        now = [int(number) for number in line.split()[1:9]]
        spent = [max(0, new - old) for new, old in zip(now, self._last, strict=True)]
        self._last = now
        whole = sum(spent) or 1
        shares = {
            "user": spent[USER] + spent[NICE],
            "kernel": spent[KERNEL] + spent[IRQ] + spent[SOFTIRQ],
            "idle": spent[IDLE],
            "iowait": spent[IOWAIT],
        }
        percents = {
            f"cpu.{name}.percent": round(100 * share / whole, 2) for name, share in shares.items()
        }
        busy = whole - spent[IDLE] - spent[IOWAIT] if sum(spent) else 0
        return {**percents, "cpu.percent": round(100 * busy / whole, 2), **self._frequency()}

    def _frequency(self) -> dict[str, float]:
        """Return the mean frequency of the CPUs in MHz, or {} if the kernel reports none."""
        frequencies = [
            float(number)
            for number in re.findall(
                r"^cpu MHz\s*:\s*([0-9.]+)$",
                (self._root / "proc/cpuinfo").read_text(),
                re.MULTILINE,
            )
        ]
        return (
            {"cpu.frequency": round(sum(frequencies) / len(frequencies), 2)} if frequencies else {}
        )


def cpus(root: Path = ROOT) -> list[int]:
    """Return the kernel's numbers of the host's CPUs, also those offline, in rising order."""
    return sorted(parse((root / "sys/devices/system/cpu/present").read_text().strip(), "present"))


def most_cpu_shares(root: Path = ROOT) -> int:
    """Return the largest value of cpu_shares that the kernel accepts.

    This is 10,000 with cgroups v2 and 262,144 with cgroups v1.
    """
    return 10_000 if (root / "sys/fs/cgroup/cgroup.controllers").exists() else 262_144


def devices(addresses: Iterable[str], root: Path = ROOT) -> list[Device]:
    """Return the PCI devices at these addresses, ordered by address, without duplicates.

    The NUMA node of a device is -1 if unknown.

    Raises:
        ConfigError: An address is malformed, or the device does not exist.
    """
    return [
        _device(address, root / "sys/bus/pci/devices" / address)
        for address in sorted(set(addresses))
    ]


def _device(address: str, folder: Path) -> Device:
    if not ADDRESS.fullmatch(address):
        raise ConfigError(
            f"[agent] pci_devices: {address} is not a PCI address; write, for example, 0000:81:00.1"
        )
    if not folder.exists():
        raise ConfigError(
            f"[agent] pci_devices: this host has no device {address}; for the addresses, see lspci -D"
        )
    vendor, product = (int((folder / name).read_text(), 16) for name in ("vendor", "device"))
    numa_file = folder / "numa_node"
    return Device(
        address,
        f"{vendor:04x}",
        f"{product:04x}",
        int(numa_file.read_text()) if numa_file.exists() else -1,
    )
