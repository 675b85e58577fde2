# SPDX-License-Identifier: Apache-2.0
"""Services, hypervisors, availability zones and extensions as admins see them."""

from __future__ import annotations

from typing import Any

import pytest
import sqlalchemy as sa

from common.domain import ids, states
from common.domain.service_binaries import Binary
from common.domain.statuses import GuestState
from common.store import schema
from common.store.hosts import hosts, services
from common.store.servers import guests
from compute_api.compute.request import host_queries
from compute_api.compute.resources import extensions
from compute_api.compute.routes import GONE, ROUTES
from compute_api.compute.views import hypervisors
from compute_api.http import microversions
from tests.api.conftest import Cloud

SERVICE = {"id", "binary", "host", "zone", "status", "state", "updated_at", "disabled_reason"}


def get(cloud: Cloud, path: str, mv: str = "2.1", status: int = 200, token: str = "admin") -> Any:
    answer = cloud.call("GET", path, mv=mv, token=token)
    assert answer.status_code == status, answer.text
    return answer.json


@pytest.fixture
def zone(cloud: Cloud) -> str:
    """Return the uuid of an aggregate with host1 that is an availability zone."""
    uuid = ids.new()
    with cloud.store.begin() as tx:
        tx.execute(
            sa.insert(schema.aggregates),
            {
                "id": 7,
                "uuid": uuid,
                "name": "rack",
                "created_at": 0,
                "meta": {"availability_zone": "az1", "ssd": "true"},
            },
        )
        tx.execute(sa.insert(schema.aggregate_hosts), {"aggregate_id": 7, "host": "host1"})
    cloud.store.write(lambda tx: services.enrol(tx, "ctl", Binary.CONDUCTOR))
    return uuid


# --- services ---
@pytest.mark.parametrize(
    ("mv", "keys", "kind"),
    [
        ("2.1", SERVICE, int),
        ("2.10", SERVICE, int),
        ("2.11", SERVICE | {"forced_down"}, int),
        ("2.52", SERVICE | {"forced_down"}, int),
        ("2.53", SERVICE | {"forced_down"}, str),
        ("2.104", SERVICE | {"forced_down"}, str),
    ],
)
def test_services_have_the_fields_of_each_microversion(
    cloud: Cloud, zone: str, mv: str, keys: set[str], kind: type
) -> None:
    compute, conductor = get(cloud, "/os-services", mv)["services"]
    assert set(compute) == set(conductor) == keys
    assert isinstance(compute["id"], kind)
    assert (
        compute["binary"],
        compute["host"],
        compute["zone"],
        compute["status"],
        compute["state"],
    ) == ("nova-compute", "host1", "az1", "enabled", "up")
    assert (conductor["binary"], conductor["zone"]) == ("nova-conductor", "internal")
    assert len(get(cloud, "/os-services?host=ctl", mv)["services"]) == 1
    assert get(cloud, "/os-services?binary=nova-compute&host=ctl", mv)["services"] == []
    get(cloud, "/os-services", mv, 403, "user")


def put_service(cloud: Cloud, path: str, body: Any, mv: str, status: int = 200) -> Any:
    answer = cloud.call("PUT", "/os-services/" + path, body, mv=mv, token="admin")
    assert answer.status_code == status, answer.text
    return answer.json


def test_update_service_by_host_changes_status_and_state_before_2_53(cloud: Cloud) -> None:
    body = {"host": "host1", "binary": "nova-compute"}
    assert put_service(cloud, "disable", body, "2.1") == {"service": {**body, "status": "disabled"}}
    assert get(cloud, "/os-services")["services"][0]["status"] == "disabled"
    assert put_service(
        cloud, "disable-log-reason", {**body, "disabled_reason": "fire"}, "2.52"
    ) == {"service": {**body, "status": "disabled", "disabled_reason": "fire"}}
    assert put_service(cloud, "enable", body, "2.1") == {"service": {**body, "status": "enabled"}}
    assert get(cloud, "/os-services")["services"][0]["disabled_reason"] is None
    assert put_service(cloud, "force-down", {**body, "forced_down": True}, "2.11") == {
        "service": {**body, "forced_down": True}
    }
    assert get(cloud, "/os-services")["services"][0]["state"] == "down"
    put_service(cloud, "force-down", {**body, "forced_down": "no"}, "2.52")
    assert get(cloud, "/os-services")["services"][0]["state"] == "up"
    for path, fields, mv, status in (
        ("explode", body, "2.1", 404),
        ("force-down", body, "2.10", 404),
        ("disable-log-reason", body, "2.1", 400),
        ("force-down", {**body, "forced_down": True}, "2.10", 400),
        ("enable", {"host": "host1"}, "2.1", 400),
        ("enable", {**body, "host": "nowhere"}, "2.1", 404),
    ):
        put_service(cloud, path, fields, mv, status)


