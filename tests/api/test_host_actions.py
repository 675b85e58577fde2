# SPDX-License-Identifier: Apache-2.0
"""Drains and evacuations of hosts through Kilonova's extension of the API."""

from __future__ import annotations

from typing import Any

import pytest

from common.domain import ids
from common.store.hosts import host_actions
from common.store.hosts.host_actions import Event, EventName, Progress, State
from tests.api.conftest import Cloud


def call_host_actions(
    cloud: Cloud,
    method: str,
    path: str = "",
    body: Any = None,
    *,
    status: int = 200,
    mv: str = "2.53",
    headers: dict[str, str] | None = None,
) -> Any:
    """Send a request to the host actions of host1, and check the status."""
    [service] = cloud.call(
        "GET", "/os-services?binary=nova-compute", mv="2.53", token="admin"
    ).json["services"]
    answer = cloud.call(
        method,
        f"/os-services/{service['id']}/actions{path}",
        body,
        mv=mv,
        token="admin",
        headers=headers,
    )
    assert answer.status_code == status, answer.text
    return answer.json if answer.text else None


def test_drain_host_begins_and_shows_progress_and_events(cloud: Cloud) -> None:
    drain = call_host_actions(
        cloud, "POST", body={"drain": {"cold": True, "parallel": 3}}, status=202
    )["host_action"]
    assert {
        name: drain[name]
        for name in ("host", "action", "state", "arguments", "progress", "message")
    } == {
        "host": "host1",
        "action": "drain",
        "state": "running",
        "message": "",
        "arguments": {"cold": True, "parallel": 3, "wait": False},
        "progress": {"moved": 0, "under_way": 0, "waiting": 0, "seconds_left": None},
    }
    assert cloud.wakeup.count
    [service] = cloud.call("GET", "/os-services", mv="2.53", token="admin").json["services"]
    assert service["status"] == "disabled"
    assert call_host_actions(cloud, "GET") == {"host_actions": [drain]}
    cloud.store.write(lambda tx: host_actions.take(tx, "c1"))
    assert cloud.store.write(
        lambda tx: host_actions.record(
            tx,
            drain["id"],
            "c1",
            [Event(EventName.MOVED, "web is on host2", "s1", "m1")],
            Progress(1),
            ended=State.DONE,
            message="host host1 is empty",
        )
    )
    completed = call_host_actions(cloud, "GET", f"/{drain['id']}")["host_action"]
    assert (completed["state"], completed["message"], completed["progress"]["moved"]) == (
        "done",
        "host host1 is empty",
        1,
    )
    assert completed["finish_time"] is not None
    [event] = completed["events"]
    assert (event["event"], event["server_id"], event["migration_id"]) == ("moved", "s1", "m1")
    fault = call_host_actions(cloud, "DELETE", f"/{drain['id']}", status=409)
    assert "has ended already: it is done" in fault["conflictingRequest"]["message"]


def test_create_second_host_action_on_a_host_returns_409(cloud: Cloud) -> None:
    evacuation = call_host_actions(cloud, "POST", body={"evacuate": {}}, status=202)["host_action"]
    assert evacuation["arguments"] == {"parallel": 2, "force": False}
    fault = call_host_actions(cloud, "POST", body={"drain": {}}, status=409)
    assert "an open evacuate since 20" in fault["conflictingRequest"]["message"]
    call_host_actions(cloud, "DELETE", f"/{evacuation['id']}", status=202)
    assert (
        call_host_actions(cloud, "GET", f"/{evacuation['id']}")["host_action"]["state"]
        == "stopping"
    )


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"drain": {}, "evacuate": {}},
        {"drain": {"force": True}},
        {"evacuate": {"cold": True}},
        {"empty": {}},
        {"drain": {"parallel": 0}},
        {"drain": {"parallel": "2"}},
        {"drain": None},
    ],
)
def test_create_host_action_with_invalid_body_returns_400(cloud: Cloud, body: Any) -> None:
    call_host_actions(cloud, "POST", body=body, status=400)
    assert call_host_actions(cloud, "GET") == {"host_actions": []}


def test_host_actions_of_unknown_service_or_action_return_404(cloud: Cloud) -> None:
    for service, status in ((ids.new(), 404), ("1", 400)):
        answer = cloud.call("GET", f"/os-services/{service}/actions", mv="2.53", token="admin")
        assert answer.status_code == status
    call_host_actions(cloud, "GET", f"/{ids.new()}", status=404)
    call_host_actions(cloud, "DELETE", f"/{ids.new()}", status=404)
    call_host_actions(cloud, "GET", mv="2.52", status=404)


def test_show_host_action_in_url_of_another_host_returns_404(cloud: Cloud) -> None:
    drain = call_host_actions(cloud, "POST", body={"drain": {}}, status=202)["host_action"]
    cloud.add_host("host2")
    other = next(
        service["id"]
        for service in cloud.call("GET", "/os-services", mv="2.53", token="admin").json["services"]
        if service["host"] == "host2"
    )
    answer = cloud.call(
        "GET", f"/os-services/{other}/actions/{drain['id']}", mv="2.53", token="admin"
    )
    assert answer.status_code == 404


@pytest.mark.parametrize(
    ("version", "status"), [("1.0", 200), ("latest", 200), ("1.1", 406), ("2.53", 406)]
)
def test_host_actions_return_406_only_for_unsupported_extension_versions(
    cloud: Cloud, version: str, status: int
) -> None:
    call_host_actions(
        cloud,
        "GET",
        headers={"OpenStack-API-Version": f"compute 2.53, kilonova {version}"},
        status=status,
    )
