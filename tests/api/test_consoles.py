# SPDX-License-Identifier: Apache-2.0
"""Consoles over HTTP: the URLs in every microversion, the refusals, and the records of tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest
import sqlalchemy as sa

from common.domain import errors
from common.store import schema
from common.store.servers import console_tokens, guests
from compute_api.compute.servers.consoles import address
from tests.api.conftest import Cloud

VNC = {"remote_console": {"protocol": "vnc", "type": "novnc"}}
SPICE = {"remote_console": {"protocol": "spice", "type": "spice-html5"}}
SERIAL = {"remote_console": {"protocol": "serial", "type": "serial"}}


class Hosts:
    """Hosts that open consoles unless they are silent."""

    def __init__(self) -> None:
        self.queries: list[tuple[str, str, dict[str, Any]]] = []
        self.silent = False
        self.kinds = ["vnc", "spice", "serial"]
        self.tls_port: int | None = None

    def query(
        self, host: str, verb: str, arguments: dict[str, Any], timeout: float = 10
    ) -> dict[str, Any]:
        self.queries.append((host, verb, arguments))
        if self.silent:
            raise errors.NoAnswer(f"{host} did not answer")
        if verb == "console_kinds":
            return {"kinds": self.kinds}
        if arguments["kind"] == "spice-direct":
            return {"host": "192.0.2.7", "port": 41235, "tls_port": self.tls_port}
        return {"host": "192.0.2.7", "port": 41234, "secret": "s" * 43}


@pytest.fixture
def hosts(cloud: Cloud) -> Hosts:
    agents = cloud.services.agents = Hosts()
    return agents


@pytest.fixture
def with_spice(cloud: Cloud, hosts: Hosts) -> None:
    """Enable SPICE on host1, as an operator does."""
    switch_spice(cloud, True)


def switch_spice(cloud: Cloud, on: bool) -> None:
    cloud.change(schema.hosts, schema.hosts.c.name == "host1", facts={"spice": on})


@pytest.fixture
def server(cloud: Cloud) -> str:
    """Return the id of a server that runs on host1, with the guest's record."""
    server_id = cloud.create()
    cloud.set_state(server_id)
    cloud.store.write(
        lambda tx: guests.add(tx, [{"server_id": server_id, "host": "host1", "fence": 1}])
    )
    return server_id


def create_console(
    cloud: Cloud, server: str, body: Any, mv: str = "2.6", token: str = "user"
) -> Any:
    return cloud.call("POST", f"/servers/{server}/remote-consoles", body, mv=mv, token=token)


def create_console_by_action(
    cloud: Cloud, server: str, key: str, kind: Any, mv: str = "2.1"
) -> Any:
    return cloud.call("POST", f"/servers/{server}/action", {key: {"type": kind}}, mv=mv)


def token_in(url: str) -> str:
    return unquote(url).rpartition("token=")[2]


# --- URLs ---
@pytest.mark.parametrize("mv", ["2.6", "2.7", "2.8", "2.98", "2.99", "2.104"])
def test_create_remote_console_returns_url_and_stores_its_token(
    cloud: Cloud, server: str, mv: str
) -> None:
    screen, terminal = (
        create_console(cloud, server, VNC, mv),
        create_console(cloud, server, SERIAL, mv),
    )
    assert (screen.status_code, terminal.status_code) == (200, 200), screen.text
    vnc = screen.json["remote_console"]
    assert {**vnc, "url": ""} == {"protocol": "vnc", "type": "novnc", "url": ""}
    assert vnc["url"].startswith("http://127.0.0.1:6080/vnc_lite.html?path=%3Ftoken%3D")
    assert terminal.json["remote_console"]["url"].startswith("ws://127.0.0.1:6080/?token=")
    records = [
        cloud.store.read(lambda tx, url=url: console_tokens.find(tx, token_in(url)))
        for url in (vnc["url"], terminal.json["remote_console"]["url"])
    ]
    assert [(row.server_id, row.host, row.kind, row.user_id) for row in records if row] == [
        (server, "host1", "novnc", "u1"),
        (server, "host1", "serial", "u1"),
    ]


