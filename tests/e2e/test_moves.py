# SPDX-License-Identifier: Apache-2.0
"""Servers that move between real hosts: what was on their disks and in their memory is there
afterwards.

Each witness (guests.py) has a canary on its disk and counts in its memory. The lab's watcher looks
at all hosts during every test: one that two hosts ran at the same moment fails it. Hosts that die
are in test_evacuate.py.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e.guests import Account, Witness, listener, witness
from tests.e2e.lab import LiveLab
from tests.e2e.live import BOOT, SETTLE, Rest
from tests.waiting import await_true

pytestmark = pytest.mark.slice("moves")

OFF = {"shutoff", "shut off"}


def admin(lab: LiveLab) -> Rest:
    return lab.rest("kilonova-admin")


def ask(rest: Rest, guest: Witness, key: str, value: Any = None, fine: int = 202) -> None:
    """POST an action that must be accepted."""
    reply = rest.act(guest.server, key, value)
    assert reply.status == fine, reply


def moved(lab: LiveLab, guest: Witness) -> dict[str, Any]:
    """The guest's last migration, as the API shows it."""
    found = (
        admin(lab).call("GET", f"/os-migrations?instance_uuid={guest.server}").body["migrations"]
    )
    return dict(found[0])


def larger(lab: LiveLab, name: str, **size: int) -> str:
    """The id of a flavor of this size, made once."""
    compute = lab.seed.admin.compute
    found = compute.find_flavor(name)
    return str((found or compute.create_flavor(name=name, **size)).id)


def booted_again(guest: Witness, before: Account) -> Account:
    """Up, on the same disk, and another run of the guest."""
    guest.await_ssh()
    after = guest.account()
    assert after.canary == before.canary and after.run != before.run
    return after


@pytest.fixture
def size(lab: LiveLab) -> str:
    return larger(lab, "moves.larger", ram=192, vcpus=2, disk=2)


def disk_size(guest: Witness) -> int:
    """Of the first disk, in bytes, in the guest's own words."""
    return int(guest.run("cat /sys/block/vda/size")) * 512


def test_resize_and_confirm(lab: LiveLab, size: str) -> None:
    with witness(lab, "grows", host="lab1") as guest:
        before = guest.account()
        ask(guest.rest, guest, "resize", {"flavorRef": size})
        shown = guest.rest.await_status(guest.server, "VERIFY_RESIZE", BOOT)
        assert shown["flavor"]["original_name"] == "moves.larger"
        there = lab.place(guest.server)
        assert there != "lab1" and lab.where(guest.server) == {"lab1": "shutoff", there: "running"}
        booted_again(guest, before)
        assert (guest.run("nproc").strip(), disk_size(guest)) == ("2", 2 << 30)
        lab.judge()
        ask(guest.rest, guest, "confirmResize", None, 204)
        guest.rest.await_status(guest.server, "ACTIVE")
        assert lab.where(guest.server) == {there: "running"}
        assert (moved(lab, guest)["status"], moved(lab, guest)["migration_type"]) == (
            "confirmed",
            "resize",
        )


def test_resize_and_revert(lab: LiveLab, size: str) -> None:
    """What was written after the resize is given up; what was there before is as it was."""
    with witness(lab, "returns", host="lab1") as guest:
        before = guest.account()
        ask(guest.rest, guest, "resize", {"flavorRef": size})
        guest.rest.await_status(guest.server, "VERIFY_RESIZE", BOOT)
        there = lab.place(guest.server)
        after = booted_again(guest, before)
        ask(guest.rest, guest, "revertResize")
        shown = guest.rest.await_status(guest.server, "ACTIVE", BOOT)
        assert shown["flavor"]["original_name"] == "m1.nano"
        assert lab.place(guest.server) == "lab1" and there not in lab.where(guest.server)
        again = booted_again(guest, after)
        assert again.canary == before.canary and (guest.run("nproc").strip(), disk_size(guest)) == (
            "1",
            1 << 30,
        )
        assert moved(lab, guest)["status"] == "reverted"


def test_delete_while_it_waits_to_be_confirmed(lab: LiveLab, size: str) -> None:
    with witness(lab, "unwanted", host="lab1") as guest:
        ask(guest.rest, guest, "resize", {"flavorRef": size})
        guest.rest.await_status(guest.server, "VERIFY_RESIZE", BOOT)


