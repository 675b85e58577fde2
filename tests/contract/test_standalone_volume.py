# SPDX-License-Identifier: Apache-2.0
"""The embedded volume service as a real process behind keystonemiddleware.

python-openstackclient and openstacksdk use it unmodified. ``requests`` sends malformed and
unauthorized requests.
"""

import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openstack
import pytest
import requests
from falcon import inspect

from deploy.one_machine.services.volume.app import build
from deploy.one_machine.services.volume.caller import VERSIONS
from tests.contract.volume_rig import GIGABYTE, HOST, NEWEST, Rig, person, volume_rig
from tests.standalone import Cloud


@pytest.fixture(scope="module")
def rig(standalone_cloud: Cloud, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    with volume_rig(standalone_cloud, tmp_path_factory.mktemp("volume")) as rig:
        yield rig


@pytest.fixture
def member(rig: Rig) -> Any:
    return person(rig.admin, rig.cloud, "member")


# Real clients


@pytest.mark.slice("guests")
def test_openstackclient_runs_volume_commands(rig: Rig) -> None:
    created, *_ = rig.cloud.openstack(
        "volume create --size 1 --description d --property a=b cli-1 -f json"
    )
    rig.until(rig.admin, created["id"], "available")
    snapshot, *_ = rig.cloud.openstack("volume snapshot create --volume cli-1 cli-s -f json")
    rig.until(rig.admin, snapshot["id"], "available", "snapshots")
    listed, volume, snapshots, snapshot_record = rig.cloud.openstack(
        "volume list --long -f json",
        "volume show cli-1 -f json",
        "volume snapshot list -f json",
        "volume snapshot show cli-s -f json",
        "volume set --bootable cli-1",
    )
    assert [row["Name"] for row in listed] == ["cli-1"]
    assert (volume["size"], volume["status"], volume["description"]) == (1, "available", "d")
    assert volume["type"] == "__DEFAULT__"
    assert [row["Name"] for row in snapshots] == ["cli-s"]
    assert snapshot_record["volume_id"] == created["id"]
    rig.cloud.openstack("volume set --size 3 cli-1")
    rig.until(rig.admin, created["id"], "available")
    changed, copied = rig.cloud.openstack(
        "volume show cli-1 -f json", "volume create --snapshot cli-s --size 2 cli-3 -f json"
    )
    assert (changed["size"], changed["properties"], changed["bootable"]) == (3, {"a": "b"}, True)
    rig.until(rig.admin, copied["id"], "available")
    offered, types, _, quota, limits, services, zones = rig.cloud.openstack(
        "volume transfer request list -f json",
        "volume type list --long -f json",
        "volume type create --multiattach shared -f json",
        "quota show --volume -f json",
        "limits show --absolute -f json",
        "volume service list -f json",
        "availability zone list --volume -f json",
    )
    assert offered == []
    assert [row["Name"] for row in types] == ["__DEFAULT__"]
    assert {row["Resource"]: row["Limit"] for row in quota}["volumes"] == 10
    limits_by_name = {row["Name"].replace("_", "").lower(): row["Value"] for row in limits}
    assert limits_by_name["maxtotalvolumes"] == 10
    assert {row["Binary"] for row in services} == {"cinder-scheduler", "cinder-volume"}
    assert zones[0]["Zone Name"] == "nova"
    rig.cloud.openstack(
        "volume snapshot delete cli-s", "volume delete cli-3", "volume type delete shared"
    )
    rig.until(rig.admin, snapshot["id"], "gone", "snapshots")
    rig.cloud.openstack("volume delete cli-1")
    rig.until(rig.admin, created["id"], "gone")
    rig.until(rig.admin, copied["id"], "gone")
    assert list(rig.folder.iterdir()) == []


def test_openstacksdk_lists_volumes_in_pages_with_filters(rig: Rig, member: Any) -> None:
    keys = [
        rig.volume(member, name=f"n{place % 2}", metadata={"p": str(place)}) for place in range(5)
    ]
    storage = member.block_storage
    assert {record.id for record in storage.volumes(limit=2)} == set(keys)
    assert {record.id for record in storage.volumes(name="n1")} == {keys[1], keys[3]}
    volume = storage.get_volume(keys[0])
    assert (volume.status, volume.size, volume.is_bootable, volume.is_multiattach) == (
        "available",
        1,
        False,
        False,
    )
    assert (volume.project_id, volume.volume_type) == (member.current_project_id, "__DEFAULT__")
    ordered = rig.ask(member, "GET", "/volumes?sort=name:asc,id:desc&limit=3").json()
    [more] = ordered["volumes_links"]
    headers = {"X-Auth-Token": member.session.get_token(), "OpenStack-API-Version": NEWEST}
    rest = requests.get(more["href"], headers=headers, timeout=30).json()
    pairs = [(record["name"], record["id"]) for record in ordered["volumes"] + rest["volumes"]]
    assert pairs == sorted(
        sorted(pairs, key=lambda record: record[1], reverse=True), key=lambda record: record[0]
    )
    assert len(pairs) == 5
    for query, number in (
        ("name~=n", 5),
        ("status=error", 0),
        ("metadata={'p': '3'}", 1),
        ('metadata={"p": "2"}', 1),
        ("bootable=false&limit=2&offset=4", 1),
        ("created_at=gt:2020-01-01T00:00:00", 5),
        ("size=1&sort_key=size&sort_dir=asc", 5),
    ):
        answer = rig.ask(member, "GET", f"/volumes/detail?{query}")
        assert (answer.status_code, len(answer.json().get("volumes", []))) == (200, number), query
    assert rig.ask(member, "GET", "/volumes?with_count=true&limit=1").json()["count"] == 5
    assert storage.get_volume(keys[0]).metadata == {"p": "0"}
    assert [record.name for record in storage.availability_zones()] == ["nova"]
    assert storage.get_limits().absolute.total_volumes_used == 5
    assert list(storage.backups()) == []
    assert {record.alias for record in storage.extensions()} >= {"os-volume-actions"}
    for key in keys:
        storage.delete_volume(key, ignore_missing=False)
    for key in keys:
        rig.until(member, key, "gone")
    with pytest.raises(openstack.exceptions.NotFoundException):
        storage.get_volume(keys[0])


@pytest.mark.parametrize(
    ("query", "status"),
    [
        ("limit=-1", 400),
        ("limit=x", 400),
        ("marker=nothing", 400),
        ("sort_key=metadata", 400),
        ("sort=name:up", 400),
        ("color=red", 400),
        ("bootable=maybe", 400),
        ("metadata=(((", 400),
        ("created_at=about:2020", 400),
        ("limit=0", 200),
    ],
)
def test_volume_list_returns_400_for_invalid_query_and_200_for_limit_0(
    rig: Rig, query: str, status: int
) -> None:
    assert rig.ask(rig.admin, "GET", f"/volumes/detail?{query}").status_code == status


# Versions


def test_volume_microversion_is_negotiated_and_selects_fields(rig: Rig, member: Any) -> None:
    root = requests.get(rig.url, timeout=20).json()["versions"][0]
    assert (root["min_version"], root["version"], root["status"]) == ("3.0", "3.70", "CURRENT")
    key = rig.volume(member)
    for version, status, header in (
        ("volume 3.0", 200, "volume 3.0"),
        ("compute 2.95", 200, "volume 3.0"),
        ("compute 2.95, volume 3.44", 200, "volume 3.44"),
        ("volume latest", 200, "volume 3.70"),
        ("volume 3.71", 406, None),
        ("volume 4.0", 406, None),
        ("volume three", 400, None),
    ):
        answer = rig.ask(member, "GET", f"/volumes/{key}", version=version)
        assert answer.status_code == status, version
        assert header is None or answer.headers["OpenStack-API-Version"] == header
    old = rig.ask(member, "GET", f"/volumes/{key}", version="volume 3.0").json()["volume"]
    new = rig.show(member, key)
    assert {"shared_targets", "service_uuid", "volume_type_id", "consumes_quota", "group_id"} <= (
        new.keys() - old.keys()
    )
    assert new["shared_targets"] is False
    for path, minor in (
        ("/attachments", 27),
        ("/volume-transfers", 55),
        ("/messages", 3),
    ):
        before, since = (
            rig.ask(member, "GET", path, version=f"volume 3.{minor_version}").status_code
            for minor_version in (minor - 1, minor)
        )
        assert (before, since) == (404, 200), path
    project = member.current_project_id
    assert rig.ask(member, "GET", f"/{project}/volumes/{key}").json()["volume"]["id"] == key
    assert rig.ask(member, "GET", f"/{uuid.uuid4().hex}/volumes").status_code == 400
    rig.ask(member, "DELETE", f"/volumes/{key}")


# Policy


def test_volume_of_other_project_returns_404(rig: Rig, member: Any) -> None:
    stranger, key = person(rig.admin, rig.cloud, "member"), rig.volume(member)
    snapshot = rig.snapshot(member, key)
    attachment = rig.attach(member, key, str(uuid.uuid4())).json()["attachment"]["id"]
    for method, path, body in (
        ("GET", f"/volumes/{key}", None),
        ("DELETE", f"/volumes/{key}", None),
        ("POST", f"/volumes/{key}/action", {"os-extend": {"new_size": 2}}),
        ("POST", f"/volumes/{key}/action", {"os-force_detach": {}}),
        ("GET", f"/snapshots/{snapshot}", None),
        ("DELETE", f"/snapshots/{snapshot}", None),
        ("POST", "/snapshots", {"snapshot": {"volume_id": key}}),
        ("POST", "/volumes", {"volume": {"size": 1, "source_volid": key}}),
        ("POST", "/volumes", {"volume": {"size": 1, "snapshot_id": snapshot}}),
        ("POST", "/attachments", {"attachment": {"volume_uuid": key}}),
        ("GET", f"/attachments/{attachment}", None),
        ("DELETE", f"/attachments/{attachment}", None),
        ("PUT", f"/attachments/{attachment}", {"attachment": {"connector": {"host": HOST}}}),
        ("POST", f"/attachments/{attachment}/action", {"os-complete": {}}),
    ):
        assert rig.ask(stranger, method, path, body).status_code == 404, (method, path)
    assert rig.ask(stranger, "GET", "/volumes?all_tenants=1").json()["volumes"] == []
    assert rig.ask(rig.admin, "GET", f"/volumes/{key}").status_code == 200
    everything = rig.ask(rig.admin, "GET", "/volumes?all_tenants=1").json()["volumes"]
    assert key in {volume["id"] for volume in everything}
    assert rig.ask(rig.service, "DELETE", f"/attachments/{attachment}").status_code == 200
    assert rig.ask(member, "DELETE", f"/volumes/{key}?cascade=true").status_code == 202
    rig.until(member, key, "gone")


def test_volume_write_by_reader_and_admin_action_by_member_return_403(
    rig: Rig, member: Any
) -> None:
    project = rig.admin.identity.get_project(member.current_project_id)
    reader, key = person(rig.admin, rig.cloud, "reader", project), rig.volume(member)
    assert rig.ask(reader, "GET", f"/volumes/{key}").status_code == 200
    for method, path, body in (
        ("POST", "/volumes", {"volume": {"size": 1}}),
        ("DELETE", f"/volumes/{key}", None),
        ("POST", f"/volumes/{key}/action", {"os-extend": {"new_size": 2}}),
        ("POST", "/snapshots", {"snapshot": {"volume_id": key}}),
        ("POST", "/attachments", {"attachment": {"volume_uuid": key}}),
    ):
        assert rig.ask(reader, method, path, body).status_code == 403, (method, path)
    for method, path, body in (
        ("POST", f"/volumes/{key}/action", {"os-reset_status": {"status": "error"}}),
        ("POST", f"/volumes/{key}/action", {"os-force_detach": {}}),
        ("DELETE", f"/volumes/{key}?force=true", None),
        ("POST", "/types", {"volume_type": {"name": "x"}}),
        ("PUT", f"/os-quota-sets/{project.id}", {"quota_set": {"volumes": 99}}),
        ("GET", f"/os-quota-sets/{uuid.uuid4().hex}", None),
        ("GET", "/os-services", None),
    ):
        assert rig.ask(member, method, path, body).status_code == 403, (method, path)
    for token in ("nonsense", ""):
        forged = {"X-Identity-Status": "Confirmed", "X-Roles": "admin", "X-Project-Id": "x"}
        answer = requests.get(
            f"{rig.url}/volumes", headers=forged | {"X-Auth-Token": token}, timeout=20
        )
        assert answer.status_code == 401
    rig.ask(member, "DELETE", f"/volumes/{key}")


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({}, 400),
        ({"volume": {}}, 400),
        ({"volume": {"size": 0}}, 400),
        ({"volume": {"size": -1}}, 400),
        ({"volume": {"size": "x"}}, 400),
        ({"volume": {"size": 1, "color": "red"}}, 400),
        ({"volume": {"size": 1, "metadata": {"a": 1}}}, 400),
        ({"volume": {"size": 1, "name": "n" * 256}}, 400),
        ({"volume": {"size": 1, "availability_zone": "mars"}}, 400),
        ({"volume": {"size": 1, "multiattach": True}}, 400),
        ({"volume": {"size": 1, "group_id": "g"}}, 400),
        ({"volume": {"size": 1, "volume_type": "nothing"}}, 404),
        ({"volume": {"size": 1, "snapshot_id": str(uuid.uuid4())}}, 404),
        ({"volume": {"size": 1, "source_volid": str(uuid.uuid4())}}, 404),
        ({"volume": {"size": 1, "backup_id": str(uuid.uuid4())}}, 404),
        ({"volume": {"size": 1, "imageRef": str(uuid.uuid4())}}, 400),
        ({"volume": {"size": 1, "imageRef": "../../v3"}}, 400),
        ({"volume": {"size": 2000}}, 413),
    ],
)
def test_create_volume_fails_400_if_invalid_404_if_unknown_413_over_quota(
    rig: Rig, member: Any, body: Any, status: int
) -> None:
    answer = rig.ask(member, "POST", "/volumes", body)
    assert answer.status_code == status, answer.text
    [(name, fault)] = answer.json().items()
    assert name == {400: "badRequest", 404: "itemNotFound", 413: "overLimit"}[status]
    assert fault["code"] == status
    assert rig.ask(member, "GET", "/volumes").json()["volumes"] == []