def test_create_remote_console_stores_auth_token_of_caller_encrypted(
    make_cloud: Callable[..., Cloud],
) -> None:
    cloud = make_cloud(secret_key="a long random text")
    server_id = cloud.create()
    cloud.set_state(server_id)
    cloud.store.write(
        lambda tx: guests.add(tx, [{"server_id": server_id, "host": "host1", "fence": 1}])
    )
    assert create_console(cloud, server_id, VNC).status_code == 200
    [row] = cloud.rows(schema.console_tokens)
    assert cloud.vault is not None and cloud.vault.open(row.caller) == {"token": "user"}
    assert "user" not in row.caller


@pytest.mark.parametrize("mv", ["2.1", "2.5"])
@pytest.mark.parametrize(
    ("key", "kind", "prefix"),
    [
        ("os-getVNCConsole", "novnc", "http://127.0.0.1:6080/vnc_lite.html?path=%3Ftoken%3D"),
        ("os-getSerialConsole", "serial", "ws://127.0.0.1:6080/?token="),
    ],
)
def test_console_actions_before_2_6_return_type_and_url(
    cloud: Cloud, server: str, mv: str, key: str, kind: str, prefix: str
) -> None:
    answer = create_console_by_action(cloud, server, key, kind, mv)
    assert answer.status_code == 200 and answer.json["console"]["type"] == kind
    assert answer.json["console"]["url"].startswith(prefix)
    assert set(answer.json["console"]) == {"type", "url"}


@pytest.mark.parametrize(
    ("url", "kind", "expected"),
    [
        ("http://c:6080", "novnc", "http://c:6080/vnc_lite.html?path=%3Ftoken%3DT"),
        (
            "https://c/consoles/",
            "novnc",
            "https://c/consoles/vnc_lite.html?path=consoles%2F%3Ftoken%3DT",
        ),
        ("http://c:6080", "spice-html5", "http://c:6080/spice/spice_auto.html?path=%3Ftoken%3DT"),
        (
            "https://c/consoles",
            "spice-html5",
            "https://c/consoles/spice/spice_auto.html?path=consoles%2F%3Ftoken%3DT",
        ),
        ("http://c:6080", "serial", "ws://c:6080/?token=T"),
        ("https://c/consoles", "serial", "wss://c/consoles/?token=T"),
    ],
)
def test_console_url_of_each_type_contains_websocket_path_with_token(
    url: str, kind: str, expected: str
) -> None:
    console_url = address(url, kind, "T")
    assert console_url == expected
    # noVNC's page joins scheme, host and path.
    if kind == "novnc":
        [path] = parse_qs(urlsplit(console_url).query)["path"]
        assert f"{urlsplit(url).path.rstrip('/')}/?token=T" == f"/{path}"


# --- SPICE ---
@pytest.mark.parametrize("mv", ["2.1", "2.5", "2.6", "2.98", "2.99", "2.104"])
def test_spice_console_returns_url_when_guest_has_spice(
    cloud: Cloud, server: str, hosts: Hosts, with_spice: None, mv: str
) -> None:
    if mv in ("2.1", "2.5"):
        answer = create_console_by_action(cloud, server, "os-getSPICEConsole", "spice-html5", mv)
        url = answer.json["console"]["url"]
        assert answer.json == {"console": {"type": "spice-html5", "url": url}}
    else:
        answer = create_console(cloud, server, SPICE, mv)
        url = answer.json["remote_console"]["url"]
        assert answer.json == {"remote_console": {**SPICE["remote_console"], "url": url}}
    assert answer.status_code == 200
    assert url.startswith("http://127.0.0.1:6080/spice/spice_auto.html?path=%3Ftoken%3D")
    row = cloud.store.read(lambda tx: console_tokens.find(tx, token_in(url)))
    assert row is not None and (row.server_id, row.kind) == (server, "spice-html5")
    assert hosts.queries == [("host1", "console_kinds", {"server": server})]


