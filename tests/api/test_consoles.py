# SPDX-License-Identifier: Apache-2.0
"""Consoles over HTTP: their URLs in every version's shape, what is refused, and what a token stands
for."""

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
    """Hosts that open consoles when they are there."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, dict[str, Any]]] = []
        self.silent = False
        self.kinds = ["vnc", "spice", "serial"]
        self.tls_port: int | None = None

    def query(
        self, host: str, verb: str, arguments: dict[str, Any], timeout: float = 10
    ) -> dict[str, Any]:
        self.asked.append((host, verb, arguments))
        if self.silent:
            raise errors.NoAnswer(f"{host} did not answer")
        if verb == "console_kinds":
            return {"kinds": self.kinds}
        if arguments["kind"] == "spice-direct":
            return {"host": "192.0.2.7", "port": 41235, "tls_port": self.tls_port}
        return {"host": "192.0.2.7", "port": 41234, "secret": "s" * 43}


@pytest.fixture
def hosts(cloud: Cloud) -> Hosts:
    made = cloud.services.agents = Hosts()
    return made


@pytest.fixture
def with_spice(cloud: Cloud, hosts: Hosts) -> None:
    """The operator has switched SPICE on at host1."""
    switch_spice(cloud, True)


def switch_spice(cloud: Cloud, on: bool) -> None:
    cloud.change(schema.hosts, schema.hosts.c.name == "host1", facts={"spice": on})


@pytest.fixture
def server(cloud: Cloud) -> str:
    """One that runs on host1, with its guest's record."""
    made = cloud.create()
    cloud.rest(made)
    cloud.store.write(lambda tx: guests.add(tx, [{"server_id": made, "host": "host1", "fence": 1}]))
    return made


def ask(cloud: Cloud, server: str, body: Any, mv: str = "2.6", token: str = "user") -> Any:
    return cloud.call("POST", f"/servers/{server}/remote-consoles", body, mv=mv, token=token)


def act(cloud: Cloud, server: str, key: str, kind: Any, mv: str = "2.1") -> Any:
    return cloud.call("POST", f"/servers/{server}/action", {key: {"type": kind}}, mv=mv)


def token_in(url: str) -> str:
    return unquote(url).rpartition("token=")[2]


# --- URLs ---
@pytest.mark.parametrize("mv", ["2.6", "2.7", "2.8", "2.98", "2.99", "2.104"])
def test_remote_consoles(cloud: Cloud, server: str, mv: str) -> None:
    screen, terminal = ask(cloud, server, VNC, mv), ask(cloud, server, SERIAL, mv)
    assert (screen.status_code, terminal.status_code) == (200, 200), screen.text
    found = screen.json["remote_console"]
    assert {**found, "url": ""} == {"protocol": "vnc", "type": "novnc", "url": ""}
    assert found["url"].startswith("http://127.0.0.1:6080/vnc_lite.html?path=%3Ftoken%3D")
    assert terminal.json["remote_console"]["url"].startswith("ws://127.0.0.1:6080/?token=")
    records = [
        cloud.store.read(lambda tx, url=url: console_tokens.find(tx, token_in(url)))
        for url in (found["url"], terminal.json["remote_console"]["url"])
    ]
    assert [(row.server_id, row.host, row.kind, row.user_id) for row in records if row] == [
        (server, "host1", "novnc", "u1"),
        (server, "host1", "serial", "u1"),
    ]


def test_the_callers_token_is_kept_sealed(make_cloud: Callable[..., Cloud]) -> None:
    cloud = make_cloud(secret_key="a long random text")
    made = cloud.create()
    cloud.rest(made)
    cloud.store.write(lambda tx: guests.add(tx, [{"server_id": made, "host": "host1", "fence": 1}]))
    assert ask(cloud, made, VNC).status_code == 200
    [row] = cloud.rows(schema.console_tokens)
    assert cloud.vault is not None and cloud.vault.open(row.caller) == {"token": "user"}
    assert "user" not in row.caller


