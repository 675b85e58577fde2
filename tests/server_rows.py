# SPDX-License-Identifier: Apache-2.0
"""A server's row for tests that insert servers without a request."""

from __future__ import annotations

from typing import Any

from common.store.engine import now


def server_row(server_id: str, **values: Any) -> dict[str, Any]:
    """Return all required columns of a server. ``values`` override the defaults."""
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
