# SPDX-License-Identifier: Apache-2.0
"""Wrong requests of clients: each returns the exact status and fault, and leaves no resource."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from deploy.one_machine.connectivity import PRIVATE, PUBLIC
from tests.e2e.guests import orphans
from tests.e2e.live import Live, Reply, Rest

NOBODY = "00000000-0000-4000-8000-000000000000"


@dataclass(frozen=True)
class Case:
    """A wrong request and the expected fault. ``change`` modifies a valid create request."""

    name: str
    status: int
    kind: str
    words: str
    change: dict[str, Any] | None = None
    method: str = "POST"
    path: str = "/servers"
    data: str | bytes | None = None
    more: dict[str, Any] = field(default_factory=dict)


CASES = [
    Case("unknown key", 400, "badRequest", "'colour'", {"colour": "green"}),
    Case(
        "unknown key beside the server", 400, "badRequest", "'colour'", {}, more={"colour": "green"}
    ),
    Case("name of a wrong type", 400, "badRequest", "name", {"name": 7}),
    Case("name of 256 characters", 400, "badRequest", "name", {"name": "n" * 256}),
    Case("empty name", 400, "badRequest", "name", {"name": ""}),
    Case("metadata of a wrong type", 400, "badRequest", "metadata", {"metadata": ["a"]}),
    Case("metadata value too long", 400, "badRequest", "key", {"metadata": {"key": "v" * 256}}),
    Case("user data that is not base64", 400, "badRequest", "user_data", {"user_data": "%%%"}),
    Case(
        "min_count above max_count",
        400,
        "badRequest",
        "min_count",
        {"min_count": 2, "max_count": 1},
    ),
    Case("no networks", 400, "badRequest", "networks", {"networks": None}),
    Case("unknown image", 400, "badRequest", NOBODY, {"imageRef": NOBODY}),
    Case("image that is no id", 400, "badRequest", "imageRef", {"imageRef": "../../etc/passwd"}),
    Case("unknown flavor", 400, "badRequest", "Flavor", {"flavorRef": "no-such"}),
    Case("unknown key pair", 400, "badRequest", "key", {"key_name": "no-such"}),
    Case("unknown zone", 400, "badRequest", "zone", {"availability_zone": "no-such"}),
    Case(
        "over the quota of servers",
        403,
        "forbidden",
        "instances",
        {"min_count": 11, "max_count": 11},
    ),
    Case(
        "host chosen by a tenant", 403, "forbidden", "forced_host", {"availability_zone": "nova:vm"}
    ),
    Case("malformed JSON", 400, "badRequest", "Malformed", data='{"server": '),
    Case("body that is not UTF-8", 400, "badRequest", "Malformed", data=b'{"server": "\xff"}'),
    Case("body that is a list", 400, "badRequest", "", data="[]"),
    Case("no body", 400, "badRequest", "Malformed", data=""),
    Case("nested without end", 400, "badRequest", "too many objects and lists", data="[" * 100_000),
    Case(
        "body of 10 MB",
        413,
        "overLimit",
        "too large",
        data=b'{"server": "' + b"x" * 10_000_000 + b'"}',
    ),
    Case("unknown server", 404, "itemNotFound", NOBODY, method="GET", path=f"/servers/{NOBODY}"),
    Case(
        "server that is no id", 404, "itemNotFound", "", method="DELETE", path="/servers/%00%2e%2e"
    ),
    Case("unknown path", 404, "itemNotFound", "", method="GET", path="/no-such"),
    Case("wrong method", 405, "badMethod", "", method="PATCH", path="/servers"),
    Case(
        "unknown query parameter",
        400,
        "badRequest",
        "colour",
        method="GET",
        path="/servers?colour=green",
    ),
    Case("wrong limit", 400, "badRequest", "limit", method="GET", path="/servers?limit=many"),
    Case(
        "unknown marker", 400, "badRequest", NOBODY, method="GET", path=f"/servers?marker={NOBODY}"
    ),
    Case("admin's list", 403, "forbidden", "os-services:list", method="GET", path="/os-services"),
    Case(
        "admin's flavor",
        403,
        "forbidden",
        "os-flavor-manage:create",
        path="/flavors",
        data='{"flavor": {"name": "mine", "ram": 1, "vcpus": 1, "disk": 1}}',
    ),
]


@pytest.fixture(scope="module", autouse=True)
def unchanged_resources(cloud: Live) -> Iterator[None]:
    """Check at the end that the resources of all projects are unchanged and consistent."""

    def list_resources() -> tuple[Any, ...]:
        return (
            sorted(
                row["id"]
                for row in cloud.rest("kilonova-admin")
                .call("GET", "/servers?all_tenants=1")
                .body["servers"]
            ),
            cloud.rows("SELECT * FROM allocations"),
            cloud.rows("SELECT count(*) FROM servers"),
            cloud.rows("SELECT count(*) FROM actions"),
            cloud.domains(),
            sorted((port.id, port.device_id) for port in cloud.seed.admin.network.ports()),
            orphans(cloud),
        )

    before = list_resources()
    yield
    assert list_resources() == before
    cloud.assert_healthy()


@pytest.fixture(scope="module")
def tenant(cloud: Live) -> Rest:
    return cloud.rest()


@pytest.fixture(scope="module")
def body(cloud: Live) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Return a function that returns a valid create request with changes. None removes a key."""
    good = {
        "name": "bad-input",
        "imageRef": cloud.image(),
        "flavorRef": cloud.flavor(),
        "networks": "none",
    }
    return lambda change: {
        key: value for key, value in {**good, **change}.items() if value is not None
    }


