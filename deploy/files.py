# SPDX-License-Identifier: Apache-2.0
"""Files with secrets, which the commands and the cloud on this machine write."""

from __future__ import annotations

import os
from pathlib import Path


def write_secret(path: Path, text: str) -> None:
    """Replace a file as a whole. Only its owner may read it, from its first byte on."""
    part = path.with_name(path.name + ".new")
    part.unlink(missing_ok=True)
    with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
    part.replace(path)