def test_update_service_by_uuid_changes_status_and_state_from_2_53(cloud: Cloud) -> None:
    uuid = get(cloud, "/os-services", "2.53")["services"][0]["id"]
    service = put_service(cloud, uuid, {"status": "disabled", "disabled_reason": "fire"}, "2.53")[
        "service"
    ]
    assert (service["status"], service["disabled_reason"], service["id"]) == (
        "disabled",
        "fire",
        uuid,
    )
    assert put_service(cloud, uuid, {"forced_down": True}, "2.104")["service"]["state"] == "down"
    service = put_service(cloud, uuid, {"status": "enabled", "forced_down": False}, "2.53")[
        "service"
    ]
    assert (service["status"], service["disabled_reason"], service["state"]) == (
        "enabled",
        None,
        "up",
    )
    for path, fields, status in (
        (uuid, {}, 400),
        (uuid, {"status": "enabled", "disabled_reason": "x"}, 400),
        ("1", {"status": "enabled"}, 400),
        (ids.new(), {"status": "enabled"}, 404),
    ):
        put_service(cloud, path, fields, "2.53", status)
    cloud.store.write(lambda tx: services.enrol(tx, "ctl", Binary.CONDUCTOR))
    conductor = get(cloud, "/os-services?host=ctl", "2.53")["services"][0]["id"]
    put_service(cloud, conductor, {"status": "disabled"}, "2.53", 400)
    assert (
        cloud.call("PUT", f"/os-services/{uuid}", {"status": "enabled"}, mv="2.53").status_code
        == 403
    )


def delete_service(
    cloud: Cloud, service: Any, mv: str, status: int = 204, token: str = "admin"
) -> str:
    answer = cloud.call("DELETE", f"/os-services/{service}", mv=mv, token=token)
    assert answer.status_code == status, answer.text
    return str(answer.json["conflictingRequest"]["message"]) if status == 409 else ""


@pytest.mark.parametrize("mv", ["2.1", "2.52", "2.53", "2.104"])
def test_delete_service_removes_host_aggregate_entry_and_inventory(
    cloud: Cloud, zone: str, mv: str
) -> None:
    with cloud.store.begin() as tx:
        tx.execute(
            sa.insert(schema.host_images).values(
                host="host1", image_id=ids.new(), image={}, asked_at=0
            )
        )
    compute, conductor = (service["id"] for service in get(cloud, "/os-services", mv)["services"])
    delete_service(cloud, compute, mv, 403, "user")
    delete_service(cloud, compute, mv)
    assert [service["binary"] for service in get(cloud, "/os-services", mv)["services"]] == [
        "nova-conductor"
    ]
    assert get(cloud, "/os-hypervisors", mv)["hypervisors"] == []
    assert get(cloud, "/os-aggregates/7", mv)["aggregate"]["hosts"] == []
    for table in (
        schema.hosts,
        schema.providers,
        schema.inventories,
        schema.provider_traits,
        schema.host_images,
    ):
        assert cloud.rows(table) == [], table.name
    delete_service(cloud, compute, mv, 404)
    delete_service(cloud, conductor, mv)
    assert (cloud.rows(schema.services), cloud.rows(schema.heartbeats)) == ([], [])


def test_deleted_host_registers_as_new_service_when_agent_still_runs(cloud: Cloud) -> None:
    before = get(cloud, "/os-services", "2.53")["services"][0]
    put_service(cloud, before["id"], {"status": "disabled"}, "2.53")
    delete_service(cloud, before["id"], "2.53")
    # Without a session the agent has to register.
    assert cloud.store.read(lambda tx: hosts.sessions(tx, ["host1"])) == {}
    cloud.add_host("host1")
    after = get(cloud, "/os-services", "2.53")["services"][0]
    assert (after["host"], after["status"], after["id"] != before["id"]) == (
        "host1",
        "enabled",
        True,
    )


