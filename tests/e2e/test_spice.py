# SPDX-License-Identifier: Apache-2.0
"""SPICE consoles of guests through the console service.

The clients are spice-html5 in a browser, and a program that opens the channels.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import requests
from websockets.sync.client import connect

from common.store.servers.console_tokens import hash_token
from deploy.one_machine.cloud import process_control
from deploy.one_machine.cloud.process_control import find_process
from tests import spice
from tests.e2e.browser import Browser
from tests.e2e.live import Live, Rest
from tests.e2e.test_consoles import END_SECONDS, extract_token
from tests.waiting import await_true, is_true_within

pytestmark = pytest.mark.slice("guests")
CONSOLE_REQUEST = {"remote_console": {"protocol": "spice", "type": "spice-html5"}}


def restart_agent(live: Live) -> None:
    """Restart the agent of the first host, which then reads its configuration again."""
    pid = process_control.kill(live.cloud, "agent")
    await_true(
        lambda: find_process(live.cloud, "agent") not in (None, pid),
        30,
        lambda: "no agent comes back",
    )


@pytest.fixture(scope="module")
def guest(cloud: Live) -> Iterator[str]:
    """Yield the id of a booted server on a host with SPICE.

    A server from before SPICE has no console.
    """
    file = cloud.cloud.config(cloud.cloud.hosts[0])
    original_text, demo = file.read_text(), cloud.rest()
    old = demo.create(name="made-before", image=cloud.image(), flavor=cloud.flavor())
    demo.await_status(old, "ACTIVE")
    assert demo.call("POST", f"/servers/{old}/remote-consoles", CONSOLE_REQUEST).status == 400
    file.write_text(f"{original_text}\n[spice]\nenabled = true\n")
    try:
        restart_agent(cloud)
        server = demo.create(name="seen-by-spice", image=cloud.image(), flavor=cloud.flavor())
        demo.await_status(server, "ACTIVE")
        demo.await_ready(server)
        refused = demo.call("POST", f"/servers/{old}/remote-consoles", CONSOLE_REQUEST)
        assert refused.status == 400 and "console type spice." in str(refused.body), refused
        yield server
        for server_id in (server, old):
            demo.call("DELETE", f"/servers/{server_id}")
            demo.await_gone(server_id)
            cloud.await_removed(server_id, END_SECONDS)
        cloud.assert_healthy()
    finally:
        file.write_text(original_text)
        restart_agent(cloud)


def test_spice_console_shows_screen_and_accepts_typing(
    cloud: Live, demo: Rest, guest: str, tmp_path: Path
) -> None:
    [console] = cloud.openstack(f"console url show --spice {guest} -f json")
    assert console["type"] == "spice-html5"
    page = requests.get(console["url"], timeout=10)
    assert (page.status_code, "spice" in page.text) == (200, True), page.text
    with Browser(tmp_path / "browser") as browser:
        browser.open(console["url"])
        browser.await_true("document.querySelector('#spice-screen canvas')?.width >= 640")
        empty = browser.picture()
        browser.evaluate("document.querySelector('#spice-screen canvas').focus()")
        await_true(
            lambda: type_line(browser, demo, guest),
            60,
            lambda: (demo.console(guest)[-500:], browser.messages),
        )
        await_true(
            lambda: browser.picture(tmp_path / "console.png") != empty, 10, lambda: browser.messages
        )


def type_line(browser: Browser, demo: Rest, guest: str) -> bool:
    """Type a line slowly, and return whether the guest executes it.

    A keyboard buffers few letters, and a busy guest loses the others.
    """
    for letter in "echo spice 42 > /dev/ttyS0\n":
        browser.type(letter)
        browser.evaluate("new Promise(done => setTimeout(done, 100))")
    return is_true_within(lambda: "spice 42" in demo.console(guest), 5, pause=0.1)


def test_spice_channels_open_only_with_cookie_of_main_channel(
    cloud: Live, demo: Rest, guest: str
) -> None:
    """The action before microversion 2.6 returns the URL, and the program chooses a cookie."""
    reply = demo.call(
        "POST",
        f"/servers/{guest}/action",
        {"os-getSPICEConsole": {"type": "spice-html5"}},
        version="2.5",
    )
    assert reply.status == 200, reply
    url = reply.body["console"]["url"]
    token, place = extract_token(url), urlsplit(url)
    cookie = {"Cookie": f"console-{hash_token(token)[:16]}=chosen"}

    with ExitStack() as opened:

        def channel(headers: dict[str, str]) -> spice.OverMessages:
            connection = opened.enter_context(
                connect(
                    f"ws://{place.netloc}/?token={token}",
                    subprotocols=["binary"],
                    additional_headers=headers,
                    compression=None,
                    proxy=None,
                    legacy=True,
                )
            )
            return spice.OverMessages(connection.send, lambda: connection.recv(timeout=END_SECONDS))

        session = spice.open_main(channel(cookie))
        for kind in (spice.DISPLAY, spice.INPUTS, spice.CURSOR):
            assert spice.link(channel(cookie), kind, session) == 0
        with pytest.raises(Exception, match="close"):
            spice.link(channel({}), spice.DISPLAY, session)
