# SPDX-License-Identifier: Apache-2.0
"""POST /servers: what is written, what is answered, and that it happens once."""

from __future__ import annotations

import base64
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import sqlalchemy as sa

from common.domain import errors, ids
from common.domain.models import Flavor
from common.store import schema
from common.store.servers import actions, servers
from compute_api.compute.request.creation import Creation
from tests.api.conftest import IMAGE, PROJECT, Cloud
from tests.waiting import await_true

GOOD: dict[str, Any] = {"name": "Web Server.1", "imageRef": IMAGE, "flavorRef": "1"}


def post(
    cloud: Cloud,
    mv: str = "2.1",
    headers: dict[str, str] | None = None,
    token: str = "user",
    hints: Any = None,
    **change: Any,
) -> Any:
    body: dict[str, Any] = {"server": {**GOOD, **change}}
    if hints is not None:
        body["os:scheduler_hints"] = hints
    return cloud.call("POST", "/servers", body, mv=mv, headers=headers, token=token)


def test_a_202_is_a_committed_server_and_its_action(cloud: Cloud) -> None:
    answer = post(
        cloud, metadata={"a": "b"}, accessIPv4="192.0.2.7", security_groups=[{"name": "web"}]
    )
    assert answer.status_code == 202
    server = answer.json["server"]
    assert sorted(server) == ["OS-DCF:diskConfig", "adminPass", "id", "links", "security_groups"]
    assert answer.headers["Location"] == server["links"][0]["href"]
    assert server["security_groups"] == [{"name": "web"}]
    assert len(server["adminPass"]) == 12
    [row], [action] = cloud.rows(schema.servers), cloud.rows(schema.actions)
    assert (row.id, row.project_id, row.user_id, row.name, row.hostname) == (
        server["id"],
        PROJECT,
        "u1",
        "Web Server.1",
        "web-server-1",
    )
    assert (row.vm_state, row.task_state, row.fence, row.action) == (
        "building",
        "scheduling",
        1,
        action.id,
    )
    assert row.flavor == {
        "id": "1",
        "name": "m1.tiny",
        "vcpus": 1,
        "memory_mb": 512,
        "root_gb": 1,
        "ephemeral_gb": 0,
        "swap_mb": 0,
        "extra_specs": {},
        "number": 1,
    }
    assert row.image["id"] == row.image_id == IMAGE
    assert (row.vcpus, row.memory_mb, row.disk_gb) == (1, 512, 1)
    assert (action.workflow, action.name, action.state, action.fence, action.server_id) == (
        "create",
        "create",
        "due",
        1,
        row.id,
    )
    assert action.request_id == answer.headers["X-Compute-Request-Id"]
    assert action.args == {
        "zone": None,
        "host": None,
        "forced": False,
        "networks": [],
        "roles": ["member", "reader"],
    }
    assert cloud.wakeup.woken == 1


def test_what_clients_send_is_taken(cloud: Cloud) -> None:
    mapping = [
        {
            "uuid": IMAGE,
            "boot_index": 0,
            "source_type": "image",
            "destination_type": "local",
            "delete_on_termination": True,
        }
    ]
    newest = post(
        cloud, "2.100", block_device_mapping_v2=mapping, min_count=1, max_count=1, networks="auto"
    )
    oldest = post(
        cloud, "2.1", block_device_mapping_v2=mapping, min_count=1, max_count=1, networks=[]
    )
    linked = post(cloud, flavorRef="http://cloud/v2.1/flavors/1", config_drive="True")
    assert [newest.status_code, oldest.status_code, linked.status_code] == [202, 202, 202]
    assert [row.config_drive for row in cloud.rows(schema.servers)].count(True) == 1


def test_everything_that_a_later_version_adds(cloud: Cloud) -> None:
    user_data = base64.b64encode(b"#!/bin/sh").decode()
    answer = post(
        cloud,
        "2.94",
        networks="none",
        description="d",
        tags=["b", "a", "a"],
        hostname="web.example.org",
        user_data=user_data,
        **{"OS-DCF:diskConfig": "AUTO"},
    )
    assert answer.status_code == 202, answer.text
    [row] = cloud.rows(schema.servers)
    assert (row.description, row.tags, row.hostname, row.user_data, row.disk_config) == (
        "d",
        ["a", "b"],
        "web.example.org",
        user_data,
        "AUTO",
    )


