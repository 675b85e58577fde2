# SPDX-License-Identifier: Apache-2.0
"""The placement service beside real hosts: what they report, what is set by hand, what servers
hold, who may."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import falcon.testing
import pytest
import sqlalchemy as sa

from common.domain import ids
from common.domain.models import HostInventory
from common.domain.service_binaries import COMPUTE_DISABLED
from common.store import schema
from common.store.engine import Store, now
from common.store.hosts import hosts, services
from common.store.placement import allocations
from compute_api.placement import app, routes
from deploy.operator import doctor
from tests.api.conftest import OTHER, PROJECT, Callers
from tests.schemas import upgrade

PARTS = HostInventory(
    "QEMU",
    7002000,
    "host1.cloud",
    8,
    16384,
    100,
    "192.0.2.1",
    {},
    ratios={"VCPU": 4.0},
    traits=["COMPUTE_NODE", "HW_CPU_X86_AVX"],
    reserved_memory_mb=512,
)


def typed(application: Any) -> Any:
    """The checker of the test client wants a type of every answer, Placement's own tests none
    without a body."""

    def entry(environ: dict[str, Any], start_response: Any) -> Any:
        def start(status: str, headers: list[tuple[str, str]], *more: Any) -> Any:
            if not status.startswith("204") and "content-type" not in {
                name.lower() for name, _ in headers
            }:
                assert ("content-length", "0") in headers
                headers = [*headers, ("Content-Type", "none")]
            return start_response(status, headers, *more)

        return application(environ, start)

    return entry


class Placement:
    """The service over one database, with shortcuts for requests."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.client = falcon.testing.TestClient(Callers(typed(app.create(store))))

    def call(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        mv: str = "1.39",
        token: str | None = "admin",
        raw: bytes | None = None,
        headers: dict[str, str] | None = None,
    ) -> falcon.testing.Result:
        sent = {
            "OpenStack-API-Version": f"placement {mv}",
            **({"X-Auth-Token": token} if token else {}),
        }
        path, _, query = path.partition("?")
        more: dict[str, Any] = {"json": body} if raw is None else {"body": raw}
        if raw is not None:
            sent["Content-Type"] = "application/json"
        return self.client.simulate_request(
            method, path, query_string=query, headers=sent | (headers or {}), **more
        )

    def get(self, path: str, status: int = 200, **more: Any) -> Any:
        answer = self.call("GET", path, **more)
        assert answer.status_code == status, answer.text
        return answer.json

    def put(self, path: str, body: Any, status: int = 200, **more: Any) -> Any:
        answer = self.call("PUT", path, body, **more)
        assert answer.status_code == status, answer.text
        return answer.json if answer.text else None

    def host(self, name: str = "host1") -> str:
        """The path of a host's provider."""
        [found] = self.get(f"/resource_providers?name={name}")["resource_providers"]
        return f"/resource_providers/{found['uuid']}"

    def generation(self, path: str) -> int:
        return int(self.get(path)["generation"])

    def set_class(self, path: str, name: str, status: int = 200, **values: Any) -> Any:
        return self.put(
            f"{path}/inventories/{name}",
            {"resource_provider_generation": self.generation(path), **values},
            status,
        )

    def in_force(self, path: str, name: str) -> tuple[int, float]:
        found = self.get(f"{path}/inventories/{name}")
        return found["reserved"], found["allocation_ratio"]


@pytest.fixture
def placement(tmp_path: Path) -> Iterator[Placement]:
    store = upgrade(Store(f"sqlite:///{tmp_path}/kilonova.db"))
    store.write(lambda tx: hosts.register(tx, "host1", "boot", PARTS))
    yield Placement(store)
    store.close()


def detail(answer: Any) -> str:
    [error] = answer["errors"]
    assert error.keys() >= {"status", "title", "detail", "request_id", "code"}
    return str(error["detail"])


def aggregate(store: Store, number: int, host: str, **meta: str) -> str:
    uuid = ids.new()
    with store.begin() as tx:
        tx.execute(
            sa.insert(schema.aggregates).values(
                id=number, uuid=uuid, name=f"a{number}", meta=meta, created_at=now()
            )
        )
        tx.execute(sa.insert(schema.aggregate_hosts).values(aggregate_id=number, host=host))
    return uuid


