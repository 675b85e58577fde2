# SPDX-License-Identifier: Apache-2.0
"""What guests find at 169.254.169.254, who is refused, and what it costs."""

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
from tests.api.test_migrations import add
from tests.waiting import await_true

SECRET = "a shared secret"
ADDRESS, SECOND, OTHERS = "10.0.0.5", "fd00::5", "10.0.0.6"
USER_DATA = b"#!/bin/sh\necho \xff\n"
TEXT = "text/plain; charset=UTF-8"


class Service:
    """The metadata service over a cloud, with a server that has a port; it counts statements and
    holds the clock."""

    def __init__(
        self,
        cloud: Cloud,
        secret: str = SECRET,
        rate: int = 1000,
        seconds: float = 15,
        most: int = 1000,
        dynamic: Any = None,
    ) -> None:
        self.cloud, self.time, self.statements = cloud, 100.0, 0
        self.read: list[str] = []
        self.server = self.make(ADDRESS, SECOND)
        self.guests = GuestCache(
            cloud.store,
            {"ntp": "n1"},
            Vault("key"),
            seconds,
            lambda: self.time,
            most,
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
        """How often a server's data was read."""
        return sum("user_data" in statement for statement in self.read)

    def make(self, *addresses: str) -> str:
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
        self.cloud.rest(server, interfaces=[to_wire(port)])
        return server

    def ask(
        self,
        path: str,
        method: str = "GET",
        body: bytes | None = None,
        server: str | None = None,
        **headers: str | None,
    ) -> falcon.testing.Result:
        """As the proxy asks; a header given as None is left out."""
        server = server or self.server
        sent = {
            "X-Instance-ID": server,
            "X-Tenant-ID": PROJECT,
            "X-Forwarded-For": ADDRESS,
            "X-Instance-ID-Signature": signature(SECRET, server),
        }
        sent |= {name.replace("_", "-"): value for name, value in headers.items()}  # type: ignore[misc]
        return self.client.simulate_request(
            method,
            path,
            body=body,
            headers={name: value for name, value in sent.items() if value is not None},
        )

    def home(self) -> str:
        """The server's host."""
        return str(
            next(row.host for row in self.cloud.rows(schema.servers) if row.id == self.server)
        )

    def password(self) -> str | None:
        return next(
            row.password for row in self.cloud.rows(schema.servers) if row.id == self.server
        )


@pytest.fixture
def make(cloud: Cloud) -> Iterator[Callable[..., Service]]:
    return lambda **more: Service(cloud, **more)


@pytest.fixture
def service(make: Callable[..., Service]) -> Service:
    return make()


EC2_LIST = "1.0\n2007-01-19\n2007-03-01\n2007-08-29\n2007-10-10\n2007-12-15\n2008-02-01\n2008-09-01\n2009-04-04\nlatest"


@pytest.mark.parametrize(
    ("path", "shown"),
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
def test_lists_and_words(service: Service, path: str, shown: str) -> None:
    told = service.ask(path)
    assert (told.status_code, told.text, told.headers["content-type"]) == (200, shown, TEXT)


# fmt: off
def test_documents(service: Service) -> None:
    told = service.ask("/openstack/latest/meta_data.json")
    assert told.headers["content-type"] == "application/json"
    assert told.json.pop("random_seed") != service.ask("/openstack/latest/meta_data.json").json["random_seed"]
    assert {name: told.json[name] for name in ("uuid", "name", "hostname", "project_id", "meta", "availability_zone")} \
        == {"uuid": service.server, "name": "Web <1>", "hostname": "web-1", "project_id": PROJECT, "meta": {"a": "b"},
            "availability_zone": "nova"}
    assert told.json["devices"][0]["tags"] == ["blue"]
    assert "files" not in told.json and "admin_pass" not in told.json
    assert service.ask("/openstack/latest/vendor_data.json").json == {"ntp": "n1"}
    assert service.ask("/openstack/latest/vendor_data2.json").json == {"static": {"ntp": "n1"}}
    networks = service.ask("/openstack/latest/network_data.json").json
    assert networks["links"][0]["ethernet_mac_address"] == "fa:16:3e:00:00:01"
    assert [network["type"] for network in networks["networks"]] == ["ipv4_dhcp", "ipv6_dhcp"]
    for path in ("/openstack/2012-08-10/user_data", "/openstack/latest/user_data", "/latest/user-data"):
        assert service.ask(path).content == USER_DATA
    head = service.ask("/latest/user-data", "HEAD")
    assert (head.status_code, head.content, head.headers["content-length"]) == (200, b"", str(len(USER_DATA)))
# fmt: on


def test_sealed_user_data_is_told_as_it_was_given(service: Service) -> None:
    kept = Vault("key").seal_text(base64.b64encode(USER_DATA).decode())
    service.cloud.store.write(
        lambda tx: tx.execute(sa.update(schema.servers).values(user_data=kept))
    )
    assert service.ask("/openstack/latest/user_data").content == USER_DATA
    other = Vault("another").seal_text("b2xk")
    service.cloud.store.write(
        lambda tx: tx.execute(sa.update(schema.servers).values(user_data=other))
    )
    service.time += 60
    assert service.ask("/openstack/latest/user_data").status_code == 503


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
def test_what_is_not_there(service: Service, path: str) -> None:
    assert service.ask(path).status_code == 404


def asked_by(service: Service, host: str, key_of: str = "") -> int:
    """The status that the proxy of a host is answered, which signs with its key or another
    host's."""
    key = host_key(SECRET, key_of or host)
    return service.ask(
        "/latest/user-data",
        X_Instance_Host=host,
        X_Instance_ID_Signature=signature(key, service.server),
    ).status_code


def test_a_host_is_believed_for_the_guests_on_it_alone(service: Service) -> None:
    home = service.home()
    assert asked_by(service, home) == 200
    assert asked_by(service, "another") == 404
    assert asked_by(service, home, key_of="another") == 403
    assert asked_by(service, "another") == 404  # also while the guest is remembered
    # what makes a host's key is no proof of a server of that name
    assert (
        service.ask(
            "/", server=f"host {home}", X_Instance_ID_Signature=host_key(SECRET, home)
        ).status_code
        == 404
    )


def test_both_hosts_of_a_move_are_believed_until_it_has_ended(service: Service) -> None:
    home = service.home()
    add(
        service.cloud,
        status="running",
        server_id=service.server,
        source_host=home,
        dest_host="another",
    )
    assert (asked_by(service, home), asked_by(service, "another"), asked_by(service, "third")) == (
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
def test_forged_headers_are_refused_and_logged(
    service: Service,
    caplog: pytest.LogCaptureFixture,
    method: str,
    status: int,
    headers: dict[str, str | None],
) -> None:
    assert service.ask("/latest/meta-data/hostname").status_code == 200
    refused = service.ask("/openstack/latest/password", method, b"stolen", **headers)
    assert refused.status_code == status
    assert service.password() is None
    logged = [record.getMessage() for record in caplog.records if "refused" in record.getMessage()]
    assert len(logged) == 1 and len(logged[0]) < 600
    for text in (*logged, refused.text):
        assert SECRET not in text and signature(SECRET, service.server) not in text


def test_a_signature_is_good_for_its_server_alone(service: Service) -> None:
    other = service.make(OTHERS)
    assert service.ask("/", server=other, X_Forwarded_For=OTHERS).status_code == 200
    assert service.ask("/", server=other).status_code == 404  # at the first one's address
    assert (
        service.ask(
            "/",
            server=other,
            X_Forwarded_For=OTHERS,
            X_Instance_ID_Signature=signature(SECRET, service.server),
        ).status_code
        == 403
    )


@pytest.mark.parametrize("address", [ADDRESS, SECOND, "FD00:0:0::5"])
def test_each_address_of_a_port_is_the_guest(service: Service, address: str) -> None:
    assert service.ask("/latest/meta-data/hostname", X_Forwarded_For=address).text == "web-1"


def test_without_a_secret_nobody_is_answered(make: Callable[..., Service]) -> None:
    service = make(secret="")
    for more in (
        {},
        {"X_Instance_ID_Signature": signature("", service.server)},
        {"X_Instance_ID_Signature": ""},
    ):
        refused = service.ask("/", **more)
        assert refused.status_code == 403 and "proxy_shared_secret" in refused.text


def test_servers_that_are_gone_or_have_no_port(service: Service) -> None:
    unknown = "00000000-0000-0000-0000-000000000000"
    assert service.ask("/", server=unknown).status_code == 404
    gone, bare = service.make(ADDRESS), service.make(ADDRESS)
    service.cloud.change(schema.servers, schema.servers.c.id == gone, deleted=1)
    service.cloud.change(schema.servers, schema.servers.c.id == bare, interfaces=None)
    assert (
        service.ask("/", server=gone).status_code
        == service.ask("/", server=bare).status_code
        == 404
    )
    service.cloud.change(schema.servers, schema.servers.c.id == service.server, deleted=1)
    assert service.ask("/").status_code == 404


def test_remembered_guest_costs_one_statement_without_its_data(service: Service) -> None:
    assert service.ask("/").status_code == 200
    service.statements, service.read = 0, []
    for path in (
        "/",
        "/openstack/latest/meta_data.json",
        "/latest/user-data",
        "/openstack/latest/password",
    ):
        assert service.ask(path).status_code == 200
    assert service.statements == 4
    assert service.reads == 0
    service.time += 15
    assert service.ask("/").status_code == 200
    assert service.reads == 1


KEYS = "/openstack/latest/meta_data.json"


@pytest.mark.parametrize(
    ("method", "path", "body", "shown"),
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
    service: Service, method: str, path: str, body: dict[str, Any], shown: str
) -> None:
    row = {"user_id": "u1", "name": "new", "type": "ssh", "fingerprint": "f"}
    key = {**row, "public_key": "ssh-rsa new"}
    service.cloud.store.write(lambda tx: keypairs.create(tx, key))
    assert shown not in service.ask(KEYS).text
    answer = service.cloud.call(method, f"/servers/{service.server}{path}", body, mv="2.90")
    assert answer.status_code in (200, 202), answer.text
    assert shown in service.ask(KEYS).text


def test_user_data_of_rebuild_is_shown_at_once(service: Service) -> None:
    assert service.ask("/latest/user-data").content == USER_DATA
    body = {"rebuild": {"imageRef": IMAGE, "user_data": base64.b64encode(b"new").decode()}}
    path = f"/servers/{service.server}/action"
    assert service.cloud.call("POST", path, body, mv="2.57").status_code == 202
    assert service.ask("/latest/user-data").content == b"new"


def test_host_of_ended_move_is_refused_at_once(service: Service) -> None:
    home, cloud = service.home(), service.cloud
    add(cloud, status="running", server_id=service.server, source_host=home, dest_host="another")
    assert asked_by(service, "another") == 200
    cloud.change(schema.migrations, schema.migrations.c.server_id == service.server, status="error")
    assert asked_by(service, "another") == 404


def test_cleared_password_is_gone_at_once(service: Service) -> None:
    path = "/openstack/latest/password"
    assert service.ask(path, "POST", b"secret").status_code == 200
    assert service.ask(path).text == "secret"
    cleared = service.cloud.call("DELETE", f"/servers/{service.server}/os-server-password")
    assert cleared.status_code == 204
    assert service.ask(path).text == ""


def test_an_interface_that_was_just_attached_is_known_at_once(service: Service) -> None:
    assert service.ask("/").status_code == 200
    assert service.ask("/", X_Forwarded_For=OTHERS).status_code == 404
    port = Interface("port2", addresses=[{"address": OTHERS, "version": 4, "prefix": 24}])
    service.cloud.store.write(
        lambda tx: actions.update_servers(tx, {service.server: {"interfaces": [to_wire(port)]}})
    )
    assert service.ask("/", X_Forwarded_For=OTHERS).status_code == 200
    assert service.ask("/", X_Forwarded_For=ADDRESS).status_code == 404


def test_every_request_reads_when_nothing_is_remembered(make: Callable[..., Service]) -> None:
    service = make(seconds=0)
    service.statements = 0
    assert [service.ask("/").status_code for _ in range(3)] == [200] * 3
    assert service.statements == 3


def test_as_many_are_remembered_as_there_is_room_for(make: Callable[..., Service]) -> None:
    service = make(most=2)
    servers = [service.make(ADDRESS) for _ in range(3)]
    service.read = []
    assert [service.ask("/", server=server).status_code for server in servers + servers[1:]] == [
        200
    ] * 5
    assert service.reads == 3
    assert service.ask("/", server=servers[0]).status_code == 200
    assert service.reads == 4  # the one that was forgotten for the third


def test_a_guest_posts_its_password_once(service: Service) -> None:
    path = "/openstack/2013-04-04/password"
    assert service.ask(path).text == ""
    posted = service.ask(path, "POST", b"c2VhbGVk")
    assert (posted.status_code, posted.content) == (200, b"")
    assert service.ask(path).text == "c2VhbGVk"
    assert service.ask(path, "POST", b"other").status_code == 409
    assert service.cloud.call("GET", f"/servers/{service.server}/os-server-password").json == {
        "password": "c2VhbGVk"
    }
    assert (
        service.cloud.call("DELETE", f"/servers/{service.server}/os-server-password").status_code
        == 204
    )
    assert service.ask(path, "POST", b"another").status_code == 200
    assert (service.ask(path).text, service.password()) == ("another", "another")


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
def test_bounds_of_a_password(service: Service, body: bytes, status: int) -> None:
    assert service.ask("/openstack/latest/password", "POST", body).status_code == status
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
def test_methods(service: Service, path: str, method: str, allowed: str) -> None:
    refused = service.ask(path, method)
    assert (refused.status_code, refused.headers["allow"]) == (405, allowed)


def test_guest_in_a_loop_takes_nothing_from_other_guests(
    make: Callable[..., Service], caplog: pytest.LogCaptureFixture
) -> None:
    service = make(rate=50)
    other = service.make(OTHERS)
    passed = []
    for number in range(3_000):  # in three seconds
        service.time = 100 + number / 1000
        answer = service.ask("/latest/meta-data/hostname")
        passed.append(answer.status_code)
        if number == 999:
            assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
            assert service.ask("/", server=other, X_Forwarded_For=OTHERS).status_code == 200
    assert set(passed) == {200, 429}
    assert 190 <= passed.count(200) <= 200  # 50 at once, then 50 a second
    assert (
        3 <= len([record for record in caplog.records if "exceeds [metadata] rate" in record.getMessage()]) <= 4
    )
    service.time += 1
    assert service.ask("/").status_code == 200


def test_who_is_not_believed_uses_up_nobodys_rate(make: Callable[..., Service]) -> None:
    service = make(rate=1)
    for _ in range(5):
        assert service.ask("/", X_Instance_ID_Signature="0" * 64).status_code == 403
    assert len(service.rate) == 0
    assert [service.ask("/").status_code for _ in range(2)] == [200, 429]


def test_quiet_guests_are_forgotten() -> None:
    time = [0.0]
    rate = RateLimiter(5, lambda: time[0])
    for number in range(MOST_RATES):
        rate.take(str(number))
    time[0] = 2.0
    rate.take("new")
    assert len(rate) == 1


def test_a_database_that_does_not_answer_is_a_503(service: Service, tmp_path: Path) -> None:
    service.cloud.change(
        schema.servers, schema.servers.c.id == service.server, flavor="not a flavor"
    )
    assert service.ask("/").status_code == 500
    with service.cloud.store.begin() as tx:
        tx.exec_driver_sql("ALTER TABLE servers RENAME TO elsewhere")
    silent = service.ask("/")
    assert (silent.status_code, silent.headers["retry-after"]) == (503, "1")


def test_refusals_are_warnings(service: Service, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        service.ask("/", X_Tenant_ID=OTHER)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert service.server in caplog.text and "another project" in caplog.text


# --- dynamic vendor data ---
VENDOR_DATA = "/openstack/latest/vendor_data2.json"


class Services:
    """The operator's services; they answer when ``go`` is set."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.is_down, self.go = False, threading.Event()
        self.go.set()

    def of(self, facts: dict[str, Any]) -> dict[str, Any]:
        self.asked.append(facts)
        assert self.go.wait(30)
        if self.is_down:
            raise errors.Unavailable("The vendor data of cmdb cannot be had.")
        return {"cmdb": {"rack": len(self.asked)}}


def test_vendor_data_is_requested_while_its_guest_is_forgotten(
    make: Callable[..., Service],
) -> None:
    services = Services()
    service = make(dynamic=services)
    assert service.ask("/openstack/latest/meta_data.json").status_code == 200
    assert services.asked == []
    for _ in range(2):
        assert service.ask(VENDOR_DATA).json == {"static": {"ntp": "n1"}, "cmdb": {"rack": 1}}
    assert service.ask("/openstack/2018-08-27/vendor_data2.json").json["cmdb"] == {"rack": 1}
    [facts] = services.asked
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
    assert service.ask(VENDOR_DATA).json["cmdb"] == {"rack": 2}


def test_a_service_that_must_answer_and_does_not_is_asked_again(
    make: Callable[..., Service],
) -> None:
    services = Services()
    service, services.is_down = make(dynamic=services), True
    told = service.ask(VENDOR_DATA)
    assert (told.status_code, told.headers["retry-after"]) == (503, "1")
    services.is_down = False
    assert service.ask(VENDOR_DATA).json["cmdb"] == {"rack": 2}


def test_one_guest_keeps_one_thread_waiting_for_services(make: Callable[..., Service]) -> None:
    services = Services()
    service = make(dynamic=services)
    services.go.clear()
    first = threading.Thread(target=service.ask, args=(VENDOR_DATA,))
    first.start()
    await_true(lambda: services.asked, 10, "the services are asked")
    assert service.ask(VENDOR_DATA).status_code == 503
    assert service.ask("/openstack/latest/meta_data.json").status_code == 200
    services.go.set()
    first.join(10)
    assert service.ask(VENDOR_DATA).json["cmdb"] == {"rack": 1}
