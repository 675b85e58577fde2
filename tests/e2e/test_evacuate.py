# SPDX-License-Identifier: Apache-2.0
"""Evacuations of dead hosts, and a drain, in a lab.

Servers are recreated on other hosts only after proof that their guests do not run. The proof is the
lab's fencing hook, or the admin's forced-down. A returning host gets the list of its guests before
it starts any, and removes the others.
"""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from tests.e2e.lab import SILENCE, LiveLab
from tests.e2e.live import BOOT, SETTLE
from tests.e2e.mini_guest import MiniGuest, mini_guest
from tests.e2e.test_moves import admin, ask, read_migration
from tests.waiting import await_true

pytestmark = pytest.mark.slice("moves")

HOST = "lab2"


def is_forced_down(lab: LiveLab, host: str) -> bool:
    return bool(lab.service(host).is_forced_down)


def test_evacuate_after_power_cut_rebuilds_server_and_old_host_drops_guest(lab: LiveLab) -> None:
    with mini_guest(lab, "lost", host=HOST) as guest:
        before = guest.read_state()
        lab.strike("kill", HOST)
        reply = admin(lab).act(guest.server, "evacuate", {})
        assert reply.status == 400, "the host counts as up still"
        lab.await_host(HOST, "down", SILENCE)
        ask(admin(lab), guest, "evacuate", {}, 200)
        # Since microversion 2.95 an evacuated server stays stopped.
        guest.rest.await_status(guest.server, "SHUTOFF", BOOT)
        new_host = lab.host_of(guest.server)
        assert new_host != HOST and is_forced_down(lab, HOST), "the hook has made sure"
        ask(guest.rest, guest, "os-start")
        guest.rest.await_status(guest.server, "ACTIVE")
        assert guest.read_state().canary != before.canary, "made of its image again"
        removals = lab.kilonova("host", "removals")
        assert guest.server in removals.stdout and HOST in removals.stdout, removals
        lab.strike("start", HOST)
        lab.await_host(HOST)
        await_true(
            lambda: lab.find_domains(guest.server) == {new_host: "running"},
            SETTLE,
            lambda: lab.find_domains(guest.server),
        )
        await_true(
            lambda: read_migration(lab, guest)["status"] == "completed",
            SETTLE,
            lambda: read_migration(lab, guest),
        )


def test_evacuate_of_cut_off_host_needs_fencing_hook_and_else_returns_400(lab: LiveLab) -> None:
    """A host that is cut off still runs its guests.

    Evacuation fences the host first. After the return of the host, the guests are removed there.
    """
    with mini_guest(lab, "island", host=HOST) as guest:
        lab.strike("cut", HOST)
        lab.await_host(HOST, "down", SILENCE)
        with lab.configure("conductor", "api", conductor={"fencing_hook": ""}):
            refused = admin(lab).act(guest.server, "evacuate", {})
            assert (
                refused.status == 400
                and "does not prove that its guests are dead" in refused.fault[2]
            ), refused
        assert lab.find_domains(guest.server) == {HOST: "running"} and not is_forced_down(lab, HOST)
        evacuated = admin(lab).call(
            "POST", f"/servers/{guest.server}/action", {"evacuate": {}}, version="2.94"
        )
        assert evacuated.status == 200, evacuated
        guest.rest.await_status(guest.server, "ACTIVE", BOOT)
        new_host = lab.host_of(guest.server)
        assert new_host != HOST and lab.find_domains(guest.server) == {new_host: "running"}
        assert lab.lab.state(HOST) == "off"
        guest.read_state()
        lab.strike("start", HOST)
        lab.await_host(HOST)
        await_true(
            lambda: read_migration(lab, guest)["status"] == "completed",
            SETTLE,
            lambda: read_migration(lab, guest),
        )
        assert lab.find_domains(guest.server) == {new_host: "running"}


def test_evacuate_keeps_disk_on_shared_storage(shared_lab: LiveLab) -> None:
    lab = shared_lab
    with mini_guest(lab, "kept", host=HOST) as guest:
        before = guest.read_state()
        lab.strike("kill", HOST)
        lab.await_host(HOST, "down", SILENCE)
        service = lab.service(HOST)
        lab.seed.admin.compute.update_service_forced_down(service, forced=True)
        evacuated = admin(lab).call(
            "POST", f"/servers/{guest.server}/action", {"evacuate": {}}, version="2.94"
        )
        assert evacuated.status == 200, evacuated
        guest.rest.await_status(guest.server, "ACTIVE", BOOT)
        after = guest.read_state()
        assert after.canary == before.canary and after.run != before.run
        lab.seed.admin.compute.update_service_forced_down(service, forced=False)
        lab.strike("start", HOST)
        lab.await_host(HOST)
        await_true(
            lambda: read_migration(lab, guest)["status"] == "completed",
            SETTLE,
            lambda: read_migration(lab, guest),
        )
        assert guest.read_state().run == after.run, (
            "the host that came back has left its files alone"
        )


# The drain may take half of the time.
@pytest.mark.timeout(1200)
def test_host_drain_moves_four_running_and_one_stopped_guest(lab: LiveLab) -> None:
    """Four running servers move live and keep their memory, the stopped server moves cold.

    The host is empty and disabled afterwards.
    """
    with ExitStack() as stack:
        guests: list[MiniGuest] = [
            stack.enter_context(mini_guest(lab, f"tenant{number}", host=HOST))
            for number in range(5)
        ]
        before = [guest.read_state() for guest in guests]
        ask(guests[4].rest, guests[4], "os-stop")
        guests[4].rest.await_status(guests[4].server, "SHUTOFF")
        plan = lab.kilonova("host", "drain", HOST, "--dry-run")
        assert plan.returncode == 0 and all(guest.server in plan.stdout for guest in guests), plan
        drain = lab.kilonova("host", "drain", HOST, "--parallel", "2", seconds=600)
        assert drain.returncode == 0, drain
        assert lab.service(HOST).status == "disabled"
        for guest, account in zip(guests[:4], before, strict=False):
            assert lab.host_of(guest.server) != HOST and guest.read_state().run == account.run
        assert (
            lab.host_of(guests[4].server) != HOST
            and guests[4].rest.server(guests[4].server)["status"] == "SHUTOFF"
        )
        assert [guest.server for guest in guests if HOST in lab.find_domains(guest.server)] == []
        restored = lab.kilonova("host", "restore", HOST)
        assert restored.returncode == 0 and lab.service(HOST).status == "enabled", restored