# Attachments


def test_volume_is_reserved_attaching_in_use_then_available_after_detach(
    rig: Rig, member: Any
) -> None:
    key, server = rig.volume(member), str(uuid.uuid4())
    body = {"attachment": {"volume_uuid": key, "instance_uuid": server}}
    attachment = rig.ask(member, "POST", "/attachments", body).json()["attachment"]
    assert (
        attachment["status"],
        attachment["instance"],
        attachment["volume_id"],
        attachment["connection_info"],
    ) == (
        "reserved",
        server,
        key,
        {},
    )
    assert rig.show(member, key)["status"] == "reserved"
    path = f"/attachments/{attachment['id']}"
    connector = {"attachment": {"connector": {"host": HOST, "mountpoint": "/dev/vdb"}}}
    connected = rig.ask(rig.service, "PUT", path, connector).json()["attachment"]
    info = connected["connection_info"]
    assert (connected["status"], connected["attach_mode"]) == ("attaching", "rw")
    assert (info["driver_volume_type"], info["format"], info["access_mode"]) == (
        "local",
        "raw",
        "rw",
    )
    assert Path(info["device_path"]).stat().st_size == GIGABYTE
    assert rig.show(member, key)["status"] == "attaching"
    rig.complete(rig.service, attachment["id"])
    volume = rig.show(rig.admin, key)
    assert volume["status"] == "in-use"
    [listed_attachment] = volume["attachments"]
    assert (
        listed_attachment["server_id"],
        listed_attachment["device"],
        listed_attachment["host_name"],
    ) == (
        server,
        "/dev/vdb",
        HOST,
    )
    assert rig.show(member, key)["attachments"][0]["host_name"] is None
    attachment_ids = [
        listed_attachment.id
        for listed_attachment in member.block_storage.attachments(volume_id=key)
    ]
    assert attachment_ids == [attachment["id"]]
    assert rig.ask(member, "DELETE", f"/volumes/{key}").status_code == 400
    assert rig.ask(rig.service, "DELETE", path).json() == {"attachments": []}
    assert rig.show(member, key)["status"] == "available"
    assert rig.ask(rig.service, "DELETE", path).status_code == 404
    rig.ask(member, "DELETE", f"/volumes/{key}")


