# SPDX-License-Identifier: Apache-2.0
"""Ports of spice-direct consoles: who reaches them, for how long, and when they end."""

from __future__ import annotations

import socket
import ssl
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
    made = MemoryDriver(MemoryHost(spice=True))
    made.ensure_guest(
        GuestSpec(SERVER, 1, "vm", Flavor("1", "m1.nano", 1, 64, 1)), lambda image: iter(()), QUIET
    )
    return made


@pytest.fixture
def make(driver: MemoryDriver) -> Iterator[Callable[..., DirectConsoles]]:
    with ExitStack() as ended:

        def one(**options: Any) -> DirectConsoles:
            made = DirectConsoles(driver.console, "127.0.0.1", [PROXY], **options)
            ended.callback(made.close)
            return made

        yield one


def connect(offer: dict[str, Any], source: str = PROXY) -> socket.socket:
    return socket.create_connection((offer["host"], offer["port"]), 5, source_address=(source, 0))


def answers(side: socket.socket) -> bool:
    """As a guest in memory does: with the same."""
    side.sendall(spice.greeting())
    return spice.OverSocket(side).read(len(spice.greeting())) == spice.greeting()


def is_open(offer: dict[str, Any]) -> bool:
    try:
        with connect(offer):
            return True
    except ConnectionError:
        return False


def test_a_proxy_speaks_spice_from_its_first_byte_on_several_connections(
    make: Callable[..., DirectConsoles],
) -> None:
    offer = make().offer(SERVER)
    assert (offer["host"], offer["tls_port"]) == ("127.0.0.1", None)
    with connect(offer) as main, connect(offer) as display:
        assert answers(main) and answers(display)


def test_nobody_else_is_told_anything(make: Callable[..., DirectConsoles]) -> None:
    offer = make().offer(SERVER)
    with connect(offer, STRANGER) as stranger:
        stranger.settimeout(5)
        try:
            assert stranger.recv(1) == b""
        except ConnectionResetError:
            assert offer["port"]
    with connect(offer) as main:
        assert answers(main)


def test_a_port_that_nobody_uses_is_closed(make: Callable[..., DirectConsoles]) -> None:
    offer = make(seconds=0.3).offer(SERVER)
    with connect(offer) as main:
        assert answers(main)
        with pytest.raises(TimeoutError):
            main.settimeout(1.0)
            while True:
                main.recv(100)
        main.settimeout(5)
        assert answers(main)  # for as long as it is used
    await_true(lambda: not is_open(offer))


def test_connections_end_with_the_guest_and_the_port_with_it(
    make: Callable[..., DirectConsoles], driver: MemoryDriver
) -> None:
    offer = make().offer(SERVER)
    with connect(offer) as main:
        assert answers(main)
        driver.host.power_off(SERVER)
        while main.recv(4096):
            pass
    await_true(lambda: not is_open(offer))  # a look for the guest finds none


def test_there_are_so_many(
    make: Callable[..., DirectConsoles], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct_consoles, "MAX_PORTS", 1)
    monkeypatch.setattr(direct_consoles, "MAX_CONNECTIONS", 1)
    made = make(seconds=0.3)
    offer = made.offer(SERVER)
    with connect(offer) as main:
        assert answers(main)
        with pytest.raises(errors.Unavailable):
            made.offer(SERVER)
        with connect(offer) as second, pytest.raises((AssertionError, ConnectionError)):
            answers(second)
        assert answers(main)
    await_true(lambda: not is_open(offer))
    assert made.offer(SERVER)


def test_over_tls_the_port_proves_itself(
    make: Callable[..., DirectConsoles], tmp_path: Path
) -> None:
    proof = Authority(tmp_path, "ours").tls("host")
    offer = make(tls=proof).offer(SERVER)
    assert offer["port"] == offer["tls_port"]
    context = ssl.create_default_context(cafile=proof.ca)
    with context.wrap_socket(connect(offer), server_hostname="127.0.0.1") as main:
        assert answers(main)
    with connect(offer) as plain, pytest.raises((AssertionError, ConnectionError)):
        answers(plain)


def test_the_relay_offers_them_where_proxies_are_known(driver: MemoryDriver) -> None:
    for proxies, wanted in (([PROXY], None), ([], "set .spice. direct_proxies")):
        direct = DirectConsoles(driver.console, "127.0.0.1", proxies)
        relay = Consoles(driver.console, "127.0.0.1", direct=direct)
        try:
            if wanted is None:
                assert set(relay.offer(SERVER, DIRECT)) == {"host", "port", "tls_port"}
                driver.host.guests[SERVER].spice = False
                with pytest.raises(errors.Conflict, match="no spice console"):
                    relay.offer(SERVER, DIRECT)
            else:
                with pytest.raises(errors.BadRequest, match=wanted):
                    relay.offer(SERVER, DIRECT)
        finally:
            relay.close()
