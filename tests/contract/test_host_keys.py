# SPDX-License-Identifier: Apache-2.0
"""Which keys of hosts count, on the three databases."""

from __future__ import annotations

import pytest

from common import errors
from common.host_keys import Generations
from common.store.engine import Store
from common.store.hosts import host_keys


def test_a_host_has_one_first_key(store: Store) -> None:
    assert [store.write(lambda tx: host_keys.ensure(tx, "h1")) for _ in range(2)] == [True, False]
    store.write(lambda tx: host_keys.add(tx, "h2"))
    with pytest.raises(errors.Conflict, match="host rotate h2"):
        store.write(lambda tx: host_keys.add(tx, "h2"))
    assert store.read(host_keys.generations) == {"h1": Generations(1), "h2": Generations(1)}


def test_the_key_before_counts_for_its_time(store: Store) -> None:
    with pytest.raises(errors.NotFound, match="host add h1"):
        store.write(lambda tx: host_keys.rotate(tx, "h1", 60))
    store.write(lambda tx: host_keys.add(tx, "h1"))
    store.write(lambda tx: host_keys.rotate(tx, "h1", 60))
    assert store.read(host_keys.generations) == {"h1": Generations(2, accepts_previous=True)}
    store.write(lambda tx: host_keys.rotate(tx, "h1", 0))
    assert store.read(host_keys.generations) == {"h1": Generations(3)}
    assert [store.write(lambda tx: host_keys.remove(tx, "h1")) for _ in range(2)] == [True, False]
    assert store.read(host_keys.generations) == {}
