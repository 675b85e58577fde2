# SPDX-License-Identifier: Apache-2.0
"""Servers: show, list, update and delete, at the edges of the microversions."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import sqlalchemy as sa

from common.domain import errors
from common.domain.clock import SECOND
from common.domain.models import Interface
from common.domain.wire import to_wire
from common.store import schema
from common.store.schema.columns import Unreadable
from common.store.servers import servers
from tests.api.conftest import IMAGE, OTHER, PROJECT, Cloud
from tests.log_lines import logged_fields

BASE = {
    "id",
    "name",
    "status",
    "tenant_id",
    "user_id",
    "metadata",
    "hostId",
    "image",
    "flavor",
    "created",
    "updated",
    "addresses",
    "accessIPv4",
    "accessIPv6",
    "links",
    "OS-DCF:diskConfig",
    "progress",
}
MORE = {
    "OS-EXT-AZ:availability_zone",
    "config_drive",
    "key_name",
    "OS-SRV-USG:launched_at",
    "OS-SRV-USG:terminated_at",
    "security_groups",
    "OS-EXT-STS:task_state",
    "OS-EXT-STS:vm_state",
    "OS-EXT-STS:power_state",
    "os-extended-volumes:volumes_attached",
}
ADMIN = {
    "OS-EXT-SRV-ATTR:host",
    "OS-EXT-SRV-ATTR:instance_name",
    "OS-EXT-SRV-ATTR:hypervisor_hostname",
}
ADMIN_3 = {
    f"OS-EXT-SRV-ATTR:{name}"
    for name in (
        "reservation_id",
        "launch_index",
        "kernel_id",
        "ramdisk_id",
        "root_device_name",
        "user_data",
    )
}
HOSTNAME = "OS-EXT-SRV-ATTR:hostname"
#: Minor version, with the keys that begin with this version for all users. The second table is for
#: admins only.
NEW = {
    9: {"locked"},
    19: {"description"},
    26: {"tags"},
    63: {"trusted_image_certificates"},
    71: {"server_groups"},
    73: {"locked_reason"},
    90: {HOSTNAME},
    96: {"pinned_availability_zone"},
    100: {"scheduler_hints"},
}
NEW_FOR_ADMINS = {1: ADMIN, 3: ADMIN_3 | {HOSTNAME}, 16: {"host_status"}}
#: A port in a security group. Without groups the answer has no key for groups.
GUARDED = [to_wire(Interface("p", groups=["default"]))]
EDGES = sorted(
    {1, 104} | {edge for since in (*NEW, *NEW_FOR_ADMINS) for edge in (since - 1, since) if edge}
)


def expected_keys(version: int, admin: bool) -> set[str]:
    keys = BASE | MORE
    for table in (NEW, NEW_FOR_ADMINS) if admin else (NEW,):
        keys = keys.union(*(list_names for since, list_names in table.items() if since <= version))
    return keys


def test_show_and_list_servers_have_the_keys_of_each_microversion(cloud: Cloud) -> None:
    server = cloud.create()
    cloud.set_state(server, interfaces=GUARDED)
    for version, token in itertools.product(EDGES, ("user", "admin")):
        admin = token == "admin"
        server_view = cloud.call("GET", f"/servers/{server}", mv=f"2.{version}", token=token).json[
            "server"
        ]
        assert set(server_view) == expected_keys(version, admin), (version, token)
        list_item = cloud.call(
            "GET",
            "/servers/detail?all_tenants=1" if admin else "/servers/detail",
            mv=f"2.{version}",
            token=token,
        ).json["servers"][0]
        assert set(list_item) == expected_keys(version, admin) - {"server_groups"}, (version, token)


def test_show_server_returns_values_of_row_flavor_and_image(cloud: Cloud) -> None:
    server = cloud.create(metadata={"a": "b"}, accessIPv6="80fe::1", config_drive=True)
    cloud.set_state(server, launched_at=1_700_000_000_123_456)
    view = cloud.call("GET", f"/servers/{server}", mv="2.100", token="admin").json["server"]
    assert view["status"] == "ACTIVE"
    assert view["metadata"] == {"a": "b"}
    assert view["image"]["properties"] == {"architecture": "x86_64"}
    assert view["flavor"] == {
        "vcpus": 1,
        "ram": 512,
        "disk": 1,
        "ephemeral": 0,
        "swap": 0,
        "original_name": "m1.tiny",
        "extra_specs": {},
    }
    assert (view["accessIPv4"], view["accessIPv6"], view["config_drive"]) == (
        "",
        "80fe::1",
        "True",
    )
    assert view["OS-SRV-USG:launched_at"] == "2023-11-14T22:13:20.123456"
    assert (view["OS-EXT-SRV-ATTR:host"], view["OS-EXT-SRV-ATTR:hypervisor_hostname"]) == (
        "host1",
        "host1.cloud",
    )
    assert view["host_status"] == "UP"
    assert len(view["hostId"]) == 56
    assert view["created"].endswith("Z")
    old_view = cloud.call("GET", f"/servers/{server}").json["server"]
    assert sorted(old_view["flavor"]) == ["id", "links"]
    assert sorted(old_view["image"]) == ["id", "links"]


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({"disabled": True}, "MAINTENANCE"),
        ({"forced_down": True}, "DOWN"),
        ({"forced_down": True, "disabled": True}, "DOWN"),
    ],
)
def test_show_server_host_status_is_maintenance_if_disabled_down_if_forced(
    cloud: Cloud, changes: dict[str, Any], status: str
) -> None:
    server = cloud.create()
    assert (
        cloud.call("GET", f"/servers/{server}", mv="2.16", token="admin").json["server"][
            "host_status"
        ]
        == ""
    )
    cloud.set_state(server)
    cloud.change(schema.services, schema.services.c.host == "host1", **changes)
    assert (
        cloud.call("GET", f"/servers/{server}", mv="2.16", token="admin").json["server"][
            "host_status"
        ]
        == status
    )


def test_show_server_has_fault_in_error_status_with_details_for_admins(cloud: Cloud) -> None:
    server = cloud.create()
    fault = {
        "code": 500,
        "message": "No valid host",
        "details": "step place",
        "created": 1_700_000_000_000_000,
    }
    cloud.set_state(server, fault=fault)
    assert "fault" not in cloud.call("GET", f"/servers/{server}").json["server"]
    cloud.set_state(server, "error", fault=fault)
    expected = {"code": 500, "message": "No valid host", "created": "2023-11-14T22:13:20Z"}
    assert cloud.call("GET", f"/servers/{server}").json["server"]["fault"] == expected
    assert cloud.call("GET", f"/servers/{server}", token="admin").json["server"]["fault"] == {
        **expected,
        "details": "step place",
    }
    assert "progress" not in cloud.call("GET", f"/servers/{server}").json["server"]


def test_show_server_has_fault_while_its_action_is_stuck(cloud: Cloud) -> None:
    """The fault is shown in any status, until another action begins."""
    server = cloud.create()
    fault = {
        "code": 500,
        "message": "The stop is stuck.",
        "details": "LookupError",
        "created": 1_700_000_000_000_000,
        "action": "a1",
        "before": None,
    }
    cloud.set_state(server, task_state="powering-off", action="a1", fault=fault)
    view = cloud.call("GET", f"/servers/{server}").json["server"]
    assert view["fault"] == {
        "code": 500,
        "created": "2023-11-14T22:13:20Z",
        "message": "The stop is stuck.",
    }
    assert (view["status"], view["OS-EXT-STS:task_state"]) == ("ACTIVE", "powering-off")
    for action in ("a2", None):
        cloud.set_state(server, action=action, fault=fault)
        assert "fault" not in cloud.call("GET", f"/servers/{server}").json["server"]


def test_show_server_has_server_group_and_scheduler_hints(cloud: Cloud) -> None:
    group = cloud.call(
        "POST",
        "/os-server-groups",
        {"server_group": {"name": "g", "policies": ["soft-affinity"]}},
        mv="2.15",
    ).json["server_group"]["id"]
    body = {
        "server": {"name": "a", "imageRef": IMAGE, "flavorRef": "1"},
        "os:scheduler_hints": {"group": group},
    }
    server = cloud.call("POST", "/servers", body).json["server"]["id"]
    view = cloud.call("GET", f"/servers/{server}", mv="2.100").json["server"]
    assert (view["server_groups"], view["scheduler_hints"]) == ([group], {"group": group})


# --- update ---
@pytest.mark.parametrize("version", [1, 8, 9, 19, 26, 46, 47, 63, 71, 73, 74, 75, 90, 96, 104])
def test_update_server_returns_keys_of_each_microversion_all_from_2_75(
    cloud: Cloud, version: int
) -> None:
    server = cloud.create()
    cloud.set_state(server, interfaces=GUARDED)
    answer = cloud.call("PUT", f"/servers/{server}", {"server": {"name": "new"}}, mv=f"2.{version}")
    assert answer.status_code == 200
    assert answer.json["server"]["name"] == "new"
    assert set(answer.json["server"]) == expected_keys(version, admin=False) - (
        set() if version >= 75 else MORE
    )


def test_update_server_changes_fields_and_returns_400_before_their_version(cloud: Cloud) -> None:
    server = cloud.create()
    body = {
        "name": "n",
        "description": "d",
        "accessIPv4": "192.0.2.1",
        "accessIPv6": "::1",
        "hostname": "h.example",
        "OS-DCF:diskConfig": "AUTO",
    }
    view = cloud.call("PUT", f"/servers/{server}", {"server": body}, mv="2.94").json["server"]
    assert {
        key: view[key]
        for key in ("name", "description", "accessIPv4", "accessIPv6", "OS-DCF:diskConfig")
    } | {"hostname": view[HOSTNAME]} == body
    cloud.call("PUT", f"/servers/{server}", {"server": {"description": None}}, mv="2.19")
    assert cloud.rows(schema.servers)[0].description is None
    for mv, key in (
        ("2.18", "description"),
        ("2.89", "hostname"),
        ("2.103", "pinned_availability_zone"),
    ):
        assert (
            cloud.call("PUT", f"/servers/{server}", {"server": {key: "x"}}, mv=mv).status_code
            == 400
        )


@pytest.mark.parametrize(
    ("mv", "hostname", "status"),
    [
        ("2.90", "h1", 200),
        ("2.93", "a-b", 200),
        ("2.90", "h", 400),
        ("2.90", "-h", 400),
        ("2.93", "h-", 400),
        ("2.93", "h.example", 400),
        ("2.94", "h.example", 200),
        ("2.94", "h", 200),
        ("2.94", "h e", 400),
    ],
)
def test_update_hostname_allows_dots_from_2_94_and_returns_400_if_invalid(
    cloud: Cloud, mv: str, hostname: str, status: int
) -> None:
    answer = cloud.call(
        "PUT", f"/servers/{cloud.create()}", {"server": {"hostname": hostname}}, mv=mv
    )
    assert answer.status_code == status


def test_update_pinned_zone_accepts_null_and_own_zone_and_else_returns_409(cloud: Cloud) -> None:
    server = cloud.create(availability_zone="nova")
    cloud.set_state(server)

    def put_zone(zone: str | None) -> int:
        return int(
            cloud.call(
                "PUT",
                f"/servers/{server}",
                {"server": {"pinned_availability_zone": zone}},
                mv="2.104",
            ).status_code
        )

    assert [put_zone("other"), put_zone(None), put_zone("nova")] == [409, 200, 200]


def test_update_pinned_zone_returns_409_when_server_moves_meanwhile(cloud: Cloud) -> None:
    server = cloud.create()
    cloud.set_state(server)
    cloud.run_after_statement(
        "SELECT servers", lambda: cloud.set_state(server, availability_zone="az1")
    )
    answer = cloud.call(
        "PUT", f"/servers/{server}", {"server": {"pinned_availability_zone": "nova"}}, mv="2.104"
    )
    assert "is in availability zone az1." in answer.json["conflictingRequest"]["message"]
    assert cloud.rows(schema.servers)[0].pinned_availability_zone is None


# --- delete ---
def test_delete_server_supersedes_running_create(cloud: Cloud) -> None:
    server = cloud.create()
    answer = cloud.call("DELETE", f"/servers/{server}")
    assert (answer.status_code, answer.content) == (204, b"")
    create, delete = sorted(cloud.rows(schema.actions), key=lambda row: row.created_at)
    assert (create.state, delete.state, delete.workflow, delete.fence) == (
        "superseded",
        "due",
        "delete",
        2,
    )
    assert (
        cloud.call("GET", f"/servers/{server}").json["server"]["OS-EXT-STS:task_state"]
        == "deleting"
    )
    assert cloud.wakeup.count == 2
    cloud.set_state(server, "deleted", deleted=1)
    assert cloud.call("GET", f"/servers/{server}").status_code == 404
    assert cloud.call("DELETE", f"/servers/{server}").status_code == 404


def test_delete_locked_server_returns_409_except_to_admin(cloud: Cloud) -> None:
    server = cloud.create()
    cloud.set_state(server, locked=True)
    answer = cloud.call("DELETE", f"/servers/{server}")
    assert answer.json == {
        "conflictingRequest": {"code": 409, "message": f"Instance {server} is locked"}
    }
    assert cloud.call("DELETE", f"/servers/{server}", token="admin").status_code == 204


# --- lists ---
@pytest.fixture
def fleet(cloud: Cloud) -> dict[str, str]:
    """Return the ids of four servers by name, created in this order a second apart."""
    server_ids = {}
    for number, name in enumerate(("alpha", "beta", "gamma", "delta")):
        server_ids[name] = cloud.create(
            name, mv="2.52", tags=[name, "all"], flavorRef="2" if name == "gamma" else "1"
        )
        cloud.set_state(
            server_ids[name],
            created_at=1_700_000_000 * SECOND + number * SECOND,
            updated_at=1_700_000_000 * SECOND + number * SECOND,
        )
    cloud.set_state(server_ids["beta"], "stopped")
    cloud.set_state(server_ids["delta"], "active", task_state="rebooting", locked=True)
    cloud.create("foreign", token="stranger")
    return server_ids


def list_names(
    cloud: Cloud, query: str, mv: str = "2.100", token: str = "user", status: int = 200
) -> list[str]:
    answer = cloud.call("GET", "/servers" + query, mv=mv, token=token)
    assert answer.status_code == status, answer.text
    return [server["name"] for server in answer.json["servers"]] if status == 200 else []


#: Query of a list, with the names in its answer.
ORDERS = {
    "": "delta gamma beta alpha",
    "?status=ACTIVE": "gamma alpha",
    "?status=SHUTOFF&status=REBOOT": "delta beta",
    "?status=active": "gamma alpha",
    "?name=a$": "delta gamma beta alpha",
    "?name=^al": "alpha",
    "?name=lph": "alpha",
    "?flavor=2": "gamma",
    f"?image={IMAGE}": "delta gamma beta alpha",
    "?image=" + OTHER: "",
    "?tags=alpha,all": "alpha",
    "?tags-any=alpha,beta": "beta alpha",
    "?not-tags=alpha,all": "delta gamma beta",
    "?not-tags-any=alpha,beta": "delta gamma",
    "?locked=true": "delta",
    "?locked=false": "gamma beta alpha",
    "?changes-since=2023-11-14T22:13:22Z": "delta gamma",
    "?changes-before=2023-11-14T22:13:21Z": "beta alpha",
    "?changes-since=2023-11-14T22:13:21&changes-before=2023-11-14T22:13:22": "gamma beta",
    "?sort_key=display_name&sort_dir=asc": "alpha beta delta gamma",
    "?sort_key=vm_state&sort_dir=desc&sort_key=display_name&sort_dir=asc": "beta alpha delta gamma",
    "?vm_state=stopped": "beta",
    "?ip=192": "",
    "?limit=0": "",
    "?all_tenants=0": "delta gamma beta alpha",
    "?host=host1": "delta gamma beta alpha",
}


def test_list_servers_returns_names_in_order_for_each_filter_and_sort_key(
    cloud: Cloud, fleet: dict[str, str]
) -> None:
    assert {query: " ".join(list_names(cloud, query)) for query in ORDERS} == ORDERS


@pytest.mark.parametrize(
    ("query", "token", "mv", "status"),
    [
        ("?status=NONSENSE", "user", "2.38", 400),
        ("?all_tenants=maybe", "admin", "2.1", 400),
        ("?all_tenants=1", "user", "2.1", 403),
        ("?status=DELETED", "user", "2.1", 403),
        ("?sort_key=host", "user", "2.1", 403),
        ("?locked=maybe", "user", "2.73", 400),
        ("?changes-since=2024-01-01&changes-before=2023-01-01", "user", "2.66", 400),
    ],
)
def test_list_servers_with_invalid_query_returns_400_with_forbidden_one_403(
    cloud: Cloud, query: str, token: str, mv: str, status: int
) -> None:
    list_names(cloud, query, mv, token, status)


def test_list_servers_changes_since_and_before_include_the_shown_second(cloud: Cloud) -> None:
    server = cloud.create("late")
    cloud.set_state(server, updated_at=1_700_000_000_900_000)
    updated = cloud.call("GET", f"/servers/{server}").json["server"]["updated"]
    assert list_names(cloud, f"?changes-since={updated}&changes-before={updated}") == ["late"]
    assert list_names(cloud, "?changes-before=2023-11-14T22:13:19Z") == []


def test_list_servers_ignores_filters_of_later_microversions(
    cloud: Cloud, fleet: dict[str, str]
) -> None:
    assert list_names(cloud, "?status=NONSENSE", "2.37") == []
    assert len(list_names(cloud, "?tags=alpha", "2.25")) == 4, (
        "the filter begins later, so it is ignored"
    )
    assert len(list_names(cloud, "?vm_state=stopped", "2.82")) == 4, (
        "the filter is for admins only, so it is ignored"
    )


DOCUMENTS = ("meta", "tags", "trusted_image_certificates", "scheduler_hints", "flavor", "image")


@pytest.mark.parametrize(
    "damage",
    [
        {"interfaces": {"x": 1}},
        {"flavor": {"vcpus": 1}},
        {"image": [1]},
        {"fault": "?", "vm_state": "error"},
        *({column: Unreadable("[1,2")} for column in DOCUMENTS),
    ],
    ids=lambda damage: next(iter(damage)),
)
def test_list_servers_shows_unreadable_server_as_unknown(
    cloud: Cloud, fleet: dict[str, str], damage: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    cloud.set_state(fleet["beta"], **damage)
    items = cloud.call("GET", "/servers/detail", mv="2.100").json["servers"]
    assert [server.get("name") for server in items] == ["delta", "gamma", None, "alpha"]
    assert (items[2]["id"], items[2]["status"]) == (fleet["beta"], "UNKNOWN")
    assert set(items[2]) == {"id", "status", "tenant_id", "created", "links"}
    assert {"server": fleet["beta"]} in logged_fields(
        caplog, "the record of a server cannot be shown; see its row in the table servers"
    )


@pytest.mark.parametrize("column", ["created_at", "updated_at", "launched_at"])
@pytest.mark.parametrize("value", ["x", 10**18 * 9])
def test_list_servers_includes_server_with_unreadable_time(
    cloud: Cloud, fleet: dict[str, str], column: str, value: Any
) -> None:
    statement = sa.text(f"UPDATE servers SET {column} = :value WHERE id = :id")
    with cloud.store.begin() as tx:
        tx.execute(statement, {"value": value, "id": fleet["beta"]})
    for token in ("user", "admin"):
        answer = _get_without_schemas(
            cloud, "/servers/detail?all_tenants=1" if token == "admin" else "/servers/detail", token
        )
        assert answer.status_code == 200
        assert fleet["beta"] in {server["id"] for server in answer.json["servers"]}
    assert _get_without_schemas(cloud, f"/servers/{fleet['beta']}", "user").status_code == 200


def _get_without_schemas(cloud: Cloud, path: str, token: str) -> Any:
    """Send a GET without the comparison with Nova's schemas, which do not allow damaged rows."""
    path, _, query = path.partition("?")
    headers = {"X-Auth-Token": token, "OpenStack-API-Version": "compute 2.100"}
    return cloud.client.simulate_get("/v2.1" + path, query_string=query, headers=headers)


