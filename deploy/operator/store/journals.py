# SPDX-License-Identifier: Apache-2.0
"""Queries for actions of a server or a request, including ended ones."""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from common.store.rows.servers import ActionRow
from common.store.schema import actions, servers


def of_server(tx: Connection, server_id: str) -> list[ActionRow]:
    """Return all actions of a server, oldest first."""
    return _read_actions(tx, actions.c.server_id == server_id)


def of_request(tx: Connection, request_id: str) -> list[ActionRow]:
    """Return all actions that a request started, oldest first.

    A request that creates several servers starts an action for each.
    """
    return _read_actions(tx, actions.c.request_id == request_id)


def find_servers(tx: Connection, name: str) -> list[str]:
    """Return the ids of the servers with this name, oldest first, including deleted servers."""
    query = sa.select(servers.c.id).where(servers.c.name == name).order_by(servers.c.created_at)
    return list(tx.execute(query).scalars())


def _read_actions(tx: Connection, condition: sa.ColumnElement[bool]) -> list[ActionRow]:
    query = sa.select(actions).where(condition).order_by(actions.c.created_at, actions.c.id)
    return list(tx.execute(query))