def test_certificates_are_kept_and_signed_images_refused(cloud: Cloud) -> None:
    certificates = {"networks": "none", "trusted_image_certificates": ["a", "b"]}
    server = post(cloud, "2.63", **certificates).json["server"]["id"]
    shown = cloud.call("GET", f"/servers/{server}", mv="2.63").json["server"]
    assert shown["trusted_image_certificates"] == ["a", "b"]
    cloud.images.images[IMAGE].ref.properties["img_signature"] = "c2lnbmVk"
    refused = post(cloud, "2.63", **certificates)
    assert refused.status_code == 400
    assert refused.json["badRequest"]["message"].startswith(
        "trusted_image_certificates: this cloud does not validate"
    )


def test_personality_travels_on_the_config_drive(make_cloud: Callable[..., Cloud]) -> None:
    contents, cloud = base64.b64encode(b"motd").decode(), make_cloud(secret_key="k")
    assert post(cloud, personality=[{"path": "/etc/motd", "contents": contents}]).status_code == 202
    [row], [action] = cloud.rows(schema.servers), cloud.rows(schema.actions)
    assert row.config_drive
    assert cloud.vault is not None
    assert cloud.vault.open(action.secrets)["files"] == [
        {"path": "/etc/motd", "contents": contents}
    ]
    assert post(cloud, "2.57", networks="none", personality=[]).status_code == 400


def test_a_key_is_copied(cloud: Cloud) -> None:
    cloud.call("POST", "/os-keypairs", {"keypair": {"name": "k"}})
    assert post(cloud, key_name="k").status_code == 202
    [row], [key] = cloud.rows(schema.servers), cloud.rows(schema.keypairs)
    assert (row.key_name, row.key_data) == ("k", key.public_key)


def test_many_are_numbered_and_share_a_reservation(cloud: Cloud) -> None:
    answer = post(cloud, name="web", min_count=2, max_count="3", return_reservation_id=True)
    rows = sorted(cloud.rows(schema.servers), key=lambda row: row.launch_index)
    assert answer.json == {"reservation_id": rows[0].reservation_id}
    assert [(row.name, row.hostname, row.launch_index) for row in rows] == [
        ("web-1", "web-1", 0),
        ("web-2", "web-2", 1),
        ("web-3", "web-3", 2),
    ]
    assert {row.reservation_id for row in rows} == {rows[0].reservation_id}
    found = cloud.call("GET", f"/servers?reservation_id={rows[0].reservation_id}").json["servers"]
    assert {server["id"] for server in found} == {row.id for row in rows}


def test_hostnames_of_servers_of_one_long_name_differ(cloud: Cloud) -> None:
    assert post(cloud, name="a" * 70, min_count=10, max_count=10).status_code == 202
    hostnames = {row.hostname for row in cloud.rows(schema.servers)}
    assert hostnames == {"a" * 61 + f"-{number}" for number in range(1, 10)} | {"a" * 60 + "-10"}


def test_hostname_for_several_servers_is_refused(cloud: Cloud) -> None:
    answer = post(
        cloud, "2.94", networks="none", hostname="web.example.org", min_count=1, max_count=2
    )
    assert answer.status_code == 400
    assert answer.json["badRequest"]["message"].startswith("hostname: ")
    assert (
        post(cloud, "2.94", networks="none", hostname="web.example.org", max_count=1).status_code
        == 202
    )


# --- quota ---
def test_as_many_as_fit_between_min_and_max(cloud: Cloud) -> None:
    assert post(cloud, min_count=8).status_code == 202
    assert post(cloud, min_count=1, max_count=9).status_code == 202
    assert len(cloud.rows(schema.servers)) == 10
    answer = post(cloud)
    assert answer.status_code == 403
    assert answer.json == {
        "forbidden": {
            "code": 403,
            "message": "Quota exceeded for instances: Requested 1, but already used 10 of 10 instances",
        }
    }


