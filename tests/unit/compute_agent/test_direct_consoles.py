# SPDX-License-Identifier: Apache-2.0
"""Ports of spice-direct consoles: permitted clients, lifetime, limits and TLS."""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from common.domain import errors
from common.domain.models import Flavor, GuestSpec
from compute_agent.consoles import direct_consoles
from compute_agent.consoles.consoles import DIRECT, Consoles
from compute_agent.consoles.direct_consoles import DirectConsoles
from compute_agent.virt.memory.driver import MemoryDriver
from compute_agent.virt.memory.state.host import MemoryHost
from compute_agent.virt.memory.state.script import QUIET
from tests import spice
from tests.unit.compute_agent.test_transfer_tls import Authority
from tests.waiting import await_true

SERVER = "6a1f9e5c-0c4b-4d53-9f1e-2f5f6f0a7b11"
PROXY, STRANGER = "127.0.0.2", "127.0.0.3"


@pytest.fixture
def driver() -> MemoryDriver:
    memory_driver = MemoryDriver(MemoryHost(spice=True))
    memory_driver.ensure_guest(
        GuestSpec(SERVER, 1, "vm", Flavor("1", "m1.nano", 1, 64, 1)), lambda image: iter(()), QUIET
    )
    return memory_driver


@pytest.fixture
def new_consoles(driver: MemoryDriver) -> Iterator[Callable[..., DirectConsoles]]:
    with ExitStack() as stack:

        def create(**options: Any) -> DirectConsoles:
            consoles = DirectConsoles(driver.console, "127.0.0.1", [PROXY], **options)
            stack.callback(consoles.close)
            return consoles

        yield create


def connect(offer: dict[str, Any], source: str = PROXY) -> socket.socket:
    return socket.create_connection((offer["host"], offer["port"]), 5, source_address=(source, 0))


def is_answering(side: socket.socket) -> bool:
    """Return True if the guest in memory echoes a SPICE greeting."""
    side.sendall(spice.greeting())
    return spice.OverSocket(side).read(len(spice.greeting())) == spice.greeting()


def is_open(offer: dict[str, Any]) -> bool:
    try:
        with connect(offer):
            return True
    except ConnectionError:
        return False


def test_direct_console_serves_several_spice_connections_of_proxy(
    new_consoles: Callable[..., DirectConsoles],
) -> None:
    offer = new_consoles().offer(SERVER)
    assert (offer["host"], offer["tls_port"]) == ("127.0.0.1", None)
    with connect(offer) as main, connect(offer) as display:
        assert is_answering(main) and is_answering(display)


def test_direct_console_sends_no_data_to_unlisted_address(
    new_consoles: Callable[..., DirectConsoles],
) -> None:
    offer = new_consoles().offer(SERVER)
    with connect(offer, STRANGER) as stranger:
        stranger.settimeout(5)
        try:
            assert stranger.recv(1) == b""
        except ConnectionResetError:
            assert offer["port"]
    with connect(offer) as main:
        assert is_answering(main)


def test_direct_console_port_closes_when_unused(
    new_consoles: Callable[..., DirectConsoles],
) -> None:
    offer = new_consoles(seconds=0.3).offer(SERVER)
    with connect(offer) as main:
        assert is_answering(main)
        with pytest.raises(TimeoutError):
            main.settimeout(1.0)
            while True:
                main.recv(100)
        main.settimeout(5)
        assert is_answering(main)  # a used port stays open
    await_true(lambda: not is_open(offer))


def test_direct_console_port_stays_open_past_deadline_while_connected(
    new_consoles: Callable[..., DirectConsoles],
) -> None:
    offer = new_consoles(seconds=0.6).offer(SERVER)
    # The first connection arrives before the end, and the second after it.
    time.sleep(0.4)
    with connect(offer) as main:
        assert is_answering(main)
        # The port waits for at most 0.6 s in one call, so the second must arrive before 1.0 s.
        time.sleep(0.4)
        with connect(offer) as display:
            assert is_answering(display) and is_answering(main)


def test_direct_console_closes_connections_and_port_when_guest_stops(
    new_consoles: Callable[..., DirectConsoles], driver: MemoryDriver
) -> None:
    offer = new_consoles().offer(SERVER)
    with connect(offer) as main:
        assert is_answering(main)
        driver.host.power_off(SERVER)
        while main.recv(4096):
            pass
    await_true(lambda: not is_open(offer))


def test_direct_console_limits_ports_and_connections(
    new_consoles: Callable[..., DirectConsoles], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct_consoles, "MAX_PORTS", 1)
    monkeypatch.setattr(direct_consoles, "MAX_CONNECTIONS", 1)
    consoles = new_consoles(seconds=0.3)
    offer = consoles.offer(SERVER)
    with connect(offer) as main:
        assert is_answering(main)
        with pytest.raises(errors.Unavailable):
            consoles.offer(SERVER)
        with connect(offer) as second, pytest.raises((AssertionError, ConnectionError)):
            is_answering(second)
        assert is_answering(main)
    await_true(lambda: not is_open(offer))
    assert consoles.offer(SERVER)


def test_direct_console_with_tls_has_certificate_and_refuses_plain_text(
    new_consoles: Callable[..., DirectConsoles], tmp_path: Path
) -> None:
    proof = Authority(tmp_path, "ours").tls("host")
    offer = new_consoles(tls=proof).offer(SERVER)
    assert offer["port"] == offer["tls_port"]
    context = ssl.create_default_context(cafile=proof.ca)
    with context.wrap_socket(connect(offer), server_hostname="127.0.0.1") as main:
        assert is_answering(main)
    with connect(offer) as plain, pytest.raises((AssertionError, ConnectionError)):
        is_answering(plain)


def test_console_relay_offers_direct_console_only_with_configured_proxies(
    driver: MemoryDriver,
) -> None:
    for proxies, message in (([PROXY], None), ([], "set .spice. direct_proxies")):
        direct = DirectConsoles(driver.console, "127.0.0.1", proxies)
        relay = Consoles(driver.console, "127.0.0.1", direct=direct)
        try:
            if message is None:
                assert set(relay.offer(SERVER, DIRECT)) == {"host", "port", "tls_port"}
                driver.host.guests[SERVER].spice = False
                with pytest.raises(errors.Conflict, match="no spice console"):
                    relay.offer(SERVER, DIRECT)
            else:
                with pytest.raises(errors.BadRequest, match=message):
                    relay.offer(SERVER, DIRECT)
        finally:
            relay.close()
