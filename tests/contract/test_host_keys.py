# SPDX-License-Identifier: Apache-2.0
"""The valid key generations of hosts, on the three databases."""

from __future__ import annotations

import pytest

from common.domain import errors
from common.security.host_keys import Generations
from common.store.engine import Store
from common.store.hosts import host_keys


def test_host_key_is_added_once_per_host(store: Store) -> None:
    assert [store.write(lambda tx: host_keys.ensure(tx, "h1")) for _ in range(2)] == [True, False]
    store.write(lambda tx: host_keys.add(tx, "h2"))
    with pytest.raises(errors.Conflict, match="host rotate h2"):
        store.write(lambda tx: host_keys.add(tx, "h2"))
    generations = store.read(host_keys.generations)
    assert generations.keys() == {"h1", "h2"}
    assert all(not generation.accepts_previous for generation in generations.values())


def test_host_key_rotation_accepts_previous_key_until_expiry(store: Store) -> None:
    with pytest.raises(errors.NotFound, match="host add h1"):
        store.write(lambda tx: host_keys.rotate(tx, "h1", 60))
    store.write(lambda tx: host_keys.add(tx, "h1"))
    first = store.read(host_keys.generations)["h1"].newest
    store.write(lambda tx: host_keys.rotate(tx, "h1", 60))
    assert store.read(host_keys.generations) == {
        "h1": Generations(first + 1, accepts_previous=True)
    }
    store.write(lambda tx: host_keys.rotate(tx, "h1", 0))
    assert store.read(host_keys.generations) == {"h1": Generations(first + 2)}
    assert [store.write(lambda tx: host_keys.remove(tx, "h1")) for _ in range(2)] == [True, False]
    assert store.read(host_keys.generations) == {}


def test_host_key_generation_continues_after_removal_of_host(store: Store) -> None:
    """Otherwise a thief of the old keys could act as the next host with this name."""
    store.write(lambda tx: host_keys.add(tx, "h1"))
    store.write(lambda tx: host_keys.rotate(tx, "h1", 60))
    before = store.read(host_keys.generations)["h1"].newest
    store.write(lambda tx: host_keys.remove(tx, "h1"))
    store.write(lambda tx: host_keys.add(tx, "h1"))
    assert store.read(host_keys.generations)["h1"].newest > before + 1
