# SPDX-License-Identifier: Apache-2.0
"""os-hosts, which the API had until 2.42."""

from __future__ import annotations

from typing import Any

import pytest

from common.domain.service_binaries import Binary
from common.store.hosts import services
from tests.api.conftest import OTHER, PROJECT, Cloud


def ask(
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


def test_services_by_their_hosts(cloud: Cloud) -> None:
    cloud.store.write(lambda tx: services.enrol(tx, "ctl", Binary.CONDUCTOR))
    compute = {"host_name": "host1", "service": "compute", "zone": "nova"}
    conductor = {"host_name": "ctl", "service": "conductor", "zone": "internal"}
    assert ask(cloud, "GET", "")["hosts"] == [compute, conductor]
    assert ask(cloud, "GET", "?zone=nova")["hosts"] == [compute]
    assert ask(cloud, "GET", "?zone=elsewhere")["hosts"] == []


def test_what_of_a_host_is_used_by_whom(cloud: Cloud) -> None:
    for name, token, flavor in (
        ("a", "user", "1"),
        ("b", "user", "2"),
        ("c", "stranger", "2"),
        ("gone", "user", "1"),
    ):
        cloud.rest(cloud.create(name, token=token, flavorRef=flavor), deleted=int(name == "gone"))
    found = [one["resource"] for one in ask(cloud, "GET", "/host1")["host"]]
    assert all(one["host"] == "host1" for one in found)
    by_project = {one["project"]: (one["cpu"], one["memory_mb"], one["disk_gb"]) for one in found}
    assert list(by_project) == ["(total)", "(used_now)", "(used_max)", PROJECT, OTHER]
    assert by_project["(total)"] == (8, 16384, 100)
    assert by_project["(used_max)"] == (3, 2 * 2048 + 512, 41)
    assert by_project[PROJECT] == (2, 2048 + 512, 21) and by_project[OTHER] == (1, 2048, 20)


@pytest.mark.parametrize(
    ("word", "status"), [("disable", "disabled"), ("Enable", "enabled"), ("DISABLE", "disabled")]
)
def test_a_host_is_taken_out_of_use_and_back(cloud: Cloud, word: str, status: str) -> None:
    assert ask(cloud, "PUT", "/host1", {"status": word}) == {"host": "host1", "status": status}
    assert cloud.call("GET", "/os-services", token="admin").json["services"][0]["status"] == status


@pytest.mark.parametrize(
    "body", [{}, {"status": "maybe"}, {"maintenance_mode": "on"}, {"status": "enable", "x": 1}]
)
def test_bodies_that_are_refused(cloud: Cloud, body: dict[str, Any]) -> None:
    ask(cloud, "PUT", "/host1", body, 400)


def test_what_the_hypervisor_cannot_do_changes_nothing(cloud: Cloud) -> None:
    ask(cloud, "PUT", "/host1", {"status": "disable", "maintenance_mode": "enable"}, 501)
    assert (
        cloud.call("GET", "/os-services", token="admin").json["services"][0]["status"] == "enabled"
    )
    for verb in ("startup", "shutdown", "reboot"):
        fault = ask(cloud, "GET", f"/host1/{verb}", status=501)
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
def test_a_host_that_is_none(cloud: Cloud, method: str, path: str, body: Any) -> None:
    ask(cloud, method, path, body, 404)


def test_it_ends_with_2_42_and_is_for_admins(cloud: Cloud) -> None:
    for method, path, body in (
        ("GET", "", None),
        ("GET", "/host1", None),
        ("PUT", "/host1", {"status": "enable"}),
        ("GET", "/host1/startup", None),
    ):
        ask(cloud, method, path, body, 404, mv="2.43")
        ask(cloud, method, path, body, 403, token="user")