@pytest.mark.parametrize(
    ("status", "answer"), [("migrating", 409), ("finished", 409), ("confirmed", 204)]
)
@pytest.mark.parametrize("place", ["source_host", "dest_host"])
def test_delete_service_returns_409_while_open_migration_involves_host(
    cloud: Cloud, place: str, status: str, answer: int
) -> None:
    service = get(cloud, "/os-services", "2.53")["services"][0]["id"]
    server = cloud.create()
    with cloud.store.begin() as tx:
        tx.execute(
            sa.insert(schema.migrations),
            {
                "uuid": ids.new(),
                "server_id": server,
                "action_id": ids.new(),
                "project_id": "p",
                "user_id": "u",
                "type": "resize",
                "status": status,
                place: "host1",
                "old_flavor": {},
                "new_flavor": {},
                "was": "active",
                "created_at": 0,
                "updated_at": 0,
            },
        )
        if answer == 409:
            guests.add(
                tx,
                [
                    {
                        "server_id": server,
                        "host": "host1",
                        "fence": 1,
                        "wanted": GuestState.KEPT,
                        "may_run": False,
                    }
                ],
            )
    message = delete_service(cloud, service, "2.53", answer)
    assert answer == 204 or "There are 1 in-progress migrations involving the host." in message


def test_delete_service_returns_409_while_host_has_resources_in_use(cloud: Cloud) -> None:
    service = get(cloud, "/os-services", "2.53")["services"][0]["id"]
    [provider] = cloud.rows(schema.providers)
    server = cloud.create()
    cloud.set_state(server)
    assert "hosting instances" in delete_service(cloud, service, "2.53", 409)
    cloud.change(schema.servers, schema.servers.c.id == server, host=None)
    cloud.store.write(
        lambda tx: guests.add(tx, [{"server_id": server, "host": "host1", "fence": 1}])
    )
    cloud.store.write(lambda tx: guests.add_removal(tx, server, 2))
    assert "The host has not removed all guests (1 left)" in delete_service(
        cloud, service, "2.53", 409
    )
    with cloud.store.begin() as tx:
        tx.execute(sa.delete(schema.guests))
        tx.execute(
            sa.insert(schema.allocations),
            {
                "provider_id": provider.id,
                "consumer_id": ids.new(),
                "resource_class": "VCPU",
                "used": 1,
            },
        )
    assert "1 in-progress migrations" in delete_service(cloud, service, "2.53", 409)
    with cloud.store.begin() as tx:
        tx.execute(sa.delete(schema.allocations))
        tx.execute(
            sa.insert(schema.providers),
            {
                "uuid": ids.new(),
                "name": "card",
                "parent_uuid": provider.uuid,
                "root_uuid": provider.uuid,
                "created_at": 0,
                "changed_at": 0,
            },
        )
    assert "resource provider has child providers" in delete_service(cloud, service, "2.53", 409)
    assert (len(cloud.rows(schema.hosts)), len(cloud.rows(schema.heartbeats))) == (1, 1)
    with cloud.store.begin() as tx:
        tx.execute(sa.delete(schema.providers).where(schema.providers.c.name == "card"))
    delete_service(cloud, service, "2.53")


@pytest.mark.parametrize(
    ("mv", "service", "status"),
    [
        ("2.1", "x", 400),
        ("2.1", "1" * 30, 400),
        ("2.1", "99", 404),
        ("2.52", "9" * 18, 404),
        ("2.53", "1", 400),
        ("2.53", "12345678-1234-1234-1234-123456789012", 404),
    ],
)
def test_delete_service_returns_400_for_malformed_404_for_unknown_id(
    cloud: Cloud, mv: str, service: str, status: int
) -> None:
    delete_service(cloud, service, mv, status)


