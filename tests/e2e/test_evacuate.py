# SPDX-License-Identifier: Apache-2.0
"""Hosts that die: their servers are made again elsewhere when it is proved that nothing of them
runs, and never before.

The proof is the lab's fencing hook, or an admin's word. A host that returns learns what it may run
before it starts anything, stops the rest, and removes what it owes. Also here: a host is emptied by
the operator's command.
"""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from tests.e2e.guests import Witness, witness
from tests.e2e.lab import SILENCE, LiveLab
from tests.e2e.live import BOOT, SETTLE
from tests.e2e.test_moves import admin, ask, moved
from tests.waiting import await_true

pytestmark = pytest.mark.slice("moves")

HOST = "lab2"


def dead(lab: LiveLab, host: str) -> bool:
    return bool(lab.service(host).is_forced_down)


def test_evacuate_after_a_power_cut_and_the_hosts_return(lab: LiveLab) -> None:
    with witness(lab, "lost", host=HOST) as guest:
        before = guest.account()
        lab.strike("kill", HOST)
        reply = admin(lab).act(guest.server, "evacuate", {})
        assert reply.status == 400, "the host counts as up still"
        lab.await_host(HOST, "down", SILENCE)
        ask(admin(lab), guest, "evacuate", {}, 200)
        guest.rest.await_status(guest.server, "SHUTOFF", BOOT)  # since 2.95 it waits to be started
        there = lab.place(guest.server)
        assert there != HOST and dead(lab, HOST), "the hook has made sure"
        ask(guest.rest, guest, "os-start")
        guest.rest.await_status(guest.server, "ACTIVE")
        guest.await_ssh()
        assert guest.account().canary != before.canary, "made of its image again"
        said = lab.kilonova("host", "debts")
        assert guest.server in said.stdout and HOST in said.stdout, said
        lab.strike("start", HOST)
        lab.await_host(HOST)
        await_true(
            lambda: lab.where(guest.server) == {there: "running"},
            SETTLE,
            lambda: lab.where(guest.server),
        )
        await_true(
            lambda: moved(lab, guest)["status"] == "completed", SETTLE, lambda: moved(lab, guest)
        )


def test_silence_is_no_proof_and_the_hook_is(lab: LiveLab) -> None:
    """A host that is cut off runs its guests still: evacuation fences it first, and it returns with
    nothing of them."""
    with witness(lab, "island", host=HOST) as guest:
        lab.strike("cut", HOST)
        lab.await_host(HOST, "down", SILENCE)
        with lab.configured("conductor", "api", conductor={"fencing_hook": ""}):
            refused = admin(lab).act(guest.server, "evacuate", {})
            assert (
                refused.status == 400
                and "does not prove that its guests are dead" in refused.fault[2]
            ), refused
        assert lab.where(guest.server) == {HOST: "running"} and not dead(lab, HOST)
        evacuated = admin(lab).call(
            "POST", f"/servers/{guest.server}/action", {"evacuate": {}}, version="2.94"
        )
        assert evacuated.status == 200, evacuated
        guest.rest.await_status(guest.server, "ACTIVE", BOOT)
        there = lab.place(guest.server)
        assert there != HOST and lab.where(guest.server) == {there: "running"}
        assert lab.lab.state(HOST) == "off"
        guest.await_ssh()
        lab.strike("start", HOST)
        lab.await_host(HOST)
        await_true(
            lambda: moved(lab, guest)["status"] == "completed", SETTLE, lambda: moved(lab, guest)
        )
        assert lab.where(guest.server) == {there: "running"}


def test_disk_on_shared_storage_is_kept(shared_lab: LiveLab) -> None:
    lab = shared_lab
    with witness(lab, "kept", host=HOST) as guest:
        before = guest.account()
        lab.strike("kill", HOST)
        lab.await_host(HOST, "down", SILENCE)
        service = lab.service(HOST)
        lab.seed.admin.compute.update_service_forced_down(service, forced=True)
        evacuated = admin(lab).call(
            "POST", f"/servers/{guest.server}/action", {"evacuate": {}}, version="2.94"
        )
        assert evacuated.status == 200, evacuated
        guest.rest.await_status(guest.server, "ACTIVE", BOOT)
        guest.await_ssh()
        after = guest.account()
        assert after.canary == before.canary and after.run != before.run
        lab.seed.admin.compute.update_service_forced_down(service, forced=False)
        lab.strike("start", HOST)
        lab.await_host(HOST)
        await_true(
            lambda: moved(lab, guest)["status"] == "completed", SETTLE, lambda: moved(lab, guest)
        )
        assert guest.account().run == after.run, "the host that came back has left its files alone"


@pytest.mark.timeout(1200)  # the command may take half of it
def test_drain_of_a_host_with_five_guests(lab: LiveLab) -> None:
    """Four run and go live, one is off and goes cold; nobody's memory is lost, and the host is
    empty and closed."""
    with ExitStack() as stack:
        guests: list[Witness] = [
            stack.enter_context(witness(lab, f"tenant{number}", host=HOST)) for number in range(5)
        ]
        before = [guest.account() for guest in guests]
        ask(guests[4].rest, guests[4], "os-stop")
        guests[4].rest.await_status(guests[4].server, "SHUTOFF")
        plan = lab.kilonova("host", "drain", HOST, "--dry-run")
        assert plan.returncode == 0 and all(guest.server in plan.stdout for guest in guests), plan
        done = lab.kilonova("host", "drain", HOST, "--parallel", "2", seconds=600)
        assert done.returncode == 0, done
        assert lab.service(HOST).status == "disabled"
        for guest, account in zip(guests[:4], before, strict=False):
            assert lab.place(guest.server) != HOST and guest.account().run == account.run
        assert (
            lab.place(guests[4].server) != HOST
            and guests[4].rest.server(guests[4].server)["status"] == "SHUTOFF"
        )
        assert [guest.server for guest in guests if HOST in lab.where(guest.server)] == []
        restored = lab.kilonova("host", "restore", HOST)
        assert restored.returncode == 0 and lab.service(HOST).status == "enabled", restored
