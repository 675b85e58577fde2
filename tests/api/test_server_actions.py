# SPDX-License-Identifier: Apache-2.0
"""Actions on servers, their journal, console output, metadata and tags."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import sqlalchemy as sa

from common.domain import ids
from common.store import schema
from common.store.engine import now
from compute_api.compute.servers.consoles import MAX_CONSOLE_BYTES
from tests.api.conftest import Cloud


def act(cloud: Cloud, server: str, body: Any, mv: str = "2.1", token: str = "user") -> Any:
    return cloud.call("POST", f"/servers/{server}/action", body, mv=mv, token=token)


@pytest.fixture
def server(cloud: Cloud) -> str:
    server_id = cloud.create()
    cloud.set_state(server_id)
    return server_id


@pytest.mark.parametrize(
    ("body", "vm_state", "workflow", "task_state"),
    [
        ({"os-stop": None}, "active", "stop", "powering-off"),
        ({"os-start": None}, "stopped", "start", "powering-on"),
        ({"reboot": {"type": "SOFT"}}, "active", "reboot_soft", "rebooting"),
        ({"reboot": {"type": "hard"}}, "stopped", "reboot_hard", "rebooting_hard"),
    ],
)
def test_server_action_is_recorded_and_wakes_conductor(
    cloud: Cloud, server: str, body: Any, vm_state: str, workflow: str, task_state: str
) -> None:
    cloud.set_state(server, vm_state)
    woken = cloud.wakeup.count
    answer = act(cloud, server, body)
    assert (answer.status_code, answer.content) == (202, b"")
    [row] = cloud.rows(schema.servers)
    action = next(row for row in cloud.rows(schema.actions) if row.name != "create")
    assert (action.workflow, action.state, action.fence) == (workflow, "due", 2)
    assert (row.action, row.fence, row.task_state) == (action.id, 2, task_state)
    assert cloud.wakeup.count == woken + 1


@pytest.mark.parametrize(
    ("body", "values", "text"),
    [
        ({"os-start": None}, {}, "Cannot 'start' instance {} while it is in vm_state active"),
        (
            {"os-stop": None},
            {"vm_state": "stopped"},
            "Cannot 'stop' instance {} while it is in vm_state stopped",
        ),
        (
            {"os-stop": None},
            {"task_state": "rebooting"},
            "Cannot 'stop' instance {} while it is in task_state rebooting",
        ),
        (
            {"reboot": {"type": "SOFT"}},
            {"vm_state": "stopped"},
            "Cannot 'reboot' instance {} while it is in vm_state stopped",
        ),
        ({"os-stop": None}, {"locked": True}, "Instance {} is locked"),
    ],
)
def test_server_action_in_wrong_state_returns_409_with_the_state(
    cloud: Cloud, server: str, body: Any, values: dict[str, Any], text: str
) -> None:
    cloud.set_state(server, **values)
    answer = act(cloud, server, body)
    assert answer.json == {"conflictingRequest": {"code": 409, "message": text.format(server)}}
    assert len(cloud.rows(schema.actions)) == 1


@pytest.mark.parametrize(
    ("body", "mv", "status", "text"),
    [
        ({"explode": None}, "2.1", 400, "There is no such action: explode"),
        ({}, "2.1", 400, "Malformed request body"),
        ({"os-start": None, "os-stop": None}, "2.1", 400, "Malformed request body"),
        ({"create": None}, "2.1", 400, "There is no such action: create"),
        ({"delete": None}, "2.1", 400, "There is no such action: delete"),
        (
            {"reboot": {"type": "warm"}},
            "2.1",
            400,
            "Invalid input for field/attribute type. Value: warm. 'warm' is not one of "
            "['HARD', 'Hard', 'hard', 'SOFT', 'Soft', 'soft']",
        ),
        (
            {"reboot": {}},
            "2.1",
            400,
            "Invalid input for field/attribute reboot. Value: {}. 'type' is a required property",
        ),
        (
            {"os-getRDPConsole": {"type": "x"}},
            "2.5",
            400,
            "There is no such action: os-getRDPConsole",
        ),
    ],
)
def test_unknown_or_malformed_server_action_returns_400(
    cloud: Cloud, server: str, body: Any, mv: str, status: int, text: str
) -> None:
    answer = act(cloud, server, body, mv)
    assert answer.status_code == status
    assert answer.json["badRequest"]["message"] == text


@pytest.mark.parametrize(
    "body",
    [
        {"rescue": {"adminPass": "p", "colour": "red"}},
        {"reboot": {"type": "SOFT", "colour": "red"}},
        {"createImage": {"name": "i", "colour": "red"}},
    ],
)
def test_server_action_accepts_unknown_keys_below_v2_root_only(
    cloud: Cloud, server: str, body: Any
) -> None:
    path = f"/servers/{server}/action"
    assert cloud.call("POST", path, body).status_code == 400
    assert cloud.call("POST", path, body, root="/v2").status_code in (200, 202)


def test_reset_network_returns_410_and_rdp_console_from_2_6_returns_404(
    cloud: Cloud, server: str
) -> None:
    assert act(cloud, server, {"resetNetwork": None}, token="admin").status_code == 410
    assert act(cloud, server, {"os-getRDPConsole": {}}, "2.6").status_code == 404


def test_server_action_by_reader_returns_403(cloud: Cloud, server: str) -> None:
    answer = act(cloud, server, {"os-stop": None}, token="reader")
    assert answer.json == {
        "forbidden": {
            "code": 403,
            "message": "Policy doesn't allow os_compute_api:servers:stop to be performed.",
        }
    }


# --- console output ---
@pytest.mark.parametrize(
    ("length", "output"),
    [
        (None, "one\ntwo\nthree"),
        (-1, "one\ntwo\nthree"),
        (2, "two\nthree"),
        ("1", "three"),
        (0, ""),
        (99, "one\ntwo\nthree"),
    ],
)
def test_console_output_returns_requested_number_of_lines(
    cloud: Cloud, server: str, length: Any, output: str
) -> None:
    answer = act(cloud, server, {"os-getConsoleOutput": {"length": length}})
    assert (answer.status_code, answer.json) == (200, {"output": output})
    assert cloud.agents.queries == [
        ("host1", "console_output", {"server": server, "length_bytes": 102400})
    ]


def test_console_output_is_limited_in_bytes(cloud: Cloud, server: str) -> None:
    cloud.agents.output = "x" * 1_000_000 + "end"
    output = act(cloud, server, {"os-getConsoleOutput": {}}).json["output"]
    assert len(output) == MAX_CONSOLE_BYTES and output.endswith("xend")


def test_console_output_has_no_control_characters(cloud: Cloud, server: str) -> None:
    cloud.agents.output = "a\x00b\x1b[31mc\td\n\u2603"
    assert act(cloud, server, {"os-getConsoleOutput": {}}).json == {"output": "ab[31mc\td\n\u2603"}


def test_console_output_has_no_del_and_no_c1_controls(cloud: Cloud, server: str) -> None:
    cloud.agents.output = "a\x7f\x9b31mred\x90\x9d0;title\x9c\xa0\xe4"
    output = act(cloud, server, {"os-getConsoleOutput": {}}).json["output"]
    assert output == "a31mred0;title\xa0\xe4"


def test_console_output_of_host_down_or_silent_returns_409(cloud: Cloud, server: str) -> None:
    body = {"os-getConsoleOutput": {}}
    cloud.agents.output = None
    assert act(cloud, server, body).json["conflictingRequest"]["message"] == (
        f"The host of instance {server} does not answer; try again."
    )
    cloud.change(schema.heartbeats, schema.heartbeats.c.host == "host1", up=False)
    assert act(cloud, server, body).json["conflictingRequest"]["message"] == (
        f"Instance {server} is on a host that is down; try again when it is up."
    )
    assert len(cloud.agents.queries) == 1, "a host that is down gets no query"
    cloud.set_state(server, "building", host=None)
    assert (
        act(cloud, server, body).json["conflictingRequest"]["message"]
        == f"Instance {server} is not ready"
    )


def test_console_output_of_silent_hosts_uses_at_most_half_the_threads(make_cloud: Any) -> None:
    cloud: Cloud = make_cloud(threads=4)
    server = cloud.create()
    cloud.set_state(server)
    cloud.agents.release = threading.Event()
    answers: list[Any] = []
    waiting = [
        threading.Thread(
            target=lambda: answers.append(act(cloud, server, {"os-getConsoleOutput": {}}))
        )
        for _ in range(2)
    ]
    for thread in waiting:
        thread.start()
    while len(cloud.agents.queries) < 2:
        threading.Event().wait(0.01)
    answer = act(cloud, server, {"os-getConsoleOutput": {}})
    assert answer.status_code == 503
    assert answer.json["serviceUnavailable"]["message"] == (
        "Too many requests are waiting for hosts to answer; try again."
    )
    cloud.agents.release.set()
    for thread in waiting:
        thread.join(10)
    assert [answer.status_code for answer in answers] == [200, 200]
    assert act(cloud, server, {"os-getConsoleOutput": {}}).status_code == 200


# --- instance actions ---
LISTED = {"action", "instance_uuid", "message", "project_id", "request_id", "start_time", "user_id"}
EVENT = {"event", "start_time", "finish_time", "result"}


def add_failed_events(cloud: Cloud) -> str:
    """Record the events of a create that was placed and failed to build. Return its request id."""
    [action] = cloud.rows(schema.actions)
    with cloud.store.begin() as tx:
        rows = [
            ("place", "started", None, None),
            ("place", "succeeded", None, None),
            ("build", "started", None, None),
            ("build", "failed", "Out of disk", "Traceback: …"),
        ]
        tx.execute(
            sa.insert(schema.events).values(at=now()),
            [
                {
                    "action_id": action.id,
                    "seq": seq,
                    "step": step,
                    "attempt": 1,
                    "event": event,
                    "message": message,
                    "details": details,
                    "host": "host1" if step == "build" else None,
                }
                for seq, (step, event, message, details) in enumerate(rows, 1)
            ],
        )
        tx.execute(sa.update(schema.actions).values(state="failed", finished_at=now()))
    return str(action.request_id)


@pytest.mark.parametrize(
    ("mv", "keys"),
    [
        ("2.1", LISTED),
        ("2.57", LISTED),
        ("2.58", LISTED | {"updated_at"}),
        ("2.104", LISTED | {"updated_at"}),
    ],
)
def test_list_instance_actions_has_the_fields_of_each_microversion(
    cloud: Cloud, server: str, mv: str, keys: set[str]
) -> None:
    act(cloud, server, {"os-stop": None})
    action_list = cloud.call("GET", f"/servers/{server}/os-instance-actions", mv=mv).json[
        "instanceActions"
    ]
    assert [action["action"] for action in action_list] == ["stop", "create"]
    assert all(set(action) == keys for action in action_list)


@pytest.mark.parametrize(
    ("mv", "token", "keys"),
    [
        ("2.1", "user", None),
        ("2.50", "user", None),
        ("2.51", "user", EVENT),
        ("2.62", "user", EVENT | {"hostId"}),
        ("2.104", "user", EVENT | {"hostId"}),
        ("2.1", "admin", EVENT | {"traceback"}),
        ("2.62", "admin", EVENT | {"traceback", "hostId", "host"}),
        ("2.84", "admin", EVENT | {"traceback", "hostId", "host", "details"}),
    ],
)
def test_show_instance_action_has_the_event_fields_of_each_microversion(
    cloud: Cloud, server: str, mv: str, token: str, keys: set[str] | None
) -> None:
    request = add_failed_events(cloud)
    action = cloud.call(
        "GET", f"/servers/{server}/os-instance-actions/{request}", mv=mv, token=token
    ).json["instanceAction"]
    assert action["message"] == "Error"
    if keys is None:
        assert "events" not in action
        return
    build, place = action["events"]
    assert set(build) == set(place) == keys
    assert [(event["event"], event["result"]) for event in (place, build)] == [
        ("conductor_schedule_and_build_instances", "Success"),
        ("compute__do_build_and_run_instance", "Error"),
    ]
    if "host" in keys:
        assert place["host"] == place["hostId"] == "", "the step ran on no host"
    if "details" in keys:
        assert (build["details"], build["traceback"], build["host"]) == (
            "Out of disk",
            "Traceback: …",
            "host1",
        )


def test_instance_action_event_ends_when_action_is_superseded(cloud: Cloud, server: str) -> None:
    act(cloud, server, {"os-stop": None})
    stop = next(row for row in cloud.rows(schema.actions) if row.name == "stop")
    with cloud.store.begin() as tx:
        tx.execute(
            sa.insert(schema.events).values(at=now()),
            {
                "action_id": stop.id,
                "seq": 1,
                "step": "stop",
                "attempt": 1,
                "event": "started",
                "message": None,
                "details": None,
                "host": "host1",
            },
        )
    path = f"/servers/{server}/os-instance-actions/{stop.request_id}"
    [event] = cloud.call("GET", path, mv="2.84", token="admin").json["instanceAction"]["events"]
    assert (event["result"], event["finish_time"]) == (None, None)
    assert cloud.call("DELETE", f"/servers/{server}").status_code == 204
    [event] = cloud.call("GET", path, mv="2.84", token="admin").json["instanceAction"]["events"]
    assert (event["result"], event["details"]) == ("Error", "Superseded by a later action.")
    assert event["finish_time"] >= event["start_time"]


def test_instance_action_shows_failed_undo_as_error(cloud: Cloud, server: str) -> None:
    [action] = cloud.rows(schema.actions)
    with cloud.store.begin() as tx:
        rows = [
            ("place", "started", None),
            ("place", "succeeded", None),
            ("place", "undo_failed", "No way back"),
            ("build", "undone", None),
        ]
        tx.execute(
            sa.insert(schema.events).values(at=now()),
            [
                {
                    "action_id": action.id,
                    "seq": seq,
                    "step": step,
                    "attempt": 1,
                    "event": event,
                    "message": message,
                    "details": None,
                    "host": None,
                }
                for seq, (step, event, message) in enumerate(rows, 1)
            ],
        )
    path = f"/servers/{server}/os-instance-actions/{action.request_id}"
    build, place = cloud.call("GET", path, mv="2.84", token="admin").json["instanceAction"][
        "events"
    ]
    assert (place["result"], place["details"]) == ("Error", "No way back")
    assert (build["result"], build["details"]) == ("Success", None)


def test_list_instance_actions_pages_and_filters_by_time(cloud: Cloud, server: str) -> None:
    act(cloud, server, {"os-stop": None})
    cloud.set_state(server)
    act(cloud, server, {"reboot": {"type": "SOFT"}})
    path, names = f"/servers/{server}/os-instance-actions?limit=1", []
    while path:
        answer = cloud.call("GET", path, mv="2.58").json
        names += [action["action"] for action in answer["instanceActions"]]
        path = answer["links"][0]["href"].partition("/v2.1")[2] if "links" in answer else ""
    assert names == ["reboot", "stop", "create"]
    base = f"/servers/{server}/os-instance-actions"
    assert (
        len(
            cloud.call("GET", base + "?changes-since=2020-01-01", mv="2.66").json["instanceActions"]
        )
        == 3
    )
    assert (
        cloud.call("GET", base + "?changes-before=2020-01-01", mv="2.66").json["instanceActions"]
        == []
    )
    cloud.change(
        schema.actions, schema.actions.c.server_id == server, updated_at=1_700_000_000_900_000
    )
    updated_at = cloud.call("GET", base, mv="2.66").json["instanceActions"][0]["updated_at"]
    for query, count in (
        (f"changes-before={updated_at}", 3),
        ("changes-before=2023-11-14T22:13:19Z", 0),
    ):
        assert (
            len(cloud.call("GET", f"{base}?{query}", mv="2.66").json["instanceActions"]) == count
        ), query
    for query, mv in (
        ("changes-before=2020-01-01", "2.65"),
        ("limit=x", "2.58"),
        ("marker=req-0", "2.58"),
        ("colour=1", "2.58"),
    ):
        assert cloud.call("GET", f"{base}?{query}", mv=mv).status_code == 400, query


def test_instance_actions_of_deleted_server_are_shown_from_2_21(cloud: Cloud, server: str) -> None:
    request = cloud.rows(schema.actions)[0].request_id
    cloud.set_state(server, "deleted", deleted=1)
    for path in ("", "/" + request):
        assert (
            cloud.call("GET", f"/servers/{server}/os-instance-actions{path}", mv="2.20").status_code
            == 404
        )
        assert (
            cloud.call("GET", f"/servers/{server}/os-instance-actions{path}", mv="2.21").status_code
            == 200
        )
        assert (
            cloud.call(
                "GET", f"/servers/{server}/os-instance-actions{path}", mv="2.104"
            ).status_code
            == 200
        )


def test_show_unknown_instance_action_returns_404(cloud: Cloud, server: str) -> None:
    request = "req-" + ids.new()
    answer = cloud.call("GET", f"/servers/{server}/os-instance-actions/{request}")
    assert answer.json["itemNotFound"]["message"] == (
        f"Action for request_id {request} on instance {server} not found"
    )


# --- metadata, tags, addresses ---
def test_server_metadata_is_added_replaced_deleted_and_limited(cloud: Cloud, server: str) -> None:
    path = f"/servers/{server}/metadata"
    assert cloud.call("POST", path, {"metadata": {"a": "1", "b": "2"}}).json == {
        "metadata": {"a": "1", "b": "2"}
    }
    assert cloud.call("POST", path, {"metadata": {"b": "3"}}).json == {
        "metadata": {"a": "1", "b": "3"}
    }
    assert cloud.call("PUT", path + "/c", {"meta": {"c": "4"}}).json == {"meta": {"c": "4"}}
    assert cloud.call("GET", path + "/c").json == {"meta": {"c": "4"}}
    assert cloud.call("DELETE", path + "/c").status_code == 204
    assert cloud.call("GET", path).json == {"metadata": {"a": "1", "b": "3"}}
    assert cloud.call("PUT", path, {"metadata": {"z": ""}}).json == {"metadata": {"z": ""}}
    assert (
        cloud.call("GET", path + "/a").status_code
        == cloud.call("DELETE", path + "/a").status_code
        == 404
    )
    assert cloud.call("PUT", path + "/a", {"meta": {"b": "1"}}).json["badRequest"]["message"] == (
        "Request body and URI mismatch"
    )
    assert cloud.call("PUT", path + "/a", {"meta": {"a": "1", "b": "1"}}).status_code == 400
    over = cloud.call("PUT", path, {"metadata": {str(number): "" for number in range(129)}})
    assert over.json["forbidden"]["message"] == "Maximum number of metadata items exceeds 128"
    cloud.set_state(server, locked=True)
    assert cloud.call("PUT", path, {"metadata": {}}).status_code == 409


def test_server_tags_are_set_added_deleted_and_limited(cloud: Cloud, server: str) -> None:
    path = f"/servers/{server}/tags"
    assert cloud.call("PUT", path, {"tags": ["b", "a", "b"]}, mv="2.26").json == {
        "tags": ["a", "b"]
    }
    first, second = (cloud.call("PUT", path + "/c", mv="2.26") for _ in range(2))
    assert (first.status_code, second.status_code) == (201, 204)
    assert first.headers["Location"].endswith(path + "/c")
    assert cloud.call("GET", path + "/c", mv="2.26").status_code == 204
    assert cloud.call("DELETE", path + "/c", mv="2.26").status_code == 204
    assert cloud.call("GET", path + "/c", mv="2.26").status_code == 404
    assert cloud.call("DELETE", path, mv="2.26").status_code == 204
    assert cloud.call("GET", path, mv="2.26").json == {"tags": []}
    assert cloud.call("PUT", path + "/" + "x" * 61, mv="2.26").status_code == 400
    assert cloud.call("PUT", path, {"tags": ["a,b"]}, mv="2.26").status_code == 400
    assert (
        cloud.call(
            "PUT", path, {"tags": [str(number) for number in range(50)]}, mv="2.26"
        ).status_code
        == 200
    )
    assert cloud.call("PUT", path + "/more", mv="2.26").status_code == 400
    assert cloud.call("GET", path, mv="2.25").status_code == 404


def test_server_ips_without_interfaces_are_empty(cloud: Cloud, server: str) -> None:
    assert cloud.call("GET", f"/servers/{server}/ips").json == {"addresses": {}}
    assert cloud.call("GET", f"/servers/{server}/ips/private").status_code == 404
