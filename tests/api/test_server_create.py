# SPDX-License-Identifier: Apache-2.0
"""POST /servers: rows, answers, quota, idempotency, and the number of statements."""

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
from tests.statements import find_rebuilt_statements
from tests.waiting import await_true

GOOD: dict[str, Any] = {"name": "Web Server.1", "imageRef": IMAGE, "flavorRef": "1"}


def post_server(
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


def test_create_server_returns_202_and_stores_server_and_due_action(cloud: Cloud) -> None:
    answer = post_server(
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
    assert cloud.wakeup.count == 1


def test_create_server_accepts_bodies_of_common_clients(cloud: Cloud) -> None:
    mapping = [
        {
            "uuid": IMAGE,
            "boot_index": 0,
            "source_type": "image",
            "destination_type": "local",
            "delete_on_termination": True,
        }
    ]
    newest = post_server(
        cloud, "2.100", block_device_mapping_v2=mapping, min_count=1, max_count=1, networks="auto"
    )
    oldest = post_server(
        cloud, "2.1", block_device_mapping_v2=mapping, min_count=1, max_count=1, networks=[]
    )
    linked = post_server(cloud, flavorRef="http://cloud/v2.1/flavors/1", config_drive="True")
    assert [newest.status_code, oldest.status_code, linked.status_code] == [202, 202, 202]
    assert [row.config_drive for row in cloud.rows(schema.servers)].count(True) == 1


def test_create_server_stores_fields_of_later_microversions(cloud: Cloud) -> None:
    user_data = base64.b64encode(b"#!/bin/sh").decode()
    answer = post_server(
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


def test_create_server_stores_image_certificates_and_signed_image_returns_400(cloud: Cloud) -> None:
    certificates = {"networks": "none", "trusted_image_certificates": ["a", "b"]}
    server = post_server(cloud, "2.63", **certificates).json["server"]["id"]
    view = cloud.call("GET", f"/servers/{server}", mv="2.63").json["server"]
    assert view["trusted_image_certificates"] == ["a", "b"]
    cloud.images.images[IMAGE].ref.properties["img_signature"] = "c2lnbmVk"
    answer = post_server(cloud, "2.63", **certificates)
    assert answer.status_code == 400
    assert answer.json["badRequest"]["message"].startswith(
        "trusted_image_certificates: this cloud does not validate"
    )


def test_create_server_with_files_sets_config_drive_and_encrypts_files(
    make_cloud: Callable[..., Cloud],
) -> None:
    contents, cloud = base64.b64encode(b"motd").decode(), make_cloud(secret_key="k")
    assert (
        post_server(cloud, personality=[{"path": "/etc/motd", "contents": contents}]).status_code
        == 202
    )
    [row], [action] = cloud.rows(schema.servers), cloud.rows(schema.actions)
    assert row.config_drive
    assert cloud.vault is not None
    assert cloud.vault.open(action.secrets)["files"] == [
        {"path": "/etc/motd", "contents": contents}
    ]
    assert post_server(cloud, "2.57", networks="none", personality=[]).status_code == 400


def test_create_server_with_key_name_stores_public_key_of_key_pair(cloud: Cloud) -> None:
    cloud.call("POST", "/os-keypairs", {"keypair": {"name": "k"}})
    assert post_server(cloud, key_name="k").status_code == 202
    [row], [key] = cloud.rows(schema.servers), cloud.rows(schema.keypairs)
    assert (row.key_name, row.key_data) == ("k", key.public_key)


def test_create_several_servers_numbers_them_and_shares_reservation(cloud: Cloud) -> None:
    answer = post_server(cloud, name="web", min_count=2, max_count="3", return_reservation_id=True)
    rows = sorted(cloud.rows(schema.servers), key=lambda row: row.launch_index)
    assert answer.json == {"reservation_id": rows[0].reservation_id}
    assert [(row.name, row.hostname, row.launch_index) for row in rows] == [
        ("web-1", "web-1", 0),
        ("web-2", "web-2", 1),
        ("web-3", "web-3", 2),
    ]
    assert {row.reservation_id for row in rows} == {rows[0].reservation_id}
    list_items = cloud.call("GET", f"/servers?reservation_id={rows[0].reservation_id}").json[
        "servers"
    ]
    assert {server["id"] for server in list_items} == {row.id for row in rows}


def test_create_several_servers_with_long_name_gives_unique_hostnames(cloud: Cloud) -> None:
    assert post_server(cloud, name="a" * 70, min_count=10, max_count=10).status_code == 202
    hostnames = {row.hostname for row in cloud.rows(schema.servers)}
    assert hostnames == {"a" * 61 + f"-{number}" for number in range(1, 10)} | {"a" * 60 + "-10"}


def test_create_several_servers_with_hostname_returns_400(cloud: Cloud) -> None:
    answer = post_server(
        cloud, "2.94", networks="none", hostname="web.example.org", min_count=1, max_count=2
    )
    assert answer.status_code == 400
    assert answer.json["badRequest"]["message"].startswith("hostname: ")
    assert (
        post_server(
            cloud, "2.94", networks="none", hostname="web.example.org", max_count=1
        ).status_code
        == 202
    )


# --- quota ---
def test_create_servers_creates_as_many_as_quota_allows(cloud: Cloud) -> None:
    assert post_server(cloud, min_count=8).status_code == 202
    assert post_server(cloud, min_count=1, max_count=9).status_code == 202
    assert len(cloud.rows(schema.servers)) == 10
    answer = post_server(cloud)
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
def test_create_server_over_quota_returns_403_with_each_resource(
    cloud: Cloud, limits: dict[str, int], text: str
) -> None:
    cloud.call("PUT", f"/os-quota-sets/{PROJECT}", {"quota_set": limits}, token="admin")
    answer = post_server(cloud, min_count=2)
    assert answer.json["forbidden"]["message"] == text
    assert cloud.rows(schema.servers) == []


def test_server_quota_ignores_deleted_servers_and_minus_1_is_unlimited(cloud: Cloud) -> None:
    cloud.call("PUT", f"/os-quota-sets/{PROJECT}", {"quota_set": {"instances": 1}}, token="admin")
    server = cloud.create()
    assert post_server(cloud).status_code == 403
    cloud.set_state(server, "deleted", deleted=1)
    assert post_server(cloud).status_code == 202
    cloud.call("PUT", f"/os-quota-sets/{PROJECT}", {"quota_set": {"instances": -1}}, token="admin")
    assert post_server(cloud, min_count=15).status_code == 202


def test_create_server_over_quota_of_user_returns_403(cloud: Cloud) -> None:
    cloud.call(
        "PUT",
        f"/os-quota-sets/{PROJECT}?user_id=u1",
        {"quota_set": {"instances": 1}},
        token="admin",
    )
    assert [post_server(cloud).status_code, post_server(cloud).status_code] == [202, 403]
    assert post_server(cloud, token="manager").status_code == 202


def test_create_several_servers_with_long_name_shortens_names(cloud: Cloud) -> None:
    answer = post_server(cloud, name="n" * 255, min_count=10)
    assert answer.status_code == 202, answer.text
    rows = sorted(cloud.rows(schema.servers), key=lambda row: row.launch_index)
    assert [rows[0].name, rows[9].name] == ["n" * 253 + "-1", "n" * 252 + "-10"]
    assert [rows[0].hostname, rows[9].hostname] == ["n" * 61 + "-1", "n" * 60 + "-10"]


# --- Idempotency-Key ---
def test_create_server_with_repeated_idempotency_key_creates_once(
    make_cloud: Callable[..., Cloud],
) -> None:
    cloud = make_cloud(secret_key="k")
    first, second = (post_server(cloud, headers={"Idempotency-Key": "k1"}) for _ in range(2))
    assert first.status_code == second.status_code == 202
    assert first.json == second.json
    assert len(cloud.rows(schema.servers)) == len(cloud.rows(schema.actions)) == 1
    assert cloud.wakeup.count == 1
    answers = [
        post_server(
            cloud, headers={"Idempotency-Key": "k2"}, min_count=2, return_reservation_id=True
        )
        for _ in range(2)
    ]
    assert answers[0].json == answers[1].json
    assert len(cloud.rows(schema.servers)) == 3


def test_idempotent_create_repeats_answer_if_server_image_and_flavor_are_gone(
    make_cloud: Callable[..., Cloud],
) -> None:
    cloud = make_cloud(secret_key="k")
    headers = {"Idempotency-Key": "k"}
    first = post_server(cloud, headers=headers)
    cloud.images.images.clear()
    cloud.call("DELETE", "/flavors/1", token="admin")
    cloud.set_state(first.json["server"]["id"], "deleted", deleted=1)
    second = post_server(cloud, headers=headers)
    assert (second.status_code, second.json) == (202, first.json)


def test_idempotency_key_with_another_body_returns_409(cloud: Cloud) -> None:
    headers = {"Idempotency-Key": "k"}
    assert post_server(cloud, headers=headers).status_code == 202
    answer = post_server(cloud, headers=headers, name="other")
    assert answer.json == {
        "conflictingRequest": {
            "code": 409,
            "message": "This Idempotency-Key was used before with another request; use a new key.",
        }
    }
    assert post_server(cloud, headers=headers, name="other", token="stranger").status_code == 202
    assert len(cloud.rows(schema.servers)) == 2


@pytest.mark.parametrize("key", ["", "x" * 256])
def test_idempotency_key_of_invalid_length_returns_400(cloud: Cloud, key: str) -> None:
    assert post_server(cloud, headers={"Idempotency-Key": key}).status_code == 400


# --- number of statements, concurrent creates ---
def record_statements(cloud: Cloud, work: Callable[[], Any]) -> list[str]:
    """Run the function and return the SQL statements that were executed."""
    texts: list[str] = []

    def append_statement(conn: Any, cursor: Any, statement: str, *rest: Any) -> None:
        texts.append(statement)

    sa.event.listen(cloud.store.engine, "before_cursor_execute", append_statement)
    work()
    sa.event.remove(cloud.store.engine, "before_cursor_execute", append_statement)
    return texts


def test_repeated_requests_about_servers_build_no_statement(cloud: Cloud) -> None:
    def request_all() -> None:
        server = post_server(cloud).json["server"]["id"]
        for body in ({"os-stop": None}, {"resize": {"flavorRef": "2"}}):
            cloud.set_state(server)
            assert cloud.call("POST", f"/servers/{server}/action", body).status_code == 202
        for token in ("user", "admin"):
            for path in (f"/servers/{server}", "/servers", "/servers/detail"):
                assert cloud.call("GET", path, token=token).status_code == 200
        assert cloud.call("GET", "/flavors/1").status_code == 200
        cloud.set_state(server)
        assert cloud.call("DELETE", f"/servers/{server}").status_code == 204

    assert find_rebuilt_statements(cloud.store.engine, request_all) == []


def test_create_server_runs_seven_statements_and_nine_for_eight_servers(cloud: Cloud) -> None:
    # The first create inserts the project's row.
    post_server(cloud)
    single = record_statements(cloud, lambda: post_server(cloud))
    assert [statement.split()[0] for statement in single] == [
        "SELECT",
        "BEGIN",
        "UPDATE",
        "SELECT",
        "SELECT",
        "INSERT",
        "INSERT",
    ]
    eight = record_statements(cloud, lambda: post_server(cloud, min_count=8))
    assert len(eight) == len(single) + 2, (
        "one more per table for the clock, for any number of servers"
    )


def test_list_servers_statement_count_is_independent_of_rows(cloud: Cloud) -> None:
    def count_statements(token: str) -> int:
        query = "?all_tenants=1" if token == "admin" else ""
        return len(
            record_statements(
                cloud, lambda: cloud.call("GET", "/servers/detail" + query, token=token, mv="2.100")
            )
        )

    empty = [count_statements("user"), count_statements("admin")]
    post_server(cloud, min_count=5)
    for row in cloud.rows(schema.servers):
        cloud.set_state(row.id)
    assert [count_statements("user"), count_statements("admin")] == empty == [1, 2]


def test_creates_waiting_for_running_create_share_one_insert(cloud: Cloud) -> None:
    """Ten creates wait while the first transaction runs. The quota allows ten in total."""
    running, go = threading.Event(), threading.Event()

    def hold(conn: Any, cursor: Any, statement: str, *rest: Any) -> None:
        if statement.startswith("INSERT INTO servers"):
            inserts.append(statement)
            running.set()
            assert go.wait(20)

    inserts: list[str] = []
    sa.event.listen(cloud.store.engine, "before_cursor_execute", hold)
    answers: list[Any] = []
    threads = [
        threading.Thread(target=lambda: answers.append(post_server(cloud))) for _ in range(11)
    ]
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
def test_invalid_create_in_shared_transaction_fails_alone(cloud: Cloud) -> None:
    """The database refuses one row and thus the transaction. Then each create runs alone."""
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
        except Exception as problem:  # noqa: BLE001 - the test compares each outcome
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


def test_action_of_create_server_can_be_taken_by_conductor(cloud: Cloud) -> None:
    server = cloud.create()
    action_rows = cloud.store.write(lambda tx: actions.take(tx, "me", {"create": 1}, 10))
    assert [row.server_id for row in action_rows] == [server]
    row = cloud.store.read(lambda tx: servers.show(tx, server))
    assert servers.loads(row.image)["properties"] == {"architecture": "x86_64"}


def set_image_properties(cloud: Cloud, **properties: str) -> None:
    """Replace the properties of the image."""
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
def test_create_server_uses_disk_config_of_image_unless_in_request(
    cloud: Cloud, properties: dict[str, str], request_body: dict[str, str], expected: str
) -> None:
    set_image_properties(cloud, **properties)
    # The second request repeats the first.
    for _ in range(2):
        answer = post_server(cloud, headers={"Idempotency-Key": "k"}, **request_body)
        assert answer.json["server"]["OS-DCF:diskConfig"] == expected
    [row] = cloud.rows(schema.servers)
    assert row.disk_config == expected


def test_create_server_with_auto_disk_config_disabled_by_image_returns_400(cloud: Cloud) -> None:
    set_image_properties(cloud, auto_disk_config="disabled")
    answer = post_server(cloud, **{"OS-DCF:diskConfig": "AUTO"})
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
def test_create_server_with_unsupported_image_property_returns_400(
    cloud: Cloud, name: str, value: str
) -> None:
    set_image_properties(cloud, **{name: value})
    answer = post_server(cloud)
    assert answer.status_code == 400
    assert answer.json["badRequest"]["message"].startswith(f"{name}: ")
    set_image_properties(
        cloud, os_distro="debian", hw_floppy_bus="fdc", ipxe_boot="false", mappings="[]"
    )
    assert post_server(cloud).status_code == 202
