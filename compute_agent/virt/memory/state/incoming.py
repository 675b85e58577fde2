# SPDX-License-Identifier: Apache-2.0
"""Records of incoming live migrations at a host in memory, by server.

``memory.state.host`` and ``memory.live_migration`` use this. A host with a state file keeps the
records in a folder beside this file. Any process of the machine finds the folder by the host's URI,
and can write records. Other hosts keep the records in a dictionary.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, MutableMapping
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

#: The record of a prepared migration before the guest arrives.
EMPTY = b""


class IncomingFolder(MutableMapping[str, bytes]):
    """Records as files. Each file is complete or missing."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir(parents=True, exist_ok=True)

    def __getitem__(self, server: str) -> bytes:
        try:
            return (self.path / server).read_bytes()
        except FileNotFoundError:
            raise KeyError(server) from None

    def __setitem__(self, server: str, record: bytes) -> None:
        part = self.path / f".{server}"
        part.write_bytes(record)
        os.replace(part, self.path / server)

    def __delitem__(self, server: str) -> None:
        try:
            (self.path / server).unlink()
        except FileNotFoundError:
            raise KeyError(server) from None

    def __iter__(self) -> Iterator[str]:
        return (name for name in os.listdir(self.path) if not name.startswith("."))

    def __len__(self) -> int:
        return sum(1 for _ in self)


def uri_of(host: str, place: str) -> str:
    """Return the URI of a host.

    Args:
        host: Name of the host.
        place: Path of the folder, or an id that distinguishes hosts with the same name.
    """
    return f"memory://{quote(host)}/{quote(place.lstrip('/'))}"


def folder_at(uri: str) -> IncomingFolder | None:
    """Return the folder of the incoming records of the host at ``uri``, a host of another process.

    None if this machine has no such folder.
    """
    path = Path(unquote(urlsplit(uri).path))
    return IncomingFolder(path) if path.is_dir() else None
