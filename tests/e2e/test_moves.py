# SPDX-License-Identifier: Apache-2.0
"""Servers that move between hosts of a lab and keep the contents of their disks and memory.

Each mini guest (mini_guest.py) has a canary on its disk and a counter in its memory. The watcher
observes all hosts, and fails a test during which a server runs on two hosts. For dead hosts see
test_evacuate.py, and for a guest with an operating system and networks test_life.py.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e.guests import LiveServer
from tests.e2e.lab import LiveLab
from tests.e2e.live import BOOT, SETTLE, Rest
from tests.e2e.mini_guest import MiniGuest, mini_guest
from tests.mini_image import UNWRITTEN, MiniGuestState
from tests.waiting import await_true

pytestmark = pytest.mark.slice("moves")

OFF = {"shutoff", "shut off"}


def admin(lab: LiveLab) -> Rest:
    return lab.rest("kilonova-admin")


def ask(rest: Rest, guest: LiveServer, key: str, value: Any = None, expected: int = 202) -> None:
    """Send an action of a server, and check the status of the response."""
    reply = rest.act(guest.server, key, value)
    assert reply.status == expected, reply


def read_migration(lab: LiveLab, guest: LiveServer) -> dict[str, Any]:
    """Return the server's last migration from the API."""
    migrations = (
        admin(lab).call("GET", f"/os-migrations?instance_uuid={guest.server}").body["migrations"]
    )
    return dict(migrations[0])


def ensure_flavor(lab: LiveLab, name: str, **properties: int) -> str:
    """Return the id of a flavor. Create the flavor if necessary."""
    compute = lab.seed.admin.compute
    flavor = compute.find_flavor(name)
    return str((flavor or compute.create_flavor(name=name, **properties)).id)


def check_rebooted(guest: MiniGuest, before: MiniGuestState) -> MiniGuestState:
    """Check that the guest has rebooted with the same disk, and return the new state."""
    after = guest.read_state()
    assert after.canary == before.canary and after.run != before.run
    assert after.was[0] == before.run and after.was[1] > before.count - UNWRITTEN
    return after


@pytest.fixture
def larger_flavor(lab: LiveLab) -> str:
    return ensure_flavor(lab, "moves.larger", ram=192, vcpus=1, disk=2)


SECTORS_OF_GIB = 1 << 21


def test_resized_server_keeps_disk_through_revert_and_confirm(
    lab: LiveLab, larger_flavor: str
) -> None:
    """After the revert the server runs on the source, with the old flavor and disk size."""
    with mini_guest(lab, "grows", host="lab1") as guest:
        before = guest.read_state()
        for is_kept in (False, True):
            ask(guest.rest, guest, "resize", {"flavorRef": larger_flavor})
            shown = guest.rest.await_status(guest.server, "VERIFY_RESIZE", BOOT)
            assert shown["flavor"]["original_name"] == "moves.larger"
            new_host = lab.host_of(guest.server)
            assert new_host != "lab1" and lab.find_domains(guest.server) == {
                "lab1": "shutoff",
                new_host: "running",
            }
            resized = check_rebooted(guest, before)
            assert (before.sectors, resized.sectors) == (SECTORS_OF_GIB, 2 * SECTORS_OF_GIB)
            lab.assert_healthy()
            if is_kept:
                ask(guest.rest, guest, "confirmResize", None, 204)
                guest.rest.await_status(guest.server, "ACTIVE")
                assert lab.find_domains(guest.server) == {new_host: "running"}
                break
            ask(guest.rest, guest, "revertResize")
            shown = guest.rest.await_status(guest.server, "ACTIVE", BOOT)
            assert shown["flavor"]["original_name"] == "m1.nano"
            assert lab.find_domains(guest.server) == {"lab1": "running"}
            reverted = guest.read_state()
            # The source's disk is as it was before the resize.
            assert (reverted.canary, reverted.sectors) == (before.canary, SECTORS_OF_GIB)
            assert reverted.was[0] == before.run
            assert read_migration(lab, guest)["status"] == "reverted"
            before = reverted
        migration = read_migration(lab, guest)
        assert (migration["status"], migration["migration_type"]) == ("confirmed", "resize")


def test_delete_in_verify_resize_leaves_no_guest(lab: LiveLab, larger_flavor: str) -> None:
    with mini_guest(lab, "unwanted", host="lab1") as guest:
        ask(guest.rest, guest, "resize", {"flavorRef": larger_flavor})
        guest.rest.await_status(guest.server, "VERIFY_RESIZE", BOOT)


