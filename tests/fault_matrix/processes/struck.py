# SPDX-License-Identifier: Apache-2.0
"""A process that has seams: what it knows of orders, and how it carries them out on itself."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from tests.fault_matrix.processes.orders import Folder, Order, Orders

Point = tuple[str, ...]


class Process:
    """This one. ``cut_until``: its host is cut off; ``away_until``: its hypervisor is away, both by
    the monotonic clock."""

    def __init__(self, name: str, folder: Folder) -> None:
        self.name, self.folder = name, folder
        self.orders = Orders(folder, name)
        self.local = threading.local()
        self.cut_until = self.away_until = 0.0
        self.kept = ExitStack()  # for as long as the process lives
        self.inside: Callable[[str], None] = lambda where: None  # an agent's command

    def reached(self, point: Point, servers: Sequence[str]) -> Order | None:
        """Somebody is there. Returns an order whose deed the seam itself has to do."""
        order = self.orders.take(point, servers)
        if order is None:
            return None
        if order.deed == "kill":
            os.killpg(os.getpgrp(), signal.SIGKILL)
        if order.deed == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif order.deed == "hold":
            self.orders.hold(order)
        elif order.deed.startswith("partition"):
            self.cut_until = time.monotonic() + float(order.deed.split()[1])
        else:
            return order
        return None