@pytest.mark.parametrize(
    ("limits", "text"),
    [
        ({"cores": 1}, "Quota exceeded for cores: Requested 2, but already used 0 of 1 cores"),
        ({"ram": 1000}, "Quota exceeded for ram: Requested 1024, but already used 0 of 1000 ram"),
        (
            {"cores": 0, "ram": 0},
            "Quota exceeded for cores, ram: Requested 2, 1024, but already used 0, 0 of 0, 0 cores, ram",
        ),
    ],
)
def test_every_counted_resource_has_its_limit(
    cloud: Cloud, limits: dict[str, int], text: str
) -> None:
    cloud.call("PUT", f"/os-quota-sets/{PROJECT}", {"quota_set": limits}, token="admin")
    answer = post(cloud, min_count=2)
    assert answer.json["forbidden"]["message"] == text
    assert cloud.rows(schema.servers) == []


def test_quota_ignores_deleted_servers_and_minus_one_is_no_limit(cloud: Cloud) -> None:
    cloud.call("PUT", f"/os-quota-sets/{PROJECT}", {"quota_set": {"instances": 1}}, token="admin")
    server = cloud.create()
    assert post(cloud).status_code == 403
    cloud.rest(server, "deleted", deleted=1)
    assert post(cloud).status_code == 202
    cloud.call("PUT", f"/os-quota-sets/{PROJECT}", {"quota_set": {"instances": -1}}, token="admin")
    assert post(cloud, min_count=15).status_code == 202


def test_a_user_may_have_a_narrower_limit_than_the_project(cloud: Cloud) -> None:
    cloud.call(
        "PUT",
        f"/os-quota-sets/{PROJECT}?user_id=u1",
        {"quota_set": {"instances": 1}},
        token="admin",
    )
    assert [post(cloud).status_code, post(cloud).status_code] == [202, 403]
    assert post(cloud, token="manager").status_code == 202


def test_servers_of_one_request_have_names_that_fit_their_column(cloud: Cloud) -> None:
    answer = post(cloud, name="n" * 255, min_count=10)
    assert answer.status_code == 202, answer.text
    rows = sorted(cloud.rows(schema.servers), key=lambda row: row.launch_index)
    assert [rows[0].name, rows[9].name] == ["n" * 253 + "-1", "n" * 252 + "-10"]
    assert [rows[0].hostname, rows[9].hostname] == ["n" * 61 + "-1", "n" * 60 + "-10"]


# --- Idempotency-Key ---
def test_repeated_idempotency_key_answers_the_same(make_cloud: Callable[..., Cloud]) -> None:
    cloud = make_cloud(secret_key="k")
    first, again = (post(cloud, headers={"Idempotency-Key": "k1"}) for _ in range(2))
    assert first.status_code == again.status_code == 202
    assert first.json == again.json
    assert len(cloud.rows(schema.servers)) == len(cloud.rows(schema.actions)) == 1
    assert cloud.wakeup.woken == 1
    many = [
        post(cloud, headers={"Idempotency-Key": "k2"}, min_count=2, return_reservation_id=True)
        for _ in range(2)
    ]
    assert many[0].json == many[1].json
    assert len(cloud.rows(schema.servers)) == 3


def test_a_request_is_known_again_though_what_it_named_is_gone(
    make_cloud: Callable[..., Cloud],
) -> None:
    cloud = make_cloud(secret_key="k")
    headers = {"Idempotency-Key": "k"}
    first = post(cloud, headers=headers)
    cloud.images.images.clear()
    cloud.call("DELETE", "/flavors/1", token="admin")
    cloud.rest(first.json["server"]["id"], "deleted", deleted=1)
    again = post(cloud, headers=headers)
    assert (again.status_code, again.json) == (202, first.json)


def test_idempotency_key_with_another_body_is_a_conflict(cloud: Cloud) -> None:
    headers = {"Idempotency-Key": "k"}
    assert post(cloud, headers=headers).status_code == 202
    answer = post(cloud, headers=headers, name="other")
    assert answer.json == {
        "conflictingRequest": {
            "code": 409,
            "message": "This Idempotency-Key was used before with another request; use a new key.",
        }
    }
    assert post(cloud, headers=headers, name="other", token="stranger").status_code == 202
    assert len(cloud.rows(schema.servers)) == 2


