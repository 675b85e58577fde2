# SPDX-License-Identifier: Apache-2.0
"""What a process is told to do to itself at a point, and the proof that it came to that.

An order is a file. Whoever reaches its point takes it, by renaming it, so that it is carried out
once whatever is killed; the renamed file is the proof. While it is held, a process waits for
another file beside it.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

#: In a point: whatever stands there.
ANY = "*"
#: Seconds in which a change of a folder may not be seen by its time.
TICK_SECONDS = 0.1
HELD_SECONDS, LOOK_SECONDS = 90.0, 0.01
_now = time.time_ns  # the right one, whatever becomes of this process's clock


@dataclass(frozen=True)
class Order:
    """``server``: its id, or the name of one that is not there yet. ``passes``: how often the point
    is passed first. ``stays``: it is carried out each time."""

    id: str
    server: str
    point: tuple[str, ...]
    deed: str
    passes: int = 0
    stays: bool = False

    def is_at(self, point: tuple[str, ...]) -> bool:
        """Is this its point?"""
        return len(point) == len(self.point) and all(
            wanted in (ANY, there) for wanted, there in zip(self.point, point, strict=True)
        )


class Folder:
    """Where the orders of a cloud lie, and what became of them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._open, self._taken, self._names = path / "open", path / "taken", path / "names"

    def make(self) -> None:
        for one in (self._open, self._taken, self._names):
            one.mkdir(parents=True, exist_ok=True)

    # --- of who strikes ---
    def give(self, order: Order) -> None:
        part = self.path / order.id
        part.write_text(json.dumps(asdict(order)))
        part.replace(self._open / order.id)

    def taken(self, order: str) -> tuple[str, int] | None:
        """Who has taken it: name and process. None: nobody yet."""
        try:
            name, process = (self._taken / f"{order}.by").read_text().split()
        except (FileNotFoundError, ValueError):
            return None
        return name, int(process)

    def release(self, order: str) -> None:
        """Who was held goes on."""
        (self._taken / f"{order}.go").touch()

    def withdraw(self, order: str) -> None:
        """Nobody is to do it any more; who is held goes on."""
        (self._open / order).unlink(missing_ok=True)
        self.release(order)

    def power_cut(self, process: str) -> None:
        """It is not started again until ``power_on``."""
        (self.path / f"{process}.down").touch()

    def power_on(self, process: str) -> None:
        (self.path / f"{process}.down").unlink(missing_ok=True)

    def is_off(self, process: str) -> bool:
        return (self.path / f"{process}.down").exists()

    def pid(self, process: str) -> int | None:
        """Of who runs under this name."""
        try:
            return int((self.path / f"{process}.pid").read_text())
        except (FileNotFoundError, ValueError):
            return None

    def violations(self) -> list[str]:
        """What processes have seen that must never be."""
        path = self.path / "violations"
        return path.read_text().splitlines() if path.exists() else []

    # --- of who is struck ---
    def say(self, file: str, text: str) -> None:
        """A line that is there whatever becomes of who wrote it."""
        with (self.path / file).open("ab", buffering=0) as out:
            out.write(f"{text}\n".encode())

    def name(self, name: str, server: str) -> None:
        """The server with this name has this id."""
        (self._names / name).write_text(server)


class Orders:
    """The open orders, as a process knows them."""

    def __init__(self, folder: Folder, process: str) -> None:
        self._folder, self._process = folder, process
        self._seen: tuple[int, dict[str, Order]] = (0, {})  # in one piece: threads look at once
        self._passed: dict[str, int] = {}

    def _look(self) -> Iterable[Order]:
        path = self._folder._open
        before, known = self._seen
        changed = path.stat().st_mtime_ns
        if changed != before or _now() - changed < TICK_SECONDS * 1e9:
            found = {name: known.get(name) or self._read(path / name) for name in os.listdir(path)}
            known = {name: order for name, order in found.items() if order}
            self._seen = changed, known
        return list(known.values())

    @staticmethod
    def _read(path: Path) -> Order | None:
        try:
            said = json.loads(path.read_text())
        except FileNotFoundError:
            return None
        return Order(**{**said, "point": tuple(said["point"])})

    def _is_of(self, order: Order, servers: Collection[str]) -> bool:
        if order.server in servers:
            return True
        try:
            return (self._folder._names / order.server).read_text() in servers
        except FileNotFoundError:
            return False

    def wants(self, *points: tuple[str, ...]) -> bool:
        """Is there an order for one of these points, of whichever server?"""
        return any(order.is_at(point) for order in self._look() for point in points)

    def wants_name(self, name: str) -> bool:
        """Is there one for the server with this name?"""
        return any(order.server == name for order in self._look())

    def take(self, point: tuple[str, ...], servers: Collection[str]) -> Order | None:
        """The order for this point, which nobody else has from now on."""
        for order in self._look():
            if not (order.is_at(point) and self._is_of(order, servers)):
                continue
            passed = self._passed[order.id] = self._passed.get(order.id, 0) + 1
            if passed > order.passes and (order.stays or self._claimed(order)):
                return order
        return None

    def _claimed(self, order: Order) -> bool:
        taken = self._folder._taken / order.id
        try:
            (self._folder._open / order.id).rename(taken)
        except FileNotFoundError:
            return False
        part = taken.with_name(f"{order.id}.new")
        part.write_text(f"{self._process} {os.getpid()}\n")
        part.replace(taken.with_name(f"{order.id}.by"))
        return True

    def hold(self, order: Order) -> None:
        """Stand here until the order is released."""
        until = time.monotonic() + HELD_SECONDS
        go = self._folder._taken / f"{order.id}.go"
        while not go.exists() and time.monotonic() < until:
            time.sleep(LOOK_SECONDS)  # who lets go is another process