@pytest.mark.parametrize("mv", ["2.1", "2.5"])
@pytest.mark.parametrize(
    ("key", "kind", "begins"),
    [
        ("os-getVNCConsole", "novnc", "http://127.0.0.1:6080/vnc_lite.html?path=%3Ftoken%3D"),
        ("os-getSerialConsole", "serial", "ws://127.0.0.1:6080/?token="),
    ],
)
def test_actions_before_2_6(
    cloud: Cloud, server: str, mv: str, key: str, kind: str, begins: str
) -> None:
    answer = act(cloud, server, key, kind, mv)
    assert answer.status_code == 200 and answer.json["console"]["type"] == kind
    assert answer.json["console"]["url"].startswith(begins)
    assert set(answer.json["console"]) == {"type", "url"}


@pytest.mark.parametrize(
    ("url", "kind", "wanted"),
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
def test_console_url_leads_novnc_to_the_websocket(url: str, kind: str, wanted: str) -> None:
    made = address(url, kind, "T")
    assert made == wanted
    if kind == "novnc":  # the page joins scheme, host and path
        [path] = parse_qs(urlsplit(made).query)["path"]
        assert f"{urlsplit(url).path.rstrip('/')}/?token=T" == f"/{path}"


# --- SPICE ---
@pytest.mark.parametrize("mv", ["2.1", "2.5", "2.6", "2.98", "2.99", "2.104"])
def test_spice_of_a_guest_that_has_it(
    cloud: Cloud, server: str, hosts: Hosts, with_spice: None, mv: str
) -> None:
    if mv in ("2.1", "2.5"):
        answer = act(cloud, server, "os-getSPICEConsole", "spice-html5", mv)
        url = answer.json["console"]["url"]
        assert answer.json == {"console": {"type": "spice-html5", "url": url}}
    else:
        answer = ask(cloud, server, SPICE, mv)
        url = answer.json["remote_console"]["url"]
        assert answer.json == {"remote_console": {**SPICE["remote_console"], "url": url}}
    assert answer.status_code == 200
    assert url.startswith("http://127.0.0.1:6080/spice/spice_auto.html?path=%3Ftoken%3D")
    row = cloud.store.read(lambda tx: console_tokens.find(tx, token_in(url)))
    assert row is not None and (row.server_id, row.kind) == (server, "spice-html5")
    assert hosts.asked == [("host1", "console_kinds", {"server": server})]


def test_spice_tokens_say_where_a_channel_is(
    cloud: Cloud, server: str, hosts: Hosts, with_spice: None
) -> None:
    token = token_in(ask(cloud, server, SPICE).json["remote_console"]["url"])
    assert show(cloud, token, "2.99").json["console"]["internal_access_path"] == "s" * 43
    assert hosts.asked[-1] == ("host1", "console", {"server": server, "kind": "spice"})


def test_no_spice_of_a_guest_that_was_made_without(
    cloud: Cloud, server: str, hosts: Hosts, with_spice: None
) -> None:
    hosts.kinds = ["vnc", "serial"]
    answer = ask(cloud, server, SPICE)
    assert answer.status_code == 400
    assert answer.json["badRequest"]["message"] == "Unavailable console type spice."
    assert cloud.rows(schema.console_tokens) == []


@pytest.mark.parametrize("on", [False, None])
def test_no_spice_where_the_operator_has_not_switched_it_on(
    cloud: Cloud, server: str, hosts: Hosts, on: bool | None
) -> None:
    if on is not None:
        switch_spice(cloud, on)
    for values in ({}, {"power_state": 4}):
        cloud.rest(server, **values)
        answer = ask(cloud, server, SPICE)
        assert answer.status_code == 400
        assert answer.json["badRequest"]["message"] == "Unavailable console type spice-html5."
    assert hosts.asked == []


@pytest.mark.parametrize(
    ("values", "silent", "status"),
    [
        ({"host": None}, False, 409),
        ({"power_state": 4}, False, 409),
        ({"vm_state": "paused", "power_state": 3}, False, 200),
        ({}, True, 409),
    ],
)
def test_spice_in_the_states_of_a_server(
    cloud: Cloud,
    server: str,
    hosts: Hosts,
    with_spice: None,
    values: dict[str, Any],
    silent: bool,
    status: int,
) -> None:
    cloud.rest(server, **values)
    hosts.silent = silent
    assert ask(cloud, server, SPICE).status_code == status


DIRECT = {"remote_console": {"protocol": "spice", "type": "spice-direct"}}


@pytest.mark.parametrize("tls_port", [None, 41235])
def test_spice_direct_leads_to_the_operators_proxy(
    make_cloud: Callable[..., Cloud], tls_port: int | None
) -> None:
    cloud = make_cloud(spice_direct_url="https://spice.example/nova")
    hosts = cloud.services.agents = Hosts()
    hosts.tls_port = tls_port
    switch_spice(cloud, True)
    server = cloud.create()
    cloud.rest(server)
    cloud.store.write(
        lambda tx: guests.add(tx, [{"server_id": server, "host": "host1", "fence": 1}])
    )
    told = ask(cloud, server, DIRECT, "2.99").json["remote_console"]
    assert told["url"].startswith("https://spice.example/nova?token=")
    shown = show(cloud, token_in(told["url"]), "2.99").json["console"]
    assert shown == {
        "instance_uuid": server,
        "host": "192.0.2.7",
        "port": 41235,
        "tls_port": tls_port,
        "internal_access_path": None,
    }
    assert "tls_port" not in show(cloud, token_in(told["url"]), "2.98").json["console"]
    assert hosts.asked[-1] == ("host1", "console", {"server": server, "kind": "spice-direct"})
    switch_spice(cloud, False)
    assert ask(cloud, server, DIRECT, "2.99").status_code == 400


def test_spice_direct_needs_a_proxy_and_its_version(
    cloud: Cloud, server: str, hosts: Hosts, with_spice: None
) -> None:
    answer = ask(cloud, server, DIRECT, "2.99")
    assert answer.status_code == 400
    assert answer.json["badRequest"]["message"] == "Unavailable console type spice-direct."
    assert ask(cloud, server, DIRECT, "2.98").status_code == 400
    assert cloud.rows(schema.console_tokens) == []


# --- what is not there ---
@pytest.mark.parametrize(
    ("protocol", "kind", "mv", "says"),
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
def test_kinds_that_there_are_not(
    cloud: Cloud, server: str, protocol: str, kind: str, mv: str, says: str
) -> None:
    answer = ask(cloud, server, {"remote_console": {"protocol": protocol, "type": kind}}, mv)
    assert answer.status_code == 400 and says in answer.json["badRequest"]["message"]
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
def test_malformed_bodies(cloud: Cloud, server: str, body: Any) -> None:
    assert ask(cloud, server, body).status_code == 400


@pytest.mark.parametrize(
    ("key", "kind", "status"),
    [
        ("os-getSPICEConsole", "spice-html5", 400),
        ("os-getVNCConsole", "xvpvnc", 400),
        ("os-getVNCConsole", "x", 400),
        ("os-getSerialConsole", None, 400),
    ],
)
def test_actions_that_are_refused(
    cloud: Cloud, server: str, key: str, kind: Any, status: int
) -> None:
    assert act(cloud, server, key, kind).status_code == status
    assert act(cloud, server, key, kind, "2.6").status_code == 404


def test_versions_bound_the_operation(cloud: Cloud, server: str) -> None:
    assert ask(cloud, server, VNC, "2.5").status_code == 404
    assert act(cloud, server, "os-getVNCConsole", "novnc", "2.6").status_code == 404


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
def test_what_does_not_run_has_none(cloud: Cloud, server: str, values: dict[str, Any]) -> None:
    cloud.rest(server, **values)
    for answer in (ask(cloud, server, VNC), act(cloud, server, "os-getVNCConsole", "novnc")):
        assert answer.status_code == 409
        assert answer.json["conflictingRequest"]["message"] == f"Instance {server} is not ready"


def test_a_guest_that_is_being_removed_has_none(cloud: Cloud, server: str) -> None:
    cloud.store.write(lambda tx: guests.add_debt(tx, server, 2))
    assert ask(cloud, server, VNC).status_code == 409


@pytest.mark.parametrize(
    "values",
    [
        {"vm_state": "paused", "power_state": 3},
        {"vm_state": "rescued"},
        {"vm_state": "error"},
        {"task_state": "rebooting", "locked": True},
    ],
)
def test_whatever_runs_has_one(cloud: Cloud, server: str, values: dict[str, Any]) -> None:
    cloud.rest(server, **values)
    assert ask(cloud, server, VNC).status_code == 200


@pytest.mark.parametrize(
    ("token", "status"), [("reader", 403), ("stranger", 404), ("admin", 200), ("nobody", 403)]
)
def test_who_may(cloud: Cloud, server: str, token: str, status: int) -> None:
    assert ask(cloud, server, VNC, token=token).status_code == status


def test_no_such_server(cloud: Cloud) -> None:
    assert ask(cloud, "6a1f9e5c-0c4b-4d53-9f1e-2f5f6f0a7b11", VNC).status_code == 404


# --- tokens, for proxies ---
def show(cloud: Cloud, token: str, mv: str, query: str = "", caller: str = "admin") -> Any:
    return cloud.call("GET", f"/os-console-auth-tokens/{token}{query}", mv=mv, token=caller)


@pytest.mark.parametrize("mv", ["2.31", "2.98", "2.99", "2.104"])
def test_a_token_says_where_its_console_is(
    cloud: Cloud, server: str, hosts: Hosts, mv: str
) -> None:
    token = token_in(ask(cloud, server, VNC).json["remote_console"]["url"])
    wanted = {
        "instance_uuid": server,
        "host": "192.0.2.7",
        "port": 41234,
        "internal_access_path": "s" * 43,
    }
    for _ in range(2):  # being looked at does not use it up
        answer = show(cloud, token, mv)
        assert (answer.status_code, answer.json) == (200, {"console": wanted})
    assert hosts.asked[0] == ("host1", "console", {"server": server, "kind": "vnc"})


@pytest.mark.parametrize("mv", ["2.1", "2.30"])
def test_tokens_before_2_31_were_of_rdp(cloud: Cloud, server: str, mv: str) -> None:
    token = token_in(ask(cloud, server, VNC).json["remote_console"]["url"])
    assert show(cloud, token, mv).status_code == 400
    assert show(cloud, token, mv, caller="user").status_code == 403


def test_a_token_that_is_none_is_not_found(cloud: Cloud, server: str, hosts: Hosts) -> None:
    token = token_in(ask(cloud, server, VNC).json["remote_console"]["url"])
    assert show(cloud, "x" * 43, "2.31").status_code == 404
    assert show(cloud, token, "2.31", caller="user").status_code == 403
    cloud.store.write(lambda tx: console_tokens.use(tx, token))
    assert show(cloud, token, "2.31").json["itemNotFound"]["message"] == "Token not found"
    assert hosts.asked == []


def test_a_token_after_delete_is_none(cloud: Cloud, server: str, hosts: Hosts) -> None:
    token = token_in(ask(cloud, server, VNC).json["remote_console"]["url"])
    assert cloud.call("DELETE", f"/servers/{server}").status_code == 204
    cloud.store.write(lambda tx: guests.add_debt(tx, server, 5))  # what the conductor does first
    assert show(cloud, token, "2.31").status_code == 404


def test_a_token_s_query(cloud: Cloud, server: str, hosts: Hosts) -> None:
    token = token_in(ask(cloud, server, VNC).json["remote_console"]["url"])
    assert show(cloud, token, "2.98", "?a=b").status_code == 200
    assert show(cloud, token, "2.99", "?a=b").status_code == 400


def test_a_host_that_is_silent(cloud: Cloud, server: str, hosts: Hosts) -> None:
    token = token_in(ask(cloud, server, VNC).json["remote_console"]["url"])
    hosts.silent = True
    assert show(cloud, token, "2.31").status_code == 409


def test_urls_are_not_hoarded(cloud: Cloud, server: str) -> None:
    for _ in range(console_tokens.UNUSED_PER_SERVER + 5):
        ask(cloud, server, VNC)
    with cloud.store.begin() as tx:
        assert (
            tx.scalar(sa.select(sa.func.count()).select_from(schema.console_tokens))
            == console_tokens.UNUSED_PER_SERVER
        )
