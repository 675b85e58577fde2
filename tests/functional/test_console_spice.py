# SPDX-License-Identifier: Apache-2.0
"""SPICE consoles: several websockets of one browser for one token."""

from __future__ import annotations

import logging
import re
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection

from common.store import schema
from common.store.servers import console_tokens, guests
from compute_api.console import sessions as parts
from compute_api.console.browser_cookies import BrowserCookies
from compute_api.console.page_server import PageServer
from compute_api.console.service import ConsoleServer, listen
from compute_api.console.sessions import ConsoleSessions
from compute_api.console.token_check import TokenChecker
from tests import spice
from tests.functional.test_console_service import (
    ALLOWED,
    OURS,
    SERVERS,
    VAULT,
    World,
    echoes,
    read_close_frame,
)
from tests.log_lines import render_records
from tests.waiting import await_true

HTML = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
PLAIN = "http://consoles.example"


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., World]]:
    with ExitStack() as stack:

        def make_world(**options: Any) -> World:
            world = World(tmp_path, **{"url": PLAIN, "origins": (), **options})
            stack.callback(world.close)
            return world

        yield make_world


@pytest.fixture
def world(make: Callable[..., World]) -> World:
    return make()


def page_path(token: str) -> str:
    return f"/spice/spice_auto.html?path=%3Ftoken%3D{token}"


def fetch_cookie(world: World, token: str, **headers: str) -> str:
    """Fetch the page, and return the cookie of the response, or "" without a cookie."""
    status, _, headers_of_page = world.get(page_path(token), {**HTML, **headers})
    assert status == 200
    return headers_of_page.get("Set-Cookie", "").partition(";")[0]


def open_channel(world: World, token: str, own: str) -> ClientConnection:
    """Open another websocket with the cookie ``own``, or without a cookie if this is ""."""
    return world.open(token, additional_headers={"Cookie": own} if own else {})


class Session:
    """An open session: its main websocket and ``more`` further channels."""

    def __init__(self, world: World, opened: ExitStack, more: int = 3, **about: Any) -> None:
        self.token = world.token("spice-html5", **about)
        self.own = fetch_cookie(world, self.token)
        self.main = opened.enter_context(open_channel(world, self.token, self.own))
        # A client opens further channels only after an answer of the main channel.
        assert echoes(self.main)
        self.channels = [
            opened.enter_context(open_channel(world, self.token, self.own)) for _ in range(more)
        ]

    @property
    def all(self) -> list[ClientConnection]:
        return [self.main, *self.channels]


def read_tokens(world: World) -> list[Any]:
    return world.store.read(lambda tx: list(tx.execute(schema.console_tokens.select())))


# --- one browser ---
def test_spice_token_opens_all_channels_of_browser_with_its_cookie(world: World) -> None:
    with ExitStack() as opened:
        session = Session(world, opened)
        for number, channel in enumerate(session.all):
            assert echoes(channel, spice.greeting(number + 1))
        for stranger in ("", session.own[:-1] + "~", "console-0123456789abcdef=x"):
            headers = {"Cookie": stranger} if stranger else {}
            assert world.hangs_up(session.token, additional_headers=headers)
        assert all(echoes(channel) for channel in session.all)


def test_spice_session_ends_with_its_main_channel(world: World) -> None:
    with ExitStack() as opened:
        session = Session(world, opened)
        assert all(echoes(channel) for channel in session.all)
        session.main.close()
        for channel in session.channels:
            assert read_close_frame(channel)[0] in (parts.DONE, parts.REFUSED)
        await_true(lambda: not read_tokens(world))
        assert world.hangs_up(session.token, additional_headers={"Cookie": session.own})
    await_true(lambda: len(world.sessions) == 0)


def test_spice_session_continues_when_a_channel_ends(world: World) -> None:
    with ExitStack() as opened:
        session = Session(world, opened)
        session.channels[0].close()
        await_true(lambda: len(world.sessions) == 3)
        assert all(echoes(channel) for channel in (session.main, *session.channels[1:]))
        with open_channel(world, session.token, session.own) as again:
            assert echoes(again)


