# SPDX-License-Identifier: Apache-2.0
"""The console service with real sockets on both sides: a websocket client here, an agent's relay
there."""

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
        # tokens of users that the identity service does not know any more
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
        """The host's answer, without a broker between."""
        if self.silent:
            raise errors.NoAnswer(f"{host} did not answer")
        assert (host, verb) == ("h1", "console")
        return self.relay.offer(arguments["server"], arguments["kind"])

    def is_good(self, token: str) -> bool:
        """What the identity service says of a user's token."""
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

    def closed(self, token: str, **more: Any) -> tuple[int, str]:
        """With which code and words it was closed."""
        with self.open(token, **more) as browser:
            return ended(browser)

    def hangs_up(self, token: str, **more: Any) -> bool:
        """Does it end the connection without a frame: no code, no words?"""
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
        found = answer.status, answer.read(), dict(answer.getheaders())
        connection.close()
        return found

    def close(self) -> None:
        self.service.close()
        self.relay.close()
        for thread in self.threads:
            thread.join(5)
        self.store.close()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.close()


def ended(browser: ClientConnection) -> tuple[int, str]:
    """What it was closed with, after whatever was said."""
    with pytest.raises(ConnectionClosed) as closed:
        while True:
            browser.recv(timeout=10)
    assert closed.value.rcvd is not None
    return closed.value.rcvd.code, closed.value.rcvd.reason


def echoes(browser: ClientConnection, said: bytes = b"hello") -> bool:
    browser.send(said)
    heard = b""
    while len(heard) < len(said):
        part = browser.recv(timeout=10)
        assert isinstance(part, bytes)
        heard += part
    return heard == said


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
def test_bytes_pass_unchanged_both_ways(world: World, path: str) -> None:
    with world.open(world.token(), path) as browser:
        assert echoes(browser, bytes(range(256)) * 500)
    await_true(lambda: len(world.sessions) == 0)


def test_text_is_bytes_too(world: World) -> None:
    with world.open(world.token()) as browser:
        browser.send("h\N{LATIN SMALL LETTER E WITH ACUTE}")
        assert browser.recv(timeout=10) == "h\N{LATIN SMALL LETTER E WITH ACUTE}".encode()


def test_a_screen_greets_first(world: World) -> None:
    with world.open(world.token("novnc"), subprotocols=["binary"]) as browser:
        assert browser.subprotocol == "binary"
        assert browser.recv(timeout=10) == b"RFB 003.008\n"


def test_unknown_subprotocols_are_passed_over(world: World) -> None:
    with world.open(world.token(), subprotocols=["base64"]) as browser:
        assert browser.subprotocol is None and echoes(browser)


def test_its_record_goes_with_it(world: World) -> None:
    with world.open(world.token()) as browser:
        assert echoes(browser)
    await_true(
        lambda: (
            world.store.read(lambda tx: tx.execute(schema.console_tokens.select()).first()) is None
        )
    )


# --- tokens ---
def test_a_second_use_is_refused_and_the_first_goes_on(world: World) -> None:
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
def test_without_a_token_nothing_opens(world: World, path: str) -> None:
    assert world.hangs_up("", path=path)


def test_an_expired_token_is_refused(world: World) -> None:
    assert world.hangs_up(world.token(seconds=0))


def test_a_token_after_delete_is_refused(world: World) -> None:
    token = world.token()
    world.store.write(lambda tx: guests.add_debt(tx, SERVERS[0], 2))
    assert world.hangs_up(token)


# --- origins ---
@pytest.mark.parametrize("origin", [OURS, ALLOWED, None])
def test_origins_that_may(world: World, origin: str | None) -> None:
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
def test_foreign_origins_are_refused_and_the_token_is_still_good(world: World, origin: str) -> None:
    token = world.token()
    with (
        pytest.raises(InvalidStatus) as refused,
        world.open(token, additional_headers={"Origin": origin}),
    ):
        pass
    assert refused.value.response.status_code == 403
    with world.open(token) as browser:
        assert echoes(browser)


def test_what_a_request_says_of_its_host_decides_nothing(world: World) -> None:
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
def test_it_ends_when_the_guest_stops(world: World) -> None:
    with world.open(world.token()) as browser:
        assert echoes(browser)
        world.driver.host.power_off(SERVERS[0])
        assert ended(browser) == (parts.DONE, "The guest has ended its console.")


def test_it_ends_when_the_server_moves_within_seconds(world: World) -> None:
    with world.open(world.token()) as browser, world.open(world.token(server=SERVERS[1])) as other:
        assert echoes(browser) and echoes(other)
        world.store.write(lambda tx: guests.add_debt(tx, SERVERS[0], 2))
        began = time.monotonic()
        code, words = ended(browser)
        assert (
            code == parts.REFUSED
            and "deleted or has moved" in words
            and time.monotonic() - began < 5
        )
        assert echoes(other)


def test_whoever_removes_the_record_ends_it(world: World) -> None:
    with world.open(world.token()) as browser:
        assert echoes(browser)
        world.store.write(lambda tx: tx.execute(schema.console_tokens.delete()))
        assert ended(browser)[0] == parts.REFUSED


def test_a_restart_tells_the_browsers(world: World) -> None:
    with world.open(world.token()) as browser:
        assert echoes(browser)
        closing = threading.Thread(target=world.service.close)
        closing.start()
        assert ended(browser)[0] == parts.RESTART
        closing.join(10)


