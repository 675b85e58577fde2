# SPDX-License-Identifier: Apache-2.0
"""The placement service beside real hosts: reports, manual changes, allocations and roles."""

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


def with_content_type(application: Any) -> Any:
    """Add a content type to answers without a body, for the checker of the test client.

    Placement's own tests expect no type for such answers.
    """

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
        self.client = falcon.testing.TestClient(Callers(with_content_type(app.create(store))))

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

    def provider_path(self, name: str = "host1") -> str:
        """Return the path of a host's provider."""
        [provider] = self.get(f"/resource_providers?name={name}")["resource_providers"]
        return f"/resource_providers/{provider['uuid']}"

    def read_generation(self, path: str) -> int:
        return int(self.get(path)["generation"])

    def set_class(self, path: str, name: str, status: int = 200, **values: Any) -> Any:
        return self.put(
            f"{path}/inventories/{name}",
            {"resource_provider_generation": self.read_generation(path), **values},
            status,
        )

    def reserved_and_ratio(self, path: str, name: str) -> tuple[int, float]:
        inventory = self.get(f"{path}/inventories/{name}")
        return inventory["reserved"], inventory["allocation_ratio"]


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


def add_aggregate(store: Store, number: int, host: str, **meta: str) -> str:
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
    """Claim resources on a host for a new server, and return the server's id."""
    request = allocations.ClaimRequest(ids.new(), PROJECT, "u1", resources, [host])
    store.write(lambda tx: allocations.claim(tx, [request]))
    assert request.host == host
    return request.consumer


# --- inventories of hosts ---
def test_placement_inventory_override_survives_report_until_put_omits_it(
    placement: Placement,
) -> None:
    path = placement.provider_path()
    assert placement.reserved_and_ratio(path, "MEMORY_MB") == (512, 1.0)
    assert (
        placement.set_class(path, "MEMORY_MB", total=16384, reserved=2048, allocation_ratio=1.5)[
            "reserved"
        ]
        == 2048
    )
    assert placement.reserved_and_ratio(path, "MEMORY_MB") == (2048, 1.5)
    placement.store.write(lambda tx: hosts.describe(tx, "host1", PARTS))
    assert placement.reserved_and_ratio(path, "MEMORY_MB") == (2048, 1.5), (
        "a report keeps manual values"
    )
    placement.set_class(path, "MEMORY_MB", total=16384, reserved=2048)
    assert placement.reserved_and_ratio(path, "MEMORY_MB") == (2048, 1.0), (
        "the host's value replaces a value that the request omits"
    )
    placement.set_class(path, "MEMORY_MB", total=16384)
    assert placement.reserved_and_ratio(path, "MEMORY_MB") == (512, 1.0)


def test_placement_put_of_unchanged_inventories_sets_no_override(placement: Placement) -> None:
    path = placement.provider_path()
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
def test_placement_refuses_change_of_reported_inventory_fields(
    placement: Placement, values: dict[str, int]
) -> None:
    path = placement.provider_path()
    before = placement.get(f"{path}/inventories")
    assert "The host host1 reports" in detail(placement.set_class(path, "MEMORY_MB", 409, **values))
    assert placement.get(f"{path}/inventories") == before


