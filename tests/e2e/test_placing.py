# SPDX-License-Identifier: Apache-2.0
"""Where servers go: hard groups under a hundred creates at once, hosts that are closed or named,
and why not elsewhere.

Twenty hosts in memory, each with an agent process of its own: nothing here needs a guest. What is
said to a tenant and to an admin is read where they read it, in the ``openstack`` client.
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
MANY = 100  # creates at once
CLIENTS = 16
JSON = " -f json"


@pytest.fixture(scope="module")
def wide() -> Iterator[Live]:
    """A cloud of twenty hosts, all alike, in one zone."""
    with without_guests(hosts=HOSTS) as live:
        yield live


@pytest.fixture
def demo(wide: Live) -> Iterator[Rest]:
    """The user demo; whatever servers there are afterwards go, and the oracle has the last word."""
    admin = wide.rest("kilonova-admin")
    yield wide.rest()
    left = admin.call("GET", "/servers?all_tenants=1").body["servers"]
    for server in left:
        admin.insist("DELETE", f"/servers/{server['id']}", fine=(204, 404))
    await_true(
        lambda: not admin.call("GET", "/servers?all_tenants=1").body["servers"],
        SETTLE,
        "servers are left",
        late=LATE,
    )
    wide.judge()


def group(rest: Rest, policy: str, **rules: int) -> str:
    body = {"server_group": {"name": "g", "policy": policy, **({"rules": rules} if rules else {})}}
    return str(
        rest.call("POST", "/os-server-groups", body, version="2.64").body["server_group"]["id"]
    )


class Tenant:
    """The user demo, or admin, who makes servers of the smallest flavor."""

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
        """A server's id, once it was accepted."""
        body = {
            "server": {**self._words, **more},
            **({"os:scheduler_hints": hints} if hints else {}),
        }
        reply = self.rest.call("POST", "/servers", body, version=version)
        assert reply.status == 202, reply
        return str(reply.body["server"]["id"])


def settled(live: Live, *servers: str) -> list[dict[str, Any]]:
    """The servers as an admin sees them, once nothing is done to them any more."""
    admin = live.rest("kilonova-admin")

    def look() -> list[dict[str, Any]]:
        found = {
            one["id"]: one
            for one in admin.call("GET", "/servers/detail?all_tenants=1").body["servers"]
        }
        return [found[server] for server in servers]

    def resting() -> list[dict[str, Any]]:
        found = look()
        return (
            []
            if any(one["OS-EXT-STS:task_state"] or one["status"] == "BUILD" for one in found)
            else found
        )

    return list(
        await_true(
            resting,
            SETTLE,
            lambda: Counter((one["status"], one["OS-EXT-STS:task_state"]) for one in look()),
            late=LATE,
        )
    )


def storm(live: Live, hints: dict[str, Any]) -> list[dict[str, Any]]:
    """So many creates at the same moment, each a request of its own; what became of them."""
    start, tenants = threading.Barrier(CLIENTS), [Tenant(live) for _ in range(CLIENTS)]

    def some(number: int) -> list[str]:
        start.wait(30)
        return [tenants[number].create(hints) for _ in range(number, MANY, CLIENTS)]

    with ThreadPoolExecutor(CLIENTS) as pool:
        return settled(
            live, *(server for made in pool.map(some, range(CLIENTS)) for server in made)
        )


def places(found: list[dict[str, Any]]) -> Counter[str]:
    """How many of the servers each host has."""
    return Counter(one["OS-EXT-SRV-ATTR:host"] for one in found if one["status"] == "ACTIVE")


def explain(live: Live, *words: str) -> tuple[int, str, str]:
    """Status, answer and complaints of ``kilonova explain``."""
    done = live.kilonova("explain", *words)
    return done.returncode, done.stdout, done.stderr


# --- groups ---
def test_anti_affinity_holds_under_a_hundred_creates(wide: Live, demo: Rest) -> None:
    found = storm(wide, {"group": group(demo, "anti-affinity")})
    assert places(found) == Counter(HOSTS)
    refused = [one for one in found if one["status"] != "ACTIVE"]
    assert len(refused) == MANY - len(HOSTS)
    assert {(one["status"], one["fault"]["message"]) for one in refused} == {
        ("ERROR", "No valid host was found. 20 hosts: 20 with a server of the group")
    }


