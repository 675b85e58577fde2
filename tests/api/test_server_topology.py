# SPDX-License-Identifier: Apache-2.0
"""The NUMA nodes of a server (2.78)."""

from __future__ import annotations

from typing import Any

import pytest

from common.domain.models import AssignedNumaNode, Flavor, HardwareAssignment
from common.domain.statuses import GuestState
from common.domain.wire import to_wire
from common.store.servers import guests
from tests.api.conftest import Cloud

CELLS = HardwareAssignment(
    [
        AssignedNumaNode(1, [0, 1], {"0": 12, "1": 13}, 256, 2048),
        AssignedNumaNode(0, [2, 3], {}, 256, 2048),
    ]
)


def on_host(cloud: Cloud, server: str, assignment: HardwareAssignment | None) -> None:
    """Its guest is there; an older one on another host is still to be removed."""
    cloud.rest(server)
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


def shown(
    cloud: Cloud, server: str, token: str = "user", mv: str = "2.78", status: int = 200
) -> Any:
    answer = cloud.call("GET", f"/servers/{server}/topology", mv=mv, token=token)
    assert answer.status_code == status, answer.text
    return answer.json


@pytest.fixture
def server(cloud: Cloud) -> str:
    cloud.add_flavor(Flavor("numa", "numa", 4, 512, 1, extra_specs={"hw:cpu_threads": "2"}))
    found = cloud.create(flavorRef="numa")
    on_host(cloud, found, CELLS)
    return found


def test_users_see_their_cells_and_admins_where_they_are(cloud: Cloud, server: str) -> None:
    own = [
        {"vcpu_set": [0, 1], "memory_mb": 256, "siblings": [[0, 1]]},
        {"vcpu_set": [2, 3], "memory_mb": 256, "siblings": [[2, 3]]},
    ]
    assert shown(cloud, server) == {"nodes": own, "pagesize_kb": 2048}
    hosts = (
        {"host_node": 1, "cpu_pinning": {"0": 12, "1": 13}},
        {"host_node": 0, "cpu_pinning": {}},
    )
    assert shown(cloud, server, "admin", "2.104")["nodes"] == [
        one | more for one, more in zip(own, hosts, strict=True)
    ]


def test_a_server_without_cells(cloud: Cloud) -> None:
    server = cloud.create()
    assert shown(cloud, server) == {"nodes": [], "pagesize_kb": None}, "it has no host yet"
    on_host(cloud, server, None)
    assert shown(cloud, server, "admin") == {"nodes": [], "pagesize_kb": None}


def test_who_may_see_it_and_since_when(cloud: Cloud, server: str) -> None:
    shown(cloud, server, mv="2.77", status=404)
    shown(cloud, server, token="stranger", status=404)
    assert shown(cloud, server, token="reader")
    shown(cloud, "9c5d0e5e-0000-4000-8000-000000000000", status=404)
