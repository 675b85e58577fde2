# SPDX-License-Identifier: Apache-2.0
"""Placement of servers on twenty memory hypervisors.

The tests cover hard groups under a hundred parallel creates, disabled and requested hosts, zones,
and the reasons of failures.

Each host has an agent process of its own. Reasons for tenants and admins are read with the
``openstack`` command.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from deploy.one_machine.cloud import process_control
from tests.e2e.conftest import without_guests
from tests.e2e.live import LATE, SETTLE, Live, Rest
from tests.waiting import await_true

pytestmark = pytest.mark.slice("guests")

HOSTS = tuple(f"rack{number:02}" for number in range(1, 21))
#: Number of parallel creates.
MANY = 100
CLIENTS = 16
JSON = " -f json"


@pytest.fixture(scope="module")
def large_cloud() -> Iterator[Live]:
    """Yield a cloud of twenty equal hosts in the same zone."""
    with without_guests(hosts=HOSTS) as live:
        yield live


@pytest.fixture
def demo(large_cloud: Live) -> Iterator[Rest]:
    """Yield the user demo. At the end, delete all servers and run the doctor."""
    admin = large_cloud.rest("kilonova-admin")
    yield large_cloud.rest()
    servers = admin.call("GET", "/servers?all_tenants=1").body["servers"]
    for server in servers:
        admin.insist("DELETE", f"/servers/{server['id']}", expected=(204, 404))
    await_true(
        lambda: not admin.call("GET", "/servers?all_tenants=1").body["servers"],
        SETTLE,
        "servers are left",
        late=LATE,
    )
    large_cloud.assert_healthy()


def create_group(rest: Rest, policy: str, **rules: int) -> str:
    body = {"server_group": {"name": "g", "policy": policy, **({"rules": rules} if rules else {})}}
    return str(
        rest.call("POST", "/os-server-groups", body, version="2.64").body["server_group"]["id"]
    )


class Tenant:
    """A client of demo or admin that creates servers of the smallest flavor."""

    def __init__(self, live: Live, user: str = "kilonova") -> None:
        self.live, self.rest = live, live.rest(user)
        self._words = {
            "name": "placed",
            "imageRef": live.image("empty"),
            "flavorRef": live.flavor(),
            "networks": "none",
        }

    def create(
        self, hints: dict[str, Any] | None = None, *, version: str = "2.96", **more: Any
    ) -> str:
        """Create a server, and return the id after the request is accepted."""
        body = {
            "server": {**self._words, **more},
            **({"os:scheduler_hints": hints} if hints else {}),
        }
        reply = self.rest.call("POST", "/servers", body, version=version)
        assert reply.status == 202, reply
        return str(reply.body["server"]["id"])


def await_settled(live: Live, *servers: str) -> list[dict[str, Any]]:
    """Wait until the servers have no task and are not in BUILD. Return the admin views."""
    admin = live.rest("kilonova-admin")

    def read_servers() -> list[dict[str, Any]]:
        servers_by_id = {
            shown["id"]: shown
            for shown in admin.call("GET", "/servers/detail?all_tenants=1").body["servers"]
        }
        return [servers_by_id[server] for server in servers]

    def read_settled() -> list[dict[str, Any]]:
        shown_servers = read_servers()
        return (
            []
            if any(
                server["OS-EXT-STS:task_state"] or server["status"] == "BUILD"
                for server in shown_servers
            )
            else shown_servers
        )

    return list(
        await_true(
            read_settled,
            SETTLE,
            lambda: Counter(
                (server["status"], server["OS-EXT-STS:task_state"]) for server in read_servers()
            ),
            late=LATE,
        )
    )


def create_storm(live: Live, hints: dict[str, Any]) -> list[dict[str, Any]]:
    """Create ``MANY`` servers with parallel requests, and return the servers after they settle."""
    start, tenants = threading.Barrier(CLIENTS), [Tenant(live) for _ in range(CLIENTS)]

    def create_share(number: int) -> list[str]:
        start.wait(30)
        return [tenants[number].create(hints) for _ in range(number, MANY, CLIENTS)]

    with ThreadPoolExecutor(CLIENTS) as pool:
        return await_settled(
            live,
            *(
                server
                for server_ids in pool.map(create_share, range(CLIENTS))
                for server in server_ids
            ),
        )


def count_places(servers: list[dict[str, Any]]) -> Counter[str]:
    """Return the number of active servers by host."""
    return Counter(
        server["OS-EXT-SRV-ATTR:host"] for server in servers if server["status"] == "ACTIVE"
    )


def explain(live: Live, *words: str) -> tuple[int, str, str]:
    """Run ``kilonova explain``, and return exit status, output and error output."""
    result = live.kilonova("explain", *words)
    return result.returncode, result.stdout, result.stderr


# --- groups ---
def test_anti_affinity_holds_under_hundred_parallel_creates(large_cloud: Live, demo: Rest) -> None:
    servers = create_storm(large_cloud, {"group": create_group(demo, "anti-affinity")})
    assert count_places(servers) == Counter(HOSTS)
    refused = [server for server in servers if server["status"] != "ACTIVE"]
    assert len(refused) == MANY - len(HOSTS)
    assert {(server["status"], server["fault"]["message"]) for server in refused} == {
        ("ERROR", "No valid host was found. 20 hosts: 20 with a server of the group")
    }


def test_anti_affinity_rule_limits_servers_per_host(large_cloud: Live, demo: Rest) -> None:
    servers = create_storm(
        large_cloud, {"group": create_group(demo, "anti-affinity", max_server_per_host=4)}
    )
    assert count_places(servers) == Counter(dict.fromkeys(HOSTS, 4))
    assert {server["fault"]["message"] for server in servers if server["status"] != "ACTIVE"} == {
        "No valid host was found. 20 hosts: 20 with 4 or more servers of the group"
    }


def test_affinity_keeps_hundred_parallel_creates_on_one_host(large_cloud: Live, demo: Rest) -> None:
    servers = create_storm(large_cloud, {"group": create_group(demo, "affinity")})
    assert list(count_places(servers).values()) == [MANY]


# --- hosts ---
def test_disabled_host_gets_no_new_server_and_keeps_its_servers(
    large_cloud: Live, demo: Rest
) -> None:
    tenant = Tenant(large_cloud)
    [before] = await_settled(large_cloud, tenant.create())
    closed = before["OS-EXT-SRV-ATTR:host"]
    [service] = large_cloud.seed.admin.compute.services(binary="nova-compute", host=closed)
    large_cloud.seed.admin.compute.disable_service(service, disabled_reason="its fan is loud")
    try:
        servers = await_settled(large_cloud, *(tenant.create() for _ in range(2 * len(HOSTS))))
        assert closed not in count_places(servers) and sum(count_places(servers).values()) == len(
            servers
        )
        assert {server["status"] for server in await_settled(large_cloud, before["id"])} == {
            "ACTIVE"
        }
        lines = large_cloud.kilonova("hosts").stdout.splitlines()
        [line] = [line for line in lines if line.startswith(closed)]
        assert "up, disabled" in line and line.endswith("its fan is loud")
        assert lines[-1] == "20 hosts, 19 of them take new servers"
    finally:
        large_cloud.seed.admin.compute.enable_service(service)


def test_create_with_requested_host_is_for_admins_only(large_cloud: Live, demo: Rest) -> None:
    admin = Tenant(large_cloud, "kilonova-admin")
    servers = await_settled(
        large_cloud,
        admin.create(availability_zone=f"nova:{HOSTS[3]}"),
        admin.create(availability_zone=f"nova::{HOSTS[4]}"),
        admin.create(host=HOSTS[5]),
        admin.create(hypervisor_hostname=HOSTS[6]),
    )
    assert [server["OS-EXT-SRV-ATTR:host"] for server in servers] == list(HOSTS[3:7])
    refused = large_cloud.rest().call(
        "POST",
        "/servers",
        {
            "server": {
                "name": "no",
                "imageRef": large_cloud.image("empty"),
                "flavorRef": large_cloud.flavor(),
                "networks": "none",
                "availability_zone": f"nova:{HOSTS[3]}",
            }
        },
    )
    assert refused.status == 403


# --- zones ---
@pytest.fixture
def zone(large_cloud: Live) -> Iterator[str]:
    """Yield the zone az1 with the first five hosts.

    The zone is deleted after the servers, because a host with servers cannot leave its zone.
    """
    compute = large_cloud.seed.admin.compute
    aggregate = compute.create_aggregate(name="secret contract", availability_zone="az1")
    for host in HOSTS[:5]:
        compute.add_host_to_aggregate(aggregate, host)
    yield "az1"
    for host in HOSTS[:5]:
        compute.remove_host_from_aggregate(aggregate, host)
    compute.delete_aggregate(aggregate)


def test_create_with_zone_places_servers_in_zone_only(
    large_cloud: Live, zone: str, demo: Rest
) -> None:
    status, answer, _ = explain(large_cloud, "--flavor", "m1.nano", "--zone", zone)
    assert (
        status == 0
        and "20 hosts, 5 of them can take one" in answer
        and "15  not in zone az1" in answer
    )
    tenant, hints = Tenant(large_cloud), {"group": create_group(demo, "anti-affinity")}
    servers = await_settled(
        large_cloud, *(tenant.create(hints, availability_zone=zone) for _ in range(6))
    )
    assert count_places(servers) == Counter(HOSTS[:5])
    assert {server["pinned_availability_zone"] for server in servers} == {zone}
    [refused] = [server for server in servers if server["status"] == "ERROR"]
    assert refused["fault"]["message"] == (
        "No valid host was found. 20 hosts: 15 not in zone az1, 5 with a server of the group"
    )
    [shown] = large_cloud.openstack(f"server show {refused['id']}" + JSON)
    assert not any(name in str(shown) for name in (*HOSTS, "secret"))
    admin = Tenant(large_cloud, "kilonova-admin")
    elsewhere, forced = await_settled(
        large_cloud,
        *(admin.create(availability_zone=f"{where}:{HOSTS[0]}") for where in ("nova", zone)),
    )
    assert (elsewhere["OS-EXT-SRV-ATTR:host"], forced["OS-EXT-SRV-ATTR:host"]) == (
        HOSTS[0],
        HOSTS[0],
    )
    assert elsewhere["pinned_availability_zone"] == forced["pinned_availability_zone"] == zone, (
        "the host's own"
    )
    unknown = tenant.rest.call(
        "POST",
        "/servers",
        {
            "server": {
                "name": "no",
                "imageRef": large_cloud.image("empty"),
                "flavorRef": large_cloud.flavor(),
                "networks": "none",
                "availability_zone": "moon",
            }
        },
    )
    assert unknown.fault == ("badRequest", 400, "The requested availability zone is not available")


# --- reasons of failures ---
@pytest.fixture
def giant_flavor(large_cloud: Live, demo: Rest) -> Iterator[str]:
    """Yield a flavor that needs the whole memory of a host, while each host has a small server."""
    flavor = large_cloud.seed.admin.compute.create_flavor(
        name="m1.giant", vcpus=1, ram=1 << 20, disk=1
    )
    tenant, number = Tenant(large_cloud), len(HOSTS)
    tenant.create(
        {"group": create_group(demo, "anti-affinity")}, min_count=number, max_count=number
    )
    small = await_settled(large_cloud, *(server["id"] for server in demo.servers()))
    assert count_places(small) == Counter(HOSTS)
    yield "m1.giant"
    large_cloud.seed.admin.compute.delete_flavor(flavor)


SHORT = "20 hosts: 20 short of MEMORY_MB (need 1048576, most free 1048448)"


def test_create_without_valid_host_shows_host_names_to_admins_only(
    large_cloud: Live, demo: Rest, giant_flavor: str
) -> None:
    tenant = Tenant(large_cloud)
    [server] = await_settled(large_cloud, tenant.create(flavorRef=large_cloud.flavor(giant_flavor)))
    text = f"No valid host was found. {SHORT}"
    texts = {}
    for user in ("kilonova", "kilonova-admin"):
        shown, events = large_cloud.openstack(
            f"server show {server['id']}" + JSON,
            f"server event list {server['id']}" + JSON,
            cloud=user,
        )
        [event] = large_cloud.openstack(
            f"server event show {server['id']} {events[0]['Request ID']}" + JSON, cloud=user
        )
        assert (shown["status"], shown["fault"]["message"], event["message"]) == (
            "ERROR",
            text,
            "Error",
        )
        texts[user] = str(shown) + str(event)
        assert [event_record["result"] for event_record in event["events"]] == ["Error"]
    assert not any(host in texts["kilonova"] for host in HOSTS), "a tenant learns no name of a host"
    assert all(
        f"{host}: short of MEMORY_MB (need 1048576, free 1048448)" in texts["kilonova-admin"]
        for host in HOSTS
    )
    status, answer, _ = explain(large_cloud, server["id"])
    assert status == 1
    assert f"place, attempt 1: {text}" in answer and "room for 0 more" in answer
    assert f"{HOSTS[0]}: short of MEMORY_MB" in answer


def test_explain_counts_further_servers_and_creates_none(
    large_cloud: Live, demo: Rest, giant_flavor: str
) -> None:
    before = large_cloud.rows("SELECT count(*) FROM servers")
    status, answer, _ = explain(
        large_cloud, "--flavor", "m1.nano", "--image", "empty", "--count", "100"
    )
    assert (status, answer.splitlines()[-1]) == (0, "100 of them: yes")
    assert "20 hosts, 20 of them can take one" in answer
    for words, expected in (
        (("--flavor", giant_flavor), "20  short of MEMORY_MB (need 1048576, most free 1048448)"),
        (("--flavor", "m1.nano", "--count", "1000000"), "1000000 of them: no"),
    ):
        status, answer, _ = explain(large_cloud, *words)
        assert status == 1 and expected in answer
    hard = create_group(demo, "anti-affinity")
    assert [
        explain(large_cloud, "--flavor", "m1.nano", "--group", hard, "--count", count)[0]
        for count in ("20", "21")
    ] == [0, 1]
    for words, option in (
        (("--flavor", "nothing"), "--flavor"),
        (("--flavor", "m1.nano", "--image", "x"), "--image"),
        (("--flavor", "m1.nano", "--zone", "moon"), "--zone"),
        (("--flavor", "m1.nano", "--host", "moon"), "--host"),
        (("--flavor", "m1.nano", "--hint", "cidr=x"), "--hint"),
        ((), "--flavor"),
        (("--flavor", "m1.nano", "--group", "x"), "--group"),
        (("nobody",), "SERVER"),
    ):
        status, answer, complaint = explain(large_cloud, *words)
        assert (status, answer) == (2, "") and complaint.startswith(f"kilonova: {option}: "), (
            complaint
        )
    assert large_cloud.rows("SELECT count(*) FROM servers") == before


def test_explain_without_scheduler_exits_with_3(large_cloud: Live, demo: Rest) -> None:
    process_control.stop(large_cloud.cloud, "scheduler")
    try:
        status, answer, complaint = explain(large_cloud, "--flavor", "m1.nano")
        assert (status, answer) == (3, "") and "kilonova status" in complaint
    finally:
        process_control.start(large_cloud.cloud, "scheduler")
