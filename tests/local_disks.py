# SPDX-License-Identifier: Apache-2.0
"""Helpers that inspect ephemeral and swap disks from outside: size, file system and test data."""

from __future__ import annotations

import json
import subprocess
import tempfile
from pathlib import Path

from compute_agent.virt.libvirt.disks.local_disks import NAME

#: Offset of the test data, behind the metadata at the beginning of each file system.
CANARY_AT, SECTOR = 48 << 20, 512


def read_local_disks(folder: Path) -> dict[str, tuple[int, str]]:
    """Return name -> (MiB, file system or "") of the local disks in a server's folder."""
    return {
        path.name: (_mebibytes(path), read_file_system(path)["TYPE"])
        for path in sorted(folder.iterdir())
        if NAME.fullmatch(path.name)
    }


def read_file_system(disk: Path) -> dict[str, str]:
    """Return TYPE and LABEL of the disk's file system according to blkid, or "" for each."""
    with tempfile.NamedTemporaryFile(dir=disk.parent) as raw:
        subprocess.run(
            ["qemu-img", "convert", "-f", "qcow2", "-O", "raw", disk, raw.name], check=True
        )
        process = subprocess.run(
            ["blkid", "-p", "-o", "export", raw.name], check=False, capture_output=True, text=True
        )
    pairs = dict(line.partition("=")[::2] for line in process.stdout.splitlines())
    return {name: pairs.get(name, "") for name in ("TYPE", "LABEL")}


def write(disk: Path) -> None:
    """Write test data to a disk that no process uses."""
    subprocess.run(
        ["qemu-io", "-f", "qcow2", "-c", f"write -P {ord('c')} {CANARY_AT} {SECTOR}", disk],
        check=True,
        capture_output=True,
    )


def is_written(disk: Path) -> bool:
    process = subprocess.run(
        ["qemu-io", "-r", "-f", "qcow2", "-c", f"read -P {ord('c')} {CANARY_AT} 1", disk],
        capture_output=True,
        text=True,
        check=False,
    )
    return process.returncode == 0 and "verification failed" not in process.stdout


def _mebibytes(disk: Path) -> int:
    process = subprocess.run(
        ["qemu-img", "info", "--force-share", "--output=json", disk],
        check=True,
        capture_output=True,
    )
    return int(json.loads(process.stdout)["virtual-size"]) >> 20