@pytest.mark.parametrize(
    ("query", "status", "text"),
    [
        ("?all_tenants=1&name=a.*b&host=h&sort_key=hostname", 400, "no index for name, hostname. "),
        ("?all_tenants=1&host=h", 503, "The database ended a statement of this request"),
    ],
)
def test_list_servers_at_time_limit_of_database_names_filters_without_index(
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch, query: str, status: int, text: str
) -> None:
    def run_too_long(*arguments: object) -> None:
        raise errors.TooSlow

    monkeypatch.setattr(servers, "page", run_too_long)
    answer = cloud.call("GET", f"/servers{query}", token="admin")
    assert answer.status_code == status
    [fault] = answer.json.values()
    assert text in fault["message"]
    assert ("user_id, host, image" in fault["message"]) == (status == 400)


def test_list_servers_by_admin_covers_and_filters_all_only_with_all_tenants(
    cloud: Cloud, fleet: dict[str, str]
) -> None:
    assert list_names(cloud, "", token="admin") == []
    assert len(list_names(cloud, "?all_tenants", token="admin")) == 5
    assert len(list_names(cloud, f"?all_tenants=True&project_id={PROJECT}", token="admin")) == 4
    assert list_names(cloud, "?all_tenants=1&host=host1&name=gamma", token="admin") == ["gamma"]
    assert list_names(cloud, "?all_tenants=1&user_id=u3", token="admin") == ["foreign"]
    assert list_names(
        cloud, "?all_tenants=1&availability_zone=nova&launch_index=0&limit=1", token="admin"
    ) == ["delta"]


