# SPDX-License-Identifier: Apache-2.0
"""The screen and the serial console of a guest, on the hypervisors that have one."""

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
    """What it says up to these bytes, or to its end; a QEMU that ends with bytes of ours unread
    resets it."""
    said, deadline = b"", time.monotonic() + SECONDS
    console.settimeout(SECONDS)
    with suppress(ConnectionResetError):
        while until not in said and (part := console.recv(4096)):
            said += part
            assert time.monotonic() < deadline, said
    return said


def test_screen_speaks_rfb_to_several_at_once(rig: Rig) -> None:
    spec = rig.boot()
    with rig.driver.console(spec.server, VNC) as one, rig.driver.console(spec.server, VNC) as two:
        for console in (one, two):
            assert read(console, b"\n").startswith(b"RFB 003.008\n")


def test_serial_console_is_a_terminal_and_its_log_goes_on(rig: Rig) -> None:
    spec = rig.ready()
    for said in (b"first", b"second"):  # the second reader comes when the first has gone
        with rig.driver.console(spec.server, SERIAL) as console:
            console.sendall(b"echo " + said + b"\n")
            assert said in read(console, said)
    if rig.real:
        await_true(
            lambda: "echo second" in rig.console(spec.server),
            SECONDS,
            lambda: rig.console(spec.server)[-500:],
        )


def test_consoles_end_with_the_guest(rig: Rig) -> None:
    spec = rig.boot(ready=True)
    with (
        rig.driver.console(spec.server, VNC) as screen,
        rig.driver.console(spec.server, SERIAL) as serial,
    ):
        rig.driver.ensure_stopped(spec.server, 2, 0, QUIET)
        for console in (screen, serial):
            assert not read(console, b"never said").endswith(b"never said")


@pytest.mark.parametrize("by", ["reboot", "resume"])
def test_consoles_are_there_again(rig: Rig, by: str) -> None:
    spec = rig.ready()
    if by == "reboot":
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
    for kind, sent, answered in ((VNC, b"", b"RFB"), (SERIAL, b"echo again\n", b"again")):
        with rig.driver.console(spec.server, kind) as console:
            console.sendall(sent)
            assert answered in read(console, answered)


@pytest.mark.parametrize("kind", [VNC, SERIAL])
def test_no_console_of_what_does_not_run(rig: Rig, kind: str) -> None:
    spec = rig.boot()
    rig.driver.ensure_stopped(spec.server, 2, 0, QUIET)
    for server in (spec.server, str(uuid.uuid4())):
        with pytest.raises(VerbFailed):
            rig.driver.console(server, kind)
