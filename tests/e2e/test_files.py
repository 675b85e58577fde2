# SPDX-License-Identifier: Apache-2.0
"""What a cloud leaves on the machine is its users' alone: every file and folder is looked at, and
guests' processes."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.one_machine.services.network.host.names import Names
from tests.e2e.live import Live

ID = r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"
THROUGH = "guests' processes and the broker go through it, and cannot list it"
#: What others than its owner and group may touch: path below the home -> (at most this, why).
OPEN = {
    r"\.": (0o711, THROUGH),
    r"state(-\d+)?": (0o711, THROUGH),
    rf"state(-\d+)?/instances/{ID}": (0o711, f"{THROUGH}; the folder above is QEMU's group's"),
    rf"state(-\d+)?/instances/{ID}/.*base\..*": (
        0o644,
        "each guest's QEMU reads it and none may write it; others do "
        "not come through the folders above",
    ),
    r"state(-\d+)?/images/[^/]+\.(qcow2|raw)": (
        0o644,
        "the same file; the folder is the agent's alone",
    ),
    rf"state(-\d+)?/instances/{ID}/tty2?": (
        0o775,
        "QEMU's socket; others do not come through the folders above",
    ),
    r"volume(/volumes)?": (0o711, THROUGH),
    r"tls(/libvirt-[^/]+)?": (
        0o711,
        "guests' processes go through it to the keys that are their group's",
    ),
    r"libvirt(-\d+)?/(run|lib|etc|log|cache)": (
        0o711,
        "guests' processes go through to their own files",
    ),
    r"libvirt(-\d+)?/(run|lib|etc|log|cache)/.*": (
        0o755,
        "libvirt makes it; the folder of it all is root's alone",
    ),
}


def below(folder: Path) -> Iterator[Path]:
    """The folder and all that is in it."""
    yield folder
    for path, folders, files in os.walk(folder):
        yield from (Path(path) / name for name in (*folders, *files))


def opened(home: Path) -> list[str]:
    """What others may touch that is not among the exceptions."""
    found = []
    for path in below(home):
        try:
            mode = path.lstat().st_mode
        except FileNotFoundError:  # the cloud runs
            continue
        name = str(path.relative_to(home))
        allowed = next(
            (most for form, (most, _) in OPEN.items() if re.fullmatch(form, name)), 0o770
        )
        if not stat.S_ISLNK(mode) and stat.S_IMODE(mode) & 0o007 & ~allowed:
            found.append(f"{stat.filemode(mode)} {name}")
    return found


def test_files_of_a_cloud_are_its_users_alone(in_memory: Live) -> None:
    assert opened(in_memory.home) == []
    made = {path.name for path in below(in_memory.home)}
    assert {
        "agent.db",
        "kilonova.db",
        "identity.db",
        "images.db",
        "api.log",
        "supervise.log",
        "rabbitmq.conf",
    } <= made


@pytest.mark.slice("guests")
def test_files_of_guests_are_its_users_alone(cloud: Live) -> None:
    assert opened(cloud.home) == []
    for state in cloud.home.glob("network-host*"):
        folder = Names.of(state).runtime
        for path in below(folder) if folder.exists() else ():
            # dnsmasq reads it after it has given up root; addresses and names of ports stand there,
            # no secrets.
            assert path.lstat().st_mode & 0o002 == 0, path


@pytest.mark.slice("guests")
def test_no_guest_is_a_process_of_root(cloud: Live) -> None:
    guests = [
        line.split(":")[0]
        for line in cloud.processes()
        if "qemu-system" in line and " -name " in line
    ]
    assert guests
    for pid in guests:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        told = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
        assert "0" not in told["Uid"].split() + told["Gid"].split()
        assert (int(told["CapEff"], 16), told["Seccomp"]) == (0, "2")
