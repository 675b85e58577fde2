# SPDX-License-Identifier: Apache-2.0
"""The metadata service for guests: documents, refusals, cache, rate limit and vendor data."""

from __future__ import annotations

import base64
import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import falcon.testing
import pytest
import sqlalchemy as sa

from common.domain import errors
from common.domain.models import Interface
from common.domain.wire import to_wire
from common.security.rate_limit import MAX_KEYS as MOST_RATES
from common.security.rate_limit import RateLimiter
from common.security.vault import Vault
from common.store import schema
from common.store.servers import actions
from common.store.tenants import keypairs
from compute_api.metadata import app
from compute_api.metadata.guest_cache import GuestCache
from compute_api.metadata.proxy_headers import host_key, signature
from tests.api.conftest import IMAGE, OTHER, PROJECT, Cloud
from tests.api.test_migrations import add_migration
from tests.log_lines import logged_fields, rendered_lines
from tests.waiting import await_true

SECRET = "a shared secret"
ADDRESS, SECOND, OTHERS = "10.0.0.5", "fd00::5", "10.0.0.6"
USER_DATA = b"#!/bin/sh\necho \xff\n"
TEXT = "text/plain; charset=UTF-8"


class Service:
    """The metadata service with one server that has a port.

    It counts SQL statements, and its clock is ``time``.
    """

    def __init__(
        self,
        cloud: Cloud,
        secret: str = SECRET,
        rate: int = 1000,
        seconds: float = 15,
        max_guests: int = 1000,
        dynamic: Any = None,
    ) -> None:
        self.cloud, self.time, self.statements = cloud, 100.0, 0
        self.read: list[str] = []
        self.server = self.create_server(ADDRESS, SECOND)
        self.guests = GuestCache(
            cloud.store,
            {"ntp": "n1"},
            Vault("key"),
            seconds,
            lambda: self.time,
            max_guests,
            dynamic=dynamic,
        )
        self.rate = RateLimiter(rate, lambda: self.time)
        self.client = falcon.testing.TestClient(app.create(self.guests, secret, self.rate))
        sa.event.listen(cloud.store.engine, "before_cursor_execute", self._count)

    def _count(self, *arguments: Any) -> None:
        if not str(arguments[2]).startswith("BEGIN"):
            self.statements += 1
            self.read.append(str(arguments[2]))

    @property
    def reads(self) -> int:
        """The number of statements that read a server's data."""
        return sum("user_data" in statement for statement in self.read)

    def create_server(self, *addresses: str) -> str:
        server = self.cloud.create(
            name="Web <1>", metadata={"a": "b"}, user_data=base64.b64encode(USER_DATA).decode()
        )
        port = Interface(
            "port1",
            "net1",
            "private",
            "fa:16:3e:00:00:01",
            mtu=1450,
            tag="blue",
            device="tap1",
            addresses=[
                {
                    "address": address,
                    "version": 6 if ":" in address else 4,
                    "prefix": 24,
                    "dhcp": True,
                    "floating": [],
                }
                for address in addresses
            ],
        )
        self.cloud.set_state(server, interfaces=[to_wire(port)])
        return server

    def request(
        self,
        path: str,
        method: str = "GET",
        body: bytes | None = None,
        server: str | None = None,
        **headers: str | None,
    ) -> falcon.testing.Result:
        """Send a request as the proxy does. A header of None is left out."""
        server = server or self.server
        all_headers = {
            "X-Instance-ID": server,
            "X-Tenant-ID": PROJECT,
            "X-Forwarded-For": ADDRESS,
            "X-Instance-ID-Signature": signature(SECRET, server),
        }
        all_headers |= {name.replace("_", "-"): value for name, value in headers.items()}  # type: ignore[misc]
        return self.client.simulate_request(
            method,
            path,
            body=body,
            headers={name: value for name, value in all_headers.items() if value is not None},
        )

    def find_host(self) -> str:
        """Return the name of the server's host."""
        return str(
            next(row.host for row in self.cloud.rows(schema.servers) if row.id == self.server)
        )

    def password(self) -> str | None:
        return next(
            row.password for row in self.cloud.rows(schema.servers) if row.id == self.server
        )


@pytest.fixture
def make_service(cloud: Cloud) -> Iterator[Callable[..., Service]]:
    return lambda **more: Service(cloud, **more)


