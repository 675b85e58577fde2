# SPDX-License-Identifier: Apache-2.0
"""The rows that the API inserts for a request to create a server."""

from __future__ import annotations

from typing import Any

from common.domain import ids, states
from common.domain.models import Flavor
from common.domain.wire import to_wire

FLAVOR = Flavor("1", "m1.nano", 1, 128, 1)


def build_rows(
    networks: list[dict[str, Any]],
    *,
    flavor: Flavor = FLAVOR,
    group: str | None = None,
    disks: dict[str, Any] | None = None,
    **args: Any,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the rows of a new server and of its create action.

    Args:
        networks: The requested networks.
        flavor: The flavor.
        group: Id of the server group, or None.
        disks: The requested local disks, or None for those of the flavor.
        args: Further arguments of the action.
    """
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
