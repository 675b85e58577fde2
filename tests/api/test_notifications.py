# SPDX-License-Identifier: Apache-2.0
"""Notifications of requests, from the handlers' transactions to the outbox."""

from __future__ import annotations

from typing import Any

import pytest

from common.service.notification_options import BOTH, NotificationSettings
from conductor.notifications.messages import messages
from tests.api.conftest import Cloud
from tests.api.test_keypairs import SSH
from tests.outbox_events import read_outbox

SECRET = "c2VjcmV0IHVzZXIgZGF0YQ=="


@pytest.fixture
def notifying_cloud(cloud: Cloud) -> Cloud:
    cloud.store.notify_with(NotificationSettings("api1"))
    return cloud


def events(cloud: Cloud) -> list[str]:
    return [row.event for row in read_outbox(cloud.store)]


def test_create_servers_emits_create_start_for_each_without_secrets(notifying_cloud: Cloud) -> None:
    pair = notifying_cloud.call(
        "POST", "/os-keypairs", {"keypair": {"name": "k", "public_key": SSH.partition(" me")[0]}}
    )
    assert pair.status_code == 200, pair.text
    notifying_cloud.create(
        min_count=2, max_count=2, key_name="k", user_data=SECRET, adminPass="swordfish"
    )
    rows = [row for row in read_outbox(notifying_cloud.store) if row.event.startswith("instance.")]
    assert [row.event for row in rows] == ["instance.create.start"] * 2
    assert len({row.key for row in rows}) == 2
    data = [message.payload for row in rows for message in messages(row, BOTH)]
    fields = data[0]["nova_object.data"]
    assert (fields["task_state"], fields["action_initiator_user"], fields["host"]) == (
        "scheduling",
        rows[0].body["request"]["user"],
        None,
    )
    assert fields["request_id"].startswith("req-")
    assert fields["keypairs"][0]["nova_object.data"]["fingerprint"].count(":") == 15
    assert [
        secret
        for secret in (SECRET, "swordfish")
        if secret in str([row.body for row in rows]) + str(data)
    ] == []


def test_keypair_requests_emit_create_import_and_delete_events(notifying_cloud: Cloud) -> None:
    notifying_cloud.call("POST", "/os-keypairs", {"keypair": {"name": "made"}})
    notifying_cloud.call(
        "POST", "/os-keypairs", {"keypair": {"name": "mine", "public_key": SSH}}, mv="2.92"
    )
    notifying_cloud.call("DELETE", "/os-keypairs/made")
    assert events(notifying_cloud) == [
        f"keypair.{verb}.{phase}"
        for verb in ("create", "import", "delete")
        for phase in ("start", "end")
    ]
    assert "PRIVATE" not in str([row.body for row in read_outbox(notifying_cloud.store)])


@pytest.mark.parametrize(
    ("method", "path", "body", "event"),
    [
        ("PUT", "", {"server": {"name": "other"}}, "instance.update"),
        ("PUT", "/tags/blue", None, "instance.update"),
        ("POST", "/action", {"lock": None}, "instance.lock"),
        ("POST", "/action", {"os-stop": None}, "instance.power_off.start"),
        ("DELETE", "", None, "instance.delete.start"),
    ],
)
def test_server_update_tag_lock_stop_and_delete_emit_one_event_each(
    notifying_cloud: Cloud, method: str, path: str, body: Any, event: str
) -> None:
    server = notifying_cloud.create()
    notifying_cloud.set_state(server)
    before = len(events(notifying_cloud))
    answer = notifying_cloud.call(method, f"/servers/{server}{path}", body, mv="2.26")
    assert answer.status_code < 300, answer.text
    assert events(notifying_cloud)[before:] == [event]
    assert read_outbox(notifying_cloud.store)[-1].key == server


def test_refused_request_emits_no_event(notifying_cloud: Cloud) -> None:
    server = notifying_cloud.create()
    notifying_cloud.set_state(server)
    before = events(notifying_cloud)
    assert (
        notifying_cloud.call("POST", f"/servers/{server}/action", {"os-start": None}).status_code
        == 409
    )
    assert events(notifying_cloud) == before
