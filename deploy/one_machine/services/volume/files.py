# SPDX-License-Identifier: Apache-2.0
"""The contents of volumes and snapshots: one sparse raw file each, in one folder.

Snapshots are independent files, so removal or damage of one affects no other. If the file system
shares blocks (XFS, Btrfs), a copy takes no space and no time, and is consistent while a guest
writes. Otherwise a copy keeps holes. A file is written as `NAME.part`, synced and renamed, so a
file with its final name is complete.
"""

import errno
import fcntl
import os
from collections.abc import Callable
from pathlib import Path

from common.service.log import get_logger

LOG = get_logger("standalone.volume")
GIGABYTE = 1024**3
BLOCK = 16 * 1024 * 1024
FICLONE = 0x40049409
#: Errors of the kernel on file systems that cannot share blocks.
NO_SHARING = (errno.EOPNOTSUPP, errno.EINVAL, errno.EXDEV, errno.ENOTTY, errno.ENOSYS)
Check = Callable[[], None]
"""Raises an exception when the work should stop."""


class VolumeFiles:
    """The folder with the files `volume-ID` and `snapshot-ID`."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        # QEMU's user reaches the files through both folders.
        for one in (folder.parent, folder):
            one.chmod(0o711)
        self.folder = folder.resolve()
        self.shares_blocks = self._shares_blocks()

    def path(self, kind: str, key: str) -> Path:
        """Return the path of the finished file of the "volume" or "snapshot" with this id."""
        return self.folder / f"{kind}-{key}"

    def part(self, path: Path) -> Path:
        """Remove the file of an earlier attempt, and return the path of the unfinished file.

        Args:
            path: The final path.
        """
        part = path.with_name(f"{path.name}.part")
        part.unlink(missing_ok=True)
        return part

    def make_blank(self, path: Path, gigabytes: int) -> None:
        """Create or replace a sparse file of zeros, which takes no space on the disk."""
        part = self.part(path)
        part.touch(0o600, exist_ok=False)
        self.finish(part, path, gigabytes * GIGABYTE)

    def copy(self, source: Path, path: Path, gigabytes: int, check: Check) -> None:
        """Create or replace a file with the content of `source`.

        After an exception, the unfinished file may stay.

        Args:
            source: The file to copy.
            path: The path of the new file.
            gigabytes: The size of the new file in GiB. The content is cut, or filled up with zeros.
            check: Raises when the copy should stop.

        Raises:
            OSError: The copy fails.
            Exception: The exception of `check`.
        """
        part = self.part(path)
        with source.open("rb") as old, os.fdopen(_new(part), "wb") as new:
            if not _share(old.fileno(), new.fileno()):
                _copy(old.fileno(), new.fileno(), check)
        check()
        self.finish(part, path, gigabytes * GIGABYTE)

    def finish(self, part: Path, path: Path, size: int) -> None:
        """Set the size of an unfinished file, sync the file and rename it to the final name.

        Args:
            part: The path of the unfinished file.
            path: The final path. An existing file is replaced.
            size: The size in bytes.
        """
        with part.open("r+b") as file:
            os.ftruncate(file.fileno(), size)
            os.fsync(file.fileno())
        part.replace(path)
        self._sync()

    def grow(self, path: Path, gigabytes: int) -> None:
        """Enlarge a file to this size in GiB, also while in use. A larger file stays as it is."""
        with path.open("r+b") as file:
            if os.fstat(file.fileno()).st_size < gigabytes * GIGABYTE:
                os.ftruncate(file.fileno(), gigabytes * GIGABYTE)
                os.fsync(file.fileno())

    def remove(self, path: Path) -> None:
        """Remove a file and its unfinished version, if they exist."""
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
        first_file, second_file = (
            self.part(self.folder / "probe-1"),
            self.part(self.folder / "probe-2"),
        )
        try:
            first_file.write_bytes(b"\0" * 4096)
            with first_file.open("rb") as old, os.fdopen(_new(second_file), "wb") as new:
                return _share(old.fileno(), new.fileno())
        finally:
            first_file.unlink(missing_ok=True)
            second_file.unlink(missing_ok=True)


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
            # Only a hole is left.
            if error.errno == errno.ENXIO:
                return
            raise
        hole = os.lseek(old, position, os.SEEK_HOLE)
        while position < hole:
            check()
            data = os.pread(old, min(BLOCK, hole - position), position)
            if not data:
                raise OSError(errno.EIO, "the source file became shorter during the copy")
            os.pwrite(new, data, position)
            position += len(data)