def test_volume_attaches_to_two_servers_only_with_multiattach(rig: Rig, member: Any) -> None:
    volume_type = rig.ask(
        rig.admin,
        "POST",
        "/types",
        {"volume_type": {"name": "many", "extra_specs": {"multiattach": "<is> True"}}},
    )
    assert volume_type.status_code == 200, volume_type.text
    single, multi = rig.volume(member), rig.volume(member, volume_type="many")
    assert rig.show(member, multi)["multiattach"] is True
    first = rig.attach(member, single, "server-1").json()["attachment"]["id"]
    assert rig.attach(member, single, "server-2").status_code == 400
    assert (
        rig.attach(member, single, "server-1").status_code == 409
    )  # second attachment on one host
    [attachment] = rig.ask(member, "GET", f"/attachments?volume_id={single}").json()["attachments"]
    assert attachment["id"] == first
    ids = []
    for server in ("server-1", "server-2"):
        attached = rig.attach(member, multi, server, mode="ro").json()["attachment"]
        assert attached["attach_mode"] == attached["connection_info"]["access_mode"] == "ro"
        rig.complete(rig.service, attached["id"])
        ids.append(attached["id"])
    assert len(rig.show(member, multi)["attachments"]) == 2
    remaining = rig.ask(rig.service, "DELETE", f"/attachments/{ids[0]}").json()["attachments"]
    assert [single["id"] for single in remaining] == [ids[1]]
    assert rig.show(member, multi)["status"] == "in-use"
    for key in (first, ids[1]):
        assert rig.ask(rig.service, "DELETE", f"/attachments/{key}").status_code == 200
    for key in (single, multi):
        assert rig.show(member, key)["status"] == "available"
        rig.ask(member, "DELETE", f"/volumes/{key}")
        rig.until(member, key, "gone")
    assert rig.ask(rig.admin, "DELETE", "/types/" + volume_type.json()["volume_type"]["id"]).ok