def claim(store: Store, host: str = "host1", **resources: int) -> str:
    """A server's id that holds these, through the one door."""
    request = allocations.ClaimRequest(ids.new(), PROJECT, "u1", resources, [host])
    store.write(lambda tx: allocations.claim(tx, [request]))
    assert request.host == host
    return request.consumer


# --- what a host reports ---
def test_reserved_and_ratio_of_a_host_are_set_and_given_back(placement: Placement) -> None:
    path = placement.host()
    assert placement.in_force(path, "MEMORY_MB") == (512, 1.0)
    assert (
        placement.set_class(path, "MEMORY_MB", total=16384, reserved=2048, allocation_ratio=1.5)[
            "reserved"
        ]
        == 2048
    )
    assert placement.in_force(path, "MEMORY_MB") == (2048, 1.5)
    placement.store.write(lambda tx: hosts.describe(tx, "host1", PARTS))
    assert placement.in_force(path, "MEMORY_MB") == (2048, 1.5), (
        "a report leaves what was set by hand"
    )
    placement.set_class(path, "MEMORY_MB", total=16384, reserved=2048)
    assert placement.in_force(path, "MEMORY_MB") == (2048, 1.0), (
        "what is left out is the host's again"
    )
    placement.set_class(path, "MEMORY_MB", total=16384)
    assert placement.in_force(path, "MEMORY_MB") == (512, 1.0)


def test_what_is_put_back_as_it_was_read_stays_the_hosts(placement: Placement) -> None:
    path = placement.host()
    body = placement.get(f"{path}/inventories")
    placement.put(f"{path}/inventories", body)
    rows = placement.store.read(lambda tx: list(tx.execute(sa.select(schema.inventories))))
    assert {(row.set_reserved, row.set_ratio) for row in rows} == {(None, None)}
    assert placement.get(f"{path}/inventories")["inventories"] == body["inventories"]


@pytest.mark.parametrize(
    "values",
    [
        {"total": 9999},
        {"total": 16384, "max_unit": 4},
        {"total": 16384, "min_unit": 2},
        {"total": 16384, "step_size": 2},
    ],
)
def test_what_a_host_reports_cannot_be_set_otherwise(
    placement: Placement, values: dict[str, int]
) -> None:
    path = placement.host()
    before = placement.get(f"{path}/inventories")
    assert "as the host host1 reports it" in detail(
        placement.set_class(path, "MEMORY_MB", 409, **values)
    )
    assert placement.get(f"{path}/inventories") == before


def test_what_a_host_reports_cannot_be_removed(placement: Placement) -> None:
    path = placement.host()
    before = placement.get(f"{path}/inventories")
    for method, where, body in (
        ("DELETE", f"{path}/inventories", None),
        ("DELETE", f"{path}/inventories/VCPU", None),
        (
            "PUT",
            f"{path}/inventories",
            {
                "resource_provider_generation": before["resource_provider_generation"],
                "inventories": {"VCPU": {"total": 8}},
            },
        ),
    ):
        answer = placement.call(method, where, body)
        assert (
            answer.status_code,
            "the host host1 reports this itself" in detail(answer.json),
        ) == (409, True)
    assert placement.get(f"{path}/inventories") == before


def test_classes_of_the_operators_own_are_added_to_a_host(placement: Placement) -> None:
    path = placement.host()
    assert placement.call("PUT", "/resource_classes/CUSTOM_LICENCE").status_code == 201
    answer = placement.call(
        "POST", f"{path}/inventories", {"resource_class": "CUSTOM_LICENCE", "total": 3}
    )
    assert answer.status_code == 201
    placement.store.write(lambda tx: hosts.describe(tx, "host1", PARTS))
    assert placement.get(f"{path}/inventories/CUSTOM_LICENCE")["total"] == 3
    consumer = claim(placement.store, VCPU=1, CUSTOM_LICENCE=2)
    gone = placement.call("DELETE", f"{path}/inventories/CUSTOM_LICENCE")
    assert (gone.status_code, gone.json["errors"][0]["code"]) == (409, "placement.inventory.inuse")
    placement.store.write(lambda tx: allocations.release(tx, [(consumer, "host1")]))
    assert placement.call("DELETE", f"{path}/inventories/CUSTOM_LICENCE").status_code == 204


