# SPDX-License-Identifier: Apache-2.0
"""Consoles of dashboards in Chromium with noVNC.

The console is in a frame or in a window of its own, or is reloaded. The screen is that of a QEMU
process without a machine, which serves VNC. As in a deployment, a proxy in front of the console
service ends TLS. All names resolve to this machine.
"""

from __future__ import annotations

import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from html import escape
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from common.security.tls import Tls
from common.security.tls_socket import TlsSocket
from compute_agent.consoles import relay
from deploy.one_machine.cloud.authority import Authority
from deploy.testing.servers import free_ports
from tests.e2e.browser import ONE_PROCESS, Browser
from tests.functional.test_console_service import World
from tests.functional.test_console_users import page_path
from tests.waiting import await_true

#: Chromium needs a CPU-second for each test.
pytestmark = pytest.mark.slice("operations")

NOVNC = Path("/usr/share/novnc")
CONSOLES, DASHBOARD, ELSEWHERE = (
    "consoles.cloud.example",
    "dashboard.cloud.example",
    "dashboard.elsewhere.example",
)
HAS_PICTURE = "document.querySelector('canvas')?.width >= 640"
STATUS = "(document.querySelector('#status')?.textContent ?? '')"
CONNECTED, REFUSED = "Connected to QEMU", "Something went wrong, connection is closed"


@dataclass(frozen=True)
class Site:
    """The console service and two dashboards.

    Attributes:
        consoles: URL of the console service.
        near: URL of a dashboard on the same site.
        far: URL of a dashboard on another site.
    """

    world: World
    consoles: str
    near: str
    far: str

    def console(self) -> str:
        """Return a new URL of a console."""
        return self.consoles + page_path(self.world.token("novnc"))


class Dashboard(BaseHTTPRequestHandler):
    """A page that shows the URL of its query in a frame."""

    def do_GET(self) -> None:
        """Send the page with the frame."""
        [url] = parse_qs(urlsplit(self.path).query).get("console", [""])
        content = f'<!doctype html><title>Dashboard</title><iframe src="{escape(url)}"></iframe>'
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(content.encode())

    def log_message(self, *args: object) -> None:
        """Discard the log line of the server."""


