# SPDX-License-Identifier: Apache-2.0
"""The console service between a websocket client and the relay of an agent, with real sockets."""

from __future__ import annotations

import http.client
import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from common.domain import errors
from common.domain.models import Flavor, GuestSpec
from common.security.vault import Vault
from common.store import schema
from common.store.engine import Store
from common.store.servers import console_tokens, guests
from compute_agent.consoles.consoles import Consoles
from compute_agent.virt.memory.driver import MemoryDriver
from compute_agent.virt.memory.state.host import MemoryHost
from compute_agent.virt.memory.state.script import QUIET
from compute_api.console import sessions as parts
from compute_api.console.browser_cookies import BrowserCookies
from compute_api.console.page_server import PageServer
from compute_api.console.service import ConsoleServer, listen
from compute_api.console.sessions import ConsoleSessions
from compute_api.console.token_check import TokenChecker
from tests.log_lines import render_records
from tests.schemas import upgrade
from tests.waiting import await_true

SERVERS = [f"6a1f9e5c-0c4b-4d53-9f1e-2f5f6f0a7b1{n}" for n in range(3)]
VAULT = Vault("key")
OURS, ALLOWED = "https://consoles.example", "https://cloud.example:8443"


class World:
    """A database, a host with three guests, and the console service."""

    def __init__(
        self,
        folder: Path,
        most: int = 4,
        per_server: int = 2,
        per_user: int = 4,
        url: str = OURS,
        origins: Sequence[str] = (ALLOWED,),
        port: int = 0,
        pages: Path | None = None,
        open_console: Callable[[str, str], socket.socket] | None = None,
    ) -> None:
        self.store = Store(f"sqlite:///{folder}/console.db")
        upgrade(self.store)
        self.driver = MemoryDriver(MemoryHost(spice=True))
        for server in SERVERS:
            self.driver.ensure_guest(
                GuestSpec(server, 1, "vm", Flavor("1", "m1.nano", 1, 64, 1)),
                lambda image: iter(()),
                QUIET,
            )
        self.store.write(
            lambda tx: guests.add(
                tx, [{"server_id": server, "host": "h1", "fence": 1} for server in SERVERS]
            )
        )
        self.relay = Consoles(open_console or self.driver.console, "127.0.0.1")
        self.silent = False
        # Tokens of users that the identity service refuses.
        self.bad: set[str] = set()
        browsers = BrowserCookies(self.store, url, origins, 60)
        self.sessions = ConsoleSessions(
            self.store,
            self,
            TokenChecker(VAULT, self.is_good),
            browsers,
            most=most,
            per_server=per_server,
            per_user=per_user,
            seconds=60,
        )
        novnc = folder / "novnc"
        (novnc / "core").mkdir(parents=True)
        (novnc / "vnc_lite.html").write_text("<p>screen")
        (novnc / "core/rfb.js").write_text("export default 1;")
        (novnc / "notes.txt").write_text("not a page")
        (folder / "secret.js").write_text("secret")
        (novnc / "out.js").symlink_to(folder / "secret.js")
        (novnc / "alias.html").symlink_to("vnc_lite.html")
        spice = folder / "spice-html5"
        spice.mkdir()
        (spice / "spice_auto.html").write_text("<p>spice")
        (spice / "main.js").write_text("export default 2;")
        listener = listen("127.0.0.1", port)
        self.port = int(listener.getsockname()[1])
        self.service = ConsoleServer(
            listener,
            PageServer(pages or novnc, url, browsers, origins, spice=spice),
            self.sessions,
            most + 8,
            ask_every=0.2,
        )
        self.threads = [self.relay.start(), *self.service.start()]

    def query(
        self, host: str, verb: str, arguments: dict[str, Any], timeout: float = 10
    ) -> dict[str, Any]:
        """Answer for the host, without a broker."""
        if self.silent:
            raise errors.NoAnswer(f"{host} did not answer")
        assert (host, verb) == ("h1", "console")
        return self.relay.offer(arguments["server"], arguments["kind"])

    def is_good(self, token: str) -> bool:
        """Return whether the identity service accepts a user's token."""
        if token == "silence":
            raise errors.Unavailable("The identity service does not answer; try again later.")
        return token not in self.bad

    def token(
        self,
        kind: str = "serial",
        server: str = SERVERS[0],
        seconds: int = 60,
        user: str = "u",
        caller: str = "",
    ) -> str:
        sealed = VAULT.seal({"token": caller}) if caller else None
        return self.store.write(
            lambda tx: console_tokens.create(
                tx, server, kind, project_id="p", user_id=user, seconds=seconds, caller=sealed
            )
        )

    def open(self, token: str, path: str = "/?token={}", **more: Any) -> ClientConnection:
        return connect(
            f"ws://127.0.0.1:{self.port}{path.format(token)}", compression=None, proxy=None, **more
        )

    def read_close(self, token: str, **more: Any) -> tuple[int, str]:
        """Open a console, and return the code and the reason with which the service closes it."""
        with self.open(token, **more) as browser:
            return read_close_frame(browser)

    def hangs_up(self, token: str, **more: Any) -> bool:
        """Return whether the service ends the connection without a close frame."""
        with self.open(token, **more) as browser, pytest.raises(ConnectionClosed) as closed:
            browser.recv(timeout=10)
        return closed.value.rcvd is None

    def get(
        self, path: str, headers: Mapping[str, str] | None = None
    ) -> tuple[int, bytes, dict[str, str]]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        connection.putrequest("GET", path, skip_host=False)
        for name, value in (headers or {}).items():
            connection.putheader(name, value)
        connection.endheaders()
        answer = connection.getresponse()
        response = answer.status, answer.read(), dict(answer.getheaders())
        connection.close()
        return response

    def close(self) -> None:
        self.service.close()
        self.relay.close()
        for thread in self.threads:
            thread.join(5)
        self.store.close()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    new_world = World(tmp_path)
    yield new_world
    new_world.close()