def test_placement_refuses_removal_of_reported_inventories(placement: Placement) -> None:
    path = placement.provider_path()
    before = placement.get(f"{path}/inventories")
    for method, url, body in (
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
        answer = placement.call(method, url, body)
        assert (
            answer.status_code,
            "The host host1 reports the inventory of " in detail(answer.json),
        ) == (409, True)
    assert placement.get(f"{path}/inventories") == before


def test_placement_custom_inventory_survives_report_and_delete_while_used(
    placement: Placement,
) -> None:
    path = placement.provider_path()
    assert placement.call("PUT", "/resource_classes/CUSTOM_LICENCE").status_code == 201
    answer = placement.call(
        "POST", f"{path}/inventories", {"resource_class": "CUSTOM_LICENCE", "total": 3}
    )
    assert answer.status_code == 201
    placement.store.write(lambda tx: hosts.describe(tx, "host1", PARTS))
    assert placement.get(f"{path}/inventories/CUSTOM_LICENCE")["total"] == 3
    consumer = claim(placement.store, VCPU=1, CUSTOM_LICENCE=2)
    answer_to_delete = placement.call("DELETE", f"{path}/inventories/CUSTOM_LICENCE")
    assert (answer_to_delete.status_code, answer_to_delete.json["errors"][0]["code"]) == (
        409,
        "placement.inventory.inuse",
    )
    placement.store.write(lambda tx: allocations.release(tx, [(consumer, "host1")]))
    assert placement.call("DELETE", f"{path}/inventories/CUSTOM_LICENCE").status_code == 204


def test_placement_allocation_ratio_prefers_override_over_aggregate(placement: Placement) -> None:
    path = placement.provider_path()
    add_aggregate(placement.store, 1, "host1", cpu_allocation_ratio="2.0")
    placement.store.write(lambda tx: hosts.describe(tx, "host1", PARTS))
    assert placement.reserved_and_ratio(path, "VCPU") == (0, 2.0)
    placement.set_class(path, "VCPU", total=8, allocation_ratio=8.0)
    assert placement.reserved_and_ratio(path, "VCPU") == (0, 8.0)
    placement.set_class(path, "VCPU", total=8)
    assert placement.reserved_and_ratio(path, "VCPU") == (0, 2.0)


def test_placement_capacity_reduced_below_usage_is_no_doctor_finding(placement: Placement) -> None:
    path = placement.provider_path()
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


def test_placement_usage_above_32_bits_is_stored_as_largest_excess(placement: Placement) -> None:
    """PostgreSQL and MariaDB refuse larger numbers in this column, and so the whole request."""
    path, most = placement.provider_path(), 2**31 - 1
    assert placement.call("PUT", "/resource_classes/CUSTOM_BYTES").status_code == 201
    body = {"resource_class": "CUSTOM_BYTES", "total": most, "allocation_ratio": 2.0}
    assert placement.call("POST", f"{path}/inventories", body).status_code == 201
    for _ in range(2):
        claim(placement.store, CUSTOM_BYTES=most)
    placement.set_class(path, "CUSTOM_BYTES", total=most, allocation_ratio=1.0)
    excess = sa.select(sa.func.max(schema.inventories.c.excess))
    assert placement.store.read(lambda tx: tx.scalar(excess)) == most


# --- traits and aggregates ---
def test_placement_put_or_delete_of_traits_keeps_traits_reported_by_host(
    placement: Placement,
) -> None:
    path = placement.provider_path()
    assert placement.call("PUT", "/traits/CUSTOM_GOLD").status_code == 201
    body = {
        "resource_provider_generation": placement.read_generation(path),
        "traits": ["CUSTOM_GOLD"],
    }
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


def test_placement_refuses_compute_disabled_trait_by_hand(placement: Placement) -> None:
    path = placement.provider_path()
    body = {
        "resource_provider_generation": placement.read_generation(path),
        "traits": [COMPUTE_DISABLED],
    }
    assert "Disable the service instead" in detail(placement.put(f"{path}/traits", body, 409))
    uuid = placement.store.read(lambda tx: services.list_all(tx, "host1"))[0].uuid
    placement.store.write(lambda tx: services.set_state(tx, uuid, disabled=True))
    assert COMPUTE_DISABLED in placement.get(f"{path}/traits")["traits"]
    assert placement.call("DELETE", f"{path}/traits").status_code == 204
    assert COMPUTE_DISABLED in placement.get(f"{path}/traits")["traits"]


def test_placement_put_of_aggregates_keeps_host_aggregates_of_compute_api(
    placement: Placement,
) -> None:
    path, uuid, rack = (
        placement.provider_path(),
        ids.new(),
        add_aggregate(placement.store, 1, "host1"),
    )
    # The aggregate is shown in this spelling, and every spelling matches.
    by_hand = uuid.replace("-", "")
    body = {
        "resource_provider_generation": placement.read_generation(path),
        "aggregates": [by_hand, uuid.upper()],
    }
    assert placement.put(f"{path}/aggregates", body)["aggregates"] == [by_hand, rack]
    for group in (by_hand, uuid, uuid.upper(), rack):
        assert placement.get(f"/resource_providers?member_of={group}")["resource_providers"] != []
    body = {"resource_provider_generation": placement.read_generation(path), "aggregates": []}
    assert placement.put(f"{path}/aggregates", body)["aggregates"] == [rack]


# --- providers of hosts and other providers ---
def test_placement_refuses_rename_move_or_delete_of_host_provider(placement: Placement) -> None:
    path = placement.provider_path()
    uuid = path.rpartition("/")[2]
    other = placement.call("POST", "/resource_providers", {"name": "by hand"}).json["uuid"]
    for method, url, body in (
        ("PUT", path, {"name": "other"}),
        ("PUT", path, {"name": "host1", "parent_provider_uuid": other}),
        ("DELETE", path, None),
        ("POST", "/resource_providers", {"name": "x", "parent_provider_uuid": uuid}),
        ("PUT", f"/resource_providers/{other}", {"name": "by hand", "parent_provider_uuid": uuid}),
    ):
        answer = placement.call(method, url, body)
        assert (answer.status_code, "host" in detail(answer.json)) == (409, True), (
            method,
            url,
            body,
        )
    assert placement.put(path, {"name": "host1"})["name"] == "host1", "the same name is no change"


def test_placement_write_raises_generation_and_change_time(placement: Placement) -> None:
    path = placement.provider_path()
    before = placement.store.read(lambda tx: tx.execute(sa.select(schema.providers)).one())
    placement.set_class(path, "VCPU", total=8, reserved=1)
    after = placement.store.read(lambda tx: tx.execute(sa.select(schema.providers)).one())
    assert (after.generation, after.changed_at > before.changed_at) == (
        before.generation + 1,
        True,
    )
    stale = placement.put(
        f"{path}/inventories/VCPU",
        {"resource_provider_generation": before.generation, "total": 8},
        409,
    )
    assert stale["errors"][0]["code"] == "placement.concurrent_update"


# --- allocations ---
def test_placement_shows_allocations_and_usage_of_server(placement: Placement) -> None:
    path = placement.provider_path()
    uuid, consumer = path.rpartition("/")[2], claim(placement.store, VCPU=2, MEMORY_MB=512)
    allocation = placement.get(f"/allocations/{consumer}")
    assert allocation == {
        "allocations": {
            uuid: {
                "generation": placement.read_generation(path),
                "resources": {"VCPU": 2, "MEMORY_MB": 512},
            }
        },
        "project_id": PROJECT,
        "user_id": "u1",
        "consumer_generation": allocation["consumer_generation"],
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
    candidates = placement.get("/allocation_candidates?resources=VCPU:1,MEMORY_MB:128")
    assert candidates["provider_summaries"][uuid]["resources"]["VCPU"] == {
        "capacity": 32,
        "used": 2,
    }
    assert candidates["allocation_requests"] == [
        {
            "allocations": {uuid: {"resources": {"VCPU": 1, "MEMORY_MB": 128}}},
            "mappings": {"": [uuid]},
        }
    ]


def test_placement_refuses_writes_of_allocations(placement: Placement) -> None:
    consumer = claim(placement.store, VCPU=2)
    before = placement.store.read(lambda tx: list(tx.execute(sa.select(schema.allocations))))
    for method, path in (
        ("PUT", f"/allocations/{consumer}"),
        ("DELETE", f"/allocations/{consumer}"),
        ("POST", "/allocations"),
        ("POST", "/reshaper"),
    ):
        for token in ("admin", "service"):
            answer = placement.call(method, path, None if method == "DELETE" else {}, token=token)
            assert (answer.status_code, "cannot change allocations" in detail(answer.json)) == (
                403,
                True,
            )
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
def test_placement_refuses_candidates_from_several_providers(
    placement: Placement, query: str
) -> None:
    assert "single providers" in detail(placement.get(f"/allocation_candidates?{query}", 400))


def test_placement_accepts_one_request_group_with_suffix(placement: Placement) -> None:
    uuid = placement.provider_path().rpartition("/")[2]
    candidates = placement.get(
        "/allocation_candidates?resources_CPU=VCPU:1&required_CPU=in:COMPUTE_NODE,HW_CPU_X86_SGX"
    )
    assert candidates["allocation_requests"][0]["mappings"] == {"_CPU": [uuid]}


# --- roles ---
def test_placement_needs_admin_or_service_except_for_own_usage(placement: Placement) -> None:
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


# --- number of statements ---
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


def test_placement_sql_statement_count_is_independent_of_rows(placement: Placement) -> None:
    placement.call("PUT", "/traits/CUSTOM_X")
    for number in (2, 12):
        for more in range(number):
            name = f"h{number}-{more}"
            placement.store.write(lambda tx, name=name: hosts.register(tx, name, "boot", PARTS))
            claim(placement.store, name, VCPU=1, MEMORY_MB=64)
        assert {path: count_statements(placement, path) for path in PATHS} == PATHS


def count_statements(placement: Placement, path: str) -> int:
    """Return the number of statements that a GET executes."""
    url, statements = path.format(host=placement.provider_path()), []

    def note(connection: Any, cursor: Any, statement: str, *more: Any) -> None:
        statements.append(statement)

    sa.event.listen(placement.store.engine, "before_cursor_execute", note)
    placement.get(url)
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
           "resources=:1", "resources=VCPU:1:1", "resources=VCPU:000000000005x", "resources=VCPU:-1",
           "resources=VCPU:0", "resources=VCPU:99999999999999", "resources=CUSTOM_NONE:1", "limit=0", "limit=-1",
           "limit=x", "unknown=1", "&".join(["a=1"] * 201),
           "required=" + "A" * 5000, "root_required=x&root_required=y", "resources1=VCPU:1&in_tree1=x", "in_tree1=x",
           "same_subtree=x", "group_policy=x", "resources%00=VCPU:1")
# fmt: on


@pytest.mark.parametrize(
    "path", ["/resource_providers", "/allocation_candidates", "/traits", "/usages"]
)
def test_placement_invalid_query_returns_400_with_reason(placement: Placement, path: str) -> None:
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
def test_placement_invalid_body_returns_400_with_reason(placement: Placement, route: Any) -> None:
    path = route.path.format(
        provider_uuid=placement.provider_path().rpartition("/")[2],
        name="CUSTOM_X",
        resource_class="VCPU",
    )
    for raw in NONSENSE:
        answer = placement.call(route.method, path, raw=raw, mv=route.until or "1.39")
        assert (
            (answer.status_code, detail(answer.json) != "") == (400, True)
            if route.until is None
            else (answer.status_code == 400)
        ), (raw, answer.text)


@pytest.mark.parametrize("name", ["%00", "..", "%ff", "x" * 300, "☃", "' OR 1=1 --", "%2e%2e%2f"])
def test_placement_invalid_name_in_path_returns_404(placement: Placement, name: str) -> None:
    for path in (
        f"/resource_providers/{name}",
        f"/resource_classes/{name}",
        f"/traits/{name}",
        f"/resource_providers/{name}/traits",
    ):
        assert placement.call("GET", path).status_code == 404


def test_placement_too_large_body_returns_413(placement: Placement) -> None:
    answer = placement.call("POST", "/resource_providers", raw=b" " * (app.MAX_BODY_BYTES + 1))
    assert answer.status_code == 413


@pytest.mark.parametrize("version", ["1.40", "2.1", "0.9", "1.99999999999999999999"])
def test_placement_unsupported_microversion_returns_406(placement: Placement, version: str) -> None:
    [error] = placement.get("/resource_providers", 406, mv=version)["errors"]
    assert (error["min_version"], error["max_version"]) == ("1.0", "1.39")


@pytest.mark.parametrize("kind", ["traits", "resource_classes"])
def test_placement_name_with_line_feed_returns_400(placement: Placement, kind: str) -> None:
    answer = placement.call("PUT", f"/{kind}/CUSTOM_A%0A")
    assert answer.status_code == 400, answer.text
    assert answer.headers.get("location") is None
    assert "CUSTOM_A\n" not in placement.call("GET", f"/{kind}").text.replace("\\n", "\n")


def test_placement_candidates_show_capacity_of_huge_allocation_ratio(placement: Placement) -> None:
    placement.set_class(placement.provider_path(), "VCPU", total=8, allocation_ratio=3.4e38)
    candidates = placement.get("/allocation_candidates?resources=VCPU:1")
    [summary] = candidates["provider_summaries"].values()
    assert summary["resources"]["VCPU"]["capacity"] >= 2**31 - 1


@pytest.mark.parametrize(
    "query",
    [
        "/resource_providers?uuid=bad&uuid=00000000-0000-0000-0000-000000000000",
        "/allocation_candidates?resources=VCPU:1&limit=x&limit=1",
    ],
)
def test_placement_uses_last_value_of_repeated_parameter(placement: Placement, query: str) -> None:
    """Placement checks and uses the last value, too. So a bad value before it is ignored."""
    placement.get(query)