@pytest.fixture
def service(make_service: Callable[..., Service]) -> Service:
    return make_service()


EC2_LIST = "1.0\n2007-01-19\n2007-03-01\n2007-08-29\n2007-10-10\n2007-12-15\n2008-02-01\n2008-09-01\n2009-04-04\nlatest"


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("/", EC2_LIST),
        ("/ec2", EC2_LIST),
        ("/ec2/", EC2_LIST),
        (
            "/openstack",
            "2012-08-10\n2013-04-04\n2013-10-17\n2015-10-15\n2016-06-30\n2016-10-06\n2017-02-22\n2018-08-27\n"
            "2020-10-14\n2025-04-04\nlatest",
        ),
        ("/openstack/2012-08-10", "meta_data.json\nuser_data"),
        (
            "/openstack/latest/",
            "meta_data.json\nuser_data\npassword\nvendor_data.json\nnetwork_data.json\n"
            "vendor_data2.json",
        ),
        ("/latest", "meta-data/\nuser-data"),
        ("/2009-04-04/", "meta-data/\nuser-data"),
        ("/latest/meta-data/local-ipv4", ADDRESS),
        ("/ec2/2009-04-04/meta-data/instance-type", "m1.tiny"),
        ("/latest/meta-data/placement/", "availability-zone"),
        ("//latest//meta-data/hostname", "web-1"),
        ("/1.0/meta-data/security-groups", "default"),
        ("/openstack/latest/password", ""),
    ],
)
def test_metadata_paths_return_lists_and_values(service: Service, path: str, text: str) -> None:
    answer = service.request(path)
    assert (answer.status_code, answer.text, answer.headers["content-type"]) == (200, text, TEXT)


def test_metadata_documents_contain_data_of_server(service: Service) -> None:
    answer = service.request("/openstack/latest/meta_data.json")
    assert answer.headers["content-type"] == "application/json"
    assert (
        answer.json.pop("random_seed")
        != service.request("/openstack/latest/meta_data.json").json["random_seed"]
    )
    assert {
        name: answer.json[name]
        for name in ("uuid", "name", "hostname", "project_id", "meta", "availability_zone")
    } == {
        "uuid": service.server,
        "name": "Web <1>",
        "hostname": "web-1",
        "project_id": PROJECT,
        "meta": {"a": "b"},
        "availability_zone": "nova",
    }
    assert answer.json["devices"][0]["tags"] == ["blue"]
    assert "files" not in answer.json and "admin_pass" not in answer.json
    assert service.request("/openstack/latest/vendor_data.json").json == {"ntp": "n1"}
    assert service.request("/openstack/latest/vendor_data2.json").json == {"static": {"ntp": "n1"}}
    networks = service.request("/openstack/latest/network_data.json").json
    assert networks["links"][0]["ethernet_mac_address"] == "fa:16:3e:00:00:01"
    assert [network["type"] for network in networks["networks"]] == ["ipv4_dhcp", "ipv6_dhcp"]
    for path in (
        "/openstack/2012-08-10/user_data",
        "/openstack/latest/user_data",
        "/latest/user-data",
    ):
        assert service.request(path).content == USER_DATA
    head = service.request("/latest/user-data", "HEAD")
    assert (head.status_code, head.content, head.headers["content-length"]) == (
        200,
        b"",
        str(len(USER_DATA)),
    )


def test_metadata_decrypts_user_data_and_returns_503_for_another_key(service: Service) -> None:
    ciphertext = Vault("key").seal_text(base64.b64encode(USER_DATA).decode())
    service.cloud.store.write(
        lambda tx: tx.execute(sa.update(schema.servers).values(user_data=ciphertext))
    )
    assert service.request("/openstack/latest/user_data").content == USER_DATA
    foreign_ciphertext = Vault("another").seal_text("b2xk")
    service.cloud.store.write(
        lambda tx: tx.execute(sa.update(schema.servers).values(user_data=foreign_ciphertext))
    )
    service.time += 60
    assert service.request("/openstack/latest/user_data").status_code == 503


@pytest.mark.parametrize(
    "path",
    [
        "/latest/nothing",
        "/1999-01-01",
        "/openstack/1999-01-01/meta_data.json",
        "/openstack/2012-08-10/vendor_data.json",
        "/openstack/2012-08-10/password",
        "/openstack/content/0000",
        "/openstack/latest/meta_data.json/x",
        "/%00",
        "/latest/meta-data/../../openstack",
        "/openstack/latest/password/x",
        "/latest/meta-data/hostname/x",
        "/ec2/ec2",
        "/" + "a/" * 3000,
    ],
)
def test_metadata_of_unknown_path_returns_404(service: Service, path: str) -> None:
    assert service.request(path).status_code == 404