def test_hand_comes_before_aggregates_before_host(placement: Placement) -> None:
    path = placement.host()
    aggregate(placement.store, 1, "host1", cpu_allocation_ratio="2.0")
    placement.store.write(lambda tx: hosts.describe(tx, "host1", PARTS))
    assert placement.in_force(path, "VCPU") == (0, 2.0)
    placement.set_class(path, "VCPU", total=8, allocation_ratio=8.0)
    assert placement.in_force(path, "VCPU") == (0, 8.0)
    placement.set_class(path, "VCPU", total=8)
    assert placement.in_force(path, "VCPU") == (0, 2.0)


def test_capacity_below_usage_is_logged_and_breaks_no_invariant(placement: Placement) -> None:
    path = placement.host()
    for _ in range(4):
        claim(placement.store, VCPU=8)
    placement.set_class(path, "VCPU", total=8, allocation_ratio=1.0)
    row = placement.store.read(
        lambda tx: tx.execute(
            sa.select(schema.inventories).where(schema.inventories.c.resource_class == "VCPU")
        ).one()
    )
    assert (row.excess, placement.get(f"{path}/usages")["usages"]["VCPU"]) == (32, 32)
    assert [
        finding for finding in placement.store.read(doctor.check) if "capacity" in finding.invariant
    ] == []
    assert placement.get("/allocation_candidates?resources=VCPU:1")["allocation_requests"] == []


# --- traits and aggregates ---
def test_traits_by_hand_stand_beside_those_of_the_host(placement: Placement) -> None:
    path = placement.host()
    assert placement.call("PUT", "/traits/CUSTOM_GOLD").status_code == 201
    body = {"resource_provider_generation": placement.generation(path), "traits": ["CUSTOM_GOLD"]}
    assert placement.put(f"{path}/traits", body)["traits"] == [
        "COMPUTE_NODE",
        "CUSTOM_GOLD",
        "HW_CPU_X86_AVX",
    ]
    placement.store.write(lambda tx: hosts.describe(tx, "host1", PARTS))
    assert (
        placement.get("/resource_providers?required=CUSTOM_GOLD,COMPUTE_NODE")["resource_providers"]
        != []
    )
    assert placement.call("DELETE", "/traits/CUSTOM_GOLD").status_code == 409
    assert placement.call("DELETE", f"{path}/traits").status_code == 204
    assert placement.get(f"{path}/traits")["traits"] == ["COMPUTE_NODE", "HW_CPU_X86_AVX"]
    assert placement.call("DELETE", "/traits/CUSTOM_GOLD").status_code == 204


def test_disabled_is_for_the_compute_service_to_say(placement: Placement) -> None:
    path = placement.host()
    body = {
        "resource_provider_generation": placement.generation(path),
        "traits": [COMPUTE_DISABLED],
    }
    assert "disable the service instead" in detail(placement.put(f"{path}/traits", body, 409))
    uuid = placement.store.read(lambda tx: services.list_all(tx, "host1"))[0].uuid
    placement.store.write(lambda tx: services.set_state(tx, uuid, disabled=True))
    assert COMPUTE_DISABLED in placement.get(f"{path}/traits")["traits"]
    assert placement.call("DELETE", f"{path}/traits").status_code == 204
    assert COMPUTE_DISABLED in placement.get(f"{path}/traits")["traits"]


