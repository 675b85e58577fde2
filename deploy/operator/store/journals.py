# SPDX-License-Identifier: Apache-2.0
"""Actions to look back at, of a server or of a request, ended ones too."""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from common.store.rows.servers import ActionRow
from common.store.schema import actions, servers


def of_server(tx: Connection, server_id: str) -> list[ActionRow]:
    """All actions of a server, the oldest first."""
    return _found(tx, actions.c.server_id == server_id)


def of_request(tx: Connection, request_id: str) -> list[ActionRow]:
    """All actions that a request has begun: of several servers when it made several."""
    return _found(tx, actions.c.request_id == request_id)


def named(tx: Connection, name: str) -> list[str]:
    """The ids of servers of this name, deleted ones too."""
    query = sa.select(servers.c.id).where(servers.c.name == name).order_by(servers.c.created_at)
    return list(tx.execute(query).scalars())


def _found(tx: Connection, which: sa.ColumnElement[bool]) -> list[ActionRow]:
    query = sa.select(actions).where(which).order_by(actions.c.created_at, actions.c.id)
    return list(tx.execute(query))