def status_for_host(service: Service, host: str, key_of: str = "") -> int:
    """Return the status for the proxy of a host. The proxy signs with the key of ``key_of``."""
    key = host_key(SECRET, key_of or host)
    return service.request(
        "/latest/user-data",
        X_Instance_Host=host,
        X_Instance_ID_Signature=signature(key, service.server),
    ).status_code


def test_metadata_with_host_key_is_served_for_guests_on_this_host_only(service: Service) -> None:
    home = service.find_host()
    assert status_for_host(service, home) == 200
    assert status_for_host(service, "another") == 404
    assert status_for_host(service, home, key_of="another") == 403
    # The host is checked for a cached guest too.
    assert status_for_host(service, "another") == 404
    # The key of a host is no signature of a server with the name "host <name>".
    assert (
        service.request(
            "/", server=f"host {home}", X_Instance_ID_Signature=host_key(SECRET, home)
        ).status_code
        == 404
    )


def test_metadata_is_served_to_both_hosts_during_a_move(service: Service) -> None:
    home = service.find_host()
    add_migration(
        service.cloud,
        status="running",
        server_id=service.server,
        source_host=home,
        dest_host="another",
    )
    assert (
        status_for_host(service, home),
        status_for_host(service, "another"),
        status_for_host(service, "third"),
    ) == (
        200,
        200,
        404,
    )


