# SPDX-License-Identifier: Apache-2.0
"""Copies of a simulated cloud: a prepared state is stored as bytes and loaded into new clouds.

Tests share only these bytes, so no test sees the changes of another. An object that cannot be
pickled, for example a nested function, a thread or a socket, raises an error and is never shared.
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
from conductor.workflows import WORKFLOWS
from tests.schemas import memory_store
from tests.workflows.simulator import Cloud, Time, default_selection_options

LOCKS = {type(make()): make for make in (threading.Lock, threading.RLock)}
UUID = re.compile(rb"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


class Frozen:
    """The state of a cloud as bytes: database, time, processes, hosts and external services.

    ``more`` is a further object, which may refer to the cloud.
    """

    def __init__(self, cloud: Cloud, more: Any) -> None:
        self._micros = cloud.time.micros
        self._memory = _pickle(cloud, (vars(cloud), more))
        with _database(cloud.store) as database:
            self._database = database.serialize()

    def pour(self, cloud: Cloud) -> Any:
        """Replace the state of this cloud by the stored one.

        Returns:
            A copy of ``more`` that refers to this cloud.
        """
        cloud.time.micros = self._micros
        with _database(cloud.store) as database:
            database.deserialize(self._database)
        memory, more = _Unpickler(self._memory, cloud).load()
        vars(cloud).update(memory)
        return more


def is_new(cloud: Cloud, hosts: int = 2, storage: str = "") -> bool:
    """Return True if the cloud is unchanged since the constructor.

    Args:
        cloud: The cloud.
        hosts: Number of hosts.
        storage: Name of the storage that the hosts share, or "".
    """
    return cloud.time.micros == Time().micros and _pickle_without_ids(cloud) == _pickle_new_cloud(
        hosts, storage
    )


@cache
def _pickle_new_cloud(hosts: int, storage: str) -> bytes:
    time = Time()
    cloud = Cloud(memory_store(time), time, hosts, storage)
    memory = _pickle_without_ids(cloud)
    cloud.store.close()
    return memory


def register(cloud: Cloud, storage: str = "") -> None:
    """Let the hosts of a new cloud register, as the first round does.

    A process does this once for each number of hosts. Later clouds get a copy.

    Args:
        cloud: A cloud that was neither used nor changed, with the database in memory.
        storage: Name of the storage that the hosts share, or "".
    """
    kind = len(cloud.hosts), storage
    assert is_new(cloud, *kind), "only the hosts of a new cloud register by a copy"
    if kind not in _REGISTERED:
        cloud.round()
        _REGISTERED[kind] = Frozen(cloud, None)
    _REGISTERED[kind].pour(cloud)


_REGISTERED: dict[tuple[int, str], Frozen] = {}


def _pickle_without_ids(cloud: Cloud) -> bytes:
    return UUID.sub(b"", _pickle(cloud, vars(cloud)))


def _shared_objects(cloud: Cloud) -> dict[str, Any]:
    """Return the objects that are stored by name only.

    Each cloud has its own, or all clouds share them.
    """
    return {
        "cloud": cloud,
        "store": cloud.store,
        "time": cloud.time,
        "workflows": WORKFLOWS,
        "selection_options": default_selection_options(),
    }


def _pickle(cloud: Cloud, content: Any) -> bytes:
    stream = io.BytesIO()
    _Pickler(stream, cloud).dump(content)
    return stream.getvalue()


class _Pickler(pickle.Pickler):
    def __init__(self, stream: io.BytesIO, cloud: Cloud) -> None:
        super().__init__(stream)
        self._names = {id(thing): name for name, thing in _shared_objects(cloud).items()}

    def persistent_id(self, thing: Any) -> str | None:
        return self._names.get(id(thing))

    def reducer_override(self, thing: Any) -> Any:
        if isinstance(thing, Journal):
            return _load_journal, (thing._db.serialize(),)
        if type(thing) in LOCKS:
            return LOCKS[type(thing)], ()
        return NotImplemented


class _Unpickler(pickle.Unpickler):
    def __init__(self, memory: bytes, cloud: Cloud) -> None:
        super().__init__(io.BytesIO(memory))
        self._objects = _shared_objects(cloud)

    def persistent_load(self, name: str) -> Any:
        return self._objects[name]


def _load_journal(content: bytes) -> Journal:
    journal = Journal(":memory:")
    journal._db.deserialize(content)
    return journal


@contextmanager
def _database(store: Store) -> Iterator[sqlite3.Connection]:
    with store.engine.connect() as connection:
        yield connection.connection.dbapi_connection  # type: ignore[misc]
