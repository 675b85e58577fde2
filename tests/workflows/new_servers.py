# SPDX-License-Identifier: Apache-2.0
"""What the API writes when a server is asked for."""

from __future__ import annotations

from typing import Any

from common.domain import ids, states
from common.domain.models import Flavor
from common.domain.wire import to_wire

FLAVOR = Flavor("1", "m1.nano", 1, 128, 1)


def rows(
    networks: list[dict[str, Any]],
    *,
    flavor: Flavor = FLAVOR,
    group: str | None = None,
    disks: dict[str, Any] | None = None,
    **args: Any,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The rows of a new server and of its create."""
    server, action = ids.new(), ids.new()
    return {
        "id": server,
        "project_id": "project",
        "user_id": "user",
        "name": "s",
        "hostname": "s",
        "vm_state": states.BUILDING,
        "task_state": states.SCHEDULING,
        "fence": 1,
        "action": action,
        "flavor": to_wire(flavor),
        "flavor_id": "1",
        "vcpus": flavor.vcpus,
        "memory_mb": flavor.memory_mb,
        "disk_gb": flavor.disk_gb,
        "meta": {},
        "tags": [],
        "scheduler_hints": {"group": group} if group else {},
        "security_groups": [],
        "interfaces": [] if networks else None,
        "reservation_id": "r",
        "disks": disks,
    }, {
        "id": action,
        "server_id": server,
        "project_id": "project",
        "user_id": "user",
        "request_id": ids.new_request(),
        "name": "create",
        "workflow": "create",
        "fence": 1,
        "args": {"networks": networks, **args},
    }
