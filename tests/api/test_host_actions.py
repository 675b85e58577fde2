# SPDX-License-Identifier: Apache-2.0
"""Drains and evacuations through the API, an extension of Kilonova's own."""

from __future__ import annotations

from typing import Any

import pytest

from common.domain import ids
from common.store.hosts import host_actions
from common.store.hosts.host_actions import Event, EventName, Progress, State
from tests.api.conftest import Cloud


def ask(
    cloud: Cloud,
    method: str,
    path: str = "",
    body: Any = None,
    *,
    status: int = 200,
    mv: str = "2.53",
    headers: dict[str, str] | None = None,
) -> Any:
    """Below the actions of host1."""
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


def test_drain_begun_and_read(cloud: Cloud) -> None:
    begun = ask(cloud, "POST", body={"drain": {"cold": True, "parallel": 3}}, status=202)[
        "host_action"
    ]
    assert {
        name: begun[name]
        for name in ("host", "action", "state", "arguments", "progress", "message")
    } == {
        "host": "host1",
        "action": "drain",
        "state": "running",
        "message": "",
        "arguments": {"cold": True, "parallel": 3, "wait": False},
        "progress": {"moved": 0, "under_way": 0, "waiting": 0, "seconds_left": None},
    }
    assert cloud.wakeup.woken
    [service] = cloud.call("GET", "/os-services", mv="2.53", token="admin").json["services"]
    assert service["status"] == "disabled"
    assert ask(cloud, "GET") == {"host_actions": [begun]}
    cloud.store.write(lambda tx: host_actions.take(tx, "c1"))
    assert cloud.store.write(
        lambda tx: host_actions.record(
            tx,
            begun["id"],
            "c1",
            [Event(EventName.MOVED, "web is on host2", "s1", "m1")],
            Progress(1),
            ended=State.DONE,
            message="host host1 is empty",
        )
    )
    ended = ask(cloud, "GET", f"/{begun['id']}")["host_action"]
    assert (ended["state"], ended["message"], ended["progress"]["moved"]) == (
        "done",
        "host host1 is empty",
        1,
    )
    assert ended["finish_time"] is not None
    [event] = ended["events"]
    assert (event["event"], event["server_id"], event["migration_id"]) == ("moved", "s1", "m1")
    fault = ask(cloud, "DELETE", f"/{begun['id']}", status=409)
    assert "has ended already: it is done" in fault["conflictingRequest"]["message"]


def test_second_action_on_a_host_is_refused(cloud: Cloud) -> None:
    begun = ask(cloud, "POST", body={"evacuate": {}}, status=202)["host_action"]
    assert begun["arguments"] == {"parallel": 2, "force": False}
    fault = ask(cloud, "POST", body={"drain": {}}, status=409)
    assert "an open evacuate since 20" in fault["conflictingRequest"]["message"]
    ask(cloud, "DELETE", f"/{begun['id']}", status=202)
    assert ask(cloud, "GET", f"/{begun['id']}")["host_action"]["state"] == "stopping"


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
def test_wrong_body_is_refused(cloud: Cloud, body: Any) -> None:
    ask(cloud, "POST", body=body, status=400)
    assert ask(cloud, "GET") == {"host_actions": []}


def test_unknown_service_and_action_are_not_found(cloud: Cloud) -> None:
    for service, status in ((ids.new(), 404), ("1", 400)):
        answer = cloud.call("GET", f"/os-services/{service}/actions", mv="2.53", token="admin")
        assert answer.status_code == status
    ask(cloud, "GET", f"/{ids.new()}", status=404)
    ask(cloud, "DELETE", f"/{ids.new()}", status=404)
    ask(cloud, "GET", mv="2.52", status=404)


def test_action_of_another_host_is_not_found(cloud: Cloud) -> None:
    begun = ask(cloud, "POST", body={"drain": {}}, status=202)["host_action"]
    cloud.add_host("host2")
    other = next(
        one["id"]
        for one in cloud.call("GET", "/os-services", mv="2.53", token="admin").json["services"]
        if one["host"] == "host2"
    )
    answer = cloud.call(
        "GET", f"/os-services/{other}/actions/{begun['id']}", mv="2.53", token="admin"
    )
    assert answer.status_code == 404


@pytest.mark.parametrize(
    ("version", "status"), [("1.0", 200), ("latest", 200), ("1.1", 406), ("2.53", 406)]
)
def test_the_extension_has_versions_of_its_own(cloud: Cloud, version: str, status: int) -> None:
    ask(
        cloud,
        "GET",
        headers={"OpenStack-API-Version": f"compute 2.53, kilonova {version}"},
        status=status,
    )
