# SPDX-License-Identifier: Apache-2.0
"""Diagnostics of a guest in both formats, and the password that a guest publishes."""

from __future__ import annotations

from typing import Any

import pytest

from common.store import schema
from tests.api.conftest import Cloud

DIAGNOSTICS: dict[str, Any] = {
    "state": "running",
    "driver": "libvirt",
    "hypervisor": "qemu",
    "hypervisor_os": "linux",
    "uptime": 7,
    "config_drive": True,
    "num_cpus": 2,
    "num_disks": 2,
    "num_nics": 1,
    "memory_details": {"maximum": 512, "used": None},
    "cpu_details": [
        {"id": 0, "time": 17, "utilisation": 3},
        {"id": 1, "time": 18, "utilisation": 4},
    ],
    "disk_details": [
        {
            "read_bytes": 1,
            "read_requests": 2,
            "write_bytes": 3,
            "write_requests": 4,
            "errors_count": 0,
        },
        {
            "read_bytes": 5,
            "read_requests": 6,
            "write_bytes": 7,
            "write_requests": 8,
            "errors_count": None,
        },
    ],
    "nic_details": [
        {
            "mac_address": "02:00:00:00:00:01",
            "rx_octets": 1,
            "rx_packets": 2,
            "rx_errors": 3,
            "rx_drop": 4,
            "rx_rate": 0,
            "tx_octets": 5,
            "tx_packets": 6,
            "tx_errors": 7,
            "tx_drop": 8,
            "tx_rate": 0,
        }
    ],
}
FLAT = {
    "cpu0_time": 17,
    "cpu1_time": 18,
    "memory": 524288,
    "vda_read": 1,
    "vda_read_req": 2,
    "vda_write": 3,
    "vda_write_req": 4,
    "vda_errors": 0,
    "vdb_read": 5,
    "vdb_read_req": 6,
    "vdb_write": 7,
    "vdb_write_req": 8,
    "vnet0_rx": 1,
    "vnet0_rx_packets": 2,
    "vnet0_rx_errors": 3,
    "vnet0_rx_drop": 4,
    "vnet0_tx": 5,
    "vnet0_tx_packets": 6,
    "vnet0_tx_errors": 7,
    "vnet0_tx_drop": 8,
}


@pytest.fixture
def server(cloud: Cloud) -> str:
    server_id = cloud.create()
    cloud.set_state(server_id)
    cloud.agents.diagnostics = dict(DIAGNOSTICS)
    return server_id


@pytest.mark.parametrize(
    ("mv", "body"), [("2.1", FLAT), ("2.47", FLAT), ("2.48", DIAGNOSTICS), ("2.104", DIAGNOSTICS)]
)
def test_server_diagnostics_have_the_format_of_each_microversion(
    cloud: Cloud, server: str, mv: str, body: dict[str, Any]
) -> None:
    answer = cloud.call("GET", f"/servers/{server}/diagnostics", token="admin", mv=mv)
    assert (answer.status_code, answer.json) == (200, body)
    assert cloud.agents.queries == [("host1", "diagnostics", {"server": server})]


def test_server_diagnostics_fill_missing_and_drop_unknown_host_fields(
    cloud: Cloud, server: str
) -> None:
    cloud.agents.diagnostics = {
        "state": "running",
        "secret": 1,
        "disk_details": [{"path": "/x", "read_bytes": 1}],
    }
    answer = cloud.call("GET", f"/servers/{server}/diagnostics", token="admin", mv="2.48").json
    assert set(answer) == set(DIAGNOSTICS)
    assert (answer["driver"], answer["config_drive"], answer["uptime"]) == ("libvirt", False, None)
    assert answer["disk_details"] == [
        {
            "read_bytes": 1,
            "read_requests": None,
            "write_bytes": None,
            "write_requests": None,
            "errors_count": None,
        }
    ]


def test_server_diagnostics_need_admin_running_guest_and_reachable_host(
    cloud: Cloud, server: str
) -> None:
    path = f"/servers/{server}/diagnostics"
    assert cloud.call("GET", path).status_code == 403
    cloud.change(schema.servers, schema.servers.c.id == server, power_state=4)
    assert cloud.call("GET", path, token="admin").status_code == 409
    cloud.set_state(server)
    cloud.agents.output = None
    assert cloud.call("GET", path, token="admin").json["conflictingRequest"]["message"] == (
        f"The host of instance {server} does not answer; try again."
    )


def test_server_password_is_shown_to_readers_and_cleared_by_members(
    cloud: Cloud, server: str
) -> None:
    path = f"/servers/{server}/os-server-password"
    assert cloud.call("GET", path, token="reader").json == {"password": ""}
    cloud.change(schema.servers, schema.servers.c.id == server, password="c2VhbGVk")
    assert cloud.call("GET", path, token="reader").json == {"password": "c2VhbGVk"}
    assert cloud.call("DELETE", path, token="reader").status_code == 403
    assert cloud.call("GET", path, token="stranger").status_code == 404
    assert cloud.call("DELETE", path, token="stranger").status_code == 404
    assert cloud.call("GET", path).json == {"password": "c2VhbGVk"}
    assert cloud.call("DELETE", path).status_code == 204
    assert cloud.call("GET", path).json == {"password": ""}
    assert cloud.call("DELETE", path).status_code == 204