def read_close_frame(browser: ClientConnection) -> tuple[int, str]:
    """Read until the connection is closed, and return the code and the reason."""
    with pytest.raises(ConnectionClosed) as closed:
        while True:
            browser.recv(timeout=10)
    assert closed.value.rcvd is not None
    return closed.value.rcvd.code, closed.value.rcvd.reason


def echoes(browser: ClientConnection, payload: bytes = b"hello") -> bool:
    browser.send(payload)
    received = b""
    while len(received) < len(payload):
        part = browser.recv(timeout=10)
        assert isinstance(part, bytes)
        received += part
    return received == payload


# --- a session ---
@pytest.mark.parametrize(
    "path",
    [
        "/?token={}",
        "/websockify?token={}",
        "/websockify?path=%3Ftoken%3D{}",
        "/?path=websockify%3Ftoken%3D{}&more=1",
    ],
)
def test_console_passes_bytes_unchanged_both_ways(world: World, path: str) -> None:
    with world.open(world.token(), path) as browser:
        assert echoes(browser, bytes(range(256)) * 500)
    await_true(lambda: len(world.sessions) == 0)


def test_console_passes_text_frames_as_bytes(world: World) -> None:
    with world.open(world.token()) as browser:
        browser.send("h\N{LATIN SMALL LETTER E WITH ACUTE}")
        assert browser.recv(timeout=10) == "h\N{LATIN SMALL LETTER E WITH ACUTE}".encode()


def test_novnc_console_starts_with_rfb_greeting(world: World) -> None:
    with world.open(world.token("novnc"), subprotocols=["binary"]) as browser:
        assert browser.subprotocol == "binary"
        assert browser.recv(timeout=10) == b"RFB 003.008\n"


def test_console_ignores_unknown_subprotocols(world: World) -> None:
    with world.open(world.token(), subprotocols=["base64"]) as browser:
        assert browser.subprotocol is None and echoes(browser)


def test_console_token_record_is_deleted_at_session_end(world: World) -> None:
    with world.open(world.token()) as browser:
        assert echoes(browser)
    await_true(
        lambda: (
            world.store.read(lambda tx: tx.execute(schema.console_tokens.select()).first()) is None
        )
    )


