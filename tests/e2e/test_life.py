# SPDX-License-Identifier: Apache-2.0
"""One guest's whole life on real hosts: create, ssh, resize to another host, live migration, ``kill
-9``, delete.

The cross-section of this ring on a lab that runs by default; each part has tests of its own
elsewhere.
"""

from __future__ import annotations

from deploy.one_machine.cloud import process_control, processes
from deploy.one_machine.cloud.process_control import find_process
from tests.e2e.guests import witness
from tests.e2e.lab import LiveLab
from tests.e2e.live import BOOT
from tests.e2e.test_moves import admin, ask, booted_again, disk_size, larger
from tests.waiting import await_true


def kill_every_process(lab: LiveLab) -> None:
    """Each of the cloud's processes but the supervisor, which starts it again, and the hosts'
    hypervisors."""
    names = [
        program.name
        for program in processes.programs(lab.cloud)
        if not program.name.startswith("libvirtd")
    ]
    assert {"api", "conductor", "scheduler", "agent", "agent-2", "agent-3", "metadata"} <= set(
        names
    ), names
    killed = {name: process_control.kill(lab.cloud, name) for name in names}
    await_true(
        lambda: all(
            find_process(lab.cloud, name) not in (None, pid) for name, pid in killed.items()
        ),
        60,
        lambda: {name: (pid, find_process(lab.cloud, name)) for name, pid in killed.items()},
    )


def test_guest_lives_through_moves_and_dead_processes(lab: LiveLab) -> None:
    # One processor: what keeps an emulated guest whole while it migrates takes turns on one
    # (decision 0021).
    size = larger(lab, "life.larger", ram=192, vcpus=1, disk=2)
    with witness(lab, "whole", host="lab1") as guest:
        new = guest.account()
        ask(guest.rest, guest, "resize", {"flavorRef": size})
        guest.rest.await_status(guest.server, "VERIFY_RESIZE", BOOT)
        there = lab.place(guest.server)
        assert there != "lab1" and lab.where(guest.server) == {"lab1": "shutoff", there: "running"}
        resized = booted_again(guest, new)
        assert disk_size(guest) == 2 << 30
        ask(guest.rest, guest, "confirmResize", None, 204)
        guest.rest.await_status(guest.server, "ACTIVE")

        ask(admin(lab), guest, "os-migrateLive", {"host": "lab1", "block_migration": "auto"})
        guest.rest.await_status(guest.server, "ACTIVE", BOOT)
        assert lab.where(guest.server) == {"lab1": "running"}
        migrated = guest.account()
        assert (migrated.run, migrated.canary) == (
            resized.run,
            new.canary,
        ) and migrated.count > resized.count

        kill_every_process(lab)
        alive = guest.account()
        assert (alive.run, alive.canary) == (
            resized.run,
            new.canary,
        ) and alive.count > migrated.count
        for host in lab.cloud.hosts:
            lab.await_host(host)
        guest.rest.insist(
            "POST", f"/servers/{guest.server}/action", {"reboot": {"type": "HARD"}}, fine=(202,)
        )
        guest.rest.await_status(guest.server, "ACTIVE", BOOT)
        booted_again(guest, alive)
