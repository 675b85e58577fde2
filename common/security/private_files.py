# SPDX-License-Identifier: Apache-2.0
"""Files with secrets: replaced atomically, and never readable for others."""

from __future__ import annotations

import os
from pathlib import Path


def replace(path: Path, text: str, mode: int = 0o600, owner: tuple[int, int] | None = None) -> None:
    """Write a file atomically: after a crash the file has the old or the new content.

    Args:
        path: The file, which need not exist.
        text: The new content.
        mode: The permissions of the file.
        owner: Ids of the file's user and group. Ignored unless the process is root. None: the ids
            of the process.
    """
    part = path.with_name(f"{path.name}.new")
    part.unlink(missing_ok=True)
    with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
        if owner is not None and os.geteuid() == 0:
            os.fchown(file.fileno(), *owner)
        os.fchmod(file.fileno(), mode)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