@pytest.mark.parametrize(
    ("status", "headers"),
    [
        (400, {"X_Instance_ID": None}),
        (400, {"X_Tenant_ID": None}),
        (400, {"X_Instance_ID_Signature": None}),
        (403, {"X_Instance_ID_Signature": "0" * 64}),
        (403, {"X_Instance_ID_Signature": signature("another", "x")}),
        (403, {"X_Instance_ID_Signature": "\xff" * 64}),
        (403, {"X_Instance_ID": "\xff"}),
        (404, {"X_Tenant_ID": OTHER}),
        (404, {"X_Tenant_ID": "p" * 5000}),
        (404, {"X_Forwarded_For": OTHERS}),
        (404, {"X_Forwarded_For": None}),
        (404, {"X_Forwarded_For": ""}),
        (404, {"X_Forwarded_For": f"{ADDRESS}, {OTHERS}"}),
        (404, {"X_Forwarded_For": "10.0.0.0/8"}),
        (404, {"X_Forwarded_For": "not an address" * 1000}),
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_metadata_with_forged_or_missing_headers_is_refused_and_logged(
    service: Service,
    caplog: pytest.LogCaptureFixture,
    method: str,
    status: int,
    headers: dict[str, str | None],
) -> None:
    assert service.request("/latest/meta-data/hostname").status_code == 200
    answer = service.request("/openstack/latest/password", method, b"stolen", **headers)
    assert answer.status_code == status
    assert service.password() is None
    lines = rendered_lines(caplog)
    refusals = [line for line in lines if "a request is refused" in line]
    assert len(refusals) == 1 and len(refusals[0]) < 670
    for text in (*lines, answer.text):
        assert SECRET not in text and signature(SECRET, service.server) not in text


def test_metadata_signature_is_valid_for_its_server_only(service: Service) -> None:
    other = service.create_server(OTHERS)
    assert service.request("/", server=other, X_Forwarded_For=OTHERS).status_code == 200
    # The request comes from the address of the first server.
    assert service.request("/", server=other).status_code == 404
    assert (
        service.request(
            "/",
            server=other,
            X_Forwarded_For=OTHERS,
            X_Instance_ID_Signature=signature(SECRET, service.server),
        ).status_code
        == 403
    )


@pytest.mark.parametrize("address", [ADDRESS, SECOND, "FD00:0:0::5"])
def test_metadata_is_served_to_each_address_of_a_port(service: Service, address: str) -> None:
    assert service.request("/latest/meta-data/hostname", X_Forwarded_For=address).text == "web-1"


def test_metadata_without_configured_secret_returns_403(
    make_service: Callable[..., Service],
) -> None:
    service = make_service(secret="")
    for headers in (
        {},
        {"X_Instance_ID_Signature": signature("", service.server)},
        {"X_Instance_ID_Signature": ""},
    ):
        answer = service.request("/", **headers)
        assert answer.status_code == 403 and "proxy_shared_secret" in answer.text


def test_metadata_accepts_signature_of_each_configured_secret(
    make_service: Callable[..., Service],
) -> None:
    service = make_service(secret=f"new, {SECRET}")
    for secret, status in ((SECRET, 200), ("new", 200), (f"new, {SECRET}", 403), ("", 403)):
        headers = {"X_Instance_ID_Signature": signature(secret, service.server)}
        assert service.request("/", **headers).status_code == status


def test_metadata_of_unknown_deleted_or_portless_server_returns_404(service: Service) -> None:
    unknown = "00000000-0000-0000-0000-000000000000"
    assert service.request("/", server=unknown).status_code == 404
    deleted, portless = service.create_server(ADDRESS), service.create_server(ADDRESS)
    service.cloud.change(schema.servers, schema.servers.c.id == deleted, deleted=1)
    service.cloud.change(schema.servers, schema.servers.c.id == portless, interfaces=None)
    assert (
        service.request("/", server=deleted).status_code
        == service.request("/", server=portless).status_code
        == 404
    )
    service.cloud.change(schema.servers, schema.servers.c.id == service.server, deleted=1)
    assert service.request("/").status_code == 404


def test_metadata_of_cached_guest_costs_one_sql_statement_and_no_data_read(
    service: Service,
) -> None:
    assert service.request("/").status_code == 200
    service.statements, service.read = 0, []
    for path in (
        "/",
        "/openstack/latest/meta_data.json",
        "/latest/user-data",
        "/openstack/latest/password",
    ):
        assert service.request(path).status_code == 200
    assert service.statements == 4
    assert service.reads == 0
    service.time += 15
    assert service.request("/").status_code == 200
    assert service.reads == 1


KEYS = "/openstack/latest/meta_data.json"


@pytest.mark.parametrize(
    ("method", "path", "body", "text"),
    [
        ("POST", "/action", {"rebuild": {"imageRef": IMAGE, "key_name": "new"}}, "ssh-rsa new"),
        ("POST", "/action", {"rebuild": {"imageRef": IMAGE, "hostname": "fresh"}}, "fresh"),
        (
            "POST",
            "/action",
            {"rebuild": {"imageRef": IMAGE, "metadata": {"k": "after-it"}}},
            "after-it",
        ),
        ("PUT", "", {"server": {"name": "fresh"}}, "fresh"),
        ("PUT", "", {"server": {"hostname": "fresh"}}, "fresh"),
        ("POST", "/metadata", {"metadata": {"k": "after-it"}}, "after-it"),
    ],
)
def test_metadata_shows_change_of_server_at_once(
    service: Service, method: str, path: str, body: dict[str, Any], text: str
) -> None:
    row = {"user_id": "u1", "name": "new", "type": "ssh", "fingerprint": "f"}
    key = {**row, "public_key": "ssh-rsa new"}
    service.cloud.store.write(lambda tx: keypairs.create(tx, key))
    assert text not in service.request(KEYS).text
    answer = service.cloud.call(method, f"/servers/{service.server}{path}", body, mv="2.90")
    assert answer.status_code in (200, 202), answer.text
    assert text in service.request(KEYS).text


def test_metadata_shows_user_data_of_rebuild_at_once(service: Service) -> None:
    assert service.request("/latest/user-data").content == USER_DATA
    body = {"rebuild": {"imageRef": IMAGE, "user_data": base64.b64encode(b"new").decode()}}
    path = f"/servers/{service.server}/action"
    assert service.cloud.call("POST", path, body, mv="2.57").status_code == 202
    assert service.request("/latest/user-data").content == b"new"


def test_metadata_is_refused_to_other_host_at_once_when_move_ends(service: Service) -> None:
    home, cloud = service.find_host(), service.cloud
    add_migration(
        cloud, status="running", server_id=service.server, source_host=home, dest_host="another"
    )
    assert status_for_host(service, "another") == 200
    cloud.change(schema.migrations, schema.migrations.c.server_id == service.server, status="error")
    assert status_for_host(service, "another") == 404


def test_metadata_password_is_empty_at_once_after_clear(service: Service) -> None:
    path = "/openstack/latest/password"
    assert service.request(path, "POST", b"secret").status_code == 200
    assert service.request(path).text == "secret"
    answer = service.cloud.call("DELETE", f"/servers/{service.server}/os-server-password")
    assert answer.status_code == 204
    assert service.request(path).text == ""


def test_metadata_accepts_address_of_new_interface_at_once(service: Service) -> None:
    assert service.request("/").status_code == 200
    assert service.request("/", X_Forwarded_For=OTHERS).status_code == 404
    port = Interface("port2", addresses=[{"address": OTHERS, "version": 4, "prefix": 24}])
    service.cloud.store.write(
        lambda tx: actions.update_servers(tx, {service.server: {"interfaces": [to_wire(port)]}})
    )
    assert service.request("/", X_Forwarded_For=OTHERS).status_code == 200
    assert service.request("/", X_Forwarded_For=ADDRESS).status_code == 404


def test_metadata_reads_server_at_each_request_without_cache(
    make_service: Callable[..., Service],
) -> None:
    service = make_service(seconds=0)
    service.statements = 0
    assert [service.request("/").status_code for _ in range(3)] == [200] * 3
    assert service.statements == 3


def test_metadata_cache_evicts_guest_when_full(make_service: Callable[..., Service]) -> None:
    service = make_service(max_guests=2)
    servers = [service.create_server(ADDRESS) for _ in range(3)]
    service.read = []
    assert [
        service.request("/", server=server).status_code for server in servers + servers[1:]
    ] == [200] * 5
    assert service.reads == 3
    assert service.request("/", server=servers[0]).status_code == 200
    # The third guest evicted the first.
    assert service.reads == 4


def test_metadata_password_can_be_posted_once_until_cleared(service: Service) -> None:
    path = "/openstack/2013-04-04/password"
    assert service.request(path).text == ""
    answer = service.request(path, "POST", b"c2VhbGVk")
    assert (answer.status_code, answer.content) == (200, b"")
    assert service.request(path).text == "c2VhbGVk"
    assert service.request(path, "POST", b"other").status_code == 409
    assert service.cloud.call("GET", f"/servers/{service.server}/os-server-password").json == {
        "password": "c2VhbGVk"
    }
    assert (
        service.cloud.call("DELETE", f"/servers/{service.server}/os-server-password").status_code
        == 204
    )
    assert service.request(path, "POST", b"another").status_code == 200
    assert (service.request(path).text, service.password()) == ("another", "another")


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"x" * 1020, 200),
        (b"x" * 1021, 400),
        ("é".encode() * 510, 200),
        (b"", 400),
        (b"\xff", 400),
        (b"a\x00b", 400),
        (b"x" * 1_000_000, 400),
    ],
)
def test_metadata_password_limits_length_and_characters(
    service: Service, body: bytes, status: int
) -> None:
    assert service.request("/openstack/latest/password", "POST", body).status_code == status
    assert service.password() == (body.decode() if status == 200 else None)