def test_a_browser_that_does_not_read_holds_nothing_up(world: World) -> None:
    """It is cut off when its session must end, although not a byte can be sent to it."""
    with stalled(world) as lazy:
        with world.open(world.token(server=SERVERS[1])) as other:
            assert echoes(other)
        await_true(lambda: len(world.sessions) == 1)
        world.store.write(lambda tx: guests.add_debt(tx, SERVERS[0], 2))
        await_true(lambda: len(world.sessions) == 0, 20)
        assert lazy.fileno() != -1


def stalled(world: World) -> socket.socket:
    """A browser by hand, which sent until nothing went any more and reads nothing of the echo."""
    lazy = socket.create_connection(("127.0.0.1", world.port), 5)
    lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    lazy.sendall(
        f"GET /?token={world.token()} HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n".encode()
    )
    assert b"101 Switching" in lazy.recv(4096)
    frame = b"\x82\xfe\xff\xff" + bytes(4) + bytes(65535)  # binary, masked with zeros
    lazy.settimeout(0.5)
    with pytest.raises(TimeoutError):
        while True:
            lazy.sendall(frame)
    return lazy


# --- limits ---
def test_so_many_of_a_server_and_in_all(world: World) -> None:
    def fill(servers: list[str]) -> None:
        for server in servers:
            browser = opened.enter_context(world.open(world.token("novnc", server)))
            assert browser.recv(timeout=10) == b"RFB 003.008\n"

    with world.open(world.token("novnc")) as first, ExitStack() as opened:
        assert first.recv(timeout=10) == b"RFB 003.008\n"
        fill([SERVERS[0]])
        third = world.token("novnc")
        code, words = world.closed(third)
        assert code == parts.BUSY and "close one" in words
        fill(SERVERS[1:])
        assert world.closed(world.token("novnc", SERVERS[2]))[0] == parts.BUSY
        first.close()

        def is_accepted() -> bool:
            with world.open(third) as browser:
                try:
                    return bool(browser.recv(timeout=10) == b"RFB 003.008\n")
                except ConnectionClosed as closed:
                    assert closed.rcvd is not None and closed.rcvd.code == parts.BUSY
                    return False

        # A place is free again a moment later. Being turned away uses no token up.
        await_true(is_accepted)


def test_a_message_that_is_too_long_ends_it(world: World) -> None:
    with world.open(world.token()) as browser:
        browser.send(bytes(300 * 1024))
        assert ended(browser)[0] == 1009


def test_a_silent_host(world: World) -> None:
    world.silent = True
    code, words = world.closed(world.token())
    assert code == parts.BUSY and "did not answer" in words
    world.silent = False
    world.relay.close()
    world.driver.host.power_off(SERVERS[1])
    assert world.closed(world.token(server=SERVERS[1]))[0] == parts.FAILED
    assert world.closed(world.token())[0] in (parts.FAILED, parts.DONE)


# --- pages ---
def test_pages(world: World) -> None:
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
def test_frame_of_a_page_that_is_not_allowed_names_the_option(
    world: World, referer: str, target: str, query: str, is_framed: bool
) -> None:
    sent = {"Referer": referer, "Sec-Fetch-Dest": target, "Accept": "text/html"}
    status, content, headers = world.get(
        f"/serial.html?token=abc{query}", {name: value for name, value in sent.items() if value}
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
def test_no_other_path_is_a_page_and_nothing_redirects(world: World, path: str) -> None:
    status, content, headers = world.get(path)
    assert status == 404 and b"secret" not in content and "Location" not in headers


def test_it_says_that_it_is_alive(world: World) -> None:
    status, content, headers = world.get("/healthcheck")
    assert (status, content, headers["Cache-Control"]) == (200, b'{"status":"alive"}', "no-store")
    assert json.loads(world.get("/healthcheck/ready")[1]) == {"status": "ready", "dependencies": {}}
    assert world.get("/healthcheck/ready/")[0] == 404


def test_noise_is_closed_and_serves_nobody(world: World) -> None:
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
                said = stranger.recv(1000)
            except TimeoutError:
                raise
            except OSError:  # it was closed before all of the noise was there
                said = b""
            assert b"200 OK" not in said
    with world.open(world.token()) as browser:
        assert echoes(browser)


def test_silent_connections_keep_nobody_out(world: World) -> None:
    patient = socket.create_connection(
        ("127.0.0.1", world.port), 5, source_address=("127.0.0.2", 0)
    )
    silent = [
        socket.create_connection(("127.0.0.1", world.port), 5, source_address=("127.0.0.3", 0))
        for _ in range(100)
    ]
    for client in silent[::2]:
        client.sendall(b"GET /vnc_lite.html HTTP/1.1\r\n")
    begun = time.monotonic()
    with world.open(world.token()) as browser:
        for client in [socket.create_connection(("127.0.0.1", world.port), 5) for _ in range(20)]:
            client.close()
        browser.send(b"hello")
        assert browser.recv(5)  # a session keeps its place
    assert time.monotonic() - begun < 2
    patient.sendall(b"GET /vnc_lite.html HTTP/1.1\r\nHost: x\r\n\r\n")
    assert patient.recv(100).startswith(b"HTTP/1.1 200 OK")  # and so has an address with one
    for client in (patient, *silent):
        client.close()


def test_tokens_and_secrets_are_never_logged(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    token = world.token()
    with world.open(token) as browser:
        assert echoes(browser)
    assert world.hangs_up(token)
    world.get(f"/vnc_lite.html?path=%3Ftoken%3D{token}")
    ours = [
        record.getMessage()
        for record in caplog.records
        if not record.name.startswith("websockets.client")
    ]
    assert any("console serial of server" in line for line in ours)
    assert not [line for line in ours if token in line]
