# SPDX-License-Identifier: Apache-2.0
"""Reads from a network in a thread, so that the verb can be cancelled meanwhile.

Called by ``images`` and ``cold_migration``. Why: a read may hang, and a cancelled verb must not
wait for the network.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Generator, Iterator
from typing import TypeVar

from compute_agent.verb_context import Cancelled, VerbContext

Item = TypeVar("Item")
#: Seconds between checks for a cancel, and the number of items that may wait for the verb.
LOOK_SECONDS, MAX_WAITING_ITEMS = 0.5, 4


def read_in_background(
    name: str, read: Callable[[], Iterator[Item]], context: VerbContext
) -> Generator[Item, None, None]:
    """Call ``read()`` in a thread, yield its items in order, and raise its exceptions.

    If the generator is closed early or the verb cancelled, the thread ends at the next item.

    Args:
        name: Name of the thread.
        read: Called once. Returns the items.
        context: Context of the verb, for the cancellation.

    Raises:
        Cancelled: The verb was cancelled. Raised within a second, even if ``read()`` hangs.
    """
    box: queue.Queue[tuple[Item] | Exception | None] = queue.Queue(maxsize=MAX_WAITING_ITEMS)
    has_ended = threading.Event()

    def pump() -> None:
        last_item: Exception | None = None
        try:
            for item in read():
                if not _put(box, (item,), has_ended):
                    return
        # The verb's thread raises the exception.
        except Exception as error:  # noqa: BLE001
            last_item = error
        _put(box, last_item, has_ended)

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
        has_ended.set()


def _put(
    box: queue.Queue[tuple[Item] | Exception | None],
    item: tuple[Item] | Exception | None,
    has_ended: threading.Event,
) -> bool:
    """Wait for room and put the item into the queue. Return False if ``has_ended`` is set first."""
    while not has_ended.is_set():
        try:
            box.put(item, timeout=LOOK_SECONDS)
            return True
        except queue.Full:
            continue
    return False
