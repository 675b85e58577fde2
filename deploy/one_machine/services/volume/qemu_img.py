# SPDX-License-Identifier: Apache-2.0
"""Conversion of images with qemu-img, which only this module runs.

An image may be hostile. The bytes must have the format that the image service names. Images that
refer to other files, or are too large, are refused before qemu-img reads them. qemu-img always gets
the format, and runs with limits on memory and CPU time, in a clean environment.
"""

import os
import subprocess
from pathlib import Path

from oslo_utils.imageutils import format_inspector

from deploy.one_machine.services.volume.files import GIGABYTE, Check
from deploy.one_machine.services.volume.neighbours import ImageRefused

#: Format at the image service -> (the permitted formats of the bytes, qemu-img's name).
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
    """Check an image before qemu-img reads it.

    Args:
        path: The image.
        disk_format: The format at the image service.
        limit: The largest permitted size of the unpacked image in bytes.

    Raises:
        ImageRefused: The image has another format, is damaged, refers to other files or is unsafe
            otherwise, or is larger than ``limit``.
    """
    allowed, _ = READABLE.get(disk_format, ((), ""))
    try:
        detected = format_inspector.detect_file_format(str(path))
        if detected is None or str(detected) not in allowed:
            raise ImageRefused(
                f"the image's disk_format is {disk_format}, but its data are {detected}"
            )
        if str(detected) != "raw":
            detected.safety_check()
        size = path.stat().st_size if disk_format in ("raw", "iso") else detected.virtual_size
    except (format_inspector.ImageFormatError, format_inspector.SafetyCheckFailed) as error:
        raise ImageRefused(f"the image is damaged or unsafe: {error}") from error
    if size > limit:
        raise ImageRefused(f"the image has {size} bytes unpacked, but the volume only {limit}")


def unpack(source: Path, disk_format: str, target: Path, check: Check) -> None:
    """Convert an image that `inspect` has checked to a new raw file.

    The function `check` raises when the conversion should stop.

    Raises:
        ImageRefused: qemu-img fails, or exceeds its limits.
    """
    _convert(READABLE[disk_format][1], "raw", source, target, check)


def pack(source: Path, disk_format: str, target: Path, check: Check) -> None:
    """Convert a raw file to a new image file of this format.

    The function `check` raises when the conversion should stop.

    Raises:
        ImageRefused: qemu-img fails, or exceeds its limits.
    """
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
        # Otherwise each thread would reserve 64 MiB of the memory limit.
        "MALLOC_ARENA_MAX": "1",
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
            _, errors = process.communicate(timeout=POLL_SECONDS)
        except subprocess.TimeoutExpired:
            check()
            continue
        if process.returncode:
            raise ImageRefused(f"qemu-img failed: {errors.decode(errors='replace').strip()[:300]}")
        return