def test_volume_detach_by_user_returns_409_while_server_uses_volume(rig: Rig, member: Any) -> None:
    key, server = rig.volume(member), str(uuid.uuid4())
    attachment = rig.attach(rig.admin, key, server).json()["attachment"]["id"]
    rig.complete(rig.service, attachment)
    rig.compute.used[key] = attachment
    refusal = rig.ask(member, "DELETE", f"/attachments/{attachment}")
    assert (refusal.status_code, list(refusal.json())) == (409, ["conflictingRequest"])
    for caller, action in (
        (member, "os-detach"),
        (member, "os-terminate_connection"),
        (rig.admin, "os-force_detach"),
    ):
        assert rig.action(caller, key, action, {}).status_code == 409, action
    assert rig.show(member, key)["status"] == "in-use"
    token = {"X-Service-Token": rig.service.session.get_token()}
    assert rig.ask(member, "DELETE", f"/attachments/{attachment}", headers=token).ok
    again = rig.attach(member, key, server).json()["attachment"]["id"]
    # The compute service uses another attachment, so a user may delete this attachment.
    assert rig.ask(member, "DELETE", f"/attachments/{again}").ok
    assert rig.show(member, key)["status"] == "available"
    third = rig.attach(member, key, server).json()["attachment"]["id"]
    assert rig.action(rig.admin, key, "os-force_detach", {"attachment_id": third}).ok
    assert rig.show(member, key)["status"] == "available"
    rig.ask(member, "DELETE", f"/volumes/{key}")


