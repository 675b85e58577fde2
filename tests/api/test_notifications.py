# SPDX-License-Identifier: Apache-2.0
"""What requests tell others: by the handlers' own transactions, from the request to the outbox."""

from __future__ import annotations

from typing import Any

import pytest

from common.service.notification_options import BOTH, NotificationSettings
from conductor.notifications.messages import messages
from tests.api.conftest import Cloud
from tests.api.test_keypairs import SSH
from tests.told import read_outbox

SECRET = "c2VjcmV0IHVzZXIgZGF0YQ=="


@pytest.fixture
def telling(cloud: Cloud) -> Cloud:
    cloud.store.notify_with(NotificationSettings("api1"))
    return cloud


def events(cloud: Cloud) -> list[str]:
    return [row.event for row in read_outbox(cloud.store)]


def test_servers_of_one_request_are_told_one_by_one(telling: Cloud) -> None:
    pair = telling.call(
        "POST", "/os-keypairs", {"keypair": {"name": "k", "public_key": SSH.partition(" me")[0]}}
    )
    assert pair.status_code == 200, pair.text
    telling.create(min_count=2, max_count=2, key_name="k", user_data=SECRET, adminPass="swordfish")
    rows = [row for row in read_outbox(telling.store) if row.event.startswith("instance.")]
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


def test_a_key_that_is_made_and_one_that_is_imported(telling: Cloud) -> None:
    telling.call("POST", "/os-keypairs", {"keypair": {"name": "made"}})
    telling.call(
        "POST", "/os-keypairs", {"keypair": {"name": "mine", "public_key": SSH}}, mv="2.92"
    )
    telling.call("DELETE", "/os-keypairs/made")
    assert events(telling) == [
        f"keypair.{verb}.{phase}"
        for verb in ("create", "import", "delete")
        for phase in ("start", "end")
    ]
    assert "PRIVATE" not in str([row.body for row in read_outbox(telling.store)])


@pytest.mark.parametrize(
    ("method", "path", "body", "told"),
    [
        ("PUT", "", {"server": {"name": "other"}}, "instance.update"),
        ("PUT", "/tags/blue", None, "instance.update"),
        ("POST", "/action", {"lock": None}, "instance.lock"),
        ("POST", "/action", {"os-stop": None}, "instance.power_off.start"),
        ("DELETE", "", None, "instance.delete.start"),
    ],
)
def test_a_request_tells_once(telling: Cloud, method: str, path: str, body: Any, told: str) -> None:
    server = telling.create()
    telling.rest(server)
    before = len(events(telling))
    answer = telling.call(method, f"/servers/{server}{path}", body, mv="2.26")
    assert answer.status_code < 300, answer.text
    assert events(telling)[before:] == [told]
    assert read_outbox(telling.store)[-1].key == server


def test_what_is_refused_is_not_told(telling: Cloud) -> None:
    server = telling.create()
    telling.rest(server)
    before = events(telling)
    assert telling.call("POST", f"/servers/{server}/action", {"os-start": None}).status_code == 409
    assert events(telling) == before
