# SPDX-License-Identifier: Apache-2.0
"""A row of a server, as tests write it where no request makes one."""

from __future__ import annotations

from typing import Any

from common.store.engine import now


def server_row(server_id: str, **values: Any) -> dict[str, Any]:
    """All values that the table demands; ``values`` in place of them."""
    return {
        "id": server_id,
        "project_id": "p",
        "user_id": "u",
        "name": "s",
        "hostname": "s",
        "vm_state": "active",
        "flavor": {},
        "flavor_id": "1",
        "vcpus": 1,
        "memory_mb": 1,
        "disk_gb": 1,
        "meta": {},
        "tags": [],
        "scheduler_hints": {},
        "security_groups": [],
        "reservation_id": "r",
        "created_at": now(),
        "updated_at": now(),
        **values,
    }
