# SPDX-License-Identifier: Apache-2.0
"""What a test is given as an empty database with a schema is one, whatever the test before did with
it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import sqlalchemy as sa

from common.domain.models import HostInventory
from common.store import schema, upgrades
from common.store.engine import Store
from common.store.hosts import hosts
from tests.schemas import WRITTEN, Server

KINDS = pytest.mark.parametrize("kind", ["postgresql", "mariadb"])


def fill(store: Store) -> int:
    """Rows in several tables; returns a number that the database gave."""
    store.write(
        lambda tx: hosts.register(tx, "h1", "boot", HostInventory("memory", 1, "h1", 8, 4096, 100))
    )
    return int(store.read(lambda tx: tx.scalar(sa.select(schema.services.c.id))) or 0)


@KINDS
def test_a_database_that_comes_back_is_as_new(servers: Callable[[str], Server], kind: str) -> None:
    databases, given = servers(kind), []
    url = databases.lend()
    for _ in range(3):
        store = Store(url)
        upgrades.check(store)
        assert store.read(lambda tx: list(tx.execute(sa.text(WRITTEN)))) == []
        given.append(fill(store))
        # its number was given all the same
        store.write(lambda tx: tx.execute(schema.services.delete()))
        store.close()
        databases.take_back(url)
        assert databases.lend() == url, "it is not used again"
    databases.take_back(url)
    assert given == [1, 1, 1]


@KINDS
def test_a_database_that_is_still_used_is_dropped(
    servers: Callable[[str], Server], kind: str
) -> None:
    databases = servers(kind)
    url = databases.lend()
    store = Store(url)
    with store.engine.connect() as connection:
        connection.execute(sa.text(WRITTEN))  # a transaction that nobody ends
        databases.take_back(url)
        other = databases.lend()
        assert other != url
        connection.invalidate()
    store.close()
    databases.take_back(other)


def test_an_engine_compiles_only_what_none_before_it_did(upgraded_url: str) -> None:
    compiled: list[str] = []

    def note(tx: sa.Connection, *told: Any) -> None:
        compiled.append(told[-1].context.cache_hit.name)

    for _ in range(2):
        store = Store(upgraded_url)
        sa.event.listen(store.engine, "after_execute", note)
        store.read(
            lambda tx: list(tx.execute(sa.select(schema.services.c.id.label("for_this_test"))))
        )
        store.close()
    assert compiled == ["CACHE_MISS", "CACHE_HIT"]