def test_aggregates_by_hand_stand_beside_those_of_the_host(placement: Placement) -> None:
    path, known, rack = placement.host(), ids.new(), aggregate(placement.store, 1, "host1")
    by_hand = known.replace("-", "")  # shown as it is spelled, found in any spelling
    body = {
        "resource_provider_generation": placement.generation(path),
        "aggregates": [by_hand, known.upper()],
    }
    assert placement.put(f"{path}/aggregates", body)["aggregates"] == [by_hand, rack]
    for group in (by_hand, known, known.upper(), rack):
        assert placement.get(f"/resource_providers?member_of={group}")["resource_providers"] != []
    body = {"resource_provider_generation": placement.generation(path), "aggregates": []}
    assert placement.put(f"{path}/aggregates", body)["aggregates"] == [rack]


# --- a host's provider, and those made by hand ---
def test_a_hosts_provider_keeps_its_name_and_its_place(placement: Placement) -> None:
    path = placement.host()
    uuid = path.rpartition("/")[2]
    other = placement.call("POST", "/resource_providers", {"name": "by hand"}).json["uuid"]
    for method, where, body in (
        ("PUT", path, {"name": "other"}),
        ("PUT", path, {"name": "host1", "parent_provider_uuid": other}),
        ("DELETE", path, None),
        ("POST", "/resource_providers", {"name": "x", "parent_provider_uuid": uuid}),
        ("PUT", f"/resource_providers/{other}", {"name": "by hand", "parent_provider_uuid": uuid}),
    ):
        answer = placement.call(method, where, body)
        assert (answer.status_code, "host" in detail(answer.json)) == (409, True), (
            method,
            where,
            body,
        )
    assert placement.put(path, {"name": "host1"})["name"] == "host1", "the same name is no change"


def test_a_write_says_when_and_that_the_provider_changed(placement: Placement) -> None:
    path = placement.host()
    before = placement.store.read(lambda tx: tx.execute(sa.select(schema.providers)).one())
    placement.set_class(path, "VCPU", total=8, reserved=1)
    after = placement.store.read(lambda tx: tx.execute(sa.select(schema.providers)).one())
    assert (after.generation, after.changed_at > before.changed_at) == (before.generation + 1, True)
    stale = placement.put(
        f"{path}/inventories/VCPU",
        {"resource_provider_generation": before.generation, "total": 8},
        409,
    )
    assert stale["errors"][0]["code"] == "placement.concurrent_update"


# --- who holds what ---
def test_allocations_of_a_server(placement: Placement) -> None:
    path = placement.host()
    uuid, consumer = path.rpartition("/")[2], claim(placement.store, VCPU=2, MEMORY_MB=512)
    held = placement.get(f"/allocations/{consumer}")
    assert held == {
        "allocations": {
            uuid: {
                "generation": placement.generation(path),
                "resources": {"VCPU": 2, "MEMORY_MB": 512},
            }
        },
        "project_id": PROJECT,
        "user_id": "u1",
        "consumer_generation": held["consumer_generation"],
        "consumer_type": "INSTANCE",
    }
    assert placement.get(f"{path}/allocations")["allocations"][consumer]["resources"] == {
        "VCPU": 2,
        "MEMORY_MB": 512,
    }
    assert placement.get(f"/usages?project_id={PROJECT}")["usages"] == {
        "INSTANCE": {"VCPU": 2, "MEMORY_MB": 512, "consumer_count": 1}
    }
    assert placement.get(f"/usages?project_id={PROJECT}", mv="1.9")["usages"] == {
        "VCPU": 2,
        "MEMORY_MB": 512,
    }
    assert placement.get(f"/allocations/{ids.new()}") == {"allocations": {}}
    found = placement.get("/allocation_candidates?resources=VCPU:1,MEMORY_MB:128")
    assert found["provider_summaries"][uuid]["resources"]["VCPU"] == {"capacity": 32, "used": 2}
    assert found["allocation_requests"] == [
        {
            "allocations": {uuid: {"resources": {"VCPU": 1, "MEMORY_MB": 128}}},
            "mappings": {"": [uuid]},
        }
    ]


