# SPDX-License-Identifier: Apache-2.0
"""Screens that speak SPICE, on the hypervisors that have them."""

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

#: A guest that boots in emulation holds QEMU up, on a busy machine for long.
SECONDS = 90


@pytest.fixture
def rig(rig: Rig) -> Rig:
    """A host whose guests are made without SPICE, until its agent begins anew."""
    if not rig.has_console:
        pytest.skip("libvirt's mock-up has no consoles")
    return rig


def answer(side: socket.socket, sent: bytes) -> bytes:
    """What a server says first to who sent this."""
    side.settimeout(SECONDS)
    side.sendall(sent)
    return spice.OverSocket(side).read(4)


def test_a_guest_has_spice_when_it_was_made_by_an_agent_with_it(rig: Rig) -> None:
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
        assert answer(screen, spice.greeting()) == spice.MAGIC
    with rig.driver.console(new.server, VNC) as screen:
        assert answer(screen, b"") == b"RFB "
    rig.driver.rebuild(replace(old, fence=2), rig.read_image, True, QUIET)
    with rig.driver.console(old.server, SPICE) as screen:
        assert answer(screen, spice.greeting()) == spice.MAGIC


def test_spice_ends_with_the_guest(rig: Rig) -> None:
    rig.restart(spice=True)
    spec = rig.boot()
    with rig.driver.console(spec.server, SPICE) as screen:
        assert answer(screen, spice.greeting()) == spice.MAGIC
        rig.driver.ensure_stopped(spec.server, 2, 0, QUIET)
        while screen.recv(4096):
            pass
    for ask in (
        lambda: rig.driver.console(spec.server, SPICE),
        lambda: rig.driver.console_kinds(spec.server),
    ):
        with pytest.raises(VerbFailed):
            ask()


def test_channels_of_one_session_pass_the_port_of_a_proxy(rig: Rig) -> None:
    """As Nova's direct proxy connects: raw SPICE, from the first byte on."""
    rig.restart(spice=True)
    spec = rig.boot()
    direct = DirectConsoles(rig.driver.console, "127.0.0.1", ["127.0.0.1"])
    try:
        offer = direct.offer(spec.server)
        with ExitStack() as opened:

            def channel() -> spice.OverSocket:
                place = (offer["host"], offer["port"])
                return spice.OverSocket(
                    opened.enter_context(socket.create_connection(place, SECONDS))
                )

            if rig.real:
                session = spice.open_main(channel())
                assert spice.link(channel(), spice.DISPLAY, session) == 0
            else:
                main = channel()
                main.send(spice.greeting())
                assert main.read(4) == spice.MAGIC
    finally:
        direct.close()


def test_channels_of_one_session_pass_the_relay(rig: Rig) -> None:
    """Each over an offer of its own, as the console service opens them."""
    if not rig.real:
        pytest.skip("only a real server knows which channels belong together")
    rig.restart(spice=True)
    spec = rig.boot()
    relay = Consoles(rig.driver.console, "127.0.0.1")
    thread = relay.start()
    try:
        with ExitStack() as opened:

            def channel() -> spice.OverSocket:
                offer = relay.offer(spec.server, SPICE)
                side = opened.enter_context(
                    socket.create_connection((offer["host"], offer["port"]), SECONDS)
                )
                side.sendall(offer["secret"].encode())
                return spice.OverSocket(side)

            session = spice.open_main(channel())
            for kind in (spice.DISPLAY, spice.INPUTS, spice.CURSOR):
                assert spice.link(channel(), kind, session) == 0
            assert spice.link(channel(), spice.DISPLAY, session ^ 1) != 0  # nobody's session
    finally:
        relay.close()
        thread.join(5)