def test_show_spice_console_token_returns_internal_access_path(
    cloud: Cloud, server: str, hosts: Hosts, with_spice: None
) -> None:
    token = token_in(create_console(cloud, server, SPICE).json["remote_console"]["url"])
    assert show(cloud, token, "2.99").json["console"]["internal_access_path"] == "s" * 43
    assert hosts.queries[-1] == ("host1", "console", {"server": server, "kind": "spice"})


def test_spice_console_returns_400_when_guest_has_no_spice(
    cloud: Cloud, server: str, hosts: Hosts, with_spice: None
) -> None:
    hosts.kinds = ["vnc", "serial"]
    answer = create_console(cloud, server, SPICE)
    assert answer.status_code == 400
    assert answer.json["badRequest"]["message"] == "Unavailable console type spice."
    assert cloud.rows(schema.console_tokens) == []


@pytest.mark.parametrize("on", [False, None])
def test_spice_console_returns_400_when_host_does_not_enable_spice(
    cloud: Cloud, server: str, hosts: Hosts, on: bool | None
) -> None:
    if on is not None:
        switch_spice(cloud, on)
    for values in ({}, {"power_state": 4}):
        cloud.set_state(server, **values)
        answer = create_console(cloud, server, SPICE)
        assert answer.status_code == 400
        assert answer.json["badRequest"]["message"] == "Unavailable console type spice-html5."
    assert hosts.queries == []


@pytest.mark.parametrize(
    ("values", "silent", "status"),
    [
        ({"host": None}, False, 409),
        ({"power_state": 4}, False, 409),
        ({"vm_state": "paused", "power_state": 3}, False, 200),
        ({}, True, 409),
    ],
)
def test_spice_console_needs_running_or_paused_guest_and_answering_host(
    cloud: Cloud,
    server: str,
    hosts: Hosts,
    with_spice: None,
    values: dict[str, Any],
    silent: bool,
    status: int,
) -> None:
    cloud.set_state(server, **values)
    hosts.silent = silent
    assert create_console(cloud, server, SPICE).status_code == status


DIRECT = {"remote_console": {"protocol": "spice", "type": "spice-direct"}}


@pytest.mark.parametrize("tls_port", [None, 41235])
def test_spice_direct_console_returns_url_of_configured_proxy(
    make_cloud: Callable[..., Cloud], tls_port: int | None
) -> None:
    cloud = make_cloud(spice_direct_url="https://spice.example/nova")
    hosts = cloud.services.agents = Hosts()
    hosts.tls_port = tls_port
    switch_spice(cloud, True)
    server = cloud.create()
    cloud.set_state(server)
    cloud.store.write(
        lambda tx: guests.add(tx, [{"server_id": server, "host": "host1", "fence": 1}])
    )
    console = create_console(cloud, server, DIRECT, "2.99").json["remote_console"]
    assert console["url"].startswith("https://spice.example/nova?token=")
    target = show(cloud, token_in(console["url"]), "2.99").json["console"]
    assert target == {
        "instance_uuid": server,
        "host": "192.0.2.7",
        "port": 41235,
        "tls_port": tls_port,
        "internal_access_path": None,
    }
    assert "tls_port" not in show(cloud, token_in(console["url"]), "2.98").json["console"]
    assert hosts.queries[-1] == ("host1", "console", {"server": server, "kind": "spice-direct"})
    switch_spice(cloud, False)
    assert create_console(cloud, server, DIRECT, "2.99").status_code == 400


def test_spice_direct_console_without_proxy_or_before_2_99_returns_400(
    cloud: Cloud, server: str, hosts: Hosts, with_spice: None
) -> None:
    answer = create_console(cloud, server, DIRECT, "2.99")
    assert answer.status_code == 400
    assert answer.json["badRequest"]["message"] == "Unavailable console type spice-direct."
    assert create_console(cloud, server, DIRECT, "2.98").status_code == 400
    assert cloud.rows(schema.console_tokens) == []