@pytest.fixture
def stranger(cloud: Live) -> Iterator[Rest]:
    """Yield a user of another project, without servers."""
    identity = cloud.seed.admin.identity
    name, password = f"stranger-{uuid.uuid4().hex[:8]}", uuid.uuid4().hex
    project = identity.create_project(name=name, domain_id="default")
    user = identity.create_user(name=name, domain_id="default", password=password)
    identity.assign_project_role_to_user(project, user, identity.find_role("member"))
    yield Rest(
        cloud.cloud.api_url,
        cloud.seed.demo.connect_as(
            username=name, password=password, project_id=project.id
        ).session.get_token(),
    )
    identity.delete_user(user)
    identity.delete_project(project)


def check(reply: Reply, status: int, kind: str, words: str) -> None:
    assert reply.status == status, reply
    assert reply.headers["Content-Type"].startswith("application/json")
    assert reply.headers["X-Compute-Request-Id"].startswith("req-")
    fault = reply.fault
    assert fault[:2] == (kind, status)
    assert words in fault[2]
    assert fault[2]


# tests/api tests each of these requests without a real cloud.
@pytest.mark.slice("guests")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_wrong_api_request_returns_expected_4xx_status_and_fault(
    tenant: Rest, body: Callable[[dict[str, Any]], dict[str, Any]], case: Case
) -> None:
    content = None if case.change is None else {"server": body(case.change), **case.more}
    check(
        tenant.call(case.method, case.path, content, data=case.data),
        case.status,
        case.kind,
        case.words,
    )


@dataclass(frozen=True)
class Networks:
    """Ids of networks and ports for wrong requests.

    Attributes:
        private: The shared network.
        public: The external network.
        foreign: A port of the admin's project.
        bound: The port of the first server.
        taken: The address of that port.
    """

    private: str
    public: str
    foreign: str
    bound: str
    taken: str


@pytest.fixture(scope="module")
def networks(cloud: Live) -> Iterator[Networks]:
    service = cloud.seed.admin.network
    private = next(iter(service.networks(name=PRIVATE, is_shared=True))).id
    public = next(iter(service.networks(name=PUBLIC, is_router_external=True))).id
    foreign = service.create_port(network_id=private, name="foreign")
    [first_server] = [
        server["id"] for server in cloud.rest().servers() if server["name"] == "first"
    ]
    bound = next(iter(service.ports(device_id=first_server)))
    yield Networks(private, public, foreign.id, bound.id, bound.fixed_ips[0]["ip_address"])
    service.delete_port(foreign)


#: Rows of name, status, kind of fault, words in the message, and requested networks.
WRONG_NETWORKS: list[tuple[str, int, str, str, Callable[[Networks], Any]]] = [
    ("unknown network", 400, "badRequest", NOBODY, lambda networks: [{"uuid": NOBODY}]),
    ("network that is no id", 400, "badRequest", "uuid", lambda networks: [{"uuid": "private"}]),
    ("unknown port", 400, "badRequest", NOBODY, lambda networks: [{"port": NOBODY}]),
    (
        "foreign port",
        400,
        "badRequest",
        "could not be found",
        lambda networks: [{"port": networks.foreign}],
    ),
    (
        "port already bound",
        409,
        "conflictingRequest",
        "still in use",
        lambda networks: [{"port": networks.bound}],
    ),
    (
        "address in use",
        400,
        "badRequest",
        "already in use",
        lambda networks: [{"uuid": networks.private, "fixed_ip": networks.taken}],
    ),
    (
        "address of another network",
        400,
        "badRequest",
        "192.0.2.7",
        lambda networks: [{"uuid": networks.private, "fixed_ip": "192.0.2.7"}],
    ),
    (
        "external network",
        403,
        "forbidden",
        "external network",
        lambda networks: [{"uuid": networks.public}],
    ),
    (
        "more ports than the quota",
        403,
        "forbidden",
        "ports",
        lambda networks: [{"uuid": networks.private}] * 9,
    ),
]