def test_spice_session_limits_number_of_channels(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "MAX_CHANNELS", 2)
    with ExitStack() as opened:
        session = Session(world, opened, more=2)
        assert all(echoes(channel) for channel in session.all)
        with open_channel(world, session.token, session.own) as late:
            code, words = read_close_frame(late)
        assert code == parts.BUSY and "too many connections" in words
        session.channels[0].close()
        await_true(lambda: len(world.sessions) == 2)
        with open_channel(world, session.token, session.own) as next_channel:
            assert echoes(next_channel)


def test_spice_channels_do_not_count_to_limits_of_sessions_or_pages(
    make: Callable[..., World],
) -> None:
    world = make(most=2, per_server=2, per_user=2)
    with ExitStack() as opened:
        for _ in range(2):
            session = Session(world, opened, more=parts.MAX_CHANNELS)
            assert all(echoes(channel) for channel in session.all)
        assert world.read_close(world.token("serial", SERVERS[1]))[0] == parts.BUSY
        patient = opened.enter_context(socket.create_connection(("127.0.0.1", world.port), 5))
        assert world.get("/spice/main.js")[0] == 200
        patient.sendall(b"GET /spice/main.js HTTP/1.1\r\nHost: x\r\n\r\n")
        assert patient.recv(100).startswith(b"HTTP/1.1 200 OK")


def test_server_delete_ends_all_spice_channels(world: World) -> None:
    with ExitStack() as opened:
        session = Session(world, opened)
        assert all(echoes(channel) for channel in session.all)
        world.store.write(lambda tx: guests.add_removal(tx, SERVERS[0], 2))
        for channel in session.all:
            assert read_close_frame(channel)[0] in (parts.DONE, parts.REFUSED)
        assert world.hangs_up(session.token, additional_headers={"Cookie": session.own})


def test_revoked_user_token_ends_all_spice_channels(world: World) -> None:
    with ExitStack() as opened:
        session = Session(world, opened, caller="mine")
        assert all(echoes(channel) for channel in session.all)
        world.bad.add("mine")
        assert world.hangs_up(session.token, additional_headers={"Cookie": session.own})
        for channel in session.all:
            assert read_close_frame(channel)[0] in (parts.DONE, parts.REFUSED)


# --- clients without a cookie ---
def test_spice_token_without_cookie_allows_one_connection(world: World) -> None:
    token = world.token("spice-html5")
    with world.open(token) as main:
        assert echoes(main)
        assert world.hangs_up(token)
        name = f"console-{console_tokens.hash_token(token)[:16]}"
        # The first connection had no such cookie.
        for late in ("", "x"):
            assert world.hangs_up(token, additional_headers={"Cookie": f"{name}={late}"})
        assert echoes(main)


def test_spice_token_accepts_cookie_chosen_by_program(world: World) -> None:
    token = world.token("spice-html5")
    own = f"console-{console_tokens.hash_token(token)[:16]}=chosen-by-me"
    with open_channel(world, token, own) as main:
        assert echoes(main)
        with open_channel(world, token, own) as channel:
            assert echoes(channel)
        assert world.hangs_up(token)


@pytest.mark.parametrize("kind", ["novnc", "serial"])
def test_novnc_and_serial_console_have_one_connection_at_a_time(world: World, kind: str) -> None:
    token = world.token(kind)
    own = f"console-{console_tokens.hash_token(token)[:16]}=chosen-by-me"
    with open_channel(world, token, own) as first:
        await_true(lambda: len(world.sessions) == 1)
        with open_channel(world, token, own):
            assert read_close_frame(first)[0] == parts.DONE
            await_true(lambda: len(world.sessions) == 1)


@pytest.mark.parametrize(
    ("url", "headers", "kept"),
    [
        (
            OURS,
            {"Sec-Fetch-Dest": "iframe"},
            r"__Host-console-[0-9a-f]{16}=[\w-]{43}; Path=/; Max-Age=60; HttpOnly; "
            "SameSite=None; Secure; Partitioned",
        ),
        (
            PLAIN,
            {},
            r"console-[0-9a-f]{16}=[\w-]{43}; Path=/; Max-Age=60; HttpOnly; SameSite=Strict",
        ),
    ],
)
def test_spice_page_sets_cookie_and_first_websocket_binds_token(
    make: Callable[..., World], url: str, headers: dict[str, str], kept: str
) -> None:
    world = make(url=url, origins=(ALLOWED,))
    token = world.token("spice-html5")
    offered = [world.get(page_path(token), {**HTML, **headers})[2]["Set-Cookie"] for _ in range(2)]
    assert all(re.fullmatch(kept, offer) for offer in offered)
    lost, own = (offer.partition(";")[0] for offer in offered)
    with open_channel(world, token, own) as main:
        assert echoes(main)
        with open_channel(world, token, own) as channel:
            assert echoes(channel)
        assert world.hangs_up(token, additional_headers={"Cookie": lost})
    # A client that keeps no cookie still has its only connection.
    token = world.token("spice-html5")
    assert world.get(page_path(token), {**HTML, **headers})[2]["Set-Cookie"]
    with world.open(token) as main:
        assert echoes(main)


