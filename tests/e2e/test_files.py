# SPDX-License-Identifier: Apache-2.0
"""The permissions of all files and folders of a cloud, and the users of guest processes."""

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
#: Exceptions for users other than owner and group: path below the home -> (highest mode, reason).
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


def walk_paths(folder: Path) -> Iterator[Path]:
    """Yield the folder and all paths below."""
    yield folder
    for path, folders, files in os.walk(folder):
        yield from (Path(path) / name for name in (*folders, *files))


def find_open_paths(home: Path) -> list[str]:
    """Return the paths that other users can access beyond the exceptions."""
    open_paths = []
    for path in walk_paths(home):
        try:
            mode = path.lstat().st_mode
        # The running cloud deleted the file meanwhile.
        except FileNotFoundError:
            continue
        name = str(path.relative_to(home))
        allowed = next(
            (most for form, (most, _) in OPEN.items() if re.fullmatch(form, name)), 0o770
        )
        if not stat.S_ISLNK(mode) and stat.S_IMODE(mode) & 0o007 & ~allowed:
            open_paths.append(f"{stat.filemode(mode)} {name}")
    return open_paths


def test_cloud_files_are_closed_to_other_users(in_memory: Live) -> None:
    assert find_open_paths(in_memory.home) == []
    names = {path.name for path in walk_paths(in_memory.home)}
    assert {
        "agent.db",
        "kilonova.db",
        "identity.db",
        "images.db",
        "api.log",
        "supervise.log",
        "rabbitmq.conf",
    } <= names


@pytest.mark.slice("guests")
def test_cloud_files_with_guests_are_closed_to_other_users(cloud: Live) -> None:
    assert find_open_paths(cloud.home) == []
    for state in cloud.home.glob("network-host*"):
        folder = Names.of(state).runtime
        for path in walk_paths(folder) if folder.exists() else ():
            # dnsmasq reads these files after it has given up root. They contain addresses and names
            # of ports, and no secrets.
            assert path.lstat().st_mode & 0o002 == 0, path


@pytest.mark.slice("guests")
def test_guest_processes_run_without_root_and_capabilities(cloud: Live) -> None:
    guests = [
        line.split(":")[0]
        for line in cloud.processes()
        if "qemu-system" in line and " -name " in line
    ]
    assert guests
    for pid in guests:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        fields = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
        assert "0" not in fields["Uid"].split() + fields["Gid"].split()
        assert (int(fields["CapEff"], 16), fields["Seccomp"]) == (0, "2")