def test_list_servers_includes_deleted_for_admins_and_changes_since(
    cloud: Cloud, fleet: dict[str, str]
) -> None:
    cloud.set_state(fleet["beta"], "deleted", deleted=1)
    assert "beta" not in list_names(cloud, "")
    assert "beta" not in list_names(cloud, "?deleted=True")
    assert list_names(cloud, "?all_tenants=1&deleted=True", token="admin") == ["beta"]
    assert list_names(cloud, "?all_tenants=1&status=DELETED", token="admin") == ["beta"]
    since = cloud.call("GET", "/servers/detail?changes-since=2023-01-01T00:00:00Z").json["servers"]
    assert {server["name"]: server["status"] for server in since}["beta"] == "DELETED"


@pytest.mark.parametrize(
    "query",
    [
        "",
        "sort_key=vm_state&sort_dir=asc&",
        "sort_key=task_state&",
        "status=ACTIVE&",
        "sort_key=launched_at&sort_dir=asc&",
    ],
)
def test_list_servers_pages_contain_every_server_once(
    cloud: Cloud, fleet: dict[str, str], query: str
) -> None:
    whole = list_names(cloud, "?" + query)
    path, names = f"/servers?{query}limit=1", []
    while path:
        answer = cloud.call("GET", path, mv="2.100").json
        names += [server["name"] for server in answer["servers"]]
        path = (
            answer["servers_links"][0]["href"].partition("/v2.1")[2]
            if "servers_links" in answer
            else ""
        )
    assert names == whole