def test_spice_direct_token_is_refused_by_console_service(world: World) -> None:
    token = world.token("spice-direct")
    assert world.hangs_up(token)
    assert world.hangs_up(token, additional_headers={"Cookie": fetch_cookie(world, token)})


# --- several processes ---
def test_spice_channels_in_another_process_end_with_main_channel(
    world: World, tmp_path: Path
) -> None:
    browsers = BrowserCookies(world.store, PLAIN, (), 60)
    sessions = ConsoleSessions(
        world.store,
        world,
        TokenChecker(VAULT, world.is_good),
        browsers,
        most=4,
        per_server=2,
        per_user=4,
        seconds=60,
    )
    listener = listen("127.0.0.1", 0)
    other = ConsoleServer(listener, PageServer(tmp_path / "novnc", PLAIN, browsers), sessions, 12)
    threads = other.start()
    first, second = world.port, int(listener.getsockname()[1])
    try:
        with ExitStack() as opened:
            session = Session(world, opened, more=1)
            world.port = second
            there = opened.enter_context(open_channel(world, session.token, session.own))
            assert echoes(there) and len(sessions) == 1
            assert world.hangs_up(session.token)
            session.main.close()
            assert read_close_frame(there)[0] == parts.REFUSED
    finally:
        world.port = first
        other.close()
        for thread in threads:
            thread.join(5)


# --- pages and logs ---
def test_spice_page_is_served_and_404_names_package_when_it_is_missing(
    world: World, tmp_path: Path
) -> None:
    assert world.get("/spice/spice_auto.html")[:2] == (200, b"<p>spice")
    assert world.get("/spice/main.js")[:2] == (200, b"export default 2;")
    for path in ("/spice_auto.html", "/main.js", "/spice", "/spice/", "/spice/../core/rfb.js"):
        assert world.get(path)[0] == 404
    missing = PageServer(
        tmp_path / "novnc",
        PLAIN,
        BrowserCookies(world.store, PLAIN, (), 60),
        spice=tmp_path / "nowhere",
    )
    listener = listen("127.0.0.1", 0)
    served = ConsoleServer(listener, missing, world.sessions, 8)
    threads = served.start()
    first, world.port = world.port, int(listener.getsockname()[1])
    try:
        status, words, _ = world.get("/spice/spice_auto.html?path=%3Ftoken%3Dx")
        assert status == 404 and b"install the package spice-html5" in words
        assert world.get("/vnc_lite.html")[0] == 200
    finally:
        world.port = first
        served.close()
        for thread in threads:
            thread.join(5)


def test_spice_token_and_cookie_are_not_logged(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    with ExitStack() as opened:
        session = Session(world, opened)
        assert all(echoes(channel) for channel in session.all)
        world.hangs_up(session.token)
    lines = render_records(
        record for record in caplog.records if not record.name.startswith("websockets.client")
    )
    assert any("a console is opened kind=spice-html5 server=" in line for line in lines)
    secrets = (session.token, session.own.partition("=")[2])
    assert not [line for line in lines for secret in secrets if secret in line]


def test_spice_page_reload_after_session_end_opens_no_session(world: World) -> None:
    """The session of the token ended with the page before the reload."""
    token = world.token("spice-html5")
    own = fetch_cookie(world, token)
    with open_channel(world, token, own) as main:
        assert echoes(main)
    await_true(lambda: not read_tokens(world))
    assert fetch_cookie(world, token) == ""
    with open_channel(world, token, own) as late, pytest.raises(ConnectionClosed) as closed:
        late.recv(timeout=10)
    assert closed.value.rcvd is None