# --- tokens ---
def test_console_token_second_use_is_refused_and_first_continues(world: World) -> None:
    token = world.token()
    with world.open(token) as browser:
        assert echoes(browser)
        assert world.hangs_up(token)
        assert echoes(browser)
    await_true(lambda: len(world.sessions) == 0)
    assert world.hangs_up(token)


@pytest.mark.parametrize(
    "path", ["/", "/?token=", "/?token=x", "/?path=x", "/?" + "&".join(["a=b"] * 30)]
)
def test_console_without_valid_token_is_closed(world: World, path: str) -> None:
    assert world.hangs_up("", path=path)


def test_console_refuses_expired_token(world: World) -> None:
    assert world.hangs_up(world.token(seconds=0))


def test_console_refuses_token_of_deleted_server(world: World) -> None:
    token = world.token()
    world.store.write(lambda tx: guests.add_removal(tx, SERVERS[0], 2))
    assert world.hangs_up(token)


# --- origins ---
@pytest.mark.parametrize("origin", [OURS, ALLOWED, None])
def test_console_accepts_own_allowed_and_missing_origin(world: World, origin: str | None) -> None:
    with world.open(world.token(), origin=origin) as browser:
        assert echoes(browser)


@pytest.mark.parametrize(
    "origin",
    [
        "https://evil.example",
        "null",
        "http://consoles.example",
        "https://consoles.example:444",
        OURS + ".evil.example",
        "https://CLOUD.example:8443",
        "https://cloud.example",
        "",
        OURS + "/",
        "file://",
    ],
)
def test_console_refuses_foreign_origin_and_token_stays_valid(world: World, origin: str) -> None:
    token = world.token()
    with (
        pytest.raises(InvalidStatus) as refused,
        world.open(token, additional_headers={"Origin": origin}),
    ):
        pass
    assert refused.value.response.status_code == 403
    with world.open(token) as browser:
        assert echoes(browser)


def test_console_ignores_host_headers_when_checking_origin(world: World) -> None:
    token = world.token()
    for more in ({"Host": "evil.example"}, {"X-Forwarded-Host": "evil.example"}):
        headers = [("Origin", "http://evil.example"), *more.items()]
        with pytest.raises(InvalidStatus), world.open(token, additional_headers=headers):
            pass
    with (
        pytest.raises(InvalidStatus),
        world.open(token, additional_headers=[("Origin", OURS), ("Origin", OURS)]),
    ):
        pass


# --- ends ---
def test_console_session_ends_when_guest_stops(world: World) -> None:
    with world.open(world.token()) as browser:
        assert echoes(browser)
        world.driver.host.power_off(SERVERS[0])
        assert read_close_frame(browser) == (parts.DONE, "The guest has ended its console.")


def test_console_session_ends_within_seconds_when_server_moves(world: World) -> None:
    with world.open(world.token()) as browser, world.open(world.token(server=SERVERS[1])) as other:
        assert echoes(browser) and echoes(other)
        world.store.write(lambda tx: guests.add_removal(tx, SERVERS[0], 2))
        began = time.monotonic()
        code, words = read_close_frame(browser)
        assert (
            code == parts.REFUSED
            and "deleted or has moved" in words
            and time.monotonic() - began < 5
        )
        assert echoes(other)


def test_console_session_ends_when_its_record_is_deleted(world: World) -> None:
    with world.open(world.token()) as browser:
        assert echoes(browser)
        world.store.write(lambda tx: tx.execute(schema.console_tokens.delete()))
        assert read_close_frame(browser)[0] == parts.REFUSED


def test_console_service_close_sends_restart_code_to_browsers(world: World) -> None:
    with world.open(world.token()) as browser:
        assert echoes(browser)
        closing = threading.Thread(target=world.service.close)
        closing.start()
        assert read_close_frame(browser)[0] == parts.RESTART
        closing.join(10)


def test_console_session_of_stalled_browser_ends_and_blocks_no_other(world: World) -> None:
    """Its session ends in time, although the service cannot send it a byte."""
    with open_stalled_connection(world) as lazy:
        with world.open(world.token(server=SERVERS[1])) as other:
            assert echoes(other)
        await_true(lambda: len(world.sessions) == 1)
        world.store.write(lambda tx: guests.add_removal(tx, SERVERS[0], 2))
        await_true(lambda: len(world.sessions) == 0, 20)
        assert lazy.fileno() != -1


