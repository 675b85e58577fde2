# SPDX-License-Identifier: Apache-2.0
"""``NewestFirst``: the order of items, stale items, errors and the end of the pool."""

from __future__ import annotations

import threading
import time

import pytest

from common.rpc.newest_first import NewestFirst
from tests.log_lines import rendered_lines
from tests.waiting import await_true


class Rig:
    """A pool with one thread, which item 0 occupies until ``free`` is set."""

    def __init__(self, stale_seconds: float = 60) -> None:
        self.free, self.done = threading.Event(), list[int]()
        self.pool = NewestFirst[int](self._work, 1, stale_seconds, "test")
        self.pool.put(0)
        await_true(lambda: self.done, 5, "the thread works")

    def _work(self, item: int) -> None:
        self.done.append(item)
        if item == 0:
            self.free.wait(30)
        elif item < 0:
            raise ValueError(item)

    def await_done(self, *items: int) -> None:
        self.free.set()
        await_true(lambda: self.done == [0, *items], 5, lambda: self.done)


def test_pool_processes_newest_item_first() -> None:
    rig = Rig()
    for item in (1, 2, 3):
        rig.pool.put(item)
    rig.await_done(3, 2, 1)
    rig.pool.put(4)
    rig.await_done(3, 2, 1, 4)
    rig.pool.close()


def test_pool_drops_stale_items() -> None:
    """Items are dropped while the threads are busy, too, so that memory stays bounded."""
    rig = Rig(stale_seconds=0.2)
    for item in range(1, 100):
        rig.pool.put(item)
    await_true(lambda: _put_and_count(rig.pool) <= 2, 5, "all others are dropped")
    rig.free.set()
    await_true(lambda: not rig.pool.waiting, 5, lambda: rig.pool.waiting)
    assert len(rig.done) <= 3
    rig.pool.close()


def _put_and_count(pool: NewestFirst[int]) -> int:
    # Longer than items may wait.
    time.sleep(0.25)
    pool.put(1000)
    return len(pool.waiting)


def test_pool_processes_next_item_after_error(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig()
    for item in (1, -1):
        rig.pool.put(item)
    rig.await_done(-1, 1)
    assert any("cannot be processed" in line for line in rendered_lines(caplog))
    rig.pool.close()


def test_closed_pool_drops_waiting_items() -> None:
    rig = Rig()
    rig.pool.put(1)
    rig.pool.close()
    rig.free.set()
    rig.await_done()
    assert not rig.pool.waiting