@pytest.mark.parametrize("key", ["", "x" * 256])
def test_a_key_that_is_none(cloud: Cloud, key: str) -> None:
    assert post(cloud, headers={"Idempotency-Key": key}).status_code == 400


# --- what it costs, and doing many at once ---
def statements(cloud: Cloud, work: Callable[[], Any]) -> list[str]:
    """The SQL that is executed meanwhile."""
    seen: list[str] = []

    def executed(conn: Any, cursor: Any, statement: str, *rest: Any) -> None:
        seen.append(statement)

    sa.event.listen(cloud.store.engine, "before_cursor_execute", executed)
    work()
    sa.event.remove(cloud.store.engine, "before_cursor_execute", executed)
    return seen


def test_a_create_costs_seven_statements_in_two_transactions(cloud: Cloud) -> None:
    post(cloud)  # makes the project's row
    seen = statements(cloud, lambda: post(cloud))
    assert [statement.split()[0] for statement in seen] == [
        "SELECT",
        "BEGIN",
        "UPDATE",
        "SELECT",
        "SELECT",
        "INSERT",
        "INSERT",
    ]
    eight = statements(cloud, lambda: post(cloud, min_count=8))
    assert len(eight) == len(seen) + 2, "however many servers, and the clock for each table"


def test_a_list_costs_the_same_whatever_it_holds(cloud: Cloud) -> None:
    def listed(token: str) -> int:
        query = "?all_tenants=1" if token == "admin" else ""
        return len(
            statements(
                cloud, lambda: cloud.call("GET", "/servers/detail" + query, token=token, mv="2.100")
            )
        )

    empty = [listed("user"), listed("admin")]
    post(cloud, min_count=5)
    for row in cloud.rows(schema.servers):
        cloud.rest(row.id)
    assert [listed("user"), listed("admin")] == empty == [1, 2]


def test_creates_that_come_together_are_committed_together(cloud: Cloud) -> None:
    """While one transaction runs, eleven others gather; quota lets ten through, one fails alone."""
    running, go = threading.Event(), threading.Event()

    def hold(conn: Any, cursor: Any, statement: str, *rest: Any) -> None:
        if statement.startswith("INSERT INTO servers"):
            inserts.append(statement)
            running.set()
            assert go.wait(20)

    inserts: list[str] = []
    sa.event.listen(cloud.store.engine, "before_cursor_execute", hold)
    answers: list[Any] = []
    threads = [threading.Thread(target=lambda: answers.append(post(cloud))) for _ in range(11)]
    threads[0].start()
    assert running.wait(20)
    for thread in threads[1:]:
        thread.start()
    creator = cloud.services.creator
    while creator.waiting < 10:
        threading.Event().wait(0.01)
    go.set()
    for thread in threads:
        thread.join(20)
    assert sorted(answer.status_code for answer in answers) == [202] * 10 + [403]
    assert len(cloud.rows(schema.servers)) == 10
    assert len(inserts) == 2, "the first alone, then nine in one statement"


