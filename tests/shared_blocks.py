# SPDX-License-Identifier: Apache-2.0
"""A file system that shares blocks, for volumes: where it does not, the volume service refuses a
snapshot of a volume that a server has."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.waiting import await_true

#: Bytes; none of them are taken before they are written.
SIZE = 32 << 30
#: Seconds that the last process may take to let go.
RELEASE = 60


@contextmanager
def sharing_blocks(place: Path) -> Iterator[None]:
    """For the block ``place`` leads to an empty XFS, which lives in a file beside it; it needs
    root. Both may be removed before the end."""
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
            await_true(lambda: _released(mounted), RELEASE, f"somebody still uses {mounted}")


def _released(mounted: Path) -> bool:
    return subprocess.run(["umount", mounted], check=False, capture_output=True).returncode == 0
