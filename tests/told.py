# SPDX-License-Identifier: Apache-2.0
"""What waits in a store's outbox."""
from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from common.store import schema
from common.store.engine import Store


def all_told(store: Store) -> list[Any]:
    """The rows, oldest first."""
    table = schema.notifications
    return store.read(lambda tx: list(tx.execute(sa.select(table).order_by(table.c.id))))


def told(store: Store, key: str) -> list[str]:
    """The events of a server, without the word before them."""
    return [row.event.removeprefix("instance.") for row in all_told(store) if row.key == key]