def test_cold_migration_moves_stopped_server_to_requested_host(lab: LiveLab) -> None:
    with mini_guest(lab, "sleeps", host="lab1") as guest:
        before = guest.read_state()
        ask(guest.rest, guest, "os-stop")
        guest.rest.await_status(guest.server, "SHUTOFF")
        ask(admin(lab), guest, "migrate", {"host": "lab3"})
        guest.rest.await_status(guest.server, "VERIFY_RESIZE", BOOT)
        assert (
            lab.host_of(guest.server) == "lab3"
            and set(lab.find_domains(guest.server).values()) <= OFF
        )
        ask(guest.rest, guest, "confirmResize", None, 204)
        guest.rest.await_status(guest.server, "SHUTOFF")
        ask(guest.rest, guest, "os-start")
        guest.rest.await_status(guest.server, "ACTIVE")
        check_rebooted(guest, before)


def test_live_migration_with_local_storage_keeps_memory_and_disk(lab: LiveLab) -> None:
    migrate_live_and_back(lab)


def test_live_migration_with_shared_storage_keeps_memory_and_disk(shared_lab: LiveLab) -> None:
    migrate_live_and_back(shared_lab)


def migrate_live_and_back(lab: LiveLab) -> None:
    """Migrate a server live to another host and back, and check that its counter continues."""
    with mini_guest(lab, "travels", host="lab1") as guest:
        before = guest.read_state()
        ask(admin(lab), guest, "os-migrateLive", {"host": "lab2", "block_migration": "auto"})
        guest.rest.await_status(guest.server, "ACTIVE", BOOT)
        after = guest.read_state()
        assert lab.host_of(guest.server) == "lab2" and lab.find_domains(guest.server) == {
            "lab2": "running"
        }
        assert (after.run, after.canary) == (
            before.run,
            before.canary,
        ) and after.count > before.count
        migration = read_migration(lab, guest)
        assert (migration["status"], migration["source_compute"], migration["dest_compute"]) == (
            "completed",
            "lab1",
            "lab2",
        )
        ask(admin(lab), guest, "os-migrateLive", {"host": None, "block_migration": "auto"})
        await_true(
            lambda: (
                read_migration(lab, guest)["source_compute"] == "lab2"
                and read_migration(lab, guest)["status"] == "completed"
            ),
            SETTLE,
            lambda: read_migration(lab, guest),
        )
        guest.rest.await_status(guest.server, "ACTIVE")
        assert guest.read_state().run == before.run


def test_cold_migration_on_shared_storage_keeps_disk_on_revert_and_confirm(
    shared_lab: LiveLab,
) -> None:
    lab = shared_lab
    with mini_guest(lab, "stays", host="lab1") as guest:
        before = guest.read_state()
        ask(admin(lab), guest, "migrate", {"host": "lab2"})
        guest.rest.await_status(guest.server, "VERIFY_RESIZE", BOOT)
        ask(guest.rest, guest, "revertResize")
        guest.rest.await_status(guest.server, "ACTIVE", BOOT)
        assert lab.host_of(guest.server) == "lab1"
        after = guest.read_state()
        # The guest has booted on the other host too, and wrote to the same disk there.
        assert after.canary == before.canary and after.run != before.run
        ask(admin(lab), guest, "migrate", {"host": "lab2"})
        guest.rest.await_status(guest.server, "VERIFY_RESIZE", BOOT)
        ask(guest.rest, guest, "confirmResize", None, 204)
        guest.rest.await_status(guest.server, "ACTIVE")
        assert lab.find_domains(guest.server) == {"lab2": "running"}
        check_rebooted(guest, after)


def test_impossible_migrate_resize_or_evacuate_fails_and_guest_runs_on(lab: LiveLab) -> None:
    with mini_guest(lab, "refuses", host="lab1") as guest:
        before, rest = guest.read_state(), admin(lab)
        for key, value, status in (
            ("migrate", {"host": "lab1"}, 400),
            ("migrate", {"host": "nowhere"}, (400, 404)),
            ("resize", {"flavorRef": lab.flavor()}, 400),
            ("confirmResize", None, 409),
            ("revertResize", None, 409),
            ("evacuate", {}, 400),
        ):
            reply = rest.act(guest.server, key, value)
            assert reply.status in (status if isinstance(status, tuple) else (status,)), (
                key,
                value,
                reply,
            )
            assert reply.fault[2], reply
        huge = ensure_flavor(lab, "moves.huge", ram=1 << 20, vcpus=1, disk=1)
        ask(guest.rest, guest, "resize", {"flavorRef": huge})
        guest.rest.await_status(guest.server, "ACTIVE")
        assert (
            read_migration(lab, guest)["status"] == "error" and guest.read_state().run == before.run
        )
        [newest, *_] = rest.call("GET", f"/servers/{guest.server}/os-instance-actions").body[
            "instanceActions"
        ]
        action = rest.call(
            "GET", f"/servers/{guest.server}/os-instance-actions/{newest['request_id']}"
        ).body
        assert "MEMORY_MB" in str(action), action