def test_list_servers_page_is_limited_by_max_limit(make_cloud: Any) -> None:
    cloud = make_cloud(max_limit=2)
    for number in range(3):
        cloud.create(f"s{number}")
    answer = cloud.call("GET", "/servers?limit=100").json
    assert len(answer["servers"]) == 2
    assert answer["servers_links"][0]["href"].endswith(
        f"limit=100&marker={answer['servers'][-1]['id']}"
    )


def test_list_servers_with_foreign_marker_returns_400(cloud: Cloud, fleet: dict[str, str]) -> None:
    answer = cloud.call("GET", f"/servers?marker={fleet['alpha']}", token="stranger")
    assert answer.json == {
        "badRequest": {"code": 400, "message": f"marker [{fleet['alpha']}] not found"}
    }


def test_server_links_begin_with_public_url(make_cloud: Any) -> None:
    cloud = make_cloud(public_url="https://compute.example/")
    server = cloud.create()
    links = cloud.call("GET", f"/servers/{server}").json["server"]["links"]
    assert [link["href"] for link in links] == [
        f"https://compute.example/v2.1/servers/{server}",
        f"https://compute.example/servers/{server}",
    ]


def test_list_servers_contains_own_project_only(cloud: Cloud, fleet: dict[str, str]) -> None:
    assert list_names(cloud, "", token="stranger") == ["foreign"]
    assert list_names(cloud, f"?project_id={PROJECT}", mv="2.1", token="stranger") == ["foreign"]


