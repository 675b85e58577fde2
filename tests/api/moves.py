# SPDX-License-Identifier: Apache-2.0
"""What the tests of servers that move share: a cloud of two hosts, and what was begun in it."""

from __future__ import annotations

from typing import Any

from common.domain.models import Flavor
from common.store import schema
from tests.api.conftest import Cloud

LARGE, TINY = "large", "1"
KEY = "k"


def furnish(cloud: Cloud) -> None:
    cloud.add_host("host2")
    cloud.add_flavor(Flavor(LARGE, "m1.large", 4, 8192, 80))


def rested(cloud: Cloud, **values: Any) -> str:
    made = cloud.create(flavorRef="2")
    cloud.rest(made, **values)
    return made


def act(
    cloud: Cloud,
    server: str,
    key: str,
    given: Any = None,
    mv: str = "2.1",
    token: str = "user",
    status: int | None = None,
) -> Any:
    answer = cloud.call("POST", f"/servers/{server}/action", {key: given}, mv=mv, token=token)
    if status is not None:
        assert answer.status_code == status, answer.text
        return next(iter(answer.json.values()))["message"] if status >= 400 else answer
    return answer


def down(cloud: Cloud, host: str, forced: bool = False) -> None:
    """Silent, or declared dead."""
    if forced:
        cloud.change(schema.services, schema.services.c.host == host, forced_down=True)
    else:
        cloud.change(schema.heartbeats, schema.heartbeats.c.host == host, up=False)


def begun(cloud: Cloud, server: str) -> tuple[Any, Any]:
    """The action that holds the server, and its migration."""
    [row] = [row for row in cloud.rows(schema.servers) if row.id == server]
    action = next(action for action in cloud.rows(schema.actions) if action.id == row.action)
    return action, next(
        (move for move in cloud.rows(schema.migrations) if move.action_id == action.id), None
    )


def asked(args: dict[str, Any]) -> dict[str, Any]:
    """What the API alone has put into an action's args."""
    return {
        key: value
        for key, value in args.items()
        if key not in ("was", "migration", "source", "old_flavor", "new_flavor")
    }


def finished(cloud: Cloud, server: str) -> None:
    """As when its resize is done: it waits on host2 to be confirmed or reverted."""
    action, move = begun(cloud, server)
    cloud.change(
        schema.migrations, schema.migrations.c.id == move.id, status="finished", dest_host="host2"
    )
    cloud.change(schema.actions, schema.actions.c.id == action.id, state="done")
    new = move.new_flavor
    cloud.rest(server, "resized", host="host2", flavor=new, flavor_id=new["id"])