def test_as_many_servers_a_host_as_the_rule_allows(wide: Live, demo: Rest) -> None:
    found = storm(wide, {"group": group(demo, "anti-affinity", max_server_per_host=4)})
    assert places(found) == Counter(dict.fromkeys(HOSTS, 4))
    assert {one["fault"]["message"] for one in found if one["status"] != "ACTIVE"} == {
        "No valid host was found. 20 hosts: 20 with 4 or more servers of the group"
    }


def test_affinity_keeps_a_hundred_creates_together(wide: Live, demo: Rest) -> None:
    found = storm(wide, {"group": group(demo, "affinity")})
    assert list(places(found).values()) == [MANY]


# --- hosts ---
def test_a_closed_host_gets_no_new_server_and_what_it_has_stays(wide: Live, demo: Rest) -> None:
    tenant = Tenant(wide)
    [before] = settled(wide, tenant.create())
    closed = before["OS-EXT-SRV-ATTR:host"]
    [service] = wide.seed.admin.compute.services(binary="nova-compute", host=closed)
    wide.seed.admin.compute.disable_service(service, disabled_reason="its fan is loud")
    try:
        found = settled(wide, *(tenant.create() for _ in range(2 * len(HOSTS))))
        assert closed not in places(found) and sum(places(found).values()) == len(found)
        assert {one["status"] for one in settled(wide, before["id"])} == {"ACTIVE"}
        told = wide.kilonova("hosts").stdout.splitlines()
        [line] = [line for line in told if line.startswith(closed)]
        assert "up, disabled" in line and line.endswith("its fan is loud")
        assert told[-1] == "20 hosts, 19 of them take new servers"
    finally:
        wide.seed.admin.compute.enable_service(service)


def test_an_admin_names_the_host(wide: Live, demo: Rest) -> None:
    admin = Tenant(wide, "kilonova-admin")
    found = settled(
        wide,
        admin.create(availability_zone=f"nova:{HOSTS[3]}"),
        admin.create(availability_zone=f"nova::{HOSTS[4]}"),
        admin.create(host=HOSTS[5]),
        admin.create(hypervisor_hostname=HOSTS[6]),
    )
    assert [one["OS-EXT-SRV-ATTR:host"] for one in found] == list(HOSTS[3:7])
    refused = wide.rest().call(
        "POST",
        "/servers",
        {
            "server": {
                "name": "no",
                "imageRef": wide.image("empty"),
                "flavorRef": wide.flavor(),
                "networks": "none",
                "availability_zone": f"nova:{HOSTS[3]}",
            }
        },
    )
    assert refused.status == 403


# --- zones ---
@pytest.fixture
def zone(wide: Live) -> Iterator[str]:
    """The zone az1 of the first five hosts; it goes after the servers, because hosts with servers
    stay in theirs."""
    compute = wide.seed.admin.compute
    aggregate = compute.create_aggregate(name="secret contract", availability_zone="az1")
    for host in HOSTS[:5]:
        compute.add_host_to_aggregate(aggregate, host)
    yield "az1"
    for host in HOSTS[:5]:
        compute.remove_host_from_aggregate(aggregate, host)
    compute.delete_aggregate(aggregate)


def test_servers_stay_in_the_zone_that_was_asked_for(wide: Live, zone: str, demo: Rest) -> None:
    status, answer, _ = explain(wide, "--flavor", "m1.nano", "--zone", zone)
    assert (
        status == 0
        and "20 hosts, 5 of them can take one" in answer
        and "15  not in zone az1" in answer
    )
    tenant, hints = Tenant(wide), {"group": group(demo, "anti-affinity")}
    found = settled(wide, *(tenant.create(hints, availability_zone=zone) for _ in range(6)))
    assert places(found) == Counter(HOSTS[:5])
    assert {one["pinned_availability_zone"] for one in found} == {zone}
    [refused] = [one for one in found if one["status"] == "ERROR"]
    assert refused["fault"]["message"] == (
        "No valid host was found. 20 hosts: 15 not in zone az1, 5 with a server of the group"
    )
    [shown] = wide.openstack(f"server show {refused['id']}" + JSON)
    assert not any(name in str(shown) for name in (*HOSTS, "secret"))
    admin = Tenant(wide, "kilonova-admin")
    elsewhere, forced = settled(
        wide, *(admin.create(availability_zone=f"{where}:{HOSTS[0]}") for where in ("nova", zone))
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
                "imageRef": wide.image("empty"),
                "flavorRef": wide.flavor(),
                "networks": "none",
                "availability_zone": "moon",
            }
        },
    )
    assert unknown.fault == ("badRequest", 400, "The requested availability zone is not available")