@pytest.mark.parametrize(
    ("status", "kind", "words", "build_networks"),
    [row[1:] for row in WRONG_NETWORKS],
    ids=[row[0] for row in WRONG_NETWORKS],
)
def test_create_with_unusable_network_port_or_address_returns_4xx_fault(
    cloud: Live,
    tenant: Rest,
    body: Callable[[dict[str, Any]], dict[str, Any]],
    networks: Networks,
    status: int,
    kind: str,
    words: str,
    build_networks: Callable[[Networks], Any],
) -> None:
    project, service = cloud.seed.demo.session.get_project_id(), cloud.seed.admin.network
    service.update_quota(project, ports=len(list(service.ports(project_id=project))) + 5)
    try:
        check(
            tenant.call(
                "POST", "/servers", {"server": body({"networks": build_networks(networks)})}
            ),
            status,
            kind,
            words,
        )
    finally:
        service.delete_quota(project)


@pytest.mark.parametrize(
    ("status", "kind", "build_attachment"),
    [
        (404, "itemNotFound", lambda networks: {"port_id": NOBODY}),
        (404, "itemNotFound", lambda networks: {"port_id": networks.foreign}),
        (409, "conflictingRequest", lambda networks: {"port_id": networks.bound}),
        (404, "itemNotFound", lambda networks: {"net_id": NOBODY}),
        (403, "forbidden", lambda networks: {"net_id": networks.public}),
        (
            400,
            "badRequest",
            lambda networks: {"net_id": networks.private, "port_id": networks.bound},
        ),
        (
            409,
            "conflictingRequest",
            lambda networks: {
                "net_id": networks.private,
                "fixed_ips": [{"ip_address": networks.taken}],
            },
        ),
    ],
)
def test_attach_interface_with_wrong_port_or_network_returns_4xx_fault(
    tenant: Rest,
    networks: Networks,
    status: int,
    kind: str,
    build_attachment: Callable[[Networks], dict[str, Any]],
) -> None:
    [first] = [server["id"] for server in tenant.servers() if server["name"] == "first"]
    check(
        tenant.call(
            "POST",
            f"/servers/{first}/os-interface",
            {"interfaceAttachment": build_attachment(networks)},
        ),
        status,
        kind,
        "",
    )
    check(
        tenant.call("DELETE", f"/servers/{first}/os-interface/{networks.foreign}"),
        404,
        "itemNotFound",
        "",
    )


@pytest.mark.parametrize(
    ("method", "path", "content"),
    [
        ("GET", "", None),
        ("DELETE", "", None),
        ("PUT", "", {"server": {"name": "mine"}}),
        ("POST", "/action", {"os-stop": None}),
        ("GET", "/os-instance-actions", None),
    ],
)
def test_server_of_another_project_returns_404(
    tenant: Rest, stranger: Rest, method: str, path: str, content: Any
) -> None:
    server = tenant.servers()[0]["id"]
    check(stranger.call(method, f"/servers/{server}{path}", content), 404, "itemNotFound", server)
    assert stranger.call("GET", "/servers").body["servers"] == []


@pytest.mark.parametrize("token", [None, "wrong", "gAAAAA" + "x" * 200])
def test_request_without_valid_token_returns_401(cloud: Live, token: str | None) -> None:
    for method in ("GET", "POST"):
        check(
            Rest(cloud.cloud.api_url, token).call(method, "/servers"),
            401,
            "unauthorized",
            "authentication",
        )


def test_versions_request_needs_no_token(cloud: Live) -> None:
    assert Rest(cloud.cloud.api_url, None).call("GET", "/").status == 200


@pytest.mark.parametrize(
    ("version", "status", "kind", "words"),
    [
        ("2.999", 406, "computeFault", "2.999"),
        ("3.1", 406, "computeFault", "3.1"),
        ("abc", 400, "badRequest", "abc"),
        ("2", 400, "badRequest", "format"),
        ("2.1.1", 400, "badRequest", "2.1.1"),
    ],
)
def test_unsupported_microversion_returns_406_and_malformed_returns_400(
    tenant: Rest, version: str, status: int, kind: str, words: str
) -> None:
    for method in ("GET", "POST"):
        check(tenant.call(method, "/servers", version=version), status, kind, words)
