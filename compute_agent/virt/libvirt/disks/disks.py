# SPDX-License-Identifier: Apache-2.0
"""The disks of a server. The root disk is a qcow2 overlay on the server's image.

Called by ``guests``, ``cold_migration``, ``incoming_migration``, ``snapshots`` and ``local_disks``.
The disks of ``local_disks`` have no backing file.

The server's folder contains a hard link to the cached image, named by its content (see
``backing_files``), and the overlay ``disk``. The overlay's header names the link. A new disk is
made as ``disk.part`` by ``qemu_img`` and renamed when complete. The name with ``.part`` is called
the temporary name.

Invariant: a file named ``disk`` is complete, and only a rebuild, the revert of a resize or a move
replaces this file. The header names the backing file, and requests cannot change that.
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
#: The name of the root disk.
ROOT_DISK = "disk"
#: The suffix of a file that is not complete.
PART = ".part"


def make(folder: Path, image: CachedImage | None, root_gb: int, name: str = ROOT_DISK) -> Disk:
    """Make the server's disk ``name`` if missing, and return the new or existing disk.

    Args:
        folder: Folder of the server.
        image: The image below the disk, or None for a disk without a backing file.
        root_gb: Size in GiB. 0: the image's size.
        name: Name of the disk.

    Raises:
        VerbFailed: The disk cannot be written, has neither an image nor a size, or exists with a
            malformed header or another backing file.
        OSError: The backing file cannot be linked.
    """
    disk = plan(folder, image, name)
    if not disk.path.exists():
        prepare(disk, image, root_gb)
        adopt(disk)
        return disk
    existing_disk = existing(folder, name)
    if existing_disk != disk:
        raise VerbFailed(
            "This host already has another disk of the server.",
            retryable=True,
            details=f"{existing_disk.path} has the backing file {existing_disk.base}, not {disk.base}; the disk is "
            "kept, check its content",
        )
    return existing_disk


def plan(folder: Path, image: CachedImage | None, name: str = ROOT_DISK) -> Disk:
    """Return path and backing file of the disk that ``prepare`` would make from the image.

    No file is accessed.
    """
    if image is None:
        return Disk(folder / name)
    return Disk(folder / name, backing_files.path_for(folder / image.path.name, name), image.format)


def existing(folder: Path, name: str = ROOT_DISK) -> Disk:
    """Return the disk of this name in a server's folder, with the backing file from its header.

    Raises:
        VerbFailed: The disk or its backing file does not exist, or the header is malformed or names
            a file that cannot be the disk's backing file.
    """
    path = folder / name
    if not path.exists():
        raise VerbFailed(
            "The server's files are not on this host's storage.", details=f"no file {path}"
        )
    header = _inspect_header(path)
    base = folder / Path(header.backing).name if header.backing else None
    if base and not base.exists():
        raise VerbFailed(
            "The server's files are not on this host's storage.", details=f"no file {base}"
        )
    return Disk(path, base, header.backing_format or "qcow2")


def verify(disk: Disk, context: VerbContext) -> None:
    """Check a disk before its guest starts.

    The disk's header must name the backing file of ``disk``, and the content of the backing file
    must have the checksum in its name. If a killed agent lent the disk to a helper, this process's
    user first becomes the owner again.

    Raises:
        VerbFailed: The check failed, or a file is missing.
        Cancelled: The verb was cancelled while the backing file was read.
    """
    with contextlib.suppress(FileNotFoundError):
        client.take_back(disk.path)
    disk_on_storage = existing(disk.path.parent, disk.path.name)
    if disk_on_storage != disk:
        raise VerbFailed(
            "The server's disk names another backing file than the server's domain, so the server is not started.",
            details=f"{disk.path} has the backing file {disk_on_storage.base} ({disk_on_storage.base_format}), not "
            f"{disk.base} ({disk.base_format}); rebuild the server, or define its "
            "domain with the backing file of the disk",
        )
    if disk.base:
        backing_files.verify(disk.base, context)


def prepare(disk: Disk, image: CachedImage | None, root_gb: int) -> None:
    """Make the disk under its temporary name, and link or copy its backing file. Repeatable.

    An existing disk of this name is not changed. ``adopt`` gives the new disk its final name, and
    ``abandon`` removes the new disk.

    Args:
        disk: The disk from ``plan``.
        image: The image below the disk, or None for a disk without a backing file.
        root_gb: Size in GiB. 0: the image's size.

    Raises:
        VerbFailed: The disk cannot be written, or has neither an image nor a size.
        OSError: The backing file cannot be linked.
    """
    size = root_gb * GIBIBYTE or (image.virtual_size if image else 0)
    if size == 0:
        raise VerbFailed(
            "A server without an image needs a flavor with a root disk; take another flavor."
        )
    _link_base(disk, image)
    _create(disk.path, disk.base, disk.base_format, size)


def take_in(disk: Disk, image: CachedImage | None, root_gb: int) -> None:
    """Check a disk received under its temporary name, and put it on this host's backing file.

    The header is inspected before any program opens the file. Then the disk is grown to ``root_gb``
    GiB, unless larger already. The disk keeps its temporary name until ``adopt``. Repeatable.

    Args:
        disk: The final path, and this host's backing file.
        image: The image of this backing file, or None for a disk without a backing file.
        root_gb: Minimum size in GiB.

    Raises:
        VerbFailed: The header or a table is malformed, the header names another backing file, or
            qemu-img cannot change the disk.
        OSError: The received disk does not exist, or the backing file cannot be linked.
    """
    _link_base(disk, image)
    part = aside(disk.path)
    header = _inspect_header(part)
    inspection.require_sound(part)
    if Path(header.backing).name != (disk.base.name if disk.base else "") or (
        disk.base and header.backing_format != disk.base_format
    ):
        raise VerbFailed(
            inspection.UNSAFE_DISK,
            details=f"{part} has the backing file {header.backing!r} ({header.backing_format}), not {disk.base} "
            f"({disk.base_format}); find out which program wrote the disk",
        )
    if disk.base and header.backing != str(disk.base):
        qemu_img.rebase(part, disk.base, disk.base_format)
    _grow_to(Disk(part, disk.base, disk.base_format), header, root_gb)
    _sync(part)


def require_space(folder: Path, count: int) -> None:
    """Raise VerbFailed unless the folder's file system has ``count`` bytes free.

    If the folder does not exist, the file system of its parent counts.
    """
    free = shutil.disk_usage(folder if folder.exists() else folder.parent).free
    if free < count:
        raise VerbFailed(
            f"The host has {free / GIBIBYTE:.1f} GiB of disk free, and the server's files may take up to "
            f"{count / GIBIBYTE:.1f} GiB.",
            retryable=True,
            details=f"free space in {folder.parent}",
        )


def keep(disk: Disk, name: str, context: VerbContext) -> None:
    """Copy the disk, which must not be in use, and keep the copy beside the disk.

    An existing copy of this name is not changed. Copies under other names are removed first.

    Args:
        disk: The disk.
        name: Distinguishes copies. Callers use the fence of the resize.
        context: Context of the verb.

    Raises:
        VerbFailed: There is not enough space, or the copy failed.
        Cancelled: The verb was cancelled during the copy.
    """
    copy = _kept_path(disk, name)
    for path in _list_kept(disk):
        if path != copy:
            path.unlink()
    if not copy.exists():
        _copy_to_kept(disk, copy, context)


def _copy_to_kept(disk: Disk, copy: Path, context: VerbContext) -> None:
    part = aside(copy)
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
        for _ in sparse.verify(part, sparse.write(part, size, pieces())):
            if context.cancelled():
                raise Cancelled
        os.replace(part, copy)
    except (OSError, ValueError) as error:
        raise VerbFailed(
            "The host could not copy the server's disk before the resize.",
            retryable=True,
            details=f"{copy}: {error}",
        ) from error
    finally:
        part.unlink(missing_ok=True)
    _sync(copy.parent)


def take_back(disk: Disk, name: str) -> None:
    """Replace the disk, which must not be in use, by the copy that ``keep`` made under this name.

    Without this copy the disk is not changed. All copies of the disk are removed afterwards.
    """
    if _kept_path(disk, name).exists():
        os.replace(_kept_path(disk, name), disk.path)
        _sync(disk.path.parent)
    forget(disk)


def forget(disk: Disk) -> None:
    """Remove all copies of the disk that ``keep`` made. The disk itself stays."""
    for path in _list_kept(disk):
        path.unlink()


def _kept_path(disk: Disk, name: str) -> Path:
    return disk.path.with_name(f"{disk.path.name}.{name}.kept")


def _list_kept(disk: Disk) -> list[Path]:
    return list(disk.path.parent.glob(f"{disk.path.name}.*.kept*"))


def grow(disk: Disk, root_gb: int) -> None:
    """Grow the disk to ``root_gb`` GiB, unless larger already. Repeatable.

    The disk must not be in use.

    Raises:
        VerbFailed: The header is malformed, or qemu-img failed.
    """
    _grow_to(disk, _inspect_header(disk.path), root_gb)


def _grow_to(disk: Disk, header: qcow2.Qcow2Header, root_gb: int) -> None:
    if header.virtual_size < root_gb * GIBIBYTE:
        qemu_img.resize(disk, root_gb * GIBIBYTE)


def _inspect_header(path: Path) -> qcow2.Qcow2Header:
    """Return the header of the disk in this file.

    Raises:
        VerbFailed: The header is malformed, names a backing file that does not belong to this disk,
            or gives another format than the name of the backing file.
        OSError: The file cannot be read.
    """
    try:
        header = qcow2.read(path)
        # The path of the instances folder differs by host. The path below that is the same.
        base, name = Path(header.backing), path.name.removesuffix(PART)
        if header.backing and not (
            header.backing == str(base)
            and base.parent.name == path.parent.name
            and backing_files.belongs(base, name)
        ):
            raise ValueError(f"the disk has the backing file {header.backing!r}")
        content = backing_files.image_of(base.name)
        if content and header.backing_format != content.disk_format:
            raise ValueError(
                f"the header gives the format of the backing file as {header.backing_format!r}"
            )
    except ValueError as problem:
        raise VerbFailed(
            inspection.UNSAFE_DISK,
            details=f"{path}: {problem}; find out which program wrote the disk",
        ) from problem
    return header


def _link_base(disk: Disk, image: CachedImage | None) -> None:
    """Hard-link the image as the disk's backing file, or copy the image to another file system.

    An existing backing file that ``is_verified``, or is a link to the image, is kept, because the
    name determines the content. Without an image or ``disk.base`` nothing happens.

    Raises:
        VerbFailed: The copy failed.
        OSError: The link failed, although both are on the same file system.
    """
    if image is None or disk.base is None:
        return
    if disk.base.exists() and (
        backing_files.is_verified(disk.base) or disk.base.samefile(image.path)
    ):
        return
    part = aside(disk.base)
    part.unlink(missing_ok=True)
    try:
        # The additional link also shows the cache that the image is used.
        os.link(image.path, part)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        # The folders of servers may be on another file system, for example on shared storage.
        _copy_image(image.path, part)
        backing_files.mark_verified(part)
    os.replace(part, disk.base)
    # Renaming onto another name of the same file leaves both, by POSIX.
    part.unlink(missing_ok=True)


def adopt(disk: Disk) -> None:
    """Rename a complete disk from its temporary name to its final name.

    An existing disk of this name is replaced. Its backing files other than ``disk.base`` are
    removed.
    """
    os.replace(aside(disk.path), disk.path)
    _sync(disk.path.parent)
    _drop_bases(disk.path, disk.base)


def abandon(folder: Path, name: str = ROOT_DISK) -> None:
    """Remove a disk that was made under its temporary name and not adopted.

    The disk ``name`` and its backing file stay. Other backing files of this name are removed,
    unless the header of the disk ``name`` is malformed.
    """
    path = folder / name
    aside(path).unlink(missing_ok=True)
    try:
        used_base = folder / Path(qcow2.read(path).backing).name
    except FileNotFoundError:
        used_base = None
    except ValueError:
        # Without a readable header the backing file in use is unknown.
        return
    _drop_bases(path, used_base)


def discard(folder: Path, name: str) -> None:
    """Remove this disk, its backing files, and unfinished files of both, as far as they exist.

    Copies that ``keep`` made stay.
    """
    aside(folder / name).unlink(missing_ok=True)
    (folder / name).unlink(missing_ok=True)
    _drop_bases(folder / name, None)


def _drop_bases(path: Path, keep: Path | None) -> None:
    """Remove all backing files of this disk, also unfinished files, except ``keep``."""
    for candidate in path.parent.iterdir() if path.parent.exists() else ():
        if candidate != keep and backing_files.belongs(
            candidate.with_name(candidate.name.removesuffix(PART)), path.name
        ):
            candidate.unlink()


def blank(disk: Disk, size: int) -> None:
    """Make an empty disk without a backing file under its temporary name. Repeatable.

    Args:
        disk: The disk.
        size: Virtual size in bytes.

    Raises:
        VerbFailed: The disk cannot be written.
    """
    _create(disk.path, None, disk.base_format, size)


def fill(disk: Disk, raw: Path) -> None:
    """Make a disk with the content of a raw file, under its temporary name. Repeatable.

    The raw file must have been written by this host, because it is not inspected.

    Raises:
        VerbFailed: The disk cannot be written.
    """
    part = aside(disk.path)
    qemu_img.fill(part, raw)
    _sync(part)


def size(disk: Disk) -> int:
    """Return the disk's virtual size in bytes, or raise VerbFailed if the header is malformed."""
    return _inspect_header(disk.path).virtual_size


