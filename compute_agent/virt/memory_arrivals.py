# SPDX-License-Identifier: Apache-2.0
"""Where guests that move while they run arrive at a host in memory: letters by server, also from another process.

Used by ``virt.memory_host`` and ``memory_live``. A host with a state file has a folder for them beside it, which any
process of this machine reaches by the host's URI; any other has a table.
"""
from __future__ import annotations

import os
from collections.abc import Iterator, MutableMapping
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

#: The letter that waits to be filled.
EMPTY = b""


class Folder(MutableMapping[str, bytes]):
    """Letters as files, each of them whole or not there."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir(parents=True, exist_ok=True)

    def __getitem__(self, server: str) -> bytes:
        try:
            return (self.path / server).read_bytes()
        except FileNotFoundError:
            raise KeyError(server) from None

    def __setitem__(self, server: str, letter: bytes) -> None:
        part = self.path / f".{server}"
        part.write_bytes(letter)
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
    """How others call a host; ``place``: the path of its folder, or whatever tells it from others of its name."""
    return f"memory://{quote(host)}/{quote(place.lstrip('/'))}"


def folder_at(uri: str) -> Folder | None:
    """The folder of a host of another process; None when there is none on this machine."""
    path = Path(unquote(urlsplit(uri).path))
    return Folder(path) if path.is_dir() else None
