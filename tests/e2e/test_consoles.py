# SPDX-License-Identifier: Apache-2.0
"""Consoles of guests through the console service.

The consoles are noVNC in a browser, and the serial console over a websocket.
The first test took the picture docs/console.png.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import unquote

import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from deploy.one_machine.cloud import process_control
from deploy.one_machine.cloud.process_control import find_process
from tests.e2e.browser import Browser
from tests.e2e.live import Live, Rest
from tests.waiting import await_true, is_true_within

pytestmark = pytest.mark.slice("guests")

#: Seconds within which a session ends.
END_SECONDS = 10


@pytest.fixture(scope="module")
def guest(cloud: Live) -> Iterator[str]:
    """Yield the id of a server with a booted guest."""
    demo = cloud.rest()
    server = demo.create(name="watched", image=cloud.image(), flavor=cloud.flavor())
    demo.await_status(server, "ACTIVE")
    demo.await_ready(server)
    yield server
    demo.call("DELETE", f"/servers/{server}")
    demo.await_gone(server)
    cloud.await_removed(server, END_SECONDS)
    cloud.assert_healthy()


def create_console_url(demo: Rest, server: str, kind: str = "novnc") -> str:
    """Create a console, and return the URL."""
    protocol = "vnc" if kind == "novnc" else kind
    reply = demo.call(
        "POST",
        f"/servers/{server}/remote-consoles",
        {"remote_console": {"protocol": protocol, "type": kind}},
    )
    assert reply.status == 200, reply
    return str(reply.body["remote_console"]["url"])


def extract_token(address: str) -> str:
    return unquote(address).rpartition("token=")[2]


def open_serial(address: str, origin: str | None = None) -> ClientConnection:
    return connect(address, compression=None, proxy=None, origin=origin, legacy=True)


def read_until(console: ClientConnection, expected: bytes) -> bytes:
    """Read from the console up to the expected output, and return all output."""
    received, deadline = b"", time.monotonic() + 20
    while expected not in received:
        part = console.recv(timeout=max(0.0, deadline - time.monotonic()))
        received += part if isinstance(part, bytes) else part.encode()
    return received


def type_until(
    browser: Browser, line: str, has_arrived: Callable[[], bool], describe: Callable[[], object]
) -> None:
    """Type the line until it has an effect.

    A keyboard buffers few letters, and a busy guest loses the others.
    """

    def type_line() -> bool:
        browser.type(f"{line}\n")
        has_effect = is_true_within(has_arrived, 10, pause=0.1)
        if not has_effect:
            # The remaining letters become a line of their own.
            browser.press("Enter")
        return has_effect

    await_true(type_line, 60, describe)


def read_close(console: ClientConnection) -> tuple[int, str]:
    """Read until the console is closed, and return the code and the reason."""
    with pytest.raises(ConnectionClosed) as closed:
        while True:
            console.recv(timeout=END_SECONDS)
    assert closed.value.rcvd is not None
    return closed.value.rcvd.code, closed.value.rcvd.reason


def check_closed_without_frame(console: ClientConnection) -> None:
    """Check that the console ends without a close frame, as for every invalid URL."""
    with pytest.raises(ConnectionClosed) as closed:
        console.recv(timeout=END_SECONDS)
    assert closed.value.rcvd is None


def test_novnc_console_shows_screen_and_accepts_typing(
    cloud: Live, demo: Rest, guest: str, tmp_path: Path
) -> None:
    [console] = cloud.openstack(f"console url show --novnc {guest} -f json")
    with Browser(tmp_path / "browser") as browser:
        browser.open(console["url"])
        browser.await_true("document.querySelector('#status').textContent.startsWith('Connected')")
        browser.await_true("document.querySelector('canvas')?.width >= 640")
        empty = browser.picture()
        browser.click(512, 400)
        type_until(
            browser,
            f"echo Typed into {guest} > /dev/ttyS0; uname -a",
            lambda: f"Typed into {guest}" in demo.console(guest),
            lambda: (demo.console(guest)[-500:], browser.messages),
        )
        await_true(
            lambda: browser.picture(tmp_path / "console.png") != empty, 10, lambda: browser.messages
        )

        # The URL still works after a reload of the page.
        browser.open(console["url"])
        browser.await_true("document.querySelector('#status').textContent.startsWith('Connected')")
        browser.await_true("document.querySelector('canvas')?.width >= 640")


def test_serial_console_works_in_browser_and_in_programs(
    cloud: Live, demo: Rest, guest: str, tmp_path: Path
) -> None:
    with open_serial(create_console_url(demo, guest, "serial")) as console:
        console.send(b"echo over $((6 * 7)) websockets\n")
        read_until(console, b"over 42 websockets")
    await_true(
        lambda: "over 42 websockets" in demo.console(guest), 10, lambda: demo.console(guest)[-500:]
    )
    with Browser(tmp_path / "browser") as browser:
        browser.open(
            f"{cloud.cloud.console_url}/serial.html?token={extract_token(create_console_url(demo, guest, 'serial'))}"
        )
        browser.await_true("document.querySelector('#status').textContent === 'Connected'")
        type_until(
            browser,
            "echo page $((6 + 7))",
            lambda: "page 13" in browser.text("#screen"),
            lambda: (browser.text("#screen")[-500:], browser.messages),
        )


def test_console_url_is_valid_once_and_for_own_origin_only(
    cloud: Live, demo: Rest, guest: str
) -> None:
    address = create_console_url(demo, guest, "serial")
    for foreign in ("https://evil.example", "null"):
        with pytest.raises(InvalidStatus) as refused:
            open_serial(address, origin=foreign)
        assert refused.value.response.status_code == 403
    with open_serial(address, origin=cloud.cloud.console_url) as console:
        console.send(b"echo still $((1 + 1))\n")
        read_until(console, b"still 2")
        with open_serial(address) as again:
            check_closed_without_frame(again)


def test_server_delete_ends_console_session_and_unused_urls(cloud: Live, demo: Rest) -> None:
    server = demo.create(name="watched-briefly", image=cloud.image(), flavor=cloud.flavor())
    demo.await_status(server, "ACTIVE")
    demo.await_ready(server)
    unused = create_console_url(demo, server, "serial")
    with open_serial(create_console_url(demo, server, "serial")) as console:
        console.send(b"echo here $((1 + 1))\n")
        read_until(console, b"here 2")
        assert demo.call("DELETE", f"/servers/{server}").status == 204
        assert read_close(console)[0] in (1000, 1008)
    demo.await_gone(server)
    with open_serial(unused) as late:
        check_closed_without_frame(late)
    admin = cloud.rest("kilonova-admin")
    assert admin.call("GET", f"/os-console-auth-tokens/{extract_token(unused)}").status == 404


def test_console_service_returns_after_kill_and_accepts_unused_url(
    cloud: Live, demo: Rest, guest: str
) -> None:
    unused_url = create_console_url(demo, guest, "serial")
    with open_serial(create_console_url(demo, guest, "serial")) as console:
        console.send(b"echo before $((1 + 1))\n")
        read_until(console, b"before 2")
        pid = process_control.kill(cloud.cloud, "console")
        with pytest.raises(ConnectionClosed):
            while True:
                console.recv(timeout=END_SECONDS)
    await_true(
        lambda: find_process(cloud.cloud, "console") not in (None, pid),
        30,
        lambda: "the service does not come back",
    )

    def reopen() -> ClientConnection | None:
        try:
            # A token is valid until its first use.
            return open_serial(unused_url)
        except OSError:
            return None

    with await_true(reopen, 30, lambda: "the service does not answer") as console:
        console.send(b"echo after $((1 + 1))\n")
        read_until(console, b"after 2")


def test_console_token_is_in_no_log(cloud: Live, demo: Rest, guest: str) -> None:
    address = create_console_url(demo, guest, "serial")
    with open_serial(address) as console:
        console.send(b"echo logged $((1 + 1))\n")
        read_until(console, b"logged 2")
    logs = b"".join(path.read_bytes() for path in (cloud.home / "log").glob("*.log"))
    assert (
        b"a console is opened kind=serial server=" in logs
        and extract_token(address).encode() not in logs
    )
