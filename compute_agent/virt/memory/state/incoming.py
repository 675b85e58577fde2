# SPDX-License-Identifier: Apache-2.0
"""Records of incoming live migrations at a host in memory, by server; other processes can write
them too.

Used by ``memory.host`` and ``memory.live_migration``. A host with a state file keeps the records in
a folder beside it, which any process of this machine finds by the host's URI. Any other host keeps
them in a dictionary.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, MutableMapping
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

#: The record of a migration that is prepared and whose guest has not come.
EMPTY = b""


class IncomingFolder(MutableMapping[str, bytes]):
    """Records as files, each of them whole or not there."""

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
    """The URI of a host. ``place``: the path of its folder, or an id that tells it from other hosts
    of its name."""
    return f"memory://{quote(host)}/{quote(place.lstrip('/'))}"


def folder_at(uri: str) -> IncomingFolder | None:
    """The folder of a host of another process; None when there is none on this machine."""
    path = Path(unquote(urlsplit(uri).path))
    return IncomingFolder(path) if path.is_dir() else None
