# SPDX-License-Identifier: Apache-2.0
"""A file system with shared blocks for volumes.

Without shared blocks, the volume service refuses snapshots of attached volumes.
"""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.waiting import await_true

#: Size of the sparse image file in bytes.
SIZE = 32 << 30
#: Seconds until the last process must have released the file system.
RELEASE = 60


@contextmanager
def sharing_blocks(place: Path) -> Iterator[None]:
    """Let ``place`` be a symbolic link to an empty XFS during the block. This needs root.

    The file system's image is in a folder beside the parent folder of ``place``. The block may
    remove the link.
    """
    with tempfile.TemporaryDirectory(prefix="kn-xfs-", dir=place.parent.parent) as folder:
        Path(folder).chmod(0o711)
        image, mounted = Path(folder, "image"), Path(folder, "mounted")
        mounted.mkdir()
        with image.open("wb") as file:
            file.truncate(SIZE)
        subprocess.run(["mkfs.xfs", "-q", image], check=True)
        subprocess.run(["mount", "-o", "loop", image, mounted], check=True)
        try:
            place.symlink_to(mounted)
            yield
        finally:
            await_true(lambda: _unmount(mounted), RELEASE, f"somebody still uses {mounted}")


def _unmount(mounted: Path) -> bool:
    return subprocess.run(["umount", mounted], check=False, capture_output=True).returncode == 0
