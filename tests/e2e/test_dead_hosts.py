# SPDX-License-Identifier: Apache-2.0
"""What nobody has to be awake for: a host that is cut off makes its own guests off ([agent]
fence_after), and the servers of a host that is dead are evacuated ([ha]). Both are off unless an
operator wants them."""

from __future__ import annotations

import pytest

from deploy.one_machine.cloud import process_control
from tests.e2e.guests import Witness, witness
from tests.e2e.lab import SILENCE, LiveLab
from tests.e2e.live import BOOT, SETTLE
from tests.e2e.test_moves import moved
from tests.waiting import await_true

pytestmark = pytest.mark.slice("operations")

HOST, FENCE_AFTER = "lab2", 10


def test_servers_of_a_dead_host_are_evacuated_by_themselves(lab: LiveLab) -> None:
    """It is cut off, and its guests still run: the hook makes sure of them first."""
    with (
        witness(lab, "orphan", host=HOST) as guest,
        lab.configured("conductor", ha={"evacuate": "true", "after": "10"}),
    ):
        lab.strike("cut", HOST)
        await_true(
            lambda: lab.place(guest.server) != HOST, SILENCE + BOOT, lambda: lab.service(HOST)
        )
        guest.rest.await_status(guest.server, "ACTIVE", BOOT)
        there = lab.place(guest.server)
        assert lab.lab.state(HOST) == "off" and lab.where(guest.server) == {there: "running"}
        guest.await_ssh()
        lab.strike("start", HOST)
        lab.await_host(HOST)
        await_true(
            lambda: moved(lab, guest)["status"] == "completed", SETTLE, lambda: moved(lab, guest)
        )
        assert lab.where(guest.server) == {there: "running"}


def test_a_host_that_is_cut_off_makes_its_own_guests_off(lab: LiveLab) -> None:
    """Nobody evacuates them; heard again, it starts them again, with all that was on their disks.
    The second time its agent starts when it is cut off already."""
    agent, settings = f"agent-{lab.lab.number(HOST)}", {"fence_after": str(FENCE_AFTER)}
    with witness(lab, "castaway", host=HOST) as guest:
        before, session = guest.account(), lab.registration(HOST)[1]
        with lab.configured(agent, host=HOST, agent=settings):
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
            guest.await_ssh()
            after = guest.account()
            assert after.canary == before.canary and after.run != before.run


def await_off(lab: LiveLab, guest: Witness) -> None:
    await_true(
        lambda: lab.where(guest.server) == {HOST: "shutoff"},
        FENCE_AFTER + SETTLE,
        lambda: lab.where(guest.server),
    )


def await_on(lab: LiveLab, guest: Witness) -> None:
    await_true(
        lambda: lab.where(guest.server) == {HOST: "running"},
        SETTLE,
        lambda: lab.where(guest.server),
    )
    guest.rest.await_status(guest.server, "ACTIVE", BOOT)
