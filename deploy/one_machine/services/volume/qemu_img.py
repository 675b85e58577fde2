# SPDX-License-Identifier: Apache-2.0
"""Images from outside, and images for outside: the one door to qemu-img.

An image may be hostile. Its format is what its bytes are, and has to be the one that the image
service names; one that refers to other files, or is of another size than fits, is refused before
qemu-img sees it. qemu-img is always told the format, and runs with bounds of memory and processor
time, in an environment of its own.
"""

import os
import subprocess
from pathlib import Path

from oslo_utils.imageutils import format_inspector

from deploy.one_machine.services.volume.files import GIGABYTE, Check
from deploy.one_machine.services.volume.neighbours import ImageRefused

#: Name at the image service -> what the bytes may be, and qemu-img's name.
READABLE = {
    "raw": (("raw", "gpt", "iso"), "raw"),
    "iso": (("iso", "raw", "gpt"), "raw"),
    "qcow2": (("qcow2",), "qcow2"),
    "vmdk": (("vmdk",), "vmdk"),
    "vdi": (("vdi",), "vdi"),
    "vhd": (("vhd",), "vpc"),
    "vhdx": (("vhdx",), "vhdx"),
}
WRITABLE = {"raw": "raw", "qcow2": "qcow2", "vmdk": "vmdk", "vdi": "vdi", "vhd": "vpc"}
WRITABLE |= {"vhdx": "vhdx"}
MEMORY_BYTES, POLL_SECONDS = GIGABYTE, 0.2


def inspect(path: Path, disk_format: str, limit: int) -> None:
    """Raises ImageRefused for an image that is not what it says, refers to other files, or has more
    than `limit` bytes when it is unpacked."""
    allowed, _ = READABLE.get(disk_format, ((), ""))
    try:
        found = format_inspector.detect_file_format(str(path))
        if found is None or str(found) not in allowed:
            raise ImageRefused(f"the image says {disk_format} and is {found}")
        if str(found) != "raw":
            found.safety_check()
        size = path.stat().st_size if disk_format in ("raw", "iso") else found.virtual_size
    except (format_inspector.ImageFormatError, format_inspector.SafetyCheckFailed) as error:
        raise ImageRefused(f"the image is not sound: {error}") from error
    if size > limit:
        raise ImageRefused(f"the image has {size} bytes unpacked, the volume {limit}")


def unpack(source: Path, disk_format: str, target: Path, check: Check) -> None:
    """Write an inspected image as a raw file."""
    _convert(READABLE[disk_format][1], "raw", source, target, check)


def pack(source: Path, disk_format: str, target: Path, check: Check) -> None:
    """Write a raw file as an image."""
    _convert("raw", WRITABLE[disk_format], source, target, check)


def _convert(old: str, new: str, source: Path, target: Path, check: Check) -> None:
    seconds = 120 + 60 * (source.stat().st_size // GIGABYTE)
    command = [
        "prlimit",
        f"--as={MEMORY_BYTES}",
        f"--cpu={seconds}",
        "--core=0",
        "qemu-img",
        "convert",
        *("-f", old, "-O", new),
        str(source),
        str(target),
    ]
    os.close(os.open(target, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    environment = {
        "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
        "LC_ALL": "C.UTF-8",
        "MALLOC_ARENA_MAX": "1",  # else each thread keeps 64 MiB of its bound to itself
    }
    with subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    ) as process:
        try:
            _await(process, check)
        except BaseException:
            process.kill()
            raise
    with target.open("rb") as file:
        os.fsync(file.fileno())


def _await(process: subprocess.Popen[bytes], check: Check) -> None:
    while True:
        try:
            _, said = process.communicate(timeout=POLL_SECONDS)
        except subprocess.TimeoutExpired:
            check()
            continue
        if process.returncode:
            raise ImageRefused(f"qemu-img: {said.decode(errors='replace').strip()[:300]}")
        return
