# SPDX-License-Identifier: Apache-2.0
"""The relay of consoles: who may have one, for how long, and when it ends."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from common.domain import errors
from common.domain.models import Flavor, GuestSpec
from compute_agent.consoles.consoles import MAX_UNPROVED, Consoles
from compute_agent.virt.driver import SERIAL, SPICE, VNC
from compute_agent.virt.memory.driver import MemoryDriver
from compute_agent.virt.memory.state.script import QUIET
from tests.waiting import await_true

SERVER = "6a1f9e5c-0c4b-4d53-9f1e-2f5f6f0a7b11"


@pytest.fixture
def driver() -> MemoryDriver:
    made = MemoryDriver()
    made.ensure_guest(
        GuestSpec(SERVER, 1, "vm", Flavor("1", "m1.nano", 1, 64, 1)), lambda image: iter(()), QUIET
    )
    return made


@pytest.fixture
def relay(driver: MemoryDriver) -> Iterator[Consoles]:
    made = Consoles(driver.console, "127.0.0.1")
    thread = made.start()
    yield made
    made.close()
    thread.join(5)


def connect(offer: dict[str, Any], secret: str | None = None) -> socket.socket:
    made = socket.create_connection((offer["host"], offer["port"]), 5)
    made.sendall((offer["secret"] if secret is None else secret).encode())
    return made


def said(console: socket.socket, length: int) -> bytes:
    found = b""
    while len(found) < length and (part := console.recv(length - len(found))):
        found += part
    return found


def test_bytes_pass_both_ways_unchanged(relay: Consoles) -> None:
    everything = bytes(range(256)) * 4096
    with connect(relay.offer(SERVER, SERIAL)) as console:
        writer = threading.Thread(target=console.sendall, args=(everything,))
        writer.start()
        assert said(console, len(everything)) == everything
        writer.join(5)


def test_a_reader_that_does_not_read_stops_the_writer(relay: Consoles) -> None:
    with connect(relay.offer(SERVER, SERIAL)) as console:
        console.settimeout(0.3)
        with pytest.raises(TimeoutError):
            # what comes back is not read: buffers fill, and there it ends
            console.sendall(bytes(64 << 20))


def test_a_secret_opens_once(relay: Consoles) -> None:
    """Of two who bring it, either may be heard first: one is let in, the other is told nothing."""
    offer = relay.offer(SERVER, VNC)
    with connect(offer) as console, connect(offer) as again:
        heard = {side: said(side, 12) for side in (console, again)}
        assert sorted(heard.values()) == [b"", b"RFB 003.008\n"]
        [let_in] = [side for side, greeting in heard.items() if greeting]
        let_in.sendall(b"RFB 003.008\n")
        assert said(let_in, 12) == b"RFB 003.008\n"
    with connect(offer) as late:
        assert said(late, 1) == b""


@pytest.mark.parametrize("secret", ["", "x" * 43, "\x00" * 200])
def test_a_wrong_secret_is_told_nothing_and_spoils_nothing(relay: Consoles, secret: str) -> None:
    offer = relay.offer(SERVER, VNC)
    with connect(offer, secret) as stranger:
        if not secret:
            stranger.shutdown(socket.SHUT_WR)
        try:
            assert said(stranger, 1) == b""
        except ConnectionResetError:
            assert len(secret) > 43  # what it sent too much was thrown away
    with connect(offer) as console:
        assert said(console, 12) == b"RFB 003.008\n"


def test_an_offer_expires_and_the_guest_s_side_is_closed(driver: MemoryDriver) -> None:
    opened: list[socket.socket] = []

    def open_console(server: str, kind: str) -> socket.socket:
        opened.append(driver.console(server, kind))
        return opened[-1]

    made = Consoles(open_console, "127.0.0.1", seconds=0.1)
    thread = made.start()
    offer = made.offer(SERVER, VNC)
    await_true(lambda: opened[0].fileno() == -1)
    with connect(offer) as late:
        assert said(late, 1) == b""
    made.close()
    thread.join(5)


def test_the_newest_session_has_the_serial_port(relay: Consoles) -> None:
    with connect(relay.offer(SERVER, SERIAL)) as older, connect(relay.offer(SERVER, VNC)) as screen:
        older.sendall(b"a")
        assert said(older, 1) == b"a"
        with connect(relay.offer(SERVER, SERIAL)) as newer:
            assert said(older, 1) == b""
            newer.sendall(b"b")
            assert said(newer, 1) == b"b"
            assert said(screen, 12) == b"RFB 003.008\n"


def test_it_ends_with_the_guest(relay: Consoles, driver: MemoryDriver) -> None:
    with connect(relay.offer(SERVER, VNC)) as console:
        assert said(console, 12) == b"RFB 003.008\n"
        driver.host.power_off(SERVER)
        assert said(console, 1) == b""


def test_silent_connections_keep_no_console_out(relay: Consoles) -> None:
    offer = relay.offer(SERVER, SERIAL)
    with contextlib.ExitStack() as stack:
        first, *_ = [
            stack.enter_context(socket.create_connection((offer["host"], offer["port"]), 5))
            for _ in range(MAX_UNPROVED)
        ]
        with connect(offer) as console:
            console.sendall(b"hello")
            assert said(console, 5) == b"hello"
        assert first.recv(1) == b""


def test_there_are_so_many_and_no_more(driver: MemoryDriver) -> None:
    relay = Consoles(driver.console, "127.0.0.1", sessions=2)
    thread = relay.start()
    with connect(relay.offer(SERVER, VNC)) as console:
        assert said(console, 12) == b"RFB 003.008\n"
        relay.offer(SERVER, VNC)
        with pytest.raises(errors.Unavailable):
            relay.offer(SERVER, VNC)

    def is_offered() -> bool:
        try:
            relay.offer(SERVER, VNC)
        except errors.Unavailable:
            return False
        return True

    await_true(is_offered)
    relay.close()
    thread.join(5)


def test_what_is_not_there_is_refused(relay: Consoles, driver: MemoryDriver) -> None:
    with pytest.raises(errors.BadRequest):
        relay.offer(SERVER, "rdp")
    with pytest.raises(errors.Conflict, match="no spice console"):
        relay.offer(SERVER, SPICE)
    driver.host.power_off(SERVER)
    with pytest.raises(errors.Conflict, match="does not run"):
        relay.offer(SERVER, VNC)