# --- refused types ---
@pytest.mark.parametrize(
    ("protocol", "kind", "mv", "message"),
    [
        ("spice", "spice-html5", "2.6", "Unavailable console type spice-html5."),
        ("rdp", "rdp-html5", "2.6", "Unavailable console type rdp-html5."),
        ("mks", "webmks", "2.8", "Unavailable console type webmks."),
        ("spice", "spice-direct", "2.99", "Unavailable console type spice-direct."),
        ("vnc", "xvpvnc", "2.6", "Invalid console type xvpvnc"),
        ("vnc", "serial", "2.6", "Invalid console type serial"),
        ("mks", "webmks", "2.7", "Invalid input for field/attribute protocol"),
        ("spice", "spice-direct", "2.98", "Invalid input for field/attribute type"),
        ("telnet", "novnc", "2.6", "Invalid input for field/attribute protocol"),
    ],
)
def test_create_remote_console_of_unavailable_or_invalid_type_returns_400(
    cloud: Cloud, server: str, protocol: str, kind: str, mv: str, message: str
) -> None:
    answer = create_console(
        cloud, server, {"remote_console": {"protocol": protocol, "type": kind}}, mv
    )
    assert answer.status_code == 400 and message in answer.json["badRequest"]["message"]
    assert cloud.rows(schema.console_tokens) == []


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"remote_console": {}},
        {"remote_console": {"protocol": "vnc"}},
        {"remote_console": {"protocol": "vnc", "type": "novnc", "more": 1}},
    ],
)
def test_create_remote_console_with_malformed_body_returns_400(
    cloud: Cloud, server: str, body: Any
) -> None:
    assert create_console(cloud, server, body).status_code == 400


@pytest.mark.parametrize(
    ("key", "kind", "status"),
    [
        ("os-getSPICEConsole", "spice-html5", 400),
        ("os-getVNCConsole", "xvpvnc", 400),
        ("os-getVNCConsole", "x", 400),
        ("os-getSerialConsole", None, 400),
    ],
)
def test_console_actions_of_unusable_type_return_400_and_404_from_2_6(
    cloud: Cloud, server: str, key: str, kind: Any, status: int
) -> None:
    assert create_console_by_action(cloud, server, key, kind).status_code == status
    assert create_console_by_action(cloud, server, key, kind, "2.6").status_code == 404


def test_remote_consoles_return_404_before_2_6_console_actions_from_2_6(
    cloud: Cloud, server: str
) -> None:
    assert create_console(cloud, server, VNC, "2.5").status_code == 404
    assert (
        create_console_by_action(cloud, server, "os-getVNCConsole", "novnc", "2.6").status_code
        == 404
    )


# --- states and callers ---
@pytest.mark.parametrize(
    "values",
    [
        {"host": None},
        {"power_state": 4},
        {"power_state": 0, "vm_state": "building"},
        {"vm_state": "shelved_offloaded", "host": None, "power_state": 4},
    ],
)
def test_console_of_server_without_running_guest_returns_409(
    cloud: Cloud, server: str, values: dict[str, Any]
) -> None:
    cloud.set_state(server, **values)
    for answer in (
        create_console(cloud, server, VNC),
        create_console_by_action(cloud, server, "os-getVNCConsole", "novnc"),
    ):
        assert answer.status_code == 409
        assert answer.json["conflictingRequest"]["message"] == f"Instance {server} is not ready"


def test_console_of_guest_pending_removal_returns_409(cloud: Cloud, server: str) -> None:
    cloud.store.write(lambda tx: guests.add_removal(tx, server, 2))
    assert create_console(cloud, server, VNC).status_code == 409


@pytest.mark.parametrize(
    "values",
    [
        {"vm_state": "paused", "power_state": 3},
        {"vm_state": "rescued"},
        {"vm_state": "error"},
        {"task_state": "rebooting", "locked": True},
    ],
)
def test_console_of_server_with_running_guest_returns_200(
    cloud: Cloud, server: str, values: dict[str, Any]
) -> None:
    cloud.set_state(server, **values)
    assert create_console(cloud, server, VNC).status_code == 200