def test_host_state_changes_raise_changed_at_of_resource_provider(cloud: Cloud) -> None:
    """Schedulers reload the providers that changed since their last read."""

    def changed_at() -> int:
        return next(
            int(row.changed_at) for row in cloud.rows(schema.providers) if row.host == "host1"
        )

    def fall_silent() -> None:
        cloud.add_host("host2")
        cloud.change(schema.heartbeats, schema.heartbeats.c.host == "host1", seen_at=0)
        assert cloud.store.write(lambda tx: services.judge(tx, 30)) == (["host1"], False)

    def beat() -> None:
        cloud.store.write(lambda tx: services.beat(tx, ["host1"], Binary.COMPUTE))

    before = changed_at()
    beat()
    assert changed_at() == before
    uuid = get(cloud, "/os-services", "2.53")["services"][0]["id"]
    for change in (
        fall_silent,
        beat,
        lambda: put_service(cloud, uuid, {"forced_down": True}, "2.53"),
        lambda: put_service(cloud, uuid, {"forced_down": False}, "2.53"),
        lambda: put_service(cloud, uuid, {"status": "disabled"}, "2.53"),
        lambda: put_service(cloud, uuid, {"status": "enabled"}, "2.53"),
    ):
        change()
        assert changed_at() > before
        before = changed_at()
    beat()
    assert changed_at() == before


# --- hypervisors ---
NAMES = {"id", "hypervisor_hostname", "state", "status"}
FACTS = NAMES | {"service", "hypervisor_type", "hypervisor_version", "host_ip"}
USAGE = {
    "vcpus",
    "vcpus_used",
    "memory_mb",
    "memory_mb_used",
    "free_ram_mb",
    "local_gb",
    "local_gb_used",
    "free_disk_gb",
    "disk_available_least",
    "running_vms",
    "current_workload",
    "cpu_info",
}


@pytest.mark.parametrize(
    ("mv", "keys", "ident", "cpu"),
    [
        ("2.1", FACTS | USAGE, int, str),
        ("2.27", FACTS | USAGE, int, str),
        ("2.28", FACTS | USAGE, int, dict),
        ("2.52", FACTS | USAGE, int, dict),
        ("2.53", FACTS | USAGE, str, dict),
        ("2.87", FACTS | USAGE, str, dict),
        ("2.88", FACTS | {"uptime"}, str, None),
        ("2.104", FACTS | {"uptime"}, str, None),
    ],
)
def test_hypervisors_have_the_fields_of_each_microversion(
    cloud: Cloud, mv: str, keys: set[str], ident: type, cpu: type | None
) -> None:
    brief = get(cloud, "/os-hypervisors", mv)["hypervisors"][0]
    assert set(brief) == NAMES
    detailed = get(cloud, "/os-hypervisors/detail", mv)["hypervisors"][0]
    hypervisor = get(cloud, f"/os-hypervisors/{brief['id']}", mv)["hypervisor"]
    assert set(detailed) == keys
    assert hypervisor == detailed
    assert isinstance(hypervisor["id"], ident)
    assert isinstance(hypervisor["service"]["id"], ident)
    assert hypervisor["service"]["host"] == "host1"
    assert cpu is None or isinstance(hypervisor["cpu_info"], cpu)
    get(cloud, "/os-hypervisors/detail", mv, 403, "user")
    get(cloud, f"/os-hypervisors/{99 if ident is int else ids.new()}", mv, 404)
    if ident is str:
        get(cloud, "/os-hypervisors/1", mv, 400)


@pytest.mark.parametrize("mv", ["2.53", "2.88", "2.104"])
def test_hypervisor_id_is_uuid_of_its_resource_provider(cloud: Cloud, mv: str) -> None:
    cloud.add_host("host2")
    with cloud.store.begin() as tx:
        providers = {row.host: row.uuid for row in tx.execute(sa.select(schema.providers))}
        services = {row.host: row.uuid for row in tx.execute(sa.select(schema.services))}
    for path in ("/os-hypervisors", "/os-hypervisors/detail", "/os-hypervisors?limit=5"):
        hypervisors = get(cloud, path, mv)["hypervisors"]
        assert [row["id"] for row in hypervisors] == [providers["host1"], providers["host2"]]
    first, second = hypervisors
    [rest] = get(cloud, f"/os-hypervisors?marker={first['id']}", mv)["hypervisors"]
    assert rest["id"] == second["id"]
    hypervisor = get(cloud, f"/os-hypervisors/{second['id']}", mv)["hypervisor"]
    assert (hypervisor["id"], hypervisor["service"]["id"]) == (
        providers["host2"],
        services["host2"],
    )
    for path in ("", "/uptime"):
        get(cloud, f"/os-hypervisors/{services['host2']}{path}", mv, 404)


