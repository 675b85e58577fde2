# SPDX-License-Identifier: Apache-2.0
"""Disks beside a root disk as tests look at them from outside: which there are, how they begin,
what was written."""

from __future__ import annotations

import json
import subprocess
import tempfile
from pathlib import Path

from compute_agent.virt.libvirt.disks.local_disks import NAME

#: Where a test writes: behind what every file system has at its beginning.
CANARY_AT, SECTOR = 48 << 20, 512


def found(folder: Path) -> dict[str, tuple[int, str]]:
    """Name -> MiB and file system of each in a server's folder; "" for one that has none."""
    return {
        path.name: (_mebibytes(path), seen(path)["TYPE"])
        for path in sorted(folder.iterdir())
        if NAME.fullmatch(path.name)
    }


def seen(disk: Path) -> dict[str, str]:
    """TYPE and LABEL, as blkid sees them."""
    with tempfile.NamedTemporaryFile(dir=disk.parent) as raw:
        subprocess.run(
            ["qemu-img", "convert", "-f", "qcow2", "-O", "raw", disk, raw.name], check=True
        )
        told = subprocess.run(
            ["blkid", "-p", "-o", "export", raw.name], check=False, capture_output=True, text=True
        )
    pairs = dict(line.partition("=")[::2] for line in told.stdout.splitlines())
    return {name: pairs.get(name, "") for name in ("TYPE", "LABEL")}


def write(disk: Path) -> None:
    """A canary onto a disk that nobody uses."""
    subprocess.run(
        ["qemu-io", "-f", "qcow2", "-c", f"write -P {ord('c')} {CANARY_AT} {SECTOR}", disk],
        check=True,
        capture_output=True,
    )


def is_written(disk: Path) -> bool:
    told = subprocess.run(
        ["qemu-io", "-r", "-f", "qcow2", "-c", f"read -P {ord('c')} {CANARY_AT} 1", disk],
        capture_output=True,
        text=True,
        check=False,
    )
    return told.returncode == 0 and "verification failed" not in told.stdout


def _mebibytes(disk: Path) -> int:
    told = subprocess.run(
        ["qemu-img", "info", "--force-share", "--output=json", disk],
        check=True,
        capture_output=True,
    )
    return int(json.loads(told.stdout)["virtual-size"]) >> 20
