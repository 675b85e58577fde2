# SPDX-License-Identifier: Apache-2.0
"""The file that keeps the guests of a host in memory after the process ends.

``memory.state.host`` uses this. Each change is appended as one line. So a change is cheap with a
thousand guests, and lines before it stay valid if the process is killed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from io import FileIO
from pathlib import Path

from common.domain.wire import from_wire
from compute_agent.virt.memory.state.guest import MemoryGuest

#: Keys of the two ids of the host.
BOOT_ID, HOST_ID = "boot_id", "host_id"
#: Prefix of the key of a server with files and no domain.
FILES = "files of "

Value = MemoryGuest | str | None


class StateFile:
    """The guests and ids of one host by key.

    A key is a server, ``FILES`` and a server, ``BOOT_ID``, or ``HOST_ID``.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._file: FileIO | None = None

    def read(self) -> Iterator[tuple[str, Value]]:
        """Yield (key, value) of each change, oldest first. The value None removes the key.

        Without a file nothing is yielded.
        """
        for line in self._path.read_bytes().splitlines() if self._path.exists() else []:
            key, value = json.loads(line)
            yield key, from_wire(MemoryGuest, value) if isinstance(value, dict) else value

    def begin(self, content: Mapping[str, Value]) -> None:
        """Replace the file atomically by ``content``, and keep the new file open for changes."""
        part = self._path.with_name(f"{self._path.name}.part")
        part.unlink(missing_ok=True)
        # Connections of volumes may contain passwords.
        part.touch(0o600)
        part.write_bytes(b"".join(_line(key, value) for key, value in content.items()))
        os.replace(part, self._path)
        self._file = FileIO(self._path, "a")

    def write(self, key: str, value: Value) -> None:
        if self._file is not None:
            self._file.write(_line(key, value))

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def _line(key: str, value: Value) -> bytes:
    return (
        json.dumps([key, asdict(value) if isinstance(value, MemoryGuest) else value]).encode()
        + b"\n"
    )
