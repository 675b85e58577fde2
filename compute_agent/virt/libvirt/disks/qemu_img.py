# SPDX-License-Identifier: Apache-2.0
"""The only door to qemu-img: each use of it, with the format of every file that it opens.

Called by ``disks`` and ``inspection``. It runs in a helper process (``compute_agent.sandbox``),
finds its files as open descriptors, and gets nothing else: no other file has a name that it was
told, and where its user is its own it could open none. Must stay true: no call leaves a format to
be guessed (tests/unit/compute_agent/test_qemu_img.py).
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
#: A cluster whose monitors do not answer is waited for much longer by librbd itself.
NETWORK_TIMEOUT_SECONDS = 30.0
MEBIBYTE = 1 << 20
#: A whole disk is copied at least as fast; slower storage needs larger limits on nothing else.
MIN_COPY_BYTES_PER_SECOND, MIN_CPU_BYTES_PER_SECOND = 4 * MEBIBYTE, 64 * MEBIBYTE


def create(target: Path, size: int, base: Path | None, base_format: str) -> None:
    """A new disk of so many bytes, over a base, which is not opened, or nothing."""
    backing = ["-u", "-b", str(base), "-F", base_format] if base else []
    _do(
        ["create", "-q", "-f", "qcow2", *backing, client.name(0), str(size)],
        {_empty(target): True},
        _written(size),
    )


def rebase(disk: Path, base: Path, base_format: str) -> None:
    """The disk says that it stands on this base; neither that one nor the one it named is
    opened."""
    _do(
        ["rebase", "-u", "-f", "qcow2", "-b", str(base), "-F", base_format, client.name(0)],
        {disk: True},
        disk.stat().st_size + MEBIBYTE,
    )


def resize(disk: Disk, size: int) -> None:
    """The disk, which is not in use, has so many bytes."""
    files = {disk.path: True, **({disk.base: False} if disk.base else {})}
    _do(
        ["resize", "-q", describe_chain(disk), str(size)],
        files,
        disk.path.stat().st_size + _written(size),
    )


def fill(target: Path, raw: Path) -> None:
    """A new disk that shows the bytes of a raw file."""
    size = raw.stat().st_size
    _do(
        ["convert", "-f", "raw", "-O", "qcow2", client.name(1), client.name(0)],
        {_empty(target): True, raw: False},
        _written(size),
        size,
    )


def copy(disk: Disk, target: Path, size: int, context: VerbContext) -> None:
    """A new disk that refers to nothing, with all that this one shows, which are ``size`` bytes and
    which nobody writes. Tells how far it is; VerbFailed, Cancelled."""

    def on_output(output: bytes) -> None:
        if percent := PERCENT.findall(output):
            context.phase(CommandPhase.COPYING_DISK, int(percent[-1]))

    files = {disk.path: False, **({disk.base: False} if disk.base else {})}
    try:
        limits = client.helpers().limits(
            cpu=size // MIN_CPU_BYTES_PER_SECOND,
            seconds=PROGRAM_TIMEOUT_SECONDS + size / MIN_COPY_BYTES_PER_SECOND,
            file=_written(size),
        )
        ended = client.helpers().execute(
            [
                _program(),
                "convert",
                "-p",
                "-O",
                "qcow2",
                describe_chain(disk),
                client.name(len(files)),
            ],
            {**files, _empty(target): True},
            limits,
            context,
            on_output,
        )
    except OSError as error:
        raise VerbFailed(
            "The host could not copy the disk.", details=f"{target}: {error}"
        ) from error
    if ended.status != 0:
        raise VerbFailed("The host could not copy the disk.", details=f"qemu-img {ended.reason}")


def opens(path: Path, kind: str, context: VerbContext) -> client.HelperResult:
    """How an attempt to open a file of this format ends; nothing that it may refer to is opened.
    Raises OSError."""
    return client.helpers().execute(
        [_program(), "info", "--output=json", "-f", kind, client.name(0)],
        {path: False},
        client.helpers().limits(seconds=PROGRAM_TIMEOUT_SECONDS),
        context,
    )


def size_of_rbd(source: VolumeSource, key: bytes) -> int:
    """Bytes of an image of a Ceph cluster, which ``key`` opens. No helper does it: what is told of
    is a number that librbd gives. Raises OSError."""
    pool, _, image = source.export.partition("/")
    about = {"driver": "rbd", "pool": pool}
    if "/" in image:
        about["namespace"], _, image = image.partition("/")
    about["image"] = image
    servers = [f"{source.host}:{source.port}", *source.beside]
    for number, one in enumerate(servers):
        about[f"server.{number}.host"], _, about[f"server.{number}.port"] = one.rpartition(":")
    secret: list[str] = []
    read, write = os.pipe()
    try:
        os.write(write, key)
        os.close(write)
        if source.secret:
            secret = ["--object", f"secret,id=key,file=/proc/self/fd/{read}"]
            about |= {"user": source.user, "key-secret": "key", "auth-client-required.0": "cephx"}
        options = ",".join(f"file.{name}={value}" for name, value in about.items())
        ended = subprocess.run(
            [_program(), "info", "--output=json", *secret, "--image-opts", f"driver=raw,{options}"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=NETWORK_TIMEOUT_SECONDS,
            pass_fds=[read],
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise OSError(f"qemu-img did not end within {error.timeout:.0f} seconds") from error
    finally:
        os.close(read)
    if ended.returncode != 0:
        raise OSError(f"qemu-img: {ended.stderr.decode(errors='replace').strip()[-500:]}")
    return int(json.loads(ended.stdout)["virtual-size"])


def _do(arguments: list[str], files: Mapping[Path, bool], file: int, work: int = 0) -> None:
    """VerbFailed when it fails. ``file``: how long what it writes may become; ``work``: bytes that
    it reads."""
    helpers = client.helpers()
    try:
        ended = helpers.execute(
            [_program(), *arguments],
            files,
            helpers.limits(
                cpu=work // MIN_CPU_BYTES_PER_SECOND,
                seconds=PROGRAM_TIMEOUT_SECONDS + work / MIN_COPY_BYTES_PER_SECOND,
                file=file,
            ),
        )
    except OSError as error:
        raise VerbFailed(
            "The host could not make the disk.", details=f"qemu-img: {error}", retryable=True
        ) from error
    if ended.status != 0:
        raise VerbFailed(
            "The host could not make the disk.",
            retryable=True,
            details=f"qemu-img {arguments[0]} {ended.reason}",
        )


def _program() -> str:
    found = shutil.which("qemu-img")
    if found is None:
        raise FileNotFoundError("there is no qemu-img; install qemu-utils")
    return os.path.realpath(found)  # its helper may be unable to follow links in private folders


def _written(size: int) -> int:
    """How long a qcow2 file for so many bytes may become, its tables included."""
    return size + size // 64 + 64 * MEBIBYTE


def _empty(path: Path) -> Path:
    """A new file that only its owner may open, for a helper to fill."""
    path.unlink(missing_ok=True)
    path.touch(0o600, exist_ok=False)
    return path


def describe_chain(disk: Disk) -> str:
    """The disk as its helper finds it, first its own file, then its base, in QEMU's words: every
    file with its format, so that no header decides what is opened."""
    base = _layer(1, disk.base_format, None) if disk.base else None
    return f"json:{json.dumps(_layer(0, 'qcow2', base))}"


def _layer(number: int, kind: str, backing: dict[str, object] | None) -> dict[str, object]:
    """A file of a chain; one of a kind that can have a backing file is told when it has none."""
    layer: dict[str, object] = {
        "driver": kind,
        "file": {"driver": "file", "filename": client.name(number)},
    }
    return layer if kind == "raw" else {**layer, "backing": backing}
