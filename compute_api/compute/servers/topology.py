# SPDX-License-Identifier: Apache-2.0
"""The NUMA nodes of a guest, and for administrators their places on the host (since 2.78)."""

from __future__ import annotations

from common.domain.hardware.cpus import topology
from common.domain.hardware.specs import HardwareSpecs
from common.domain.json_types import JsonObject
from common.domain.models import AssignedNumaNode, Flavor, HardwareAssignment
from common.domain.wire import from_wire
from common.store.rows import ServerRecord
from common.store.servers import guests
from common.store.servers.servers import loads
from compute_api.compute.request.request import Request

_ON_HOST = "compute:server:topology:host:index"


def show(request: Request, server: ServerRecord) -> JsonObject:
    """Return the NUMA nodes of a server for GET /servers/{id}/topology.

    The list is empty if flavor and image request no NUMA nodes, dedicated CPUs or page size, or if
    the server is on no host. Only callers that the policy ``_ON_HOST`` allows see the host's NUMA
    nodes and pinned CPUs.
    """
    assignment = next(
        (
            row.assignment
            for row in request.read(guests.places, server.id)
            if row.host == server.host
        ),
        None,
    )
    numa_nodes = from_wire(HardwareAssignment, assignment).numa_nodes if assignment else []
    threads = topology(
        HardwareSpecs(
            from_wire(Flavor, loads(server.flavor)),
            loads(server.image or "{}").get("properties", {}),
        )
    )[2]
    with_host = request.allows(
        _ON_HOST, {"project_id": server.project_id, "user_id": server.user_id}
    )
    return {
        "nodes": [_show_node(numa_node, threads, with_host) for numa_node in numa_nodes],
        "pagesize_kb": next(
            (numa_node.page_kb for numa_node in numa_nodes if numa_node.page_kb), None
        ),
    }


def _show_node(numa_node: AssignedNumaNode, threads: int, with_host: bool) -> JsonObject:
    node: JsonObject = {
        "vcpu_set": numa_node.cpus,
        "memory_mb": numa_node.memory_mb,
        "siblings": [
            numa_node.cpus[first : first + threads]
            for first in range(0, len(numa_node.cpus), threads)
        ]
        if threads > 1
        else [],
    }
    if with_host:
        node |= {"host_node": numa_node.numa_node, "cpu_pinning": numa_node.pins}
    return node
