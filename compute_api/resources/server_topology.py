# SPDX-License-Identifier: Apache-2.0
"""The NUMA cells of a server's guest, and for admins where they are on its host (since 2.78)."""
from __future__ import annotations

from typing import Any

from common.hardware.asked import Asked
from common.hardware.topology import topology
from common.models import FittedCell, Fitting, Flavor
from common.store import guests
from common.store.servers import loads
from common.wire import from_wire
from compute_api.request import Request

_ON_HOST = "compute:server:topology:host:index"


def show(request: Request, server: Any) -> dict[str, Any]:
    """GET …/topology: no cells where its flavor and image ask for none"""
    fitting = next((row.fitting for row in request.read(guests.places, server.id) if row.host == server.host), None)
    cells = from_wire(Fitting, fitting).cells if fitting else []
    threads = topology(Asked(from_wire(Flavor, loads(server.flavor)),
                             loads(server.image or "{}").get("properties", {})))[2]
    with_host = request.allows(_ON_HOST, {"project_id": server.project_id, "user_id": server.user_id})
    return {"nodes": [_node(cell, threads, with_host) for cell in cells],
            "pagesize_kb": next((cell.page_kb for cell in cells if cell.page_kb), None)}


def _node(cell: FittedCell, threads: int, with_host: bool) -> dict[str, Any]:
    node: dict[str, Any] = {
        "vcpu_set": cell.cpus, "memory_mb": cell.memory_mb,
        "siblings": [cell.cpus[first:first + threads] for first in range(0, len(cell.cpus), threads)]
        if threads > 1 else []}
    if with_host:
        node |= {"host_node": cell.cell, "cpu_pinning": cell.pins}
    return node
