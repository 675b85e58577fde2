# SPDX-License-Identifier: Apache-2.0
"""os-hosts, a part of the API up to 2.42."""

from __future__ import annotations

from typing import Any

import pytest

from common.domain.service_binaries import Binary
from common.store.hosts import services
from tests.api.conftest import OTHER, PROJECT, Cloud


def call_os_hosts(
    cloud: Cloud,
    method: str,
    path: str,
    body: Any = None,
    status: int = 200,
    mv: str = "2.42",
    token: str = "admin",
) -> Any:
    answer = cloud.call(method, "/os-hosts" + path, body, mv=mv, token=token)
    assert answer.status_code == status, answer.text
    return answer.json


def test_os_hosts_lists_services_by_zone(cloud: Cloud) -> None:
    cloud.store.write(lambda tx: services.enrol(tx, "ctl", Binary.CONDUCTOR))
    compute = {"host_name": "host1", "service": "compute", "zone": "nova"}
    conductor = {"host_name": "ctl", "service": "conductor", "zone": "internal"}
    assert call_os_hosts(cloud, "GET", "")["hosts"] == [compute, conductor]
    assert call_os_hosts(cloud, "GET", "?zone=nova")["hosts"] == [compute]
    assert call_os_hosts(cloud, "GET", "?zone=elsewhere")["hosts"] == []


def test_os_hosts_show_returns_usage_by_project(cloud: Cloud) -> None:
    for name, token, flavor in (
        ("a", "user", "1"),
        ("b", "user", "2"),
        ("c", "stranger", "2"),
        ("gone", "user", "1"),
    ):
        cloud.set_state(
            cloud.create(name, token=token, flavorRef=flavor), deleted=int(name == "gone")
        )
    resources = [resource["resource"] for resource in call_os_hosts(cloud, "GET", "/host1")["host"]]
    assert all(resource["host"] == "host1" for resource in resources)
    by_project = {
        resource["project"]: (resource["cpu"], resource["memory_mb"], resource["disk_gb"])
        for resource in resources
    }
    assert list(by_project) == ["(total)", "(used_now)", "(used_max)", PROJECT, OTHER]
    assert by_project["(total)"] == (8, 16384, 100)
    assert by_project["(used_max)"] == (3, 2 * 2048 + 512, 41)
    assert by_project[PROJECT] == (2, 2048 + 512, 21) and by_project[OTHER] == (1, 2048, 20)


@pytest.mark.parametrize(
    ("word", "status"), [("disable", "disabled"), ("Enable", "enabled"), ("DISABLE", "disabled")]
)
def test_os_hosts_update_disables_and_enables_host(cloud: Cloud, word: str, status: str) -> None:
    assert call_os_hosts(cloud, "PUT", "/host1", {"status": word}) == {
        "host": "host1",
        "status": status,
    }
    assert cloud.call("GET", "/os-services", token="admin").json["services"][0]["status"] == status


@pytest.mark.parametrize(
    "body", [{}, {"status": "maybe"}, {"maintenance_mode": "on"}, {"status": "enable", "x": 1}]
)
def test_os_hosts_update_with_invalid_body_returns_400(cloud: Cloud, body: dict[str, Any]) -> None:
    call_os_hosts(cloud, "PUT", "/host1", body, 400)


def test_os_hosts_maintenance_and_power_return_501_without_change(cloud: Cloud) -> None:
    call_os_hosts(cloud, "PUT", "/host1", {"status": "disable", "maintenance_mode": "enable"}, 501)
    assert (
        cloud.call("GET", "/os-services", token="admin").json["services"][0]["status"] == "enabled"
    )
    for verb in ("startup", "shutdown", "reboot"):
        fault = call_os_hosts(cloud, "GET", f"/host1/{verb}", status=501)
        assert (
            fault["notImplemented"]["message"]
            == "Virt driver does not implement host power management."
        )


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", "/none", None),
        ("PUT", "/none", {"status": "enable"}),
        ("PUT", "/none", {"maintenance_mode": "enable"}),
        ("GET", "/none/reboot", None),
    ],
)
def test_os_hosts_of_unknown_host_returns_404(
    cloud: Cloud, method: str, path: str, body: Any
) -> None:
    call_os_hosts(cloud, method, path, body, 404)


def test_os_hosts_return_404_from_2_43_and_403_to_users(cloud: Cloud) -> None:
    for method, path, body in (
        ("GET", "", None),
        ("GET", "/host1", None),
        ("PUT", "/host1", {"status": "enable"}),
        ("GET", "/host1/startup", None),
    ):
        call_os_hosts(cloud, method, path, body, 404, mv="2.43")
        call_os_hosts(cloud, method, path, body, 403, token="user")