@pytest.mark.parametrize(
    ("path", "method", "allowed"),
    [
        ("/", "POST", "GET, HEAD"),
        ("/latest/meta-data/hostname", "PUT", "GET, HEAD"),
        ("/openstack/latest/meta_data.json", "DELETE", "GET, HEAD"),
        ("/", "OPTIONS", "GET, HEAD"),
        ("/openstack/latest/password", "PUT", "GET, HEAD, POST"),
        ("/openstack/latest/password", "DELETE", "GET, HEAD, POST"),
    ],
)
def test_metadata_method_not_allowed_returns_405_with_allow(
    service: Service, path: str, method: str, allowed: str
) -> None:
    answer = service.request(path, method)
    assert (answer.status_code, answer.headers["allow"]) == (405, allowed)


def test_metadata_rate_limit_of_one_guest_does_not_affect_others(
    make_service: Callable[..., Service], caplog: pytest.LogCaptureFixture
) -> None:
    service = make_service(rate=50)
    other = service.create_server(OTHERS)
    statuses = []
    # The requests take three seconds.
    for number in range(3_000):
        service.time = 100 + number / 1000
        answer = service.request("/latest/meta-data/hostname")
        statuses.append(answer.status_code)
        if number == 999:
            assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
            assert service.request("/", server=other, X_Forwarded_For=OTHERS).status_code == 200
    assert set(statuses) == {200, 429}
    # 50 requests pass at once, and then 50 a second.
    assert 190 <= statuses.count(200) <= 200
    warnings = logged_fields(caplog, "a server exceeds [metadata] rate")
    assert 3 <= len(warnings) <= 4
    assert all(fields == {"server": service.server} for fields in warnings)
    service.time += 1
    assert service.request("/").status_code == 200


