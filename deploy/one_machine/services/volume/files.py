# SPDX-License-Identifier: Apache-2.0
"""Contents of volumes and snapshots: one sparse raw file each, in one folder.

Each snapshot is a file of its own: none stands on another, so no removal, no damage and no order of
removals can take another's data. Where the file system shares blocks (XFS, Btrfs) a copy takes no
room and no time, and is of one moment even while a guest writes; elsewhere holes stay holes. A file
is made as `NAME.part`, synced and renamed: what has its own name is whole.
"""

import errno
import fcntl
import logging
import os
from collections.abc import Callable
from pathlib import Path

LOG = logging.getLogger("standalone.volume")
GIGABYTE = 1024**3
BLOCK = 16 * 1024 * 1024
FICLONE = 0x40049409
#: What the kernel says where blocks cannot be shared.
NO_SHARING = (errno.EOPNOTSUPP, errno.EINVAL, errno.EXDEV, errno.ENOTTY, errno.ENOSYS)
Check = Callable[[], None]
"""Raises when the work is not wanted any more."""


class VolumeFiles:
    """The folder; names are `volume-ID` and `snapshot-ID`."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for one in (folder.parent, folder):
            one.chmod(0o711)  # QEMU's user goes through to its own files
        self.folder = folder.resolve()
        self.shares_blocks = self._shares_blocks()

    def path(self, kind: str, key: str) -> Path:
        """Of the finished file of a "volume" or "snapshot"."""
        return self.folder / f"{kind}-{key}"

    def part(self, path: Path) -> Path:
        """The file that becomes `path`; what an attempt before left of it is gone."""
        part = path.with_name(f"{path.name}.part")
        part.unlink(missing_ok=True)
        return part

    def make_blank(self, path: Path, gigabytes: int) -> None:
        """A file of zeros that takes no room."""
        part = self.part(path)
        part.touch(0o600, exist_ok=False)
        self.finish(part, path, gigabytes * GIGABYTE)

    def copy(self, source: Path, path: Path, gigabytes: int, check: Check) -> None:
        """A file with the content of `source`, as large as `gigabytes` say."""
        part = self.part(path)
        with source.open("rb") as old, os.fdopen(_new(part), "wb") as new:
            if not _share(old.fileno(), new.fileno()):
                _copy(old.fileno(), new.fileno(), check)
        check()
        self.finish(part, path, gigabytes * GIGABYTE)

    def finish(self, part: Path, path: Path, size: int) -> None:
        """Give a file its size and its name, when all of it is on the disk."""
        with part.open("r+b") as file:
            os.ftruncate(file.fileno(), size)
            os.fsync(file.fileno())
        part.replace(path)
        self._sync()

    def grow(self, path: Path, gigabytes: int) -> None:
        """Make a file larger, also while it is in use; never smaller."""
        with path.open("r+b") as file:
            if os.fstat(file.fileno()).st_size < gigabytes * GIGABYTE:
                os.ftruncate(file.fileno(), gigabytes * GIGABYTE)
                os.fsync(file.fileno())

    def remove(self, path: Path) -> None:
        """Remove a file, and what was begun of it."""
        path.unlink(missing_ok=True)
        self.part(path)
        self._sync()

    def _sync(self) -> None:
        folder = os.open(self.folder, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def _shares_blocks(self) -> bool:
        one, other = self.part(self.folder / "probe-1"), self.part(self.folder / "probe-2")
        try:
            one.write_bytes(b"\0" * 4096)
            with one.open("rb") as old, os.fdopen(_new(other), "wb") as new:
                return _share(old.fileno(), new.fileno())
        finally:
            one.unlink(missing_ok=True)
            other.unlink(missing_ok=True)


def _new(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)


def _share(old: int, new: int) -> bool:
    try:
        fcntl.ioctl(new, FICLONE, old)
    except OSError as error:
        if error.errno not in NO_SHARING:
            raise
        return False
    return True


def _copy(old: int, new: int, check: Check) -> None:
    end = os.fstat(old).st_size
    os.ftruncate(new, end)
    position = 0
    while position < end:
        try:
            position = os.lseek(old, position, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # only a hole is left
                return
            raise
        hole = os.lseek(old, position, os.SEEK_HOLE)
        while position < hole:
            check()
            data = os.pread(old, min(BLOCK, hole - position), position)
            if not data:
                raise OSError(errno.EIO, "the source became shorter while it was copied")
            os.pwrite(new, data, position)
            position += len(data)
