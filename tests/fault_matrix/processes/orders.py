# SPDX-License-Identifier: Apache-2.0
"""Orders: files that let a process inject a fault into itself at a point.

A process takes an order by renaming the file, so that the fault happens once although processes are
killed. The renamed file proves that the point was reached. A held process waits for another file
beside it.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

#: Matches every value in a point.
ANY = "*"
#: Resolution of a folder's modification time. A second change within this time may go unnoticed.
TICK_SECONDS = 0.1
HELD_SECONDS, LOOK_SECONDS = 90.0, 0.01
# Bound before ``at_agents`` changes the clock of this process.
_now = time.time_ns


@dataclass(frozen=True)
class Order:
    """A fault to be injected at a point.

    Attributes:
        id: The name of the file.
        server: The id of the server, or its name if the server does not exist yet.
        point: The point, with ``ANY`` as a wildcard.
        effect: The fault, for example "kill" or "hold".
        passes: How often the process passes the point before it takes the order.
        stays: The order is not taken, so its effect repeats at each pass.
    """

    id: str
    server: str
    point: tuple[str, ...]
    effect: str
    passes: int = 0
    stays: bool = False

    def is_at(self, point: tuple[str, ...]) -> bool:
        """Return True if the order applies at this point."""
        return len(point) == len(self.point) and all(
            expected in (ANY, actual) for expected, actual in zip(self.point, point, strict=True)
        )


class Folder:
    """The folder with the orders of a cloud, and the traces of the processes that took them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._open, self._taken, self._names = path / "open", path / "taken", path / "names"

    def make(self) -> None:
        for path in (self._open, self._taken, self._names):
            path.mkdir(parents=True, exist_ok=True)

    # --- used by the test process ---
    def give(self, order: Order) -> None:
        """Add an open order to the folder."""
        part = self.path / order.id
        part.write_text(json.dumps(asdict(order)))
        part.replace(self._open / order.id)

    def read_taker(self, order: str) -> tuple[str, int] | None:
        """Return the name and the process id of the process that took the order, or None."""
        try:
            name, process = (self._taken / f"{order}.by").read_text().split()
        except (FileNotFoundError, ValueError):
            return None
        return name, int(process)

    def release(self, order: str) -> None:
        """Let the process continue that the order holds."""
        (self._taken / f"{order}.go").touch()

    def withdraw(self, order: str) -> None:
        """Remove the order if no process took it, and let the held process continue."""
        (self._open / order).unlink(missing_ok=True)
        self.release(order)

    def power_cut(self, process: str) -> None:
        """Prevent restarts of the process until ``power_on``."""
        (self.path / f"{process}.down").touch()

    def power_on(self, process: str) -> None:
        (self.path / f"{process}.down").unlink(missing_ok=True)

    def is_off(self, process: str) -> bool:
        return (self.path / f"{process}.down").exists()

    def read_pid(self, process: str) -> int | None:
        """Return the id of the process that runs under this name, or None."""
        try:
            return int((self.path / f"{process}.pid").read_text())
        except (FileNotFoundError, ValueError):
            return None

    def violations(self) -> list[str]:
        """Return the violated invariants that processes recorded, for example an old fence."""
        path = self.path / "violations"
        return path.read_text().splitlines() if path.exists() else []

    # --- used by the processes with faults ---
    def append_line(self, file: str, text: str) -> None:
        """Append a line without buffering, so that the line survives a kill of this process."""
        with (self.path / file).open("ab", buffering=0) as out:
            out.write(f"{text}\n".encode())

    def record_server_id(self, name: str, server: str) -> None:
        """Record the id of the server with this name."""
        (self._names / name).write_text(server)


class Orders:
    """The open orders, read by one process."""

    def __init__(self, folder: Folder, process: str) -> None:
        self._folder, self._process = folder, process
        # One tuple, so that threads replace both values at once.
        self._seen: tuple[int, dict[str, Order]] = (0, {})
        self._passed: dict[str, int] = {}

    def _read_open_orders(self) -> Iterable[Order]:
        path = self._folder._open
        last_change, orders_by_id = self._seen
        changed = path.stat().st_mtime_ns
        if changed != last_change or _now() - changed < TICK_SECONDS * 1e9:
            orders = {
                name: orders_by_id.get(name) or self._read(path / name) for name in os.listdir(path)
            }
            orders_by_id = {name: order for name, order in orders.items() if order}
            self._seen = changed, orders_by_id
        return list(orders_by_id.values())

    @staticmethod
    def _read(path: Path) -> Order | None:
        try:
            fields = json.loads(path.read_text())
        except FileNotFoundError:
            return None
        return Order(**{**fields, "point": tuple(fields["point"])})

    def _is_for(self, order: Order, servers: Collection[str]) -> bool:
        if order.server in servers:
            return True
        try:
            return (self._folder._names / order.server).read_text() in servers
        except FileNotFoundError:
            return False

    def has_order_at(self, *points: tuple[str, ...]) -> bool:
        """Return True if an order for any server exists at one of these points."""
        return any(order.is_at(point) for order in self._read_open_orders() for point in points)

    def has_order_for(self, name: str) -> bool:
        """Return True if an order exists for the server with this name."""
        return any(order.server == name for order in self._read_open_orders())

    def take(self, point: tuple[str, ...], servers: Collection[str]) -> Order | None:
        """Take and return the order for this point and one of these servers, or return None.

        No other process gets the order, unless the order stays.
        """
        for order in self._read_open_orders():
            if not (order.is_at(point) and self._is_for(order, servers)):
                continue
            passed = self._passed[order.id] = self._passed.get(order.id, 0) + 1
            if passed > order.passes and (order.stays or self._claim(order)):
                return order
        return None

    def _claim(self, order: Order) -> bool:
        path = self._folder._taken / order.id
        try:
            (self._folder._open / order.id).rename(path)
        except FileNotFoundError:
            return False
        part = path.with_name(f"{order.id}.new")
        part.write_text(f"{self._process} {os.getpid()}\n")
        part.replace(path.with_name(f"{order.id}.by"))
        return True

    def hold(self, order: Order) -> None:
        """Block until the order is released, or ``HELD_SECONDS`` have passed."""
        until = time.monotonic() + HELD_SECONDS
        go = self._folder._taken / f"{order.id}.go"
        while not go.exists() and time.monotonic() < until:
            # Another process creates the file, so polling is the only way.
            time.sleep(LOOK_SECONDS)
