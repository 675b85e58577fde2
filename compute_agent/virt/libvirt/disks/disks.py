# SPDX-License-Identifier: Apache-2.0
"""The disks of a server: a qcow2 overlay on its image.

Called by ``guests``, ``cold_migration``, ``incoming_migration``, ``snapshots`` and ``local_disks``,
whose disks stand on nothing. The server's folder holds a hard link to the cached image, named by
its content (``backing_files``), and the overlay ``disk`` on it, whose header names that link. What
is made is ``disk.part``, which is renamed when it is whole; ``qemu_img`` makes it. Must stay true:
a file named ``disk`` is complete, and only a rebuild makes it again; what lies under it is what its
header says, never what a request says.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from common.domain.command_progress import CommandPhase
from compute_agent.sandbox import client
from compute_agent.transfer import sparse
from compute_agent.verb_context import Cancelled, VerbContext, VerbFailed
from compute_agent.virt.libvirt.disks import backing_files, inspection, qcow2, qemu_img
from compute_agent.virt.libvirt.disks.images import GIBIBYTE, CachedImage
from compute_agent.virt.libvirt.xml.domain_xml import Disk

LIMITS = ("prlimit", "--as=2147483648", "--cpu=60", "setpriv", "--pdeathsig", "KILL", "--")
PROGRAM_TIMEOUT_SECONDS = 120
#: The server's own disk, the first of its disks.
ROOT_DISK = "disk"
#: The end of a file's name as long as it is made.
PART = ".part"


def make(folder: Path, image: CachedImage | None, root_gb: int, name: str = ROOT_DISK) -> Disk:
    """The server's disk ``name`` of ``root_gb`` GiB (0: as large as the image), made unless it
    exists.

    VerbFailed (another host may do) when it cannot be written, or when one is there that was made
    of something else.
    """
    made = planned(folder, image, name)
    if not made.path.exists():
        prepare(made, image, root_gb)
        adopt(made)
        return made
    there = existing(folder, name)
    if there != made:
        raise VerbFailed(
            "The host has another disk of the server already.",
            retryable=True,
            details=f"{there.path} stands on {there.base}; it is not removed, see what it holds",
        )
    return there


def planned(folder: Path, image: CachedImage | None, name: str = ROOT_DISK) -> Disk:
    """The disk of that name as it is when it is made of this image; None: one without a base."""
    if image is None:
        return Disk(folder / name)
    return Disk(folder / name, backing_files.named(folder / image.path.name, name), image.format)


def existing(folder: Path, name: str = ROOT_DISK) -> Disk:
    """The disk of that name with its base, as its header says. VerbFailed when its files are not
    here, or when the header names another file."""
    path = folder / name
    if not path.exists():
        raise VerbFailed("The server's files are not on this host's storage.", details=f"no {path}")
    known = _inspected(path)
    base = folder / Path(known.backing).name if known.backing else None
    if base and not base.exists():
        raise VerbFailed("The server's files are not on this host's storage.", details=f"no {base}")
    return Disk(path, base, known.backing_format or "qcow2")


def verify(disk: Disk, context: VerbContext) -> None:
    """VerbFailed unless the disk stands on this base by its own header, and the base holds what its
    name says."""
    with contextlib.suppress(FileNotFoundError):
        client.take_back(disk.path)
    found = existing(disk.path.parent, disk.path.name)
    if found != disk:
        raise VerbFailed(
            "What lies under the server's disk is not what the disk was made on; the server is not "
            "started.",
            details=f"{disk.path} stands on {found.base} ({found.base_format}), not on "
            f"{disk.base} ({disk.base_format}); rebuild the server, or define its "
            "domain as the disk says",
        )
    if disk.base:
        backing_files.verify(disk.base, context)


def prepare(disk: Disk, image: CachedImage | None, root_gb: int) -> None:
    """Make the disk and its base aside, as ``.part``; what has their names stays. Repeatable."""
    size = root_gb * GIBIBYTE or (image.virtual_size if image else 0)
    if size == 0:
        raise VerbFailed("A server without an image needs a flavor with a root disk.")
    _link(disk, image)
    _create(disk.path, disk.base, disk.base_format, size)


def take_in(disk: Disk, image: CachedImage | None, root_gb: int) -> None:
    """What another host sent, aside as ``.part``, becomes a disk over our own base, of at least
    ``root_gb`` GiB. Its header is inspected before any program opens it: VerbFailed when that says
    more than it should. Repeatable."""
    _link(disk, image)
    part = aside(disk.path)
    known = _inspected(part)
    inspection.require_sound(part)
    if Path(known.backing).name != (disk.base.name if disk.base else "") or (
        disk.base and known.backing_format != disk.base_format
    ):
        raise VerbFailed(
            "The server's disk is not one that this host may open.",
            details=f"{part} stands on {known.backing!r} ({known.backing_format}), not on {disk.base} "
            f"({disk.base_format}); see what wrote it",
        )
    if disk.base and known.backing != str(disk.base):
        qemu_img.rebase(part, disk.base, disk.base_format)
    _grow(Disk(part, disk.base, disk.base_format), known, root_gb)
    _sync(part)


def require_space(folder: Path, count: int) -> None:
    """VerbFailed unless the file system that has (or will have) the folder has so many bytes
    free."""
    free = shutil.disk_usage(folder if folder.exists() else folder.parent).free
    if free < count:
        raise VerbFailed(
            f"The host has {free / GIBIBYTE:.1f} GiB of disk free and the server's files may take "
            f"{count / GIBIBYTE:.1f} GiB.",
            retryable=True,
            details=f"free space in {folder.parent}",
        )


def keep(disk: Disk, name: str, context: VerbContext) -> None:
    """Keep the disk, which is not in use, as it is, under a name; what has that name already stays.
    Of other names nothing is kept."""
    kept = _kept(disk, name)
    for path in _all_kept(disk):
        if path != kept:
            path.unlink()
    if not kept.exists():
        _keep(disk, kept, context)


def _keep(disk: Disk, kept: Path, context: VerbContext) -> None:
    part = aside(kept)
    size, count = disk.path.stat().st_size, sparse.data_bytes(disk.path)
    require_space(disk.path.parent, count)

    def pieces() -> Iterator[tuple[int, bytes]]:
        copied = 0
        for offset, data in sparse.pieces(disk.path, size):
            if context.cancelled():
                raise Cancelled
            yield offset, data
            copied += len(data)
            context.phase(CommandPhase.COPYING_DISK, 100 * copied // count)

    try:
        for _ in sparse.proved(part, sparse.write(part, size, pieces())):
            if context.cancelled():
                raise Cancelled
        os.replace(part, kept)
    except (OSError, ValueError) as error:
        raise VerbFailed(
            "The host could not keep the server's disk as it was.",
            retryable=True,
            details=f"{kept}: {error}",
        ) from error
    finally:
        part.unlink(missing_ok=True)
    _sync(kept.parent)


def take_back(disk: Disk, name: str) -> None:
    """The disk, which is not in use, is what was kept under this name; with nothing kept it
    stays."""
    if _kept(disk, name).exists():
        os.replace(_kept(disk, name), disk.path)
        _sync(disk.path.parent)
    forget(disk)


def forget(disk: Disk) -> None:
    """Keep nothing."""
    for path in _all_kept(disk):
        path.unlink()


def _kept(disk: Disk, name: str) -> Path:
    return disk.path.with_name(f"{disk.path.name}.{name}.kept")


def _all_kept(disk: Disk) -> list[Path]:
    return list(disk.path.parent.glob(f"{disk.path.name}.*.kept*"))


def grow(disk: Disk, root_gb: int) -> None:
    """The disk, which is not in use, has at least ``root_gb`` GiB; it never shrinks. Repeatable."""
    _grow(disk, _inspected(disk.path), root_gb)


def _grow(disk: Disk, known: qcow2.Qcow2Header, root_gb: int) -> None:
    if known.virtual_size < root_gb * GIBIBYTE:
        qemu_img.resize(disk, root_gb * GIBIBYTE)


def _inspected(path: Path) -> qcow2.Qcow2Header:
    """The header of the disk in this file: it refers to a base as the server's disk has it on any
    host, or to nothing."""
    try:
        known = qcow2.read(path)
        # Where the folders of servers are is each host's own; what is below is not.
        base, name = Path(known.backing), path.name.removesuffix(PART)
        if known.backing and not (
            known.backing == str(base)
            and base.parent.name == path.parent.name
            and backing_files.belongs(base, name)
        ):
            raise ValueError(f"it stands on {known.backing!r}")
        content = backing_files.image_of(base.name)
        if content and known.backing_format != content.disk_format:
            raise ValueError(f"its base is said to be {known.backing_format!r}")
    except ValueError as problem:
        raise VerbFailed(
            "The server's disk is not one that this host may open.",
            details=f"{path}: {problem}; see what wrote it",
        ) from problem
    return known


def _link(disk: Disk, image: CachedImage | None) -> None:
    """The base has its name here, which no other content can have."""
    if image is None or disk.base is None:
        return
    if disk.base.exists() and (
        backing_files.is_verified(disk.base) or disk.base.samefile(image.path)
    ):
        return
    part = aside(disk.base)
    part.unlink(missing_ok=True)
    try:
        # The second name also tells the cache that the image is used.
        os.link(image.path, part)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        # the servers' folders are on another file system, which hosts may share
        _copy(image.path, part)
        backing_files.mark_verified(part)
    os.replace(part, disk.base)
    # Renaming onto another name of the same file leaves both, by POSIX.
    part.unlink(missing_ok=True)


def adopt(disk: Disk) -> None:
    """Give what ``prepare`` made its name, in place of what had it; what lay under that one
    goes."""
    os.replace(aside(disk.path), disk.path)
    _sync(disk.path.parent)
    _drop_bases(disk.path, disk.base)


def abandon(folder: Path, name: str = ROOT_DISK) -> None:
    """Remove what ``prepare`` made and nobody adopted."""
    path = folder / name
    aside(path).unlink(missing_ok=True)
    try:
        keep = folder / Path(qcow2.read(path).backing).name
    except FileNotFoundError:
        keep = None
    except ValueError:
        return  # not a disk: it is not known what belongs to it
    _drop_bases(path, keep)


def discard(folder: Path, name: str) -> None:
    """Remove this disk, its base, and what was being made of them."""
    aside(folder / name).unlink(missing_ok=True)
    (folder / name).unlink(missing_ok=True)
    _drop_bases(folder / name, None)


def _drop_bases(path: Path, keep: Path | None) -> None:
    """Remove the bases of this disk but for one."""
    for found in path.parent.iterdir() if path.parent.exists() else ():
        if found != keep and backing_files.belongs(
            found.with_name(found.name.removesuffix(PART)), path.name
        ):
            found.unlink()


def blank(disk: Disk, size: int) -> None:
    """Make a disk of so many bytes aside that stands on nothing. Repeatable."""
    _create(disk.path, None, disk.base_format, size)


def fill(disk: Disk, raw: Path) -> None:
    """Make a disk aside that shows the bytes of a raw file of ours. Repeatable."""
    part = aside(disk.path)
    qemu_img.fill(part, raw)
    _sync(part)


def size(disk: Disk) -> int:
    """How many bytes the disk shows."""
    return _inspected(disk.path).virtual_size


def convert(disk: Disk, target: Path, context: VerbContext) -> None:
    """Write all that the disk shows into ``target``, a qcow2 that refers to nothing. The disk must
    not be in use."""
    try:
        shown = qcow2.read(disk.path).virtual_size  # what else the header says nobody believes
    except (OSError, ValueError) as problem:
        raise VerbFailed(
            "The host could not copy the disk.", details=f"{disk.path}: {problem}"
        ) from problem
    qemu_img.copy(disk, target, shown, context)


def _copy(source: Path, target: Path) -> None:
    try:
        shutil.copyfile(source, target)
        target.chmod(0o644)
        _sync(target)
    except OSError as error:
        raise VerbFailed(
            "The host could not store the image.", retryable=True, details=f"{target}: {error}"
        ) from error


def aside(path: Path) -> Path:
    """Where a file is made before it has its name."""
    return path.with_name(f"{path.name}{PART}")


def _create(disk: Path, base: Path | None, base_format: str, size: int) -> None:
    part = aside(disk)
    qemu_img.create(part, size, base, base_format)
    _sync(part)


def bounded(program: str, *arguments: str) -> None:
    """Run a program on files of ours, with limits on its memory and time. VerbFailed when it
    fails."""
    try:
        done = subprocess.run(
            [*LIMITS, program, *arguments],
            capture_output=True,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            timeout=PROGRAM_TIMEOUT_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise VerbFailed(
            "The host could not make the disk.", details=f"{program}: {error}", retryable=True
        ) from error
    if done.returncode != 0:
        raise VerbFailed(
            "The host could not make the disk.",
            retryable=True,
            details=(
                f"{program} {arguments[0]} ended with {done.returncode}: {done.stderr.strip()[:1000]}"
            ),
        )


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
