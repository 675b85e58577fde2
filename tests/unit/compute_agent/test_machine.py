# SPDX-License-Identifier: Apache-2.0
"""Data from the kernel's files: the text of uptime, the monitor's percentages, PCI devices."""

from __future__ import annotations

import re
import shutil
import subprocess
from datetime import datetime
from pathlib import Path

import pytest

from common.domain.errors import ConfigError
from common.domain.models import Device
from compute_agent.virt import machine

NOON = datetime(2026, 11, 21, 12, 3, 4)
#: The expression with which clients of the API parse the text.
CLIENTS = re.compile(r"\s*(.+)\sup\s+(.+),\s+(.+)\susers?,\s+load average:\s(.+)")


def write(root: Path, **files: str | bytes) -> Path:
    """Write files below ``root``. In the name of a file, __ stands for /."""
    for name, content in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return root


def session(kind: int) -> bytes:
    return kind.to_bytes(2, "little").ljust(machine.UTMP_BYTES, b"\0")


@pytest.mark.parametrize(
    ("seconds", "duration"),
    [
        (59, "0 min"),
        (14 * 60, "14 min"),
        (3600, " 1:00"),
        (86399, "23:59"),
        (86400, "1 day, 0 min"),
        (2 * 86400 + 3 * 3600 + 14 * 60, "2 days,  3:14"),
    ],
)
def test_uptime_text_has_format_of_uptime_command(
    tmp_path: Path, seconds: int, duration: str
) -> None:
    root = write(
        tmp_path, proc__uptime=f"{seconds}.93 12.00\n", proc__loadavg="0.07 0.11 0.15 1/231 4077\n"
    )
    assert (
        machine.uptime(NOON, root)
        == f" 12:03:04 up {duration},  0 users,  load average: 0.07, 0.11, 0.15"
    )


def test_uptime_counts_logged_in_users(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        proc__uptime="60 1",
        proc__loadavg="0 0 0 1/1 1",
        run__utmp=session(2) + session(7) + session(8) + b"cut off",
    )
    assert ",  1 user,  load" in machine.uptime(NOON, root)


def test_uptime_of_this_machine_matches_pattern_of_api_clients() -> None:
    assert CLIENTS.match(machine.uptime(NOON))


@pytest.mark.skipif(shutil.which("uptime") is None, reason="no uptime on this machine")
def test_uptime_shows_same_duration_as_uptime_command() -> None:
    def parse_duration(output: str) -> str:
        return re.split(r",\s+\d+ user", output.split(" up ")[1])[0].strip()

    before = machine.uptime(NOON)
    command_output = subprocess.run(["uptime"], capture_output=True, text=True, check=True).stdout
    assert parse_duration(command_output) in {
        parse_duration(before),
        parse_duration(machine.uptime(NOON)),
    }


def test_monitor_reports_cpu_use_since_last_read(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        proc__stat="cpu  100 0 50 800 50 0 0 0 9 9\ncpu0 1\n",
        proc__cpuinfo="processor\t: 0\ncpu MHz\t\t: 2000.5\n\nprocessor\t: 1\ncpu MHz\t\t: 3000.5\n",
    )
    monitor = machine.Monitor(root)
    assert monitor.read()["cpu.idle.percent"] == 80.0
    write(tmp_path, proc__stat="cpu  110 10 60 840 60 5 5 10 9 9\n")
    assert monitor.read() == {
        "cpu.user.percent": 20.0,
        "cpu.kernel.percent": 20.0,
        "cpu.idle.percent": 40.0,
        "cpu.iowait.percent": 10.0,
        "cpu.percent": 50.0,
        "cpu.frequency": 2500.5,
    }
    assert monitor.read()["cpu.percent"] == 0.0


def test_monitor_reads_cpu_percentages_of_this_machine() -> None:
    values = machine.Monitor().read()
    assert 0 <= values["cpu.percent"] <= 100
    assert (
        sum(values[f"cpu.{name}.percent"] for name in ("user", "kernel", "idle", "iowait")) <= 100.1
    )


def test_pci_devices_are_read_from_kernel_files(tmp_path: Path) -> None:
    for address, product, numa_node in (
        ("0000:81:00.1", "0x1521", "1\n"),
        ("0000:00:02.0", "0x00ab", ""),
    ):
        folder = f"sys__bus__pci__devices__{address}__"
        write(tmp_path, **{f"{folder}vendor": "0x8086\n", f"{folder}device": f"{product}\n"})
        if numa_node:
            write(tmp_path, **{f"{folder}numa_node": numa_node})
    assert machine.devices(["0000:81:00.1", "0000:00:02.0"], tmp_path) == [
        Device("0000:00:02.0", "8086", "00ab", -1),
        Device("0000:81:00.1", "8086", "1521", 1),
    ]


@pytest.mark.parametrize("address", ["81:00.1", "../../etc", "0000:81:00.9", "0000:ff:1f.7"])
def test_pci_devices_raise_config_error_for_malformed_or_missing_device(
    tmp_path: Path, address: str
) -> None:
    with pytest.raises(ConfigError, match="not a PCI address|no device"):
        machine.devices([address], tmp_path)