def test_metadata_with_wrong_signature_does_not_use_rate_of_guest(
    make_service: Callable[..., Service],
) -> None:
    service = make_service(rate=1)
    for _ in range(5):
        assert service.request("/", X_Instance_ID_Signature="0" * 64).status_code == 403
    assert len(service.rate) == 0
    assert [service.request("/").status_code for _ in range(2)] == [200, 429]


def test_rate_limiter_drops_idle_keys() -> None:
    time = [0.0]
    rate = RateLimiter(5, lambda: time[0])
    for number in range(MOST_RATES):
        rate.take(str(number))
    time[0] = 2.0
    rate.take("new")
    assert len(rate) == 1


def test_metadata_returns_503_when_database_fails_and_500_for_bad_row(
    service: Service, tmp_path: Path
) -> None:
    service.cloud.change(
        schema.servers, schema.servers.c.id == service.server, flavor="not a flavor"
    )
    assert service.request("/").status_code == 500
    with service.cloud.store.begin() as tx:
        tx.exec_driver_sql("ALTER TABLE servers RENAME TO elsewhere")
    answer = service.request("/")
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")


def test_metadata_refusal_is_logged_as_warning(
    service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        service.request("/", X_Tenant_ID=OTHER)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    [fields] = logged_fields(caplog, "a request is refused")
    assert fields["server"] == service.server and "another project" in str(fields["problem"])


# --- dynamic vendor data ---
VENDOR_DATA = "/openstack/latest/vendor_data2.json"


class Services:
    """Vendor data services of the operator. They answer when ``go`` is set."""

    def __init__(self) -> None:
        self.queries: list[dict[str, Any]] = []
        self.is_down, self.go = False, threading.Event()
        self.go.set()

    def of(self, facts: dict[str, Any]) -> dict[str, Any]:
        self.queries.append(facts)
        assert self.go.wait(30)
        if self.is_down:
            raise errors.Unavailable("The vendor data of cmdb cannot be read.")
        return {"cmdb": {"rack": len(self.queries)}}


def test_vendor_data_is_fetched_once_per_cached_guest(
    make_service: Callable[..., Service],
) -> None:
    services = Services()
    service = make_service(dynamic=services)
    assert service.request("/openstack/latest/meta_data.json").status_code == 200
    assert services.queries == []
    for _ in range(2):
        assert service.request(VENDOR_DATA).json == {"static": {"ntp": "n1"}, "cmdb": {"rack": 1}}
    assert service.request("/openstack/2018-08-27/vendor_data2.json").json["cmdb"] == {"rack": 1}
    [facts] = services.queries
    assert facts == {
        "project-id": PROJECT,
        "instance-id": service.server,
        "image-id": IMAGE,
        "hostname": "web-1",
        "user-data": base64.b64encode(USER_DATA).decode(),
        "metadata": {"a": "b"},
        "boot-roles": "member,reader",
    }
    service.time += 15
    assert service.request(VENDOR_DATA).json["cmdb"] == {"rack": 2}


def test_vendor_data_returns_503_and_is_fetched_again_after_failure(
    make_service: Callable[..., Service],
) -> None:
    services = Services()
    service, services.is_down = make_service(dynamic=services), True
    answer = service.request(VENDOR_DATA)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    services.is_down = False
    assert service.request(VENDOR_DATA).json["cmdb"] == {"rack": 2}


def test_vendor_data_returns_503_while_another_thread_fetches_same_guest(
    make_service: Callable[..., Service],
) -> None:
    services = Services()
    service = make_service(dynamic=services)
    services.go.clear()
    first = threading.Thread(target=service.request, args=(VENDOR_DATA,))
    first.start()
    await_true(lambda: services.queries, 10, "the services are asked")
    assert service.request(VENDOR_DATA).status_code == 503
    assert service.request("/openstack/latest/meta_data.json").status_code == 200
    services.go.set()
    first.join(10)
    assert service.request(VENDOR_DATA).json["cmdb"] == {"rack": 1}