# --- why not ---
@pytest.fixture
def giant(wide: Live, demo: Rest) -> Iterator[str]:
    """A flavor that needs all the memory of a host, while each has a small server."""
    flavor = wide.seed.admin.compute.create_flavor(name="m1.giant", vcpus=1, ram=1 << 20, disk=1)
    tenant, number = Tenant(wide), len(HOSTS)
    tenant.create({"group": group(demo, "anti-affinity")}, min_count=number, max_count=number)
    small = settled(wide, *(one["id"] for one in demo.servers()))
    assert places(small) == Counter(HOSTS)
    yield "m1.giant"
    wide.seed.admin.compute.delete_flavor(flavor)


SHORT = "20 hosts: 20 short of MEMORY_MB (need 1048576, most free 1048448)"


def test_why_no_host_was_found_is_told_to_each_as_far_as_it_is_theirs(
    wide: Live, demo: Rest, giant: str
) -> None:
    tenant = Tenant(wide)
    [server] = settled(wide, tenant.create(flavorRef=wide.flavor(giant)))
    text = f"No valid host was found. {SHORT}"
    said = {}
    for user in ("kilonova", "kilonova-admin"):
        shown, events = wide.openstack(
            f"server show {server['id']}" + JSON,
            f"server event list {server['id']}" + JSON,
            cloud=user,
        )
        [event] = wide.openstack(
            f"server event show {server['id']} {events[0]['Request ID']}" + JSON, cloud=user
        )
        assert (shown["status"], shown["fault"]["message"], event["message"]) == (
            "ERROR",
            text,
            "Error",
        )
        said[user] = str(shown) + str(event)
        assert [one["result"] for one in event["events"]] == ["Error"]
    assert not any(host in said["kilonova"] for host in HOSTS), "a tenant learns no name of a host"
    assert all(
        f"{host}: short of MEMORY_MB (need 1048576, free 1048448)" in said["kilonova-admin"]
        for host in HOSTS
    )
    status, answer, _ = explain(wide, server["id"])
    assert status == 1
    assert f"place, attempt 1: {text}" in answer and "room for 0 more" in answer
    assert f"{HOSTS[0]}: short of MEMORY_MB" in answer


def test_explain_says_how_many_more_would_fit_and_makes_nothing(
    wide: Live, demo: Rest, giant: str
) -> None:
    before = wide.rows("SELECT count(*) FROM servers")
    status, answer, _ = explain(wide, "--flavor", "m1.nano", "--image", "empty", "--count", "100")
    assert (status, answer.splitlines()[-1]) == (0, "100 of them: yes")
    assert "20 hosts, 20 of them can take one" in answer
    for words, said in (
        (("--flavor", giant), "20  short of MEMORY_MB (need 1048576, most free 1048448)"),
        (("--flavor", "m1.nano", "--count", "1000000"), "1000000 of them: no"),
    ):
        status, answer, _ = explain(wide, *words)
        assert status == 1 and said in answer
    hard = group(demo, "anti-affinity")
    assert [
        explain(wide, "--flavor", "m1.nano", "--group", hard, "--count", count)[0]
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
        status, answer, complaint = explain(wide, *words)
        assert (status, answer) == (2, "") and complaint.startswith(f"kilonova: {option}: "), (
            complaint
        )
    assert wide.rows("SELECT count(*) FROM servers") == before


def test_nobody_knows_while_no_scheduler_answers(wide: Live, demo: Rest) -> None:
    process_control.stop(wide.cloud, "scheduler")
    try:
        status, answer, complaint = explain(wide, "--flavor", "m1.nano")
        assert (status, answer) == (3, "") and "kilonova status" in complaint
    finally:
        process_control.start(wide.cloud, "scheduler")
