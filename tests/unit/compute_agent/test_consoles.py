# SPDX-License-Identifier: Apache-2.0
"""The console relay with guests in memory: secrets, expiry, limits, and the end of sessions."""

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
    memory_driver = MemoryDriver()
    memory_driver.ensure_guest(
        GuestSpec(SERVER, 1, "vm", Flavor("1", "m1.nano", 1, 64, 1)), lambda image: iter(()), QUIET
    )
    return memory_driver


@pytest.fixture
def relay(driver: MemoryDriver) -> Iterator[Consoles]:
    consoles = Consoles(driver.console, "127.0.0.1")
    thread = consoles.start()
    yield consoles
    consoles.close()
    thread.join(5)


def connect(offer: dict[str, Any], secret: str | None = None) -> socket.socket:
    console = socket.create_connection((offer["host"], offer["port"]), 5)
    console.sendall((offer["secret"] if secret is None else secret).encode())
    return console


def receive(console: socket.socket, length: int) -> bytes:
    data = b""
    while len(data) < length and (part := console.recv(length - len(data))):
        data += part
    return data


def test_console_relay_passes_bytes_unchanged_in_both_directions(relay: Consoles) -> None:
    content = bytes(range(256)) * 4096
    with connect(relay.offer(SERVER, SERIAL)) as console:
        writer = threading.Thread(target=console.sendall, args=(content,))
        writer.start()
        assert receive(console, len(content)) == content
        writer.join(5)


def test_console_relay_blocks_writer_when_guest_output_is_not_read(relay: Consoles) -> None:
    with connect(relay.offer(SERVER, SERIAL)) as console:
        console.settimeout(0.3)
        with pytest.raises(TimeoutError):
            # The test does not read the echo, so the buffers fill.
            console.sendall(bytes(64 << 20))


def test_console_secret_opens_only_one_connection(relay: Consoles) -> None:
    """Either of two connections with the secret may be first. The relay sends the other no data."""
    offer = relay.offer(SERVER, VNC)
    with connect(offer) as console, connect(offer) as second:
        greetings = {side: receive(side, 12) for side in (console, second)}
        assert sorted(greetings.values()) == [b"", b"RFB 003.008\n"]
        [winner] = [side for side, greeting in greetings.items() if greeting]
        winner.sendall(b"RFB 003.008\n")
        assert receive(winner, 12) == b"RFB 003.008\n"
    with connect(offer) as late:
        assert receive(late, 1) == b""


@pytest.mark.parametrize("secret", ["", "x" * 43, "\x00" * 200])
def test_console_with_wrong_secret_gets_no_data_and_offer_stays_valid(
    relay: Consoles, secret: str
) -> None:
    offer = relay.offer(SERVER, VNC)
    with connect(offer, secret) as stranger:
        if not secret:
            stranger.shutdown(socket.SHUT_WR)
        try:
            assert receive(stranger, 1) == b""
        except ConnectionResetError:
            assert len(secret) > 43  # the relay closes with unread bytes
    with connect(offer) as console:
        assert receive(console, 12) == b"RFB 003.008\n"


def test_console_offer_expires_and_closes_guest_connection(driver: MemoryDriver) -> None:
    opened: list[socket.socket] = []

    def open_console(server: str, kind: str) -> socket.socket:
        opened.append(driver.console(server, kind))
        return opened[-1]

    consoles = Consoles(open_console, "127.0.0.1", seconds=0.1)
    thread = consoles.start()
    offer = consoles.offer(SERVER, VNC)
    await_true(lambda: opened[0].fileno() == -1)
    with connect(offer) as late:
        assert receive(late, 1) == b""
    consoles.close()
    thread.join(5)


def test_new_serial_console_ends_older_serial_session(relay: Consoles) -> None:
    with connect(relay.offer(SERVER, SERIAL)) as older, connect(relay.offer(SERVER, VNC)) as screen:
        older.sendall(b"a")
        assert receive(older, 1) == b"a"
        with connect(relay.offer(SERVER, SERIAL)) as newer:
            assert receive(older, 1) == b""
            newer.sendall(b"b")
            assert receive(newer, 1) == b"b"
            assert receive(screen, 12) == b"RFB 003.008\n"


def test_console_session_ends_when_guest_powers_off(relay: Consoles, driver: MemoryDriver) -> None:
    with connect(relay.offer(SERVER, VNC)) as console:
        assert receive(console, 12) == b"RFB 003.008\n"
        driver.host.power_off(SERVER)
        assert receive(console, 1) == b""


def test_silent_connections_do_not_block_new_console(relay: Consoles) -> None:
    offer = relay.offer(SERVER, SERIAL)
    with contextlib.ExitStack() as stack:
        first, *_ = [
            stack.enter_context(socket.create_connection((offer["host"], offer["port"]), 5))
            for _ in range(MAX_UNPROVED)
        ]
        with connect(offer) as console:
            console.sendall(b"hello")
            assert receive(console, 5) == b"hello"
        assert first.recv(1) == b""


def test_console_offer_is_refused_beyond_session_limit(driver: MemoryDriver) -> None:
    relay = Consoles(driver.console, "127.0.0.1", sessions=2)
    thread = relay.start()
    with connect(relay.offer(SERVER, VNC)) as console:
        assert receive(console, 12) == b"RFB 003.008\n"
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


def test_console_offer_refuses_unknown_or_absent_kind_and_stopped_guest(
    relay: Consoles, driver: MemoryDriver
) -> None:
    with pytest.raises(errors.BadRequest):
        relay.offer(SERVER, "rdp")
    with pytest.raises(errors.Conflict, match="no spice console"):
        relay.offer(SERVER, SPICE)
    driver.host.power_off(SERVER)
    with pytest.raises(errors.Conflict, match="does not run"):
        relay.offer(SERVER, VNC)
