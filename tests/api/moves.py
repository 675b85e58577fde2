# SPDX-License-Identifier: Apache-2.0
"""Helpers for tests of server moves: a second host, and the state of moves."""

from __future__ import annotations

from typing import Any

from common.domain.models import Flavor
from common.store import schema
from tests.api.conftest import Cloud

LARGE, TINY = "large", "1"
KEY = "k"


def add_host2_and_large_flavor(cloud: Cloud) -> None:
    cloud.add_host("host2")
    cloud.add_flavor(Flavor(LARGE, "m1.large", 4, 8192, 80))


def create_resting_server(cloud: Cloud, **values: Any) -> str:
    server = cloud.create(flavorRef="2")
    cloud.set_state(server, **values)
    return server


def act(
    cloud: Cloud,
    server: str,
    key: str,
    body: Any = None,
    mv: str = "2.1",
    token: str = "user",
    status: int | None = None,
) -> Any:
    answer = cloud.call("POST", f"/servers/{server}/action", {key: body}, mv=mv, token=token)
    if status is not None:
        assert answer.status_code == status, answer.text
        return next(iter(answer.json.values()))["message"] if status >= 400 else answer
    return answer


def mark_host_down(cloud: Cloud, host: str, forced: bool = False) -> None:
    """Let a host be silent, or with ``forced`` declare the host dead."""
    if forced:
        cloud.change(schema.services, schema.services.c.host == host, forced_down=True)
    else:
        cloud.change(schema.heartbeats, schema.heartbeats.c.host == host, up=False)


def find_action_and_migration(cloud: Cloud, server: str) -> tuple[Any, Any]:
    """Return the open action of a server and its migration, or None without a migration."""
    [row] = [row for row in cloud.rows(schema.servers) if row.id == server]
    action = next(action for action in cloud.rows(schema.actions) if action.id == row.action)
    return action, next(
        (move for move in cloud.rows(schema.migrations) if move.action_id == action.id), None
    )


def requested_args(args: dict[str, Any]) -> dict[str, Any]:
    """Return the action's arguments that come from the request."""
    return {
        key: value
        for key, value in args.items()
        if key not in ("was", "migration", "source", "old_flavor", "new_flavor")
    }


def finish_resize(cloud: Cloud, server: str) -> None:
    """Bring a server to host2, resized, so that the user can confirm or revert."""
    action, move = find_action_and_migration(cloud, server)
    cloud.change(
        schema.migrations, schema.migrations.c.id == move.id, status="finished", dest_host="host2"
    )
    cloud.change(schema.actions, schema.actions.c.id == action.id, state="done")
    new = move.new_flavor
    cloud.set_state(server, "resized", host="host2", flavor=new, flavor_id=new["id"])