def open_stalled_connection(world: World) -> socket.socket:
    """Open a session by hand, send until the socket blocks, and read no echo."""
    lazy = socket.create_connection(("127.0.0.1", world.port), 5)
    lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    lazy.sendall(
        f"GET /?token={world.token()} HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n".encode()
    )
    assert b"101 Switching" in lazy.recv(4096)
    # A binary frame, masked with zeros.
    frame = b"\x82\xfe\xff\xff" + bytes(4) + bytes(65535)
    lazy.settimeout(0.5)
    with pytest.raises(TimeoutError):
        while True:
            lazy.sendall(frame)
    return lazy


# --- limits ---
def test_console_limits_sessions_per_server_and_in_total(world: World) -> None:
    def fill(servers: list[str]) -> None:
        for server in servers:
            browser = opened.enter_context(world.open(world.token("novnc", server)))
            assert browser.recv(timeout=10) == b"RFB 003.008\n"

    with world.open(world.token("novnc")) as first, ExitStack() as opened:
        assert first.recv(timeout=10) == b"RFB 003.008\n"
        fill([SERVERS[0]])
        third = world.token("novnc")
        code, words = world.read_close(third)
        assert code == parts.BUSY and "close a console" in words
        fill(SERVERS[1:])
        assert world.read_close(world.token("novnc", SERVERS[2]))[0] == parts.BUSY
        first.close()

        def is_accepted() -> bool:
            with world.open(third) as browser:
                try:
                    return bool(browser.recv(timeout=10) == b"RFB 003.008\n")
                except ConnectionClosed as closed:
                    assert closed.rcvd is not None and closed.rcvd.code == parts.BUSY
                    return False

        # The place is free after a moment, and a refusal does not use the token up.
        await_true(is_accepted)


def test_console_session_ends_when_message_is_too_long(world: World) -> None:
    with world.open(world.token()) as browser:
        browser.send(bytes(300 * 1024))
        assert read_close_frame(browser)[0] == 1009


def test_console_closes_with_busy_on_silent_and_failed_on_failing_host(world: World) -> None:
    world.silent = True
    code, words = world.read_close(world.token())
    assert code == parts.BUSY and "did not answer" in words
    world.silent = False
    world.relay.close()
    world.driver.host.power_off(SERVERS[1])
    assert world.read_close(world.token(server=SERVERS[1]))[0] == parts.FAILED
    assert world.read_close(world.token())[0] in (parts.FAILED, parts.DONE)


# --- pages ---
def test_console_pages_have_content_type_and_security_headers(world: World) -> None:
    status, content, headers = world.get("/vnc_lite.html?path=%3Ftoken%3Dabc")
    assert (status, content, headers["Content-Type"]) == (
        200,
        b"<p>screen",
        "text/html; charset=utf-8",
    )
    assert (
        headers["Referrer-Policy"] == "no-referrer"
        and headers["X-Content-Type-Options"] == "nosniff"
    )
    assert "connect-src 'self' wss://consoles.example;" in headers["Content-Security-Policy"]
    assert f"frame-ancestors 'self' {ALLOWED} {OURS}" in headers["Content-Security-Policy"]
    assert world.get("/core/rfb.js")[2]["Content-Type"] == "text/javascript; charset=utf-8"
    assert world.get("/alias.html")[:2] == (200, b"<p>screen")
    assert b"serial console" in world.get("/serial.html")[1]


