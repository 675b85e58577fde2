# SPDX-License-Identifier: Apache-2.0
"""The life of a guest on a lab.

The guest is created, used over ssh, resized to another host, migrated live and deleted. Before the
delete, ``kill -9`` ends all processes.

This test runs by default. Other files test each part on its own.
"""

from __future__ import annotations

from deploy.one_machine.cloud import process_control, processes
from deploy.one_machine.cloud.process_control import find_process
from tests.e2e.guests import Witness, WitnessState, witness
from tests.e2e.lab import LiveLab
from tests.e2e.live import BOOT
from tests.e2e.test_moves import admin, ask, ensure_flavor
from tests.waiting import await_true


def kill_every_process(lab: LiveLab) -> None:
    """Kill all processes of the cloud except the supervisor and the libvirtds.

    Return when the supervisor has restarted the processes.
    """
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


def check_rebooted(guest: Witness, before: WitnessState) -> WitnessState:
    """Wait for ssh, and check that the guest has rebooted with the same disk."""
    guest.await_ssh()
    after = guest.read_state()
    assert after.canary == before.canary and after.run != before.run
    return after


def read_disk_size(guest: Witness) -> int:
    """Return the size of the first disk in bytes, as the guest sees it."""
    return int(guest.run("cat /sys/block/vda/size")) * 512


def test_guest_survives_resize_live_migration_and_killed_processes(lab: LiveLab) -> None:
    # Emulated guests migrate safely only with one processor (decision 0021).
    size = ensure_flavor(lab, "life.larger", ram=192, vcpus=1, disk=2)
    with witness(lab, "whole", host="lab1", migrates=True) as guest:
        new = guest.read_state()
        ask(guest.rest, guest, "resize", {"flavorRef": size})
        guest.rest.await_status(guest.server, "VERIFY_RESIZE", BOOT)
        new_host = lab.host_of(guest.server)
        assert new_host != "lab1" and lab.find_domains(guest.server) == {
            "lab1": "shutoff",
            new_host: "running",
        }
        resized = check_rebooted(guest, new)
        assert read_disk_size(guest) == 2 << 30
        ask(guest.rest, guest, "confirmResize", None, 204)
        guest.rest.await_status(guest.server, "ACTIVE")

        ask(admin(lab), guest, "os-migrateLive", {"host": "lab1", "block_migration": "auto"})
        guest.rest.await_status(guest.server, "ACTIVE", BOOT)
        assert lab.find_domains(guest.server) == {"lab1": "running"}
        migrated = guest.read_state()
        assert (migrated.run, migrated.canary) == (
            resized.run,
            new.canary,
        ) and migrated.count > resized.count

        kill_every_process(lab)
        alive = guest.read_state()
        assert (alive.run, alive.canary) == (
            resized.run,
            new.canary,
        ) and alive.count > migrated.count
        for host in lab.cloud.hosts:
            lab.await_host(host)
        guest.rest.insist(
            "POST", f"/servers/{guest.server}/action", {"reboot": {"type": "HARD"}}, expected=(202,)
        )
        guest.rest.await_status(guest.server, "ACTIVE", BOOT)
        check_rebooted(guest, alive)