def test_nobody_writes_allocations_from_outside(placement: Placement) -> None:
    consumer = claim(placement.store, VCPU=2)
    before = placement.store.read(lambda tx: list(tx.execute(sa.select(schema.allocations))))
    for method, where in (
        ("PUT", f"/allocations/{consumer}"),
        ("DELETE", f"/allocations/{consumer}"),
        ("POST", "/allocations"),
        ("POST", "/reshaper"),
    ):
        for token in ("admin", "service"):
            answer = placement.call(method, where, None if method == "DELETE" else {}, token=token)
            assert (answer.status_code, "own claim" in detail(answer.json)) == (403, True)
    assert (
        placement.store.read(lambda tx: list(tx.execute(sa.select(schema.allocations)))) == before
    )


@pytest.mark.parametrize(
    "query",
    [
        "resources=VCPU:1&resources1=VCPU:1",
        "resources1=VCPU:1&resources2=VCPU:1&group_policy=none",
        "resources1=VCPU:1&same_subtree=1",
    ],
)
def test_what_several_providers_would_have_to_give_is_refused(
    placement: Placement, query: str
) -> None:
    assert "alone" in detail(placement.get(f"/allocation_candidates?{query}", 400))


def test_one_group_may_have_a_suffix(placement: Placement) -> None:
    uuid = placement.host().rpartition("/")[2]
    found = placement.get(
        "/allocation_candidates?resources_CPU=VCPU:1&required_CPU=in:COMPUTE_NODE,HW_CPU_X86_SGX"
    )
    assert found["allocation_requests"][0]["mappings"] == {"_CPU": [uuid]}


# --- who may ---
def test_admins_and_services_see_all_others_their_own_usage(placement: Placement) -> None:
    for route in routes.ROUTES:
        if not route.policy:
            continue
        path = route.path.format(
            provider_uuid=ids.new(), consumer_uuid=ids.new(), name="VCPU", resource_class="VCPU"
        )
        for token, status in ((None, 401), ("user", 403), ("manager", 403), ("nobody", 403)):
            body = {} if route.body else None
            answer = placement.call(route.method, path, body, token=token, mv=route.until or "1.39")
            assert answer.status_code == status, (route, token, answer.text)
    placement.get("/resource_providers", token="service")
    placement.get(f"/usages?project_id={PROJECT}", token="reader")
    placement.get(f"/usages?project_id={OTHER}", 403, token="reader")
    placement.get(f"/usages?project_id={PROJECT}", 403, token="nobody")
    placement.get(f"/usages?project_id={OTHER}", token="admin")
    placement.get("/", token=None)


# --- what it costs ---
PATHS = {
    "/resource_providers": 1,
    "/resource_providers?required=CUSTOM_X,COMPUTE_NODE&resources=VCPU:1": 2,
    "/allocation_candidates?resources=VCPU:1,MEMORY_MB:64&required=COMPUTE_NODE": 5,
    "{host}": 1,
    "{host}/inventories": 2,
    "{host}/usages": 3,
    "{host}/traits": 2,
    "{host}/aggregates": 2,
    "{host}/allocations": 2,
    "/traits": 2,
    "/resource_classes": 1,
    f"/usages?project_id={PROJECT}": 2,
}


def test_statements_do_not_grow_with_hosts_and_servers(placement: Placement) -> None:
    placement.call("PUT", "/traits/CUSTOM_X")
    for number in (2, 12):
        for more in range(number):
            name = f"h{number}-{more}"
            placement.store.write(lambda tx, name=name: hosts.register(tx, name, "boot", PARTS))
            claim(placement.store, name, VCPU=1, MEMORY_MB=64)
        assert {path: count_statements(placement, path) for path in PATHS} == PATHS


def count_statements(placement: Placement, path: str) -> int:
    """Return how many statements a GET executes."""
    where, statements = path.format(host=placement.host()), []

    def note(connection: Any, cursor: Any, statement: str, *more: Any) -> None:
        statements.append(statement)

    sa.event.listen(placement.store.engine, "before_cursor_execute", note)
    placement.get(where)
    sa.event.remove(placement.store.engine, "before_cursor_execute", note)
    return len(statements)