def convert(disk: Disk, target: Path, context: VerbContext) -> None:
    """Copy the content of the disk to ``target``, a qcow2 file without a backing file.

    The disk must not be in use. After a failure ``target`` may be incomplete.

    Raises:
        VerbFailed: The disk cannot be read, or the copy failed.
        Cancelled: The verb was cancelled during the copy.
    """
    try:
        # Only the size is taken from this header.
        virtual_size = qcow2.read(disk.path).virtual_size
    except (OSError, ValueError) as problem:
        raise VerbFailed(
            "The host could not copy the server's disk.", details=f"{disk.path}: {problem}"
        ) from problem
    qemu_img.copy(disk, target, virtual_size, context)


def _copy_image(source: Path, target: Path) -> None:
    try:
        shutil.copyfile(source, target)
        target.chmod(0o644)
        _sync(target)
    except OSError as error:
        raise VerbFailed(
            "The host could not store the server's image.",
            retryable=True,
            details=f"{target}: {error}",
        ) from error


def aside(path: Path) -> Path:
    """Return the path with ``.part`` appended: the temporary name of a file that is being made."""
    return path.with_name(f"{path.name}{PART}")


def _create(disk: Path, base: Path | None, base_format: str, size: int) -> None:
    part = aside(disk)
    qemu_img.create(part, size, base, base_format)
    _sync(part)


def run_bounded(program: str, *arguments: str) -> None:
    """Run a program on files written by this host, with limits on memory and time.

    Raises:
        VerbFailed: The program failed or took too long.
    """
    try:
        result = subprocess.run(
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
            "The host could not make a disk of the server.",
            details=f"{program}: {error}",
            retryable=True,
        ) from error
    if result.returncode != 0:
        raise VerbFailed(
            "The host could not make a disk of the server.",
            retryable=True,
            details=(
                f"{program} {arguments[0]} ended with {result.returncode}: {result.stderr.strip()[:1000]}"
            ),
        )


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
