# SPDX-License-Identifier: Apache-2.0
"""Reactions to host failures without an operator, both off by default.

A host without contact stops its guests ([agent] fence_after). The conductor evacuates the servers
of a dead host ([ha]).
"""

from __future__ import annotations

import pytest

from deploy.one_machine.cloud import process_control
from tests.e2e.lab import SILENCE, LiveLab
from tests.e2e.live import BOOT, SETTLE
from tests.e2e.mini_guest import MiniGuest, mini_guest
from tests.e2e.test_moves import read_migration
from tests.waiting import await_true

pytestmark = pytest.mark.slice("operations")

HOST, FENCE_AFTER = "lab2", 10


def test_ha_fences_unreachable_host_and_evacuates_its_servers(lab: LiveLab) -> None:
    """The host is cut off and its guests still run, so the fencing hook stops them first."""
    with (
        mini_guest(lab, "orphan", host=HOST) as guest,
        lab.configure("conductor", ha={"evacuate": "true", "after": "10"}),
    ):
        lab.strike("cut", HOST)
        await_true(
            lambda: lab.host_of(guest.server) != HOST, SILENCE + BOOT, lambda: lab.service(HOST)
        )
        guest.rest.await_status(guest.server, "ACTIVE", BOOT)
        new_host = lab.host_of(guest.server)
        assert lab.lab.state(HOST) == "off" and lab.find_domains(guest.server) == {
            new_host: "running"
        }
        guest.read_state()
        lab.strike("start", HOST)
        lab.await_host(HOST)
        await_true(
            lambda: read_migration(lab, guest)["status"] == "completed",
            SETTLE,
            lambda: read_migration(lab, guest),
        )
        assert lab.find_domains(guest.server) == {new_host: "running"}


def test_fence_after_option_stops_guests_while_host_is_cut_off(lab: LiveLab) -> None:
    """The guests are not evacuated. After contact returns, the host starts them with their disks.

    The second time, the agent starts while the host is cut off.
    """
    agent, settings = f"agent-{lab.lab.number(HOST)}", {"fence_after": str(FENCE_AFTER)}
    with mini_guest(lab, "castaway", host=HOST) as guest:
        before, session = guest.read_state(), lab.registration(HOST)[1]
        with lab.configure(agent, host=HOST, agent=settings):
            await_true(
                lambda: lab.registration(HOST)[1] != session, SETTLE, lambda: lab.registration(HOST)
            )
            lab.strike("cut", HOST)
            await_off(lab, guest)
            lab.strike("heal", HOST)
            await_on(lab, guest)
            lab.strike("cut", HOST)
            process_control.restart(lab.cloud, agent)
            await_off(lab, guest)
            lab.strike("heal", HOST)
            await_on(lab, guest)
            after = guest.read_state()
            assert after.canary == before.canary and after.run != before.run


def await_off(lab: LiveLab, guest: MiniGuest) -> None:
    await_true(
        lambda: lab.find_domains(guest.server) == {HOST: "shutoff"},
        FENCE_AFTER + SETTLE,
        lambda: lab.find_domains(guest.server),
    )


def await_on(lab: LiveLab, guest: MiniGuest) -> None:
    await_true(
        lambda: lab.find_domains(guest.server) == {HOST: "running"},
        SETTLE,
        lambda: lab.find_domains(guest.server),
    )
    guest.rest.await_status(guest.server, "ACTIVE", BOOT)
