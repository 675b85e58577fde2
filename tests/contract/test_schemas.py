# SPDX-License-Identifier: Apache-2.0
"""The pool of test databases (tests/schemas.py), and the shared cache of compiled statements.

The pool lends only empty databases, whatever the previous test left in them.
"""

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
    """Insert rows in several tables and return an id that the database generated."""
    store.write(
        lambda tx: hosts.register(tx, "h1", "boot", HostInventory("memory", 1, "h1", 8, 4096, 100))
    )
    return int(store.read(lambda tx: tx.scalar(sa.select(schema.services.c.id))) or 0)


@KINDS
def test_returned_test_database_is_empty_and_lent_again(
    servers: Callable[[str], Server], kind: str
) -> None:
    databases, generated_ids = servers(kind), []
    url = databases.lend()
    for _ in range(3):
        store = Store(url)
        upgrades.check(store)
        assert store.read(lambda tx: list(tx.execute(sa.text(WRITTEN)))) == []
        generated_ids.append(fill(store))
        # The deleted row used an id, so the sequence must be reset too.
        store.write(lambda tx: tx.execute(schema.services.delete()))
        store.close()
        databases.take_back(url)
        assert databases.lend() == url, "it is not used again"
    databases.take_back(url)
    assert generated_ids == [1, 1, 1]


@KINDS
def test_returned_test_database_with_open_transaction_is_replaced(
    servers: Callable[[str], Server], kind: str
) -> None:
    databases = servers(kind)
    url = databases.lend()
    store = Store(url)
    with store.engine.connect() as connection:
        connection.execute(sa.text(WRITTEN))  # a transaction that stays open
        databases.take_back(url)
        other = databases.lend()
        assert other != url
        connection.invalidate()
    store.close()
    databases.take_back(other)


def test_second_engine_uses_compiled_statements_of_first(upgraded_url: str) -> None:
    compiled: list[str] = []

    def record(tx: sa.Connection, *arguments: Any) -> None:
        compiled.append(arguments[-1].context.cache_hit.name)

    for _ in range(2):
        store = Store(upgraded_url)
        sa.event.listen(store.engine, "after_execute", record)
        store.read(
            lambda tx: list(tx.execute(sa.select(schema.services.c.id.label("for_this_test"))))
        )
        store.close()
    assert compiled == ["CACHE_MISS", "CACHE_HIT"]