def test_os_volumes_boot_serves_servers_up_to_2_102(cloud: Cloud) -> None:
    answer = cloud.call(
        "POST", "/os-volumes_boot", {"server": {"name": "vm", "imageRef": IMAGE, "flavorRef": "1"}}
    )
    assert answer.status_code == 202
    server = answer.json["server"]["id"]
    cloud.set_state(server)
    for path in ("", "/detail"):
        assert (
            cloud.call("GET", f"/os-volumes_boot{path}").json
            == cloud.call("GET", f"/servers{path}").json
        )
    assert (
        cloud.call("GET", f"/os-volumes_boot/{server}", mv="2.102").json["server"]["id"] == server
    )
    assert cloud.call("GET", f"/os-volumes_boot/{server}", mv="2.103").status_code == 404
    assert cloud.call("GET", f"/os-volumes_boot/{server}/topology", mv="2.102").status_code == 404
    assert (
        cloud.call("POST", f"/os-volumes_boot/{server}/action", {"os-stop": None}).status_code
        == 202
    )
    assert cloud.call("DELETE", f"/os-volumes_boot/{server}").status_code == 204


def test_server_access_ipv6_is_shown_in_short_form(cloud: Cloud) -> None:
    server = cloud.create(accessIPv6="80FE:0:0::0001")
    cloud.set_state(server)

    def show_address() -> str:
        return str(cloud.call("GET", f"/servers/{server}").json["server"]["accessIPv6"])

    assert show_address() == "80fe::1"
    cloud.call("PUT", f"/servers/{server}", {"server": {"accessIPv6": "2001:DB8:0:0:0:0:0:2"}})
    assert show_address() == "2001:db8::2"
    answer = cloud.call(
        "POST", f"/servers/{server}/action", {"rebuild": {"imageRef": IMAGE, "accessIPv6": "0::3"}}
    )
    assert answer.json["server"]["accessIPv6"] == "::3" == show_address()


def test_list_volume_attachments_without_volumes_is_empty(cloud: Cloud) -> None:
    path = f"/servers/{cloud.create()}/os-volume_attachments"
    assert cloud.call("GET", path, mv="2.104").json == {"volumeAttachments": []}
    assert cloud.call("GET", f"{path}?limit=1", token="reader").status_code == 200
    assert cloud.call("GET", f"{path}?colour=red", mv="2.75").status_code == 400
    assert cloud.call("GET", f"{path}/{IMAGE}").status_code == 404
    assert cloud.call("GET", path, token="stranger").status_code == 404