# fmt: off
def test_hypervisor_shows_inventory_and_usage(cloud: Cloud) -> None:
    server = cloud.create()
    cloud.set_state(server)
    with cloud.store.begin() as tx:
        provider = tx.scalar(sa.select(schema.providers.c.id))
        tx.execute(sa.insert(schema.allocations), [
            {"provider_id": provider, "consumer_id": server, "resource_class": name, "used": used}
            for name, used in (("VCPU", 1), ("MEMORY_MB", 512), ("DISK_GB", 1))])
        stock = schema.inventories
        tx.execute(sa.update(stock).where(stock.c.resource_class == "MEMORY_MB").values(reserved=384))
    hypervisor = get(cloud, "/os-hypervisors/1")["hypervisor"]
    assert {key: hypervisor[key] for key in USAGE - {"cpu_info"}} == {
        "vcpus": 8, "vcpus_used": 1, "memory_mb": 16384, "memory_mb_used": 896, "free_ram_mb": 15488, "local_gb": 100,
        "local_gb_used": 1, "free_disk_gb": 99, "disk_available_least": 99, "running_vms": 1, "current_workload": 0}
    statistics = get(cloud, "/os-hypervisors/statistics", "2.87")["hypervisor_statistics"]
    assert (statistics["count"], statistics["memory_mb_used"], statistics["vcpus"]) == (1, 896, 8)
# fmt: on


def test_hypervisor_statistics_count_damaged_amount_as_0() -> None:
    row = {"name": "h1", "disabled": False, "inventory": {"VCPU": {"total": "many"}}}
    statistics = hypervisors.statistics([row], microversions.number("2.87"))
    assert (statistics["count"], statistics["vcpus"], statistics["local_gb"]) == (1, 0, 0)


def test_hypervisors_show_servers_in_the_format_of_each_microversion(cloud: Cloud) -> None:
    server = cloud.create("vm")
    cloud.set_state(server)
    cloud.add_host("host2")
    servers = [{"name": "vm", "uuid": server}]
    hypervisors = get(cloud, "/os-hypervisors/detail?with_servers=true", "2.53")["hypervisors"]
    assert [item.get("servers") for item in hypervisors] == [servers, None]
    hypervisors = get(cloud, "/os-hypervisors?with_servers=1", "2.75")["hypervisors"]
    assert [item["servers"] for item in hypervisors] == [servers, []]
    assert "servers" not in get(cloud, "/os-hypervisors", "2.75")["hypervisors"][0]
    assert (
        get(cloud, f"/os-hypervisors/{hypervisors[0]['id']}?with_servers=1", "2.88")["hypervisor"][
            "servers"
        ]
        == servers
    )
    assert (
        get(cloud, "/os-hypervisors/host1/servers", "2.52")["hypervisors"][0]["servers"] == servers
    )
    assert [
        item["hypervisor_hostname"]
        for item in get(cloud, "/os-hypervisors/host/search")["hypervisors"]
    ] == ["host1.cloud", "host2.cloud"]
    for path, mv in (
        ("/os-hypervisors/zzz/search", "2.1"),
        ("/os-hypervisors/zzz/servers", "2.1"),
        ("/os-hypervisors/host/search", "2.53"),
        ("/os-hypervisors?hypervisor_hostname_pattern=zzz", "2.53"),
    ):
        get(cloud, path, mv, 404)


UPTIME = " 10:01:02 up 3 days,  4:05,  2 users,  load average: 0.10, 0.20, 0.30"


