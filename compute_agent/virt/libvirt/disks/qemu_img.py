# SPDX-License-Identifier: Apache-2.0
"""Runs qemu-img. Every call gives the format of every file that qemu-img opens.

Called by ``disks`` and ``inspection``. No other module runs qemu-img. Except for Ceph images,
qemu-img runs in a helper process (``compute_agent.sandbox``), gets open descriptors of the files,
and can open no other file.

Invariant: no call lets qemu-img detect a format (tests/unit/compute_agent/test_qemu_img.py).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from common.domain.command_progress import CommandPhase
from compute_agent.sandbox import client
from compute_agent.verb_context import VerbContext, VerbFailed
from compute_agent.virt.libvirt.xml.domain_xml import Disk
from compute_agent.virt.libvirt.xml.volume_xml import VolumeSource

PERCENT = re.compile(rb"\((\d+)\.\d+/100%\)")
PROGRAM_TIMEOUT_SECONDS = 120.0
#: librbd itself would wait much longer for monitors that do not answer.
NETWORK_TIMEOUT_SECONDS = 30.0
MEBIBYTE = 1 << 20
#: Minimum rates for the copy of a whole disk. They only determine time limits.
MIN_COPY_BYTES_PER_SECOND, MIN_CPU_BYTES_PER_SECOND = 4 * MEBIBYTE, 64 * MEBIBYTE


def create(target: Path, size: int, base: Path | None, base_format: str) -> None:
    """Make a new qcow2 disk of ``size`` bytes, in place of an existing file.

    The backing file, if any, is not opened.

    Raises:
        VerbFailed: qemu-img failed.
    """
    backing = ["-u", "-b", str(base), "-F", base_format] if base else []
    _run(
        ["create", "-q", "-f", "qcow2", *backing, client.name(0), str(size)],
        {_create_empty(target): True},
        _max_length(size),
    )


def rebase(disk: Path, base: Path, base_format: str) -> None:
    """Change the backing file in the disk's header. No backing file is opened.

    Raises:
        VerbFailed: qemu-img failed.
    """
    _run(
        ["rebase", "-u", "-f", "qcow2", "-b", str(base), "-F", base_format, client.name(0)],
        {disk: True},
        disk.stat().st_size + MEBIBYTE,
    )


def resize(disk: Disk, size: int) -> None:
    """Change the virtual size of the disk, which must not be in use, to ``size`` bytes.

    Raises:
        VerbFailed: qemu-img failed.
    """
    files = {disk.path: True, **({disk.base: False} if disk.base else {})}
    _run(
        ["resize", "-q", describe_chain(disk), str(size)],
        files,
        disk.path.stat().st_size + _max_length(size),
    )


def fill(target: Path, raw: Path) -> None:
    """Make a new qcow2 disk with the content of a raw file, in place of an existing file.

    Raises:
        VerbFailed: qemu-img failed.
    """
    size = raw.stat().st_size
    _run(
        ["convert", "-f", "raw", "-O", "qcow2", client.name(1), client.name(0)],
        {_create_empty(target): True, raw: False},
        _max_length(size),
        size,
    )


def copy(disk: Disk, target: Path, size: int, context: VerbContext) -> None:
    """Copy the content of a disk to a new disk without a backing file, and report progress.

    Args:
        disk: The disk, which must not be in use.
        target: Path of the new qcow2 file. An existing file is replaced.
        size: Virtual size of the disk in bytes.
        context: Context of the verb.

    Raises:
        VerbFailed: qemu-img failed.
        Cancelled: The verb was cancelled during the copy.
    """

    def on_output(output: bytes) -> None:
        if percent := PERCENT.findall(output):
            context.phase(CommandPhase.COPYING_DISK, int(percent[-1]))

    files = {disk.path: False, **({disk.base: False} if disk.base else {})}
    try:
        limits = client.helpers().limits(
            cpu=size // MIN_CPU_BYTES_PER_SECOND,
            seconds=PROGRAM_TIMEOUT_SECONDS + size / MIN_COPY_BYTES_PER_SECOND,
            file=_max_length(size),
        )
        result = client.helpers().execute(
            [
                _find_program(),
                "convert",
                "-p",
                "-O",
                "qcow2",
                describe_chain(disk),
                client.name(len(files)),
            ],
            {**files, _create_empty(target): True},
            limits,
            context,
            on_output,
        )
    except OSError as error:
        raise VerbFailed(
            "The host could not copy the server's disk.", details=f"{target}: {error}"
        ) from error
    if result.status != 0:
        raise VerbFailed(
            "The host could not copy the server's disk.", details=f"qemu-img {result.reason}"
        )


def opens(path: Path, kind: str, context: VerbContext) -> client.HelperResult:
    """Let qemu-img open a file of this format without the backing file, and return the result.

    ``status`` of the result is 0 if qemu-img can open the file.

    Raises:
        OSError: qemu-img is not installed or cannot be run, or the file cannot be opened.
        Cancelled: The verb was cancelled.
    """
    return client.helpers().execute(
        [_find_program(), "info", "--output=json", "-f", kind, client.name(0)],
        {path: False},
        client.helpers().limits(seconds=PROGRAM_TIMEOUT_SECONDS),
        context,
    )


def size_of_rbd(source: VolumeSource, key: bytes) -> int:
    """Return the size of a Ceph image in bytes.

    No helper is used, because qemu-img parses no file here and only needs the cluster's answer.

    Args:
        source: Monitors, pool and name of the image.
        key: The secret of the cluster's user, or b"" for a cluster without authentication.

    Raises:
        OSError: qemu-img failed, or the cluster does not answer.
    """
    pool, _, image = source.export.partition("/")
    properties = {"driver": "rbd", "pool": pool}
    if "/" in image:
        properties["namespace"], _, image = image.partition("/")
    properties["image"] = image
    servers = [f"{source.host}:{source.port}", *source.beside]
    for number, server in enumerate(servers):
        properties[f"server.{number}.host"], _, properties[f"server.{number}.port"] = (
            server.rpartition(":")
        )
    secret: list[str] = []
    read, write = os.pipe()
    try:
        with os.fdopen(write, "wb") as pipe:
            pipe.write(key)
        if source.secret:
            secret = ["--object", f"secret,id=key,file=/proc/self/fd/{read}"]
            properties |= {
                "user": source.user,
                "key-secret": "key",
                "auth-client-required.0": "cephx",
            }
        options = ",".join(f"file.{name}={value}" for name, value in properties.items())
        result = subprocess.run(
            [
                _find_program(),
                "info",
                "--output=json",
                *secret,
                "--image-opts",
                f"driver=raw,{options}",
            ],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=NETWORK_TIMEOUT_SECONDS,
            pass_fds=[read],
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise OSError(
            f"the Ceph cluster did not return the size of image {source.export} within {error.timeout:.0f} seconds; "
            "check that this host reaches the monitors"
        ) from error
    finally:
        os.close(read)
    if result.returncode != 0:
        raise OSError(f"qemu-img failed: {result.stderr.decode(errors='replace').strip()[-500:]}")
    return int(json.loads(result.stdout)["virtual-size"])


def _run(arguments: list[str], files: Mapping[Path, bool], file: int, work: int = 0) -> None:
    """Run qemu-img in a helper process.

    Args:
        arguments: Arguments of qemu-img.
        files: Files that the helper may open: path -> True to write, False to read.
        file: Limit of the written file in bytes.
        work: Bytes to read, which determine the time limits.

    Raises:
        VerbFailed: qemu-img failed or is not installed.
    """
    helpers = client.helpers()
    try:
        result = helpers.execute(
            [_find_program(), *arguments],
            files,
            helpers.limits(
                cpu=work // MIN_CPU_BYTES_PER_SECOND,
                seconds=PROGRAM_TIMEOUT_SECONDS + work / MIN_COPY_BYTES_PER_SECOND,
                file=file,
            ),
        )
    except OSError as error:
        raise VerbFailed(
            "The host could not make a disk of the server.",
            details=f"qemu-img: {error}",
            retryable=True,
        ) from error
    if result.status != 0:
        raise VerbFailed(
            "The host could not make a disk of the server.",
            retryable=True,
            details=f"qemu-img {arguments[0]} {result.reason}",
        )


def _find_program() -> str:
    path = shutil.which("qemu-img")
    if path is None:
        raise FileNotFoundError("this host has no qemu-img; install qemu-utils")
    # The helper may be unable to follow links in private folders.
    return os.path.realpath(path)


def _max_length(size: int) -> int:
    """Return the size limit of a qcow2 file, tables included, with ``size`` bytes of content."""
    return size + size // 64 + 64 * MEBIBYTE


def _create_empty(path: Path) -> Path:
    """Make an empty file that only the owner may open, in place of an old file. Return the path.

    A helper process then writes the content.
    """
    path.unlink(missing_ok=True)
    path.touch(0o600, exist_ok=False)
    return path


def describe_chain(disk: Disk) -> str:
    """Return the disk and the backing file as a JSON filename of QEMU, with descriptors as paths.

    Every file has a format, so that no header decides which files QEMU opens.
    """
    base = _describe_layer(1, disk.base_format, None) if disk.base else None
    return f"json:{json.dumps(_describe_layer(0, 'qcow2', base))}"


def _describe_layer(number: int, kind: str, backing: dict[str, object] | None) -> dict[str, object]:
    """Return QEMU's options for the file with descriptor ``number`` and the format ``kind``.

    ``backing`` has the options of the backing file. With None, QEMU ignores a backing file that the
    header names.
    """
    layer: dict[str, object] = {
        "driver": kind,
        "file": {"driver": "file", "filename": client.name(number)},
    }
    return layer if kind == "raw" else {**layer, "backing": backing}
