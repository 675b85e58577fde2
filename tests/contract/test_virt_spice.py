# SPDX-License-Identifier: Apache-2.0
"""SPICE consoles of guests, on the hypervisors that have consoles."""

from __future__ import annotations

import socket
from contextlib import ExitStack
from dataclasses import replace

import pytest

from compute_agent.consoles.consoles import Consoles
from compute_agent.consoles.direct_consoles import DirectConsoles
from compute_agent.verb_context import VerbFailed
from compute_agent.virt.driver import SERIAL, SPICE, VNC
from tests import spice
from tests.contract.virt_rigs import QUIET, Rig

#: The boot of an emulated guest delays QEMU, on a busy machine for a long time.
SECONDS = 90


@pytest.fixture
def rig(rig: Rig) -> Rig:
    """Return a host without SPICE. Tests turn SPICE on with a restart of the driver."""
    if not rig.has_console:
        pytest.skip("libvirt's mock-up has no consoles")
    return rig


def read_answer(side: socket.socket, request: bytes) -> bytes:
    """Send these bytes to a server, and return the first four bytes of the answer."""
    side.settimeout(SECONDS)
    side.sendall(request)
    return spice.OverSocket(side).read(4)


def test_guest_has_spice_only_if_created_or_rebuilt_with_spice_option(rig: Rig) -> None:
    old = rig.boot()
    assert rig.driver.inventory().facts["spice"] is False
    rig.restart(spice=True)
    assert rig.driver.inventory().facts["spice"] is True
    assert rig.driver.console_kinds(old.server) == [VNC, SERIAL]
    with pytest.raises(VerbFailed, match="no spice console"):
        rig.driver.console(old.server, SPICE)
    new = rig.boot()
    assert rig.driver.console_kinds(new.server) == [VNC, SPICE, SERIAL]
    with rig.driver.console(new.server, SPICE) as screen:
        assert read_answer(screen, spice.greeting()) == spice.MAGIC
    with rig.driver.console(new.server, VNC) as screen:
        assert read_answer(screen, b"") == b"RFB "
    rig.driver.rebuild(replace(old, fence=2), rig.read_image, True, QUIET)
    with rig.driver.console(old.server, SPICE) as screen:
        assert read_answer(screen, spice.greeting()) == spice.MAGIC


def test_spice_console_closes_when_guest_stops(rig: Rig) -> None:
    rig.restart(spice=True)
    spec = rig.boot()
    with rig.driver.console(spec.server, SPICE) as screen:
        assert read_answer(screen, spice.greeting()) == spice.MAGIC
        rig.driver.ensure_stopped(spec.server, 2, 0, QUIET)
        while screen.recv(4096):
            pass
    for call in (
        lambda: rig.driver.console(spec.server, SPICE),
        lambda: rig.driver.console_kinds(spec.server),
    ):
        with pytest.raises(VerbFailed):
            call()


def test_direct_console_port_accepts_all_spice_channels_of_session(rig: Rig) -> None:
    """Nova's direct proxy connects in this way, with SPICE from the first byte on."""
    rig.restart(spice=True)
    spec = rig.boot()
    direct = DirectConsoles(rig.driver.console, "127.0.0.1", ["127.0.0.1"])
    try:
        offer = direct.offer(spec.server)
        with ExitStack() as sockets:

            def open_channel() -> spice.OverSocket:
                place = (offer["host"], offer["port"])
                return spice.OverSocket(
                    sockets.enter_context(socket.create_connection(place, SECONDS))
                )

            if rig.real:
                session = spice.open_main(open_channel())
                assert spice.link(open_channel(), spice.DISPLAY, session) == 0
            else:
                main = open_channel()
                main.send(spice.greeting())
                assert main.read(4) == spice.MAGIC
    finally:
        direct.close()


def test_console_relay_accepts_all_spice_channels_of_session(rig: Rig) -> None:
    """Each channel uses a new offer, as in the console service."""
    if not rig.real:
        pytest.skip("only a real server knows which channels belong together")
    rig.restart(spice=True)
    spec = rig.boot()
    relay = Consoles(rig.driver.console, "127.0.0.1")
    thread = relay.start()
    try:
        with ExitStack() as sockets:

            def open_channel() -> spice.OverSocket:
                offer = relay.offer(spec.server, SPICE)
                side = sockets.enter_context(
                    socket.create_connection((offer["host"], offer["port"]), SECONDS)
                )
                side.sendall(offer["secret"].encode())
                return spice.OverSocket(side)

            session = spice.open_main(open_channel())
            for kind in (spice.DISPLAY, spice.INPUTS, spice.CURSOR):
                assert spice.link(open_channel(), kind, session) == 0
            # This session does not exist.
            assert spice.link(open_channel(), spice.DISPLAY, session ^ 1) != 0
    finally:
        relay.close()
        thread.join(5)
