# SPDX-License-Identifier: Apache-2.0
"""Which keys of hosts count, on the three databases."""

from __future__ import annotations

import pytest

from common.domain import errors
from common.security.host_keys import Generations
from common.store.engine import Store
from common.store.hosts import host_keys


def test_a_host_has_one_first_key(store: Store) -> None:
    assert [store.write(lambda tx: host_keys.ensure(tx, "h1")) for _ in range(2)] == [True, False]
    store.write(lambda tx: host_keys.add(tx, "h2"))
    with pytest.raises(errors.Conflict, match="host rotate h2"):
        store.write(lambda tx: host_keys.add(tx, "h2"))
    known = store.read(host_keys.generations)
    assert known.keys() == {"h1", "h2"}
    assert all(not one.accepts_previous for one in known.values())


def test_the_key_before_counts_for_its_time(store: Store) -> None:
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


def test_keys_of_a_host_that_was_removed_never_count_again(store: Store) -> None:
    """Who stole them would else be heard as the next host of that name."""
    store.write(lambda tx: host_keys.add(tx, "h1"))
    store.write(lambda tx: host_keys.rotate(tx, "h1", 60))
    before = store.read(host_keys.generations)["h1"].newest
    store.write(lambda tx: host_keys.remove(tx, "h1"))
    store.write(lambda tx: host_keys.add(tx, "h1"))
    assert store.read(host_keys.generations)["h1"].newest > before + 1
