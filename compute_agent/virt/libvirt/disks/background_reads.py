# SPDX-License-Identifier: Apache-2.0
"""Bytes that come from a network, handed to a verb that may be cancelled meanwhile.

Called by ``images`` and ``cold_migration``. A thread of its own reads them, because one that hangs
must not outlast a cancel.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Generator, Iterator
from typing import TypeVar

from compute_agent.verb_context import Cancelled, VerbContext

Item = TypeVar("Item")
#: Seconds to wait for the next item before asking whether to go on; items that wait for the verb.
LOOK_SECONDS, MAX_WAITING_ITEMS = 0.5, 4


def read_in_background(
    name: str, read: Callable[[], Iterator[Item]], context: VerbContext
) -> Generator[Item, None, None]:
    """What ``read()`` gives, and raises. Cancelled within a second, whatever the reader does; it
    ends at its next item when nobody wants more."""
    box: queue.Queue[tuple[Item] | Exception | None] = queue.Queue(maxsize=MAX_WAITING_ITEMS)
    left = threading.Event()

    def pump() -> None:
        last: Exception | None = None
        try:
            for item in read():
                if not _put(box, (item,), left):
                    return
        except Exception as error:  # noqa: BLE001 - told to the verb's thread, which raises it
            last = error
        _put(box, last, left)

    threading.Thread(target=pump, name=name, daemon=True).start()
    try:
        while True:
            if context.cancelled():
                raise Cancelled
            try:
                item = box.get(timeout=LOOK_SECONDS)
            except queue.Empty:
                continue
            if item is None:
                return
            if isinstance(item, Exception):
                raise item
            yield item[0]
    finally:
        left.set()


def _put(
    box: queue.Queue[tuple[Item] | Exception | None],
    item: tuple[Item] | Exception | None,
    left: threading.Event,
) -> bool:
    """Put, unless the verb has left meanwhile."""
    while not left.is_set():
        try:
            box.put(item, timeout=LOOK_SECONDS)
            return True
        except queue.Full:
            continue
    return False
