# SPDX-License-Identifier: Apache-2.0
"""What drain and evacuate work with on a real cloud: the store, a scheduler, the conductors' bell, and Ctrl-C.

The first Ctrl-C (or SIGTERM) lets the loop begin nothing more and wait for what is under way, the second one ends it;
what is under way then goes on by itself, because it is in the database.
"""
from __future__ import annotations

import argparse
import signal
import time
from collections.abc import Callable
from types import FrameType

from common import config
from common.notifications.options import Telling
from common.rpc import conductor, scheduler
from common.rpc.transport import Transport
from common.store import upgrades
from common.store.engine import Store
from deploy.cli.moving import Hands


class Stop:
    """Remembers the first signal; the second one interrupts."""

    def __init__(self) -> None:
        self.wanted = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.wanted:
            raise KeyboardInterrupt
        self.wanted = True


def carry_out(options: argparse.Namespace, work: Callable[[Hands], int]) -> int:
    """Open everything, do the work of one command, and close; returns its status, 1 when it was interrupted."""
    conf = config.load(options.config)
    store = Store.opened(conf.database, telling=Telling.of(conf))
    upgrades.check(store)
    transport, stop = Transport(conf), Stop()
    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        return work(Hands(store, scheduler.Client(transport).select, conductor.Bell(transport).ring, time.sleep, say,
                          lambda: stop.wanted))
    except KeyboardInterrupt:
        say("interrupted: what is under way goes on by itself; what was moved cold waits to be confirmed until the "
            "command is given again")
        return 1
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        transport.close()
        store.close()


def say(text: str) -> None:
    """A line at once, also into a pipe."""
    print(text, flush=True)