@pytest.mark.parametrize(
    ("referer", "target", "query", "is_framed"),
    [
        ("https://dashboard.example/project/", "iframe", "", True),
        ("https://dashboard.example/project/", "document", "", False),
        ("https://dashboard.example/project/", "", "", True),
        ("https://dashboard.example/project/", "", "&alone=1", False),
        ("https://dashboard.example/project/", "iframe", "&alone=1", True),
        (f"{ALLOWED}/project/", "iframe", "", False),
        (f"{ALLOWED}/project/", "", "", False),
        (f"{OURS}/serial.html", "iframe", "", False),
        ("http://[/", "iframe", "", True),
        ("", "iframe", "", False),
        ("", "", "", False),
    ],
)
def test_console_page_names_allowed_origins_only_in_forbidden_frame(
    world: World, referer: str, target: str, query: str, is_framed: bool
) -> None:
    headers_by_name = {"Referer": referer, "Sec-Fetch-Dest": target, "Accept": "text/html"}
    status, content, headers = world.get(
        f"/serial.html?token=abc{query}",
        {name: value for name, value in headers_by_name.items() if value},
    )
    assert status == 200
    assert (b"allowed_origins" in content) == is_framed
    assert (b"serial console" in content) != is_framed
    assert ("frame-ancestors" in headers["Content-Security-Policy"]) != is_framed
    assert "Set-Cookie" not in headers


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/nothing",
        "/core",
        "/core/",
        "/notes.txt",
        "/out.js",
        "/../secret.js",
        "/core/../../secret.js",
        "/%2e%2e/secret.js",
        "/..%2fsecret.js",
        "//evil.example/%2F..",
        "///evil.example",
        "/core/..\\..\\secret.js",
        "/core//rfb.js",
        "/./vnc_lite.html",
        "http://evil.example/vnc_lite.html",
        "/vnc_lite.html/",
        "/door.py",
        "/vnc_lite.html%00.js",
        "/" + "a" * 4000,
    ],
)
def test_console_page_of_unknown_path_returns_404_without_redirect(world: World, path: str) -> None:
    status, content, headers = world.get(path)
    assert status == 404 and b"secret" not in content and "Location" not in headers


def test_console_healthcheck_reports_alive_and_ready(world: World) -> None:
    status, content, headers = world.get("/healthcheck")
    assert (status, content, headers["Cache-Control"]) == (200, b'{"status":"alive"}', "no-store")
    assert json.loads(world.get("/healthcheck/ready")[1]) == {"status": "ready", "dependencies": {}}
    assert world.get("/healthcheck/ready/")[0] == 404


def test_console_service_accepts_no_malformed_request_and_keeps_serving(world: World) -> None:
    for noise in (
        b"\x16\x03\x01" * 100,
        b"POST / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /" + b"a" * 100_000,
        b"\r\n",
    ):
        with socket.create_connection(("127.0.0.1", world.port), 5) as stranger:
            try:
                stranger.sendall(noise)
                stranger.shutdown(socket.SHUT_WR)
                response = stranger.recv(1000)
            except TimeoutError:
                raise
            # The service closed the connection before all data was sent.
            except OSError:
                response = b""
            assert b"200 OK" not in response
    with world.open(world.token()) as browser:
        assert echoes(browser)


def test_console_service_accepts_sessions_despite_silent_connections(world: World) -> None:
    patient = socket.create_connection(
        ("127.0.0.1", world.port), 5, source_address=("127.0.0.2", 0)
    )
    silent_clients = [
        socket.create_connection(("127.0.0.1", world.port), 5, source_address=("127.0.0.3", 0))
        for _ in range(100)
    ]
    for client in silent_clients[::2]:
        client.sendall(b"GET /vnc_lite.html HTTP/1.1\r\n")
    began = time.monotonic()
    with world.open(world.token()) as browser:
        for client in [socket.create_connection(("127.0.0.1", world.port), 5) for _ in range(20)]:
            client.close()
        browser.send(b"hello")
        # The session keeps its place.
        assert browser.recv(5)
    assert time.monotonic() - began < 2
    patient.sendall(b"GET /vnc_lite.html HTTP/1.1\r\nHost: x\r\n\r\n")
    # The only connection of another address keeps its place too.
    assert patient.recv(100).startswith(b"HTTP/1.1 200 OK")
    for client in (patient, *silent_clients):
        client.close()


def test_console_tokens_are_not_logged(world: World, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    token = world.token()
    with world.open(token) as browser:
        assert echoes(browser)
    assert world.hangs_up(token)
    world.get(f"/vnc_lite.html?path=%3Ftoken%3D{token}")
    lines = render_records(
        record for record in caplog.records if not record.name.startswith("websockets.client")
    )
    assert any("a console is opened kind=serial server=" in line for line in lines)
    assert not [line for line in lines if token in line]