def test_concurrent_volume_attaches_succeed_once_and_others_return_400(
    rig: Rig, member: Any
) -> None:
    key, answers = rig.volume(member), []

    def attach(number: int) -> None:
        answers.append(rig.attach(member, key, f"server-{number}").status_code)

    threads = [threading.Thread(target=attach, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(answers) == [200, 400, 400, 400, 400, 400]
    [attachment] = rig.ask(member, "GET", f"/attachments?volume_id={key}").json()["attachments"]
    rig.ask(rig.service, "DELETE", f"/attachments/{attachment['id']}")
    rig.ask(member, "DELETE", f"/volumes/{key}")


def test_volume_attach_to_second_server_after_reset_status_returns_400(
    rig: Rig, member: Any
) -> None:
    key = rig.volume(member)
    first = rig.attach(member, key, "server-1").json()["attachment"]["id"]
    rig.complete(rig.service, first)
    assert rig.action(rig.admin, key, "os-reset_status", {"status": "available"}).ok
    refusal = rig.attach(member, key, "server-2")
    assert (refusal.status_code, "is attached" in refusal.text) == (400, True)
    assert rig.ask(member, "DELETE", f"/volumes/{key}").status_code == 400
    assert rig.ask(rig.service, "DELETE", f"/attachments/{first}").ok
    rig.ask(member, "DELETE", f"/volumes/{key}")


# Every route


def operations() -> list[tuple[str, str]]:
    """Return method and path of every operation of the service, except the version lists."""
    app = build(None)  # type: ignore[arg-type]
    return [
        (method.method, route.path.replace("{", "").replace("}", "").removeprefix("/v3"))
        for route in inspect.inspect_routes(app)
        for method in route.methods
        if not method.internal and route.path not in VERSIONS
    ]


def test_volume_routes_require_token_and_refuse_writes_of_reader(rig: Rig, member: Any) -> None:
    routes = operations()
    assert len(routes) > 45
    reader = person(
        rig.admin, rig.cloud, "reader", rig.admin.identity.get_project(member.current_project_id)
    )
    body = {"os-extend": {"new_size": 2}}
    for method, path in routes:
        assert requests.request(method, rig.url + path, timeout=20).status_code == 401, path
        answer = rig.ask(reader, method, path, None if method == "GET" else body)
        assert answer.status_code in ((200, 403, 404) if method == "GET" else (400, 403, 404)), (
            method,
            path,
            answer.status_code,
        )
