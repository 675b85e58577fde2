# SPDX-License-Identifier: Apache-2.0
"""Consoles of real guests through the console service: noVNC in a browser, the serial console over
a websocket.

docs/console.png is a picture that the first test took.
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

ENDED = 10  #: seconds within which a session notices


@pytest.fixture(scope="module")
def guest(cloud: Live) -> Iterator[str]:
    """The id of a server that is ready."""
    demo = cloud.rest()
    server = demo.create(name="watched", image=cloud.image(), flavor=cloud.flavor())
    demo.await_status(server, "ACTIVE")
    demo.await_ready(server)
    yield server
    demo.call("DELETE", f"/servers/{server}")
    demo.await_gone(server)
    cloud.await_nothing_of(server, ENDED)
    cloud.judge()


def url(demo: Rest, server: str, kind: str = "novnc") -> str:
    """A new address."""
    protocol = "vnc" if kind == "novnc" else kind
    reply = demo.call(
        "POST",
        f"/servers/{server}/remote-consoles",
        {"remote_console": {"protocol": protocol, "type": kind}},
    )
    assert reply.status == 200, reply
    return str(reply.body["remote_console"]["url"])


def token_of(address: str) -> str:
    return unquote(address).rpartition("token=")[2]


def open_serial(address: str, origin: str | None = None) -> ClientConnection:
    return connect(address, compression=None, proxy=None, origin=origin, legacy=True)


def words(console: ClientConnection, wanted: bytes) -> bytes:
    """What it says until it says this."""
    said, deadline = b"", time.monotonic() + 20
    while wanted not in said:
        part = console.recv(timeout=max(0.0, deadline - time.monotonic()))
        said += part if isinstance(part, bytes) else part.encode()
    return said


def type_until(
    browser: Browser, line: str, arrived: Callable[[], bool], story: Callable[[], object]
) -> None:
    """Type the line, and again when nothing comes of it: a keyboard holds few letters, and those
    that come while its guest is too busy to fetch them are lost."""

    def typed() -> bool:
        browser.type(f"{line}\n")
        there = is_true_within(arrived, 10, pause=0.1)
        if not there:
            browser.press("Enter")  # what is left of the line is another one
        return there

    await_true(typed, 60, story)


def why(console: ClientConnection) -> tuple[int, str]:
    """With which code and reason it is closed."""
    with pytest.raises(ConnectionClosed) as closed:
        while True:
            console.recv(timeout=ENDED)
    assert closed.value.rcvd is not None
    return closed.value.rcvd.code, closed.value.rcvd.reason


def hangs_up(console: ClientConnection) -> None:
    """It ends without a frame, as for every address that is not good."""
    with pytest.raises(ConnectionClosed) as closed:
        console.recv(timeout=ENDED)
    assert closed.value.rcvd is None


def test_a_browser_sees_the_screen_and_types(
    cloud: Live, demo: Rest, guest: str, tmp_path: Path
) -> None:
    [told] = cloud.openstack(f"console url show --novnc {guest} -f json")
    with Browser(tmp_path / "browser") as browser:
        browser.open(told["url"])
        browser.await_true("document.querySelector('#status').textContent.startsWith('Connected')")
        browser.await_true("document.querySelector('canvas')?.width >= 640")
        empty = browser.picture()
        browser.click(512, 400)
        type_until(
            browser,
            f"echo Typed into {guest} > /dev/ttyS0; uname -a",
            lambda: f"Typed into {guest}" in demo.console(guest),
            lambda: (demo.console(guest)[-500:], browser.said),
        )
        await_true(
            lambda: browser.picture(tmp_path / "console.png") != empty, 10, lambda: browser.said
        )

        browser.open(told["url"])  # as a reload does
        browser.await_true("document.querySelector('#status').textContent.startsWith('Connected')")
        browser.await_true("document.querySelector('canvas')?.width >= 640")


def test_a_serial_console_is_for_a_browser_and_for_programs(
    cloud: Live, demo: Rest, guest: str, tmp_path: Path
) -> None:
    with open_serial(url(demo, guest, "serial")) as console:
        console.send(b"echo over $((6 * 7)) websockets\n")
        words(console, b"over 42 websockets")
    await_true(
        lambda: "over 42 websockets" in demo.console(guest), 10, lambda: demo.console(guest)[-500:]
    )
    with Browser(tmp_path / "browser") as browser:
        browser.open(
            f"{cloud.cloud.console_url}/serial.html?token={token_of(url(demo, guest, 'serial'))}"
        )
        browser.await_true("document.querySelector('#status').textContent === 'Connected'")
        type_until(
            browser,
            "echo page $((6 + 7))",
            lambda: "page 13" in browser.text("#screen"),
            lambda: (browser.text("#screen")[-500:], browser.said),
        )


def test_an_address_is_good_once_and_for_our_own_pages(cloud: Live, demo: Rest, guest: str) -> None:
    address = url(demo, guest, "serial")
    for foreign in ("https://evil.example", "null"):
        with pytest.raises(InvalidStatus) as refused:
            open_serial(address, origin=foreign)
        assert refused.value.response.status_code == 403
    with open_serial(address, origin=cloud.cloud.console_url) as console:
        console.send(b"echo still $((1 + 1))\n")
        words(console, b"still 2")
        with open_serial(address) as again:
            hangs_up(again)


def test_delete_ends_a_session_and_every_address(cloud: Live, demo: Rest) -> None:
    server = demo.create(name="watched-briefly", image=cloud.image(), flavor=cloud.flavor())
    demo.await_status(server, "ACTIVE")
    demo.await_ready(server)
    unused = url(demo, server, "serial")
    with open_serial(url(demo, server, "serial")) as console:
        console.send(b"echo here $((1 + 1))\n")
        words(console, b"here 2")
        assert demo.call("DELETE", f"/servers/{server}").status == 204
        assert why(console)[0] in (1000, 1008)
    demo.await_gone(server)
    with open_serial(unused) as late:
        hangs_up(late)
    admin = cloud.rest("kilonova-admin")
    assert admin.call("GET", f"/os-console-auth-tokens/{token_of(unused)}").status == 404


def test_the_console_service_is_killed_and_comes_back(cloud: Live, demo: Rest, guest: str) -> None:
    kept = url(demo, guest, "serial")
    with open_serial(url(demo, guest, "serial")) as console:
        console.send(b"echo before $((1 + 1))\n")
        words(console, b"before 2")
        pid = process_control.kill(cloud.cloud, "console")
        with pytest.raises(ConnectionClosed):
            while True:
                console.recv(timeout=ENDED)
    await_true(
        lambda: find_process(cloud.cloud, "console") not in (None, pid),
        30,
        lambda: "the service does not come back",
    )

    def back() -> ClientConnection | None:
        try:
            return open_serial(kept)  # was not used, so it is still good
        except OSError:
            return None

    with await_true(back, 30, lambda: "the service does not answer") as console:
        console.send(b"echo after $((1 + 1))\n")
        words(console, b"after 2")


def test_no_token_stands_in_a_log(cloud: Live, demo: Rest, guest: str) -> None:
    address = url(demo, guest, "serial")
    with open_serial(address) as console:
        console.send(b"echo logged $((1 + 1))\n")
        words(console, b"logged 2")
    logs = b"".join(path.read_bytes() for path in (cloud.home / "log").glob("*.log"))
    assert b"console serial of server" in logs and token_of(address).encode() not in logs