def test_hypervisor_uptime_shows_uptime_text_answered_by_host(
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    uuid = get(cloud, "/os-hypervisors", "2.53")["hypervisors"][0]["id"]
    get(cloud, "/os-hypervisors/1/uptime", "2.1", 501)
    assert get(cloud, f"/os-hypervisors/{uuid}", "2.88")["hypervisor"]["uptime"] is None
    cloud.agents.uptime = UPTIME
    assert get(cloud, "/os-hypervisors/1/uptime", "2.52")["hypervisor"] == {
        "id": 1,
        "hypervisor_hostname": "host1.cloud",
        "state": "up",
        "status": "enabled",
        "uptime": UPTIME,
    }
    assert get(cloud, f"/os-hypervisors/{uuid}/uptime", "2.87")["hypervisor"]["uptime"] == UPTIME
    assert get(cloud, f"/os-hypervisors/{uuid}", "2.88")["hypervisor"]["uptime"] == UPTIME
    with monkeypatch.context() as patch:
        patch.setattr(host_queries, "TOTAL_TIMEOUT_SECONDS", 0)  # The wait for a slot took it all.
        get(cloud, "/os-hypervisors/1/uptime", "2.52", 400)
    get(cloud, "/os-hypervisors/9/uptime", "2.1", 404)
    get(cloud, "/os-hypervisors/x/uptime", "2.1", 404)
    get(cloud, "/os-hypervisors/1/uptime", "2.53", 400)
    get(cloud, f"/os-hypervisors/{uuid}/uptime", "2.88", 404)
    cloud.agents.output = None
    text = get(cloud, "/os-hypervisors/1/uptime", "2.1", 400)["badRequest"]["message"]
    assert text == "Compute service of host1 is unavailable at this time."
    assert get(cloud, f"/os-hypervisors/{uuid}", "2.88")["hypervisor"]["uptime"] is None


def test_hypervisor_uptime_is_queried_only_from_hosts_in_state_up(cloud: Cloud) -> None:
    cloud.agents.uptime = UPTIME
    cloud.add_host("host2")
    cloud.change(schema.heartbeats, schema.heartbeats.c.host == "host1", up=False)
    hypervisors = get(cloud, "/os-hypervisors/detail", "2.104")["hypervisors"]
    assert [(item["state"], item["uptime"]) for item in hypervisors] == [
        ("down", None),
        ("up", UPTIME),
    ]
    get(cloud, "/os-hypervisors/1/uptime", "2.1", 400)
    assert [host for host, _, _ in cloud.agents.queries] == ["host2"]
    get(cloud, "/os-hypervisors", "2.104")
    get(cloud, "/os-hypervisors/detail", "2.87")
    # Without an uptime in the answer the hosts get no query.
    assert len(cloud.agents.queries) == 1


def test_hypervisor_list_has_null_uptime_for_silent_host_only(cloud: Cloud) -> None:
    for number in range(2, 13):
        cloud.add_host(f"host{number}")
    cloud.agents.uptime, cloud.agents.silent = UPTIME, {"host3"}
    hypervisors = get(cloud, "/os-hypervisors/detail", "2.88")["hypervisors"]
    assert {item["hypervisor_hostname"]: item["uptime"] for item in hypervisors} == {
        f"host{number}.cloud": None if number == 3 else UPTIME for number in range(1, 13)
    }


def test_hypervisor_uptime_returns_503_when_query_slots_are_in_use(cloud: Cloud) -> None:
    cloud.agents.uptime = UPTIME
    slots = cloud.services.query_slots
    while slots.acquire(blocking=False):
        pass
    get(cloud, "/os-hypervisors/1/uptime", "2.1", 503)
    assert get(cloud, "/os-hypervisors/detail", "2.88")["hypervisors"][0]["uptime"] is None


def test_list_hypervisors_pages_and_filters_by_hostname_pattern(cloud: Cloud) -> None:
    cloud.add_host("host2")
    first = get(cloud, "/os-hypervisors?limit=1", "2.33")
    assert first["hypervisors_links"][0]["href"].endswith("/v2.1/os-hypervisors?limit=1&marker=1")
    assert get(cloud, "/os-hypervisors?limit=5&marker=1", "2.33")["hypervisors"][0]["id"] == 2
    page = get(cloud, "/os-hypervisors/detail?limit=1", "2.53")
    rest = get(cloud, "/os-hypervisors/detail?marker=" + page["hypervisors"][0]["id"], "2.53")[
        "hypervisors"
    ]
    assert [item["hypervisor_hostname"] for item in rest] == ["host2.cloud"]
    assert len(get(cloud, "/os-hypervisors?limit=1", "2.32")["hypervisors"]) == 2
    matches = get(cloud, "/os-hypervisors?hypervisor_hostname_pattern=host2", "2.53")["hypervisors"]
    assert [item["hypervisor_hostname"] for item in matches] == ["host2.cloud"]
    for path in (
        "?limit=x",
        "?marker=9",
        "?limit=1&limit=2",
        "?hypervisor_hostname_pattern=h&limit=1",
        "?colour=1",
    ):
        get(cloud, "/os-hypervisors" + path, "2.53", 400)


# --- zones, extensions ---
def test_availability_zones_show_state_and_hosts_to_admins(cloud: Cloud, zone: str) -> None:
    cloud.add_host("host2")
    assert get(cloud, "/os-availability-zone", token="user") == {
        "availabilityZoneInfo": [
            {"zoneName": "az1", "zoneState": {"available": True}, "hosts": None},
            {"zoneName": "nova", "zoneState": {"available": True}, "hosts": None},
        ]
    }
    cloud.change(schema.services, schema.services.c.host == "host2", disabled=True)
    cloud.change(schema.heartbeats, schema.heartbeats.c.host == "host1", up=False)
    zones = {
        item["zoneName"]: item
        for item in get(cloud, "/os-availability-zone/detail")["availabilityZoneInfo"]
    }
    assert list(zones) == ["az1", "internal", "nova"]
    assert zones["nova"] == {"zoneName": "nova", "zoneState": {"available": False}, "hosts": None}
    compute = zones["az1"]["hosts"]["host1"]["nova-compute"]
    assert (compute["active"], compute["available"]) == (True, False)
    assert list(zones["internal"]["hosts"]["ctl"]) == ["nova-conductor"]
    get(cloud, "/os-availability-zone/detail", status=403, token="user")


def test_baremetal_node_changes_return_400_until_2_35_and_404_from_2_36(cloud: Cloud) -> None:
    for method, path in (("POST", ""), ("DELETE", "/x"), ("POST", "/x/action")):
        for mv, status in (("2.1", 400), ("2.35", 400), ("2.36", 404)):
            assert (
                cloud.call(
                    method,
                    "/os-baremetal-nodes" + path,
                    {} if method == "POST" else None,
                    mv=mv,
                    token="admin",
                ).status_code
                == status
            )


def test_extensions_are_listed_and_shown_by_alias(cloud: Cloud) -> None:
    extensions = get(cloud, "/extensions", token="user")["extensions"]
    assert {"os-keypairs", "OS-EXT-STS"} <= {extension["alias"] for extension in extensions}
    assert get(cloud, "/extensions/os-keypairs", token="user")["extension"]["name"] == "Keypairs"
    get(cloud, "/extensions/nonsense", status=404)


def test_extensions_without_routes_are_not_listed(cloud: Cloud) -> None:
    aliases = {
        extension["alias"] for extension in get(cloud, "/extensions", token="user")["extensions"]
    }
    routed = {route.path.split("/")[1] for route in ROUTES}
    for alias in (
        "os-volumes",
        "os-hosts",
        "os-fping",
        "os-shelve",
        "os-user-data",
        "os-assisted-volume-snapshots",
    ):
        is_listed = alias not in ("os-volumes", "os-assisted-volume-snapshots") or alias in routed
        assert (alias in aliases) is is_listed, alias
        get(cloud, f"/extensions/{alias}", token="user", status=200 if is_listed else 404)
    announced = set(extensions.announced([*aliases, "GET /os-volumes/x"]))
    assert {"OS-EXT-STS", "os-user-data"} <= announced and announced.isdisjoint(
        {"os-volumes", "os-hosts", "os-shelve", "NMN"}
    )
    assert {"os-volumes", "NMN", "os-hosts"} <= set(
        extensions.announced(["GET /os-volumes", "addFixedIp", "PUT /os-hosts/{host}"])
    )


def test_operations_of_extensions_match_existing_routes() -> None:
    operations = {f"{route.method} {route.path}" for route in ROUTES} | {
        row.key for row in states.ACTIONS
    }
    operations |= {
        f"{method} {path}" for path, methods in GONE.items() for method in methods.split()
    }
    absent = {
        "os-assisted-volume-snapshots",
        "os-baremetal-nodes",
        "os-volumes",
    }
    assert {
        alias for alias, operation in extensions.OPERATIONS.items() if operation not in operations
    } <= absent