class TlsFront:
    """A proxy that ends TLS in front of a port of this machine."""

    def __init__(self, port: int, target: int, proof: Tls) -> None:
        self._target, self._context = target, proof.for_server(proved=False)
        self._listener = socket.create_server(("127.0.0.1", port))
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                peer, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(peer,), daemon=True).start()

    def _serve(self, peer: socket.socket) -> None:
        # The browser opens connections that it does not use, and closes them without a handshake.
        with (
            suppress(OSError),
            socket.create_connection(("127.0.0.1", self._target)) as plain,
        ):
            secured = TlsSocket.open(peer, self._context)
            relay.join(secured, plain, "front")
            secured.close()

    def close(self) -> None:
        """Close the listener and end its thread."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(5)
        self._listener.close()


@pytest.fixture(scope="module")
def screen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., socket.socket]]:
    """Yield a function that opens a connection to the VNC server of a QEMU process."""
    path = tmp_path_factory.mktemp("screen") / "vnc"
    qemu = subprocess.Popen(
        [
            *("qemu-system-x86_64", "-machine", "none", "-nodefaults", "-display", "none"),
            *("-vnc", f"unix:{path}"),
        ]
    )

    def open_screen(server: str, kind: str) -> socket.socket:
        side = socket.socket(socket.AF_UNIX)
        side.connect(str(path))
        return side

    await_true(path.exists, 20)
    yield open_screen
    qemu.terminate()
    qemu.wait(10)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    options = (
        *ONE_PROCESS,
        "--host-resolver-rules=MAP *.example 127.0.0.1",
        "--ignore-certificate-errors",
    )
    with Browser(tmp_path_factory.mktemp("browser"), options=options) as started:
        yield started


@pytest.fixture
def make_site(
    tmp_path: Path, screen: Callable[..., socket.socket]
) -> Iterator[Callable[..., Site]]:
    with ExitStack() as stack:

        def make(scheme: str, *allowed: str) -> Site:
            """Make a site. ``allowed`` are the names of dashboards in allowed_origins."""
            first = free_ports(3)
            consoles = f"{scheme}://{CONSOLES}:{first}"
            urls = {name: f"{scheme}://{name}:{first + 1}" for name in (DASHBOARD, ELSEWHERE)}
            world = World(
                tmp_path,
                url=consoles,
                origins=[urls[name] for name in allowed],
                port=first + 2 if scheme == "https" else first,
                pages=NOVNC,
                open_console=screen,
            )
            stack.callback(world.close)
            dashboard = ThreadingHTTPServer(("127.0.0.1", first + 1), Dashboard)
            if scheme == "https":
                proof = Authority(tmp_path / "ca").issue("site", CONSOLES, DASHBOARD, ELSEWHERE)
                stack.callback(TlsFront(first, world.port, proof).close)
                dashboard.socket = proof.for_server(proved=False).wrap_socket(
                    dashboard.socket, server_side=True, do_handshake_on_connect=False
                )
            threading.Thread(target=dashboard.serve_forever, daemon=True).start()
            stack.callback(dashboard.server_close)
            stack.callback(dashboard.shutdown)
            return Site(world, consoles, urls[DASHBOARD], urls[ELSEWHERE])

        yield make


def await_connected(browser: Browser) -> None:
    browser.await_true(f"{STATUS} === '{CONNECTED}' && {HAS_PICTURE}")


def open_in_frame(browser: Browser, dashboard: str, console: str) -> None:
    browser.open("about:blank")
    browser.evaluate(f"location.href = '{dashboard}/?console=' + encodeURIComponent('{console}')")
    browser.await_true("document.title === 'Dashboard' && document.readyState === 'complete'")


@pytest.mark.parametrize(("scheme", "dashboard"), [("http", "near"), ("https", "far")])
def test_console_frame_of_unlisted_dashboard_shows_allowed_origins_hint(
    make_site: Callable[..., Site], browser: Browser, scheme: str, dashboard: str
) -> None:
    site = make_site(scheme)
    url, console = getattr(site, dashboard), site.console()
    open_in_frame(browser, url, console)
    browser.await_in_frame("/allowed_origins.*\\[console\\]/s.test(document.body?.innerText)")
    assert not browser.evaluate_in_frame("document.querySelector('canvas')")
    # A link of the same page goes to the console.
    browser.evaluate(f"location.href = '{console}'")
    await_connected(browser)


@pytest.mark.parametrize(
    ("scheme", "dashboard"),
    [("http", "near"), pytest.param("https", "far", marks=pytest.mark.slice("default"))],
)
def test_console_in_frame_of_allowed_dashboard_connects_and_reloads(
    make_site: Callable[..., Site], browser: Browser, scheme: str, dashboard: str
) -> None:
    site = make_site(scheme, DASHBOARD, ELSEWHERE)
    open_in_frame(browser, getattr(site, dashboard), site.console())
    browser.await_in_frame(f"{STATUS} === '{CONNECTED}' && {HAS_PICTURE}")
    browser.evaluate_in_frame("document.title = 'before the reload'")
    browser.send("Page.reload")
    browser.await_in_frame(
        f"document.title !== 'before the reload' && {STATUS} === '{CONNECTED}' && {HAS_PICTURE}",
    )
    await_true(lambda: len(site.world.sessions) == 1)


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_console_of_frame_opens_in_own_window_on_same_site(
    make_site: Callable[..., Site], browser: Browser, scheme: str
) -> None:
    """This is the link "show only console" of Horizon."""
    site = make_site(scheme, DASHBOARD)
    console = site.console()
    open_in_frame(browser, site.near, console)
    browser.await_in_frame(f"{STATUS} === '{CONNECTED}'")
    browser.evaluate(f"location.href = '{console}'")
    await_connected(browser)


def test_console_reload_takes_over_and_another_browser_is_refused(
    make_site: Callable[..., Site], browser: Browser
) -> None:
    site = make_site("http")
    console = site.console()
    browser.open(console)
    await_connected(browser)
    with browser.second_page(same_profile=False) as stranger:
        stranger.open(console)
        stranger.await_true(f"{STATUS} === '{REFUSED}'")
    assert browser.evaluate(STATUS) == CONNECTED
    with browser.second_page(same_profile=True) as second:
        second.open(console)
        await_connected(second)
        browser.await_true(f"{STATUS} === 'Disconnected'")
        browser.evaluate("document.title = 'before the reload'")
        browser.send("Page.reload")
        browser.await_true("document.title !== 'before the reload'")
        await_connected(browser)
        second.await_true(f"{STATUS} === 'Disconnected'")
    await_true(lambda: len(site.world.sessions) == 1)