# fmt: off
def test_one_bad_create_does_not_hurt_the_others(cloud: Cloud) -> None:
    """A row that the database refuses fails the whole transaction; then each is tried alone."""
    cloud.add_flavor(Flavor("9", "odd", 1, 64, 1))
    answers: dict[str, Any] = {}
    broken = {"id": None}
    original = cloud.services.creator

    def creation(name: str, **columns: Any) -> Any:
        server_id, action_id = ids.new(), ids.new()
        row = {"id": server_id, "project_id": PROJECT, "user_id": "u1", "name": name, "hostname": name,
               "vm_state": "building", "flavor": {}, "flavor_id": "1", "vcpus": 1, "memory_mb": 1, "disk_gb": 1,
               "meta": {}, "tags": [], "scheduler_hints": {}, "security_groups": [], "reservation_id": "r",
               "action": action_id, **columns}
        action = {"id": action_id, "server_id": server_id, "project_id": PROJECT, "user_id": "u1", "request_id": "r",
                  "name": "create", "workflow": "create", "fence": 1}
        return Creation(PROJECT, "u1", 1, 1, 1, 1, "r", lambda count: ([row], [action]))

    def create(name: str, **columns: Any) -> None:
        try:
            answers[name] = original.create(creation(name, **columns))
        except Exception as problem:  # noqa: BLE001  # looked at below
            answers[name] = problem
    # The first create commits only when the others wait, so that these share the next transaction.
    is_leading, is_released = threading.Event(), threading.Event()
    leader = creation("first")

    def leader_rows(count: int) -> Any:
        is_leading.set()
        assert is_released.wait(30)
        return leader.rows(count)

    threads = [threading.Thread(target=original.create, args=(replace(leader, rows=leader_rows),))]
    threads[0].start()
    assert is_leading.wait(30)
    threads += [threading.Thread(target=create, args=("good",)),
                threading.Thread(target=create, args=("bad",), kwargs=broken)]
    for thread in threads[1:]:
        thread.start()
    await_true(lambda: original.waiting == 2)
    is_released.set()
    for thread in threads:
        thread.join(30)
    assert isinstance(answers["bad"], Exception)
    assert not isinstance(answers["bad"], errors.Problem)
    assert sorted(row.name for row in cloud.rows(schema.servers)) == ["first", "good"]
# fmt: on


def test_the_action_is_what_a_conductor_takes(cloud: Cloud) -> None:
    server = cloud.create()
    taken = cloud.store.write(lambda tx: actions.take(tx, "me", {"create": 1}, 10))
    assert [row.server_id for row in taken] == [server]
    row = cloud.store.read(lambda tx: servers.show(tx, server))
    assert servers.loads(row.image)["properties"] == {"architecture": "x86_64"}


def use_image(cloud: Cloud, **properties: str) -> None:
    """Give the image these properties."""
    image = cloud.images.images[IMAGE]
    cloud.images.images[IMAGE] = replace(image, ref=replace(image.ref, properties=properties))


@pytest.mark.parametrize(
    ("properties", "request_body", "expected"),
    [
        ({}, {}, "MANUAL"),
        ({"auto_disk_config": "true"}, {}, "AUTO"),
        ({"auto_disk_config": "true"}, {"OS-DCF:diskConfig": "MANUAL"}, "MANUAL"),
        ({"hw_auto_disk_config": "True"}, {}, "AUTO"),
        ({"auto_disk_config": "false"}, {"OS-DCF:diskConfig": "AUTO"}, "AUTO"),
        ({"auto_disk_config": "Disabled"}, {}, "MANUAL"),
    ],
)
def test_create_takes_disk_config_of_image_unless_request_has_one(
    cloud: Cloud, properties: dict[str, str], request_body: dict[str, str], expected: str
) -> None:
    use_image(cloud, **properties)
    for _ in range(2):  # the second is the repetition of the first
        answer = post(cloud, headers={"Idempotency-Key": "k"}, **request_body)
        assert answer.json["server"]["OS-DCF:diskConfig"] == expected
    [row] = cloud.rows(schema.servers)
    assert row.disk_config == expected


def test_create_with_disk_config_that_image_disables_returns_400(cloud: Cloud) -> None:
    use_image(cloud, auto_disk_config="disabled")
    answer = post(cloud, **{"OS-DCF:diskConfig": "AUTO"})
    assert answer.status_code == 400
    assert answer.json["badRequest"]["message"] == (
        f"Requested image {IMAGE} has automatic disk resize disabled."
    )
    assert cloud.rows(schema.servers) == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ipxe_boot", "true"),
        ("mappings", '[{"virtual": "swap", "device": "sda3"}]'),
        ("hw_ephemeral_encryption_secret_uuid", IMAGE),
    ],
)
def test_create_with_image_property_of_no_host_returns_400_by_name(
    cloud: Cloud, name: str, value: str
) -> None:
    use_image(cloud, **{name: value})
    answer = post(cloud)
    assert answer.status_code == 400
    assert answer.json["badRequest"]["message"].startswith(f"{name}: ")
    use_image(cloud, os_distro="debian", hw_floppy_bus="fdc", ipxe_boot="false", mappings="[]")
    assert post(cloud).status_code == 202