# --- wrong input ---
NONSENSE = (
    b"",
    b"{",
    b"[]",
    b"null",
    b'"x"',
    b"7",
    b"\xff\xfe",
    b'{"a": "\\u0000"}',
    b'{"name": "\\ud800"}',
    b"[" * 5000,
    b'{"resource_provider_generation": 1e400}',
    b'{"total": 99999999999999999999999}',
)
# fmt: off
QUERIES = ("name=%00", "uuid=x", "in_tree=x", "member_of=", "member_of=in:", "member_of=!in:,", "required=!",
           "required=,", "required=in:", "required=in:!A", "resources=", "resources=VCPU", "resources=VCPU:",
           "resources=:1", "resources=VCPU:1:1", "resources=VCPU:-1", "resources=VCPU:0",
           "resources=VCPU:99999999999999", "resources=CUSTOM_NONE:1", "limit=0", "limit=-1", "limit=x", "unknown=1",
           "&".join(["a=1"] * 201),
           "required=" + "A" * 5000, "root_required=x&root_required=y", "resources1=VCPU:1&in_tree1=x", "in_tree1=x",
           "same_subtree=x", "group_policy=x", "resources%00=VCPU:1")
# fmt: on


@pytest.mark.parametrize(
    "path", ["/resource_providers", "/allocation_candidates", "/traits", "/usages"]
)
def test_wrong_queries_are_refused_with_a_reason(placement: Placement, path: str) -> None:
    for query in QUERIES:
        detail(placement.get(f"{path}?{query}", 400))


@pytest.mark.parametrize(
    "route",
    [
        route
        for route in routes.ROUTES
        if route.body and "/res" in route.path and route.path != "/reshaper"
    ],
    ids=lambda route: f"{route.method} {route.path}",
)
def test_nonsense_in_bodies_is_refused_with_a_reason(placement: Placement, route: Any) -> None:
    path = route.path.format(
        provider_uuid=placement.host().rpartition("/")[2], name="CUSTOM_X", resource_class="VCPU"
    )
    for raw in NONSENSE:
        answer = placement.call(route.method, path, raw=raw, mv=route.until or "1.39")
        assert (
            (answer.status_code, detail(answer.json) != "") == (400, True)
            if route.until is None
            else (answer.status_code == 400)
        ), (raw, answer.text)


@pytest.mark.parametrize("name", ["%00", "..", "%ff", "x" * 300, "☃", "' OR 1=1 --", "%2e%2e%2f"])
def test_strange_names_in_paths_find_nothing(placement: Placement, name: str) -> None:
    for path in (
        f"/resource_providers/{name}",
        f"/resource_classes/{name}",
        f"/traits/{name}",
        f"/resource_providers/{name}/traits",
    ):
        assert placement.call("GET", path).status_code == 404


def test_a_body_that_is_too_large_is_not_read(placement: Placement) -> None:
    answer = placement.call("POST", "/resource_providers", raw=b" " * (app.MAX_BODY_BYTES + 1))
    assert answer.status_code == 413


@pytest.mark.parametrize("version", ["1.40", "2.1", "0.9", "1.99999999999999999999"])
def test_versions_that_are_not_served(placement: Placement, version: str) -> None:
    [error] = placement.get("/resource_providers", 406, mv=version)["errors"]
    assert (error["min_version"], error["max_version"]) == ("1.0", "1.39")


@pytest.mark.parametrize("kind", ["traits", "resource_classes"])
def test_a_name_ends_where_its_line_does(placement: Placement, kind: str) -> None:
    refused = placement.call("PUT", f"/{kind}/CUSTOM_A%0A")
    assert refused.status_code == 400, refused.text
    assert refused.headers.get("location") is None
    assert "CUSTOM_A\n" not in placement.call("GET", f"/{kind}").text.replace("\\n", "\n")


def test_a_capacity_beyond_all_numbers_can_be_shown(placement: Placement) -> None:
    placement.set_class(placement.host(), "VCPU", total=8, allocation_ratio=3.4e38)
    found = placement.get("/allocation_candidates?resources=VCPU:1")
    [summary] = found["provider_summaries"].values()
    assert summary["resources"]["VCPU"]["capacity"] >= 2**31 - 1