def test_stopped_server_is_migrated_to_a_host_by_name(lab: LiveLab) -> None:
    with witness(lab, "sleeps", host="lab1") as guest:
        before = guest.account()
        ask(guest.rest, guest, "os-stop")
        guest.rest.await_status(guest.server, "SHUTOFF")
        ask(admin(lab), guest, "migrate", {"host": "lab3"})
        guest.rest.await_status(guest.server, "VERIFY_RESIZE", BOOT)
        assert lab.place(guest.server) == "lab3" and set(lab.where(guest.server).values()) <= OFF
        ask(guest.rest, guest, "confirmResize", None, 204)
        guest.rest.await_status(guest.server, "SHUTOFF")
        ask(guest.rest, guest, "os-start")
        guest.rest.await_status(guest.server, "ACTIVE")
        booted_again(guest, before)


def test_live_migration_on_local_storage(lab: LiveLab) -> None:
    migrate_live_and_back(lab)


def test_live_migration_on_shared_storage(shared_lab: LiveLab) -> None:
    migrate_live_and_back(shared_lab)


def migrate_live_and_back(lab: LiveLab) -> None:
    """The count goes on; how long nobody heard the guest is printed."""
    with witness(lab, "travels", host="lab1") as guest:
        before = guest.account()
        with listener(guest) as heard:
            ask(admin(lab), guest, "os-migrateLive", {"host": "lab2", "block_migration": "auto"})
            guest.rest.await_status(guest.server, "ACTIVE", BOOT)
            after = guest.account()
        assert lab.place(guest.server) == "lab2" and lab.where(guest.server) == {"lab2": "running"}
        assert (after.run, after.canary) == (
            before.run,
            before.canary,
        ) and after.count > before.count
        found = moved(lab, guest)
        assert (found["status"], found["source_compute"], found["dest_compute"]) == (
            "completed",
            "lab1",
            "lab2",
        )
        print(f"\nlive migration: not heard for {heard.longest:.2f} s")
        ask(admin(lab), guest, "os-migrateLive", {"host": None, "block_migration": "auto"})
        await_true(
            lambda: (
                moved(lab, guest)["source_compute"] == "lab2"
                and moved(lab, guest)["status"] == "completed"
            ),
            SETTLE,
            lambda: moved(lab, guest),
        )
        guest.rest.await_status(guest.server, "ACTIVE")
        assert guest.account().run == before.run


def test_cold_migration_on_shared_storage(shared_lab: LiveLab) -> None:
    lab = shared_lab
    with witness(lab, "stays", host="lab1") as guest:
        before = guest.account()
        ask(admin(lab), guest, "migrate", {"host": "lab2"})
        guest.rest.await_status(guest.server, "VERIFY_RESIZE", BOOT)
        ask(guest.rest, guest, "revertResize")
        guest.rest.await_status(guest.server, "ACTIVE", BOOT)
        assert lab.place(guest.server) == "lab1"
        after = booted_again(guest, before)
        ask(admin(lab), guest, "migrate", {"host": "lab2"})
        guest.rest.await_status(guest.server, "VERIFY_RESIZE", BOOT)
        ask(guest.rest, guest, "confirmResize", None, 204)
        guest.rest.await_status(guest.server, "ACTIVE")
        assert lab.where(guest.server) == {"lab2": "running"}
        booted_again(guest, after)


def test_what_cannot_be_is_said_and_changes_nothing(lab: LiveLab) -> None:
    with witness(lab, "refuses", host="lab1") as guest:
        before, rest = guest.account(), admin(lab)
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
        huge = larger(lab, "moves.huge", ram=1 << 20, vcpus=1, disk=1)
        ask(guest.rest, guest, "resize", {"flavorRef": huge})
        guest.rest.await_status(guest.server, "ACTIVE")
        assert moved(lab, guest)["status"] == "error" and guest.account().run == before.run
        [newest, *_] = rest.call("GET", f"/servers/{guest.server}/os-instance-actions").body[
            "instanceActions"
        ]
        told = rest.call(
            "GET", f"/servers/{guest.server}/os-instance-actions/{newest['request_id']}"
        ).body
        assert "MEMORY_MB" in str(told), told
