# SPDX-License-Identifier: Apache-2.0
"""A whole cloud as bytes: what was prepared once is poured into as many new clouds as there are
cases.

Bytes are all that two cases have in common, so none can see what another did. What cannot be frozen
(a function within a function, a thread, a socket) is refused when it is to be frozen, and never
shared.
"""

from __future__ import annotations

import io
import pickle
import re
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from common.store.engine import Store
from compute_agent.journal import Journal
from tests.schemas import memory_store
from tests.workflows.simulator import Cloud, Time, choosing

LOCKS = {type(make()): make for make in (threading.Lock, threading.RLock)}
UUID = re.compile(rb"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


class Frozen:
    """All that a cloud has: its database, its time, what its processes, hosts and neighbours
    remember; and ``more``, which may speak of the cloud."""

    def __init__(self, cloud: Cloud, more: Any) -> None:
        self._micros = cloud.time.micros
        self._memory = _pickled(cloud, (vars(cloud), more))
        with _database(cloud.store) as database:
            self._database = database.serialize()

    def pour(self, cloud: Cloud) -> Any:
        """This cloud has all that now, in place of what it had; returns a copy of ``more``, which
        speaks of it."""
        cloud.time.micros = self._micros
        with _database(cloud.store) as database:
            database.deserialize(self._database)
        memory, more = _Unpickler(self._memory, cloud).load()
        vars(cloud).update(memory)
        return more


def is_new(cloud: Cloud, hosts: int = 2, storage: str = "") -> bool:
    """True if the cloud is as its constructor leaves it. ``storage``: what its hosts share."""
    return cloud.time.micros == Time().micros and _memory_but_ids(cloud) == _new(hosts, storage)


@cache
def _new(hosts: int, storage: str) -> bytes:
    time = Time()
    cloud = Cloud(memory_store(time), time, hosts, storage)
    memory = _memory_but_ids(cloud)
    cloud.store.close()
    return memory


def register(cloud: Cloud, storage: str = "") -> None:
    """Let the hosts of a new cloud register, as its first round does.

    A process does this once for each number of hosts. Later clouds get a copy.

    Args:
        cloud: A cloud that was neither used nor changed, with its database in memory.
        storage: The storage that its hosts share.
    """
    kind = len(cloud.hosts), storage
    assert is_new(cloud, *kind), "only the hosts of a new cloud register by a copy"
    if kind not in _REGISTERED:
        cloud.round()
        _REGISTERED[kind] = Frozen(cloud, None)
    _REGISTERED[kind].pour(cloud)


_REGISTERED: dict[tuple[int, str], Frozen] = {}


def _memory_but_ids(cloud: Cloud) -> bytes:
    return UUID.sub(b"", _pickled(cloud, vars(cloud)))


def _named(cloud: Cloud) -> dict[str, Any]:
    """What is not frozen: a copy has its own, or it is the same for all."""
    return {
        "cloud": cloud,
        "store": cloud.store,
        "time": cloud.time,
        "choosing": choosing(),
    }


def _pickled(cloud: Cloud, what: Any) -> bytes:
    made = io.BytesIO()
    _Pickler(made, cloud).dump(what)
    return made.getvalue()


class _Pickler(pickle.Pickler):
    def __init__(self, made: io.BytesIO, cloud: Cloud) -> None:
        super().__init__(made)
        self._names = {id(thing): name for name, thing in _named(cloud).items()}

    def persistent_id(self, thing: Any) -> str | None:
        return self._names.get(id(thing))

    def reducer_override(self, thing: Any) -> Any:
        if isinstance(thing, Journal):
            return _journal, (thing._db.serialize(),)
        if type(thing) in LOCKS:
            return LOCKS[type(thing)], ()
        return NotImplemented


class _Unpickler(pickle.Unpickler):
    def __init__(self, memory: bytes, cloud: Cloud) -> None:
        super().__init__(io.BytesIO(memory))
        self._named = _named(cloud)

    def persistent_load(self, name: str) -> Any:
        return self._named[name]


def _journal(content: bytes) -> Journal:
    journal = Journal(":memory:")
    journal._db.deserialize(content)
    return journal


@contextmanager
def _database(store: Store) -> Iterator[sqlite3.Connection]:
    with store.engine.connect() as connection:
        yield connection.connection.dbapi_connection  # type: ignore[misc]  # it is sqlite3's