@pytest.mark.parametrize(
    ("token", "status"), [("reader", 403), ("stranger", 404), ("admin", 200), ("nobody", 403)]
)
def test_create_remote_console_returns_403_to_reader_404_to_other_project(
    cloud: Cloud, server: str, token: str, status: int
) -> None:
    assert create_console(cloud, server, VNC, token=token).status_code == status


def test_create_remote_console_of_unknown_server_returns_404(cloud: Cloud) -> None:
    assert create_console(cloud, "6a1f9e5c-0c4b-4d53-9f1e-2f5f6f0a7b11", VNC).status_code == 404


# --- tokens, for proxies ---
def show(cloud: Cloud, token: str, mv: str, query: str = "", caller: str = "admin") -> Any:
    return cloud.call("GET", f"/os-console-auth-tokens/{token}{query}", mv=mv, token=caller)


@pytest.mark.parametrize("mv", ["2.31", "2.98", "2.99", "2.104"])
def test_show_console_token_returns_address_of_console(
    cloud: Cloud, server: str, hosts: Hosts, mv: str
) -> None:
    token = token_in(create_console(cloud, server, VNC).json["remote_console"]["url"])
    expected = {
        "instance_uuid": server,
        "host": "192.0.2.7",
        "port": 41234,
        "internal_access_path": "s" * 43,
    }
    # Showing a token does not use the token up.
    for _ in range(2):
        answer = show(cloud, token, mv)
        assert (answer.status_code, answer.json) == (200, {"console": expected})
    assert hosts.queries[0] == ("host1", "console", {"server": server, "kind": "vnc"})


@pytest.mark.parametrize("mv", ["2.1", "2.30"])
def test_show_vnc_console_token_before_2_31_returns_400(cloud: Cloud, server: str, mv: str) -> None:
    token = token_in(create_console(cloud, server, VNC).json["remote_console"]["url"])
    assert show(cloud, token, mv).status_code == 400
    assert show(cloud, token, mv, caller="user").status_code == 403


def test_show_unknown_or_used_console_token_returns_404(
    cloud: Cloud, server: str, hosts: Hosts
) -> None:
    token = token_in(create_console(cloud, server, VNC).json["remote_console"]["url"])
    assert show(cloud, "x" * 43, "2.31").status_code == 404
    assert show(cloud, token, "2.31", caller="user").status_code == 403
    cloud.store.write(lambda tx: console_tokens.use(tx, token))
    assert show(cloud, token, "2.31").json["itemNotFound"]["message"] == "Token not found"
    assert hosts.queries == []


def test_show_console_token_after_server_delete_returns_404(
    cloud: Cloud, server: str, hosts: Hosts
) -> None:
    token = token_in(create_console(cloud, server, VNC).json["remote_console"]["url"])
    assert cloud.call("DELETE", f"/servers/{server}").status_code == 204
    # The conductor does this first.
    cloud.store.write(lambda tx: guests.add_removal(tx, server, 5))
    assert show(cloud, token, "2.31").status_code == 404


def test_show_console_token_refuses_query_parameters_from_2_99(
    cloud: Cloud, server: str, hosts: Hosts
) -> None:
    token = token_in(create_console(cloud, server, VNC).json["remote_console"]["url"])
    assert show(cloud, token, "2.98", "?a=b").status_code == 200
    assert show(cloud, token, "2.99", "?a=b").status_code == 400


def test_show_console_token_of_silent_host_returns_409(
    cloud: Cloud, server: str, hosts: Hosts
) -> None:
    token = token_in(create_console(cloud, server, VNC).json["remote_console"]["url"])
    hosts.silent = True
    assert show(cloud, token, "2.31").status_code == 409


def test_create_remote_console_limits_unused_tokens_per_server(cloud: Cloud, server: str) -> None:
    for _ in range(console_tokens.UNUSED_PER_SERVER + 5):
        create_console(cloud, server, VNC)
    with cloud.store.begin() as tx:
        assert (
            tx.scalar(sa.select(sa.func.count()).select_from(schema.console_tokens))
            == console_tokens.UNUSED_PER_SERVER
        )
