# SPDX-License-Identifier: Apache-2.0
"""The process into which faults are injected: orders are taken and executed here."""

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
    """The current process.

    Attributes:
        cut_until: Monotonic time until which the host of this agent has no network.
        away_until: Monotonic time until which the hypervisor of this agent is away.
    """

    def __init__(self, name: str, folder: Folder) -> None:
        self.name, self.folder = name, folder
        self.orders = Orders(folder, name)
        self.local = threading.local()
        self.cut_until = self.away_until = 0.0
        # Open until the process ends.
        self.exit_stack = ExitStack()
        # Called at the points inside an agent's command.
        self.inside: Callable[[str], None] = lambda where: None

    def reach(self, point: Point, servers: Sequence[str]) -> Order | None:
        """Take the order for this point, and execute the effect.

        Returns:
            The order, if the seam has to execute the effect. Otherwise None.
        """
        order = self.orders.take(point, servers)
        if order is None:
            return None
        if order.effect == "kill":
            os.killpg(os.getpgrp(), signal.SIGKILL)
        if order.effect == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif order.effect == "hold":
            self.orders.hold(order)
        elif order.effect.startswith("partition"):
            self.cut_until = time.monotonic() + float(order.effect.split()[1])
        else:
            return order
        return None
