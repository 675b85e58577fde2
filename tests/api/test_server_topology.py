# SPDX-License-Identifier: Apache-2.0
"""GET /servers/{id}/topology: the NUMA nodes of a server, from 2.78."""

from __future__ import annotations

from typing import Any

import pytest

from common.domain.models import AssignedNumaNode, Flavor, HardwareAssignment
from common.domain.statuses import GuestState
from common.domain.wire import to_wire
from common.store.servers import guests
from tests.api.conftest import Cloud

NUMA_NODES = HardwareAssignment(
    [
        AssignedNumaNode(1, [0, 1], {"0": 12, "1": 13}, 256, 2048),
        AssignedNumaNode(0, [2, 3], {}, 256, 2048),
    ]
)


def put_on_host1(cloud: Cloud, server: str, assignment: HardwareAssignment | None) -> None:
    """Record the server's guest on host1, and an older guest elsewhere that is pending removal."""
    cloud.set_state(server)
    cloud.store.write(
        lambda tx: guests.add(
            tx,
            [
                {
                    "server_id": server,
                    "host": host,
                    "fence": 1,
                    "wanted": wanted,
                    "may_run": True,
                    "assignment": to_wire(assignment) if assignment and host == "host1" else None,
                }
                for host, wanted in (("another", GuestState.ABSENT), ("host1", GuestState.RUNNING))
            ],
        )
    )


def get_topology(
    cloud: Cloud, server: str, token: str = "user", mv: str = "2.78", status: int = 200
) -> Any:
    answer = cloud.call("GET", f"/servers/{server}/topology", mv=mv, token=token)
    assert answer.status_code == status, answer.text
    return answer.json


@pytest.fixture
def server(cloud: Cloud) -> str:
    cloud.add_flavor(Flavor("numa", "numa", 4, 512, 1, extra_specs={"hw:cpu_threads": "2"}))
    server_id = cloud.create(flavorRef="numa")
    put_on_host1(cloud, server_id, NUMA_NODES)
    return server_id


def test_server_topology_shows_numa_nodes_of_host_to_admins_only(cloud: Cloud, server: str) -> None:
    own = [
        {"vcpu_set": [0, 1], "memory_mb": 256, "siblings": [[0, 1]]},
        {"vcpu_set": [2, 3], "memory_mb": 256, "siblings": [[2, 3]]},
    ]
    assert get_topology(cloud, server) == {"nodes": own, "pagesize_kb": 2048}
    hosts = (
        {"host_node": 1, "cpu_pinning": {"0": 12, "1": 13}},
        {"host_node": 0, "cpu_pinning": {}},
    )
    assert get_topology(cloud, server, "admin", "2.104")["nodes"] == [
        node | host_node for node, host_node in zip(own, hosts, strict=True)
    ]


def test_server_topology_without_numa_nodes_is_empty(cloud: Cloud) -> None:
    server = cloud.create()
    assert get_topology(cloud, server) == {"nodes": [], "pagesize_kb": None}, (
        "the server has no host yet"
    )
    put_on_host1(cloud, server, None)
    assert get_topology(cloud, server, "admin") == {"nodes": [], "pagesize_kb": None}


def test_server_topology_returns_404_to_strangers_and_before_2_78(
    cloud: Cloud, server: str
) -> None:
    get_topology(cloud, server, mv="2.77", status=404)
    get_topology(cloud, server, token="stranger", status=404)
    assert get_topology(cloud, server, token="reader")
    get_topology(cloud, "9c5d0e5e-0000-4000-8000-000000000000", status=404)
