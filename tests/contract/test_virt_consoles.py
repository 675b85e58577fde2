# SPDX-License-Identifier: Apache-2.0
"""The VNC and serial consoles of a guest, on the hypervisors that have consoles."""

from __future__ import annotations

import socket
import time
import uuid
from contextlib import suppress

import pytest

from compute_agent.verb_context import VerbFailed
from compute_agent.virt.driver import SERIAL, VNC
from tests.contract.virt_rigs import BOOT_SECONDS, QUIET, Rig
from tests.waiting import await_true

SECONDS = 20


@pytest.fixture
def rig(rig: Rig) -> Rig:
    if not rig.has_console:
        pytest.skip("libvirt's mock-up has no consoles")
    return rig


def read(console: socket.socket, until: bytes) -> bytes:
    """Read the console until these bytes or the end of the connection.

    QEMU resets the connection if it exits with unread input.
    """
    output, deadline = b"", time.monotonic() + SECONDS
    console.settimeout(SECONDS)
    with suppress(ConnectionResetError):
        while until not in output and (part := console.recv(4096)):
            output += part
            assert time.monotonic() < deadline, output
    return output


def test_vnc_console_speaks_rfb_to_two_clients_at_once(rig: Rig) -> None:
    spec = rig.boot()
    with (
        rig.driver.console(spec.server, VNC) as first,
        rig.driver.console(spec.server, VNC) as second,
    ):
        for console in (first, second):
            assert read(console, b"\n").startswith(b"RFB 003.008\n")


def test_serial_console_echoes_input_and_guest_log_continues(rig: Rig) -> None:
    spec = rig.ready()
    # The second client connects after the first has disconnected.
    for word in (b"first", b"second"):
        with rig.driver.console(spec.server, SERIAL) as console:
            console.sendall(b"echo " + word + b"\n")
            assert word in read(console, word)
    if rig.real:
        await_true(
            lambda: "echo second" in rig.console(spec.server),
            SECONDS,
            lambda: rig.console(spec.server)[-500:],
        )


def test_consoles_close_when_guest_stops(rig: Rig) -> None:
    spec = rig.boot(ready=True)
    with (
        rig.driver.console(spec.server, VNC) as screen,
        rig.driver.console(spec.server, SERIAL) as serial,
    ):
        rig.driver.ensure_stopped(spec.server, 2, 0, QUIET)
        for console in (screen, serial):
            assert not read(console, b"never said").endswith(b"never said")


@pytest.mark.parametrize("action", ["reboot", "resume"])
def test_consoles_accept_new_clients_after_reboot_or_resume(rig: Rig, action: str) -> None:
    spec = rig.ready()
    if action == "reboot":
        rig.driver.reboot(spec.server, 2, BOOT_SECONDS, QUIET)
        rig.await_boots(spec.server, 2)
        assert not rig.real or f"id {spec.server}" in rig.console(spec.server), (
            "it is another guest"
        )
    else:
        rig.driver.ensure_suspended(spec.server, 2, QUIET)
        with pytest.raises(VerbFailed):
            rig.driver.console(spec.server, VNC)
        rig.driver.ensure_running(spec.server, 3, QUIET)
    for kind, console_input, expected in ((VNC, b"", b"RFB"), (SERIAL, b"echo again\n", b"again")):
        with rig.driver.console(spec.server, kind) as console:
            console.sendall(console_input)
            assert expected in read(console, expected)


@pytest.mark.parametrize("kind", [VNC, SERIAL])
def test_console_of_stopped_or_unknown_server_raises_verb_failed(rig: Rig, kind: str) -> None:
    spec = rig.boot()
    rig.driver.ensure_stopped(spec.server, 2, 0, QUIET)
    for server in (spec.server, str(uuid.uuid4())):
        with pytest.raises(VerbFailed):
            rig.driver.console(server, kind)
