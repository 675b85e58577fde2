# SPDX-License-Identifier: Apache-2.0
"""A database-like writer on volumes of a real guest, while agents, the conductor and the volume
service are killed in the middle of each step of attach, detach, migrate and delete.

The writer numbers its records, each with its checksum, and counts one only when the disk has it.
When a step stands in the action's journal a process is killed with signal 9. The action must be
done all the same; then every record that was counted is there, each volume is attached once or not
at all, and nothing is stuck. A slice has one step of each action; with KILONOVA_VOLUME_KILLS=all
every process is killed in every step, which takes an hour or more (docs/testing.md).
"""

from __future__ import annotations

import base64
import os
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import pytest

from conductor.workflows import WORKFLOWS
from deploy.one_machine.cloud import process_control
from deploy.one_machine.cloud.process_control import find_process
from tests.e2e import guests
from tests.e2e.guests import Guest
from tests.e2e.lab import LiveLab
from tests.e2e.live import BOOT, CUT_OFF, SETTLE, Live
from tests.e2e.strikes import Strikes, await_back, await_debts
from tests.waiting import await_true

#: "few": over NBD too, and few steps; "all": over NBD too, and every step.
WANTED = os.environ.get("KILONOVA_VOLUME_KILLS", "")
RECORD = 512  #: bytes
#: $1 is a disk. It ends when its file in /run goes, or the disk refuses a record.
WRITER = f"""#!/bin/sh
name=$(basename $1)
n=$(cat /run/$name.counted 2> /dev/null || echo 0)
while [ -e /run/$name.goes ]; do
    n=$((n + 1))
    sum=$(echo "record $n" | sha256sum)
    printf '%-{RECORD - 1}s\\n' "$n ${{sum%% *}}" |
        dd of=$1 bs={RECORD} seek=$n conv=notrunc,fsync 2> /run/$name.said || break
    echo $n > /run/$name.counting && mv /run/$name.counting /run/$name.counted
done
rm -f /run/$name.goes
touch /run/$name.ended
"""
#: The steps of each action, and those that no action here has: of guests without what they are for,
#: and of the way back.
STEPS: dict[str, tuple[str, ...]] = {
    "attach_volume": ("reserve", "connect", "attach", "complete"),
    "detach_volume": ("detach", "end_attachment"),
    "live_migrate": (
        *("place", "offer", "bind_there", "connect_there", "prepare", "heed", "migrate"),
        *("arrive", "switch", "activate", "leave", "let_go", "disconnect_source", "finish"),
    ),
    "delete": ("remove", "unplug", "release_volumes", "gone"),
}
NOT_HERE: dict[str, set[str]] = {
    "live_migrate": {"return"},
    "delete": {
        *("unshare", "wait", "release", "unshare_late", "release_volumes_late", "forget"),
        "delete_snapshots",
    },
}
#: Who is killed; "source" and "destination" are agents.
VICTIMS: dict[str, tuple[str, ...]] = {
    "live_migrate": ("source", "destination", "conductor", "volume"),
    **dict.fromkeys(
        ("attach_volume", "detach_volume", "delete"), ("source", "conductor", "volume")
    ),
}
#: The libvirtds of both hosts speak by the agent of the destination: without it libvirt gives the
#: migration up, which begins when the operator's word is heeded. The guest runs on where it was,
#: and a client may ask again.
GIVEN_UP = {("live_migrate", step, "destination") for step in ("heed", "migrate")}
#: What a slice has of them.
FEW = {
    "attach_volume": [("attach", "source"), ("connect", "volume")],
    "detach_volume": [("detach", "conductor"), ("end_attachment", "volume")],
    "live_migrate": [("migrate", "source")],
    "delete": [("release_volumes", "conductor")],
}


def cells(action: str) -> list[tuple[str, str]]:
    """Step and victim of each blow."""
    if WANTED != "all":
        return FEW[action]
    return [(step, victim) for step in STEPS[action] for victim in VICTIMS[action]]


@dataclass
class Story:
    """A guest of this cloud, and what is done to it."""

    live: Live
    guest: Guest

    # --- the writer ---
    def begin(self, disk: str) -> None:
        """Records are written on this disk from now on, behind those that are there."""
        name = disk.rpartition("/")[2]
        self.guest.run("cat > /run/writer && chmod +x /run/writer", given=WRITER.encode())
        self.guest.run(
            f"rm -f /run/{name}.ended; touch /run/{name}.goes; "
            f"setsid /run/writer {disk} < /dev/null > /dev/null 2>&1 &"
        )

    def goes_on(self, disk: str, seconds: float = 60) -> None:
        """Another record is counted, so that the disk is there and takes it."""
        before = self.counted(disk)
        await_true(
            lambda: self.counted(disk) > before,
            seconds,
            lambda: f"{disk}: {before} records, {self.guest.ssh('tail /run/*.said; dmesg | tail')}",
        )

    def end(self, disk: str) -> None:
        name = disk.rpartition("/")[2]
        self.guest.run(f"rm -f /run/{name}.goes")
        await_true(lambda: self.guest.does(f"test -e /run/{name}.ended"), 30, "the writer's end")

    def counted(self, disk: str) -> int:
        name = disk.rpartition("/")[2]
        return int(self.guest.run(f"cat /run/{name}.counted 2> /dev/null || echo 0"))

    def verify(self, disk: str) -> int:
        """Every record that was counted is on the disk, whole; how many there are."""
        counted = self.counted(disk)
        said = self.guest.run(
            f"dd if={disk} bs={RECORD} skip=1 count={counted} iflag=direct 2> /dev/null | base64"
        )
        data = base64.b64decode(said)
        wrong = [
            number
            for number in range(1, counted + 1)
            if data[(number - 1) * RECORD : number * RECORD].split() != record(number)
        ]
        assert counted and not wrong, f"{disk}: of {counted} records these are not there: {wrong}"
        return counted

    # --- blows ---
    def strike(self, action: str, step: str, victim: str, ask: Callable[[], Any]) -> None:
        """Ask, kill the victim when the action is at the step, and wait for its end."""
        names = {"source": self.agent(), "destination": self.agent(elsewhere=True)}
        name = names.get(victim, victim)
        pid = find_process(self.live.cloud, name)
        found = Strikes(self.live, self.guest.server).at_step(
            action, step, lambda host: process_control.kill(self.live.cloud, name), ask
        )
        await_back(self.live, name, pid)
        if found.state == "failed" and (action, step, victim) in GIVEN_UP:
            print(f"{action}: {victim} killed in {step}: {found.message}")
            await_debts(self.live, self.guest.server)
            found = Strikes(self.live, self.guest.server).at_step(action, step, nothing, ask)
        assert found.state == "done", f"{victim} killed in {step} of {action}: {found.message}"
        print(f"{action}: {victim} killed in {step}, which was {found.seen}; {found.answer}")

    def agent(self, elsewhere: bool = False) -> str:
        """The agent of the guest's host, or of the other one."""
        number = 3 - self.guest.host() if elsewhere else self.guest.host()
        return "agent" if number == 1 else f"agent-{number}"

    # --- volumes ---
    def attach(self, volume: str) -> Any:
        """The API waits for the reservation; a client whose answer is cut off looks for itself."""
        try:
            return self.guest.rest.call(
                "POST",
                f"/servers/{self.guest.server}/os-volume_attachments",
                {"volumeAttachment": {"volumeId": volume}},
            ).status
        except CUT_OFF as problem:
            return problem

    def detach(self, volume: str) -> Any:
        path = f"/servers/{self.guest.server}/os-volume_attachments/{volume}"
        return self.guest.rest.insist("DELETE", path, fine=(202,)).status

    def has(self, volumes: Sequence[str]) -> None:
        """These are the guest's, each once: by our API, by the volume service, by its domain."""
        listed = self.guest.rest.call(
            "GET", f"/servers/{self.guest.server}/os-volume_attachments"
        ).body["volumeAttachments"]
        assert sorted(one["volumeId"] for one in listed) == sorted(volumes)
        for volume in volumes:
            shown = self.live.seed.demo.block_storage.get_volume(volume)
            users = [one["server_id"] for one in shown.attachments]
            assert (shown.status, users) == ("in-use", [self.guest.server]), shown
        described = self.live.virsh("dumpxml", self.guest.server, host=self.guest.host())
        serials = Counter(
            line.strip()[len("<serial>") : -len("</serial>")]
            for line in described.splitlines()
            if line.strip().startswith("<serial>")
        )
        assert serials == Counter(volumes)


def nothing(host: str | None) -> None:
    """No blow."""


def record(number: int) -> list[bytes]:
    """Its number, and the checksum of what it says."""
    return [str(number).encode(), sha256(f"record {number}\n".encode()).hexdigest().encode()]


def make_volume(live: Live, name: str) -> str:
    volume = live.seed.demo.block_storage.create_volume(name=name, size=1)
    await_true(lambda: is_free(live, volume.id), 60, f"{name} is there")
    return str(volume.id)


def is_free(live: Live, volume: str) -> bool:
    return bool(live.seed.demo.block_storage.get_volume(volume).status == "available")


@contextmanager
def volumes(live: Live, *names: str) -> Iterator[list[str]]:
    """New volumes, which are free again at the end, and go."""
    made = [make_volume(live, name) for name in names]
    yield made
    for volume in made:
        await_true(lambda one=volume: is_free(live, one), SETTLE, f"{volume} is free")  # type: ignore[misc]  # bound here
        live.seed.demo.block_storage.delete_volume(volume)


@contextmanager
def story(live: Live, name: str) -> Iterator[Story]:
    made = guests.make(live, f"{name}-{uuid.uuid4().hex[:6]}")
    try:
        made.await_ssh(3 * BOOT, guests.PATIENT)
        yield Story(live, made)
    finally:
        guests.remove(made)


def test_the_steps_are_those_of_the_workflows() -> None:
    for action, steps in STEPS.items():
        known = {step.name for step in WORKFLOWS[action].steps}
        assert known == {*steps, *NOT_HERE.get(action, ())}, action


def come_and_go(live: Live) -> None:
    """One volume is written to all the time, another comes and goes."""
    with volumes(live, "stays", "comes-and-goes") as (stays, other), story(live, "writes") as one:
        assert one.attach(stays) == 200
        await_true(lambda: one.guest.does("test -b /dev/vdb"), 60, "the guest sees it")
        one.begin("/dev/vdb")
        coming, going = cells("attach_volume"), cells("detach_volume")
        for number in range(max(len(coming), len(going))):
            step, victim = coming[number % len(coming)]
            one.strike("attach_volume", step, victim, lambda: one.attach(other))
            await_true(lambda: one.guest.does("test -b /dev/vdc"), 60, "the guest sees it")
            one.has([stays, other])
            if number:
                one.verify("/dev/vdc")
            one.begin("/dev/vdc")
            one.goes_on("/dev/vdc")
            one.goes_on("/dev/vdb")
            one.end("/dev/vdc")
            step, victim = going[number % len(going)]
            one.strike("detach_volume", step, victim, lambda: one.detach(other))
            one.has([stays])
            assert is_free(live, other) and not one.guest.does("test -b /dev/vdc")
            one.goes_on("/dev/vdb")
        one.end("/dev/vdb")
        one.verify("/dev/vdb")
        live.judge()


@pytest.mark.slice("guests")
@pytest.mark.timeout(3600)
def test_volumes_come_and_go_while_processes_die(cloud: Live) -> None:
    come_and_go(cloud)


@pytest.mark.slice("guests")
@pytest.mark.timeout(3600)
def test_a_deleted_server_leaves_its_volumes_whole(cloud: Live) -> None:
    """Another server finds what it has written."""
    deletes(cloud)


def deletes(live: Live) -> None:
    counted = 0
    with volumes(live, "outlives") as (volume,):
        for step, victim in cells("delete"):
            with story(live, "goes") as one:
                assert one.attach(volume) == 200
                await_true(lambda: one.guest.does("test -b /dev/vdb"), 60, "the guest sees it")
                if counted:
                    one.guest.run(f"echo {counted} > /run/vdb.counted")
                    one.verify("/dev/vdb")
                one.begin("/dev/vdb")
                one.goes_on("/dev/vdb")
                counted = one.counted("/dev/vdb")
                one.strike("delete", step, victim, lambda: delete(one))
                await_true(lambda: is_free(live, volume), SETTLE, "the volume is free")
        with story(live, "finds") as one:
            assert one.attach(volume) == 200
            await_true(lambda: one.guest.does("test -b /dev/vdb"), 60, "the guest sees it")
            one.guest.run(f"echo {counted} > /run/vdb.counted")
            one.verify("/dev/vdb")
            live.judge()


def delete(one: Story) -> int:
    path = f"/servers/{one.guest.server}"
    return one.guest.rest.insist("DELETE", path, fine=(204, 404)).status


AT_LENGTH = pytest.mark.skipif(not WANTED, reason="takes KILONOVA_VOLUME_KILLS, few or all")


@AT_LENGTH
@pytest.mark.slice("moves")
@pytest.mark.timeout(3600)
def test_volumes_come_and_go_over_nbd(lab: LiveLab) -> None:
    come_and_go(lab)


@AT_LENGTH
@pytest.mark.slice("moves")
@pytest.mark.timeout(3600)
def test_what_was_written_over_nbd_outlives_its_server(lab: LiveLab) -> None:
    deletes(lab)


@pytest.mark.slice("moves")
@pytest.mark.timeout(5400)
def test_volumes_move_with_their_server_while_processes_die(lab: LiveLab) -> None:
    """Over NBD, from host to host, while it writes."""
    admin = lab.rest("kilonova-admin")
    with volumes(lab, "travels") as (volume,), story(lab, "travels") as one:
        assert one.attach(volume) == 200
        await_true(lambda: one.guest.does("test -b /dev/vdb"), 60, "the guest sees it")
        one.begin("/dev/vdb")
        one.goes_on("/dev/vdb")
        for step, victim in cells("live_migrate"):
            before = lab.place(one.guest.server)
            there = next(host for host in lab.cloud.hosts[:2] if host != before)
            one.strike(
                "live_migrate",
                step,
                victim,
                lambda: (
                    admin.act(
                        one.guest.server,
                        "os-migrateLive",
                        {"host": there, "block_migration": "auto"},  # noqa: B023
                    ).status
                ),
            )
            assert lab.place(one.guest.server) == there
            assert lab.where(one.guest.server) == {there: "running"}
            one.has([volume])
            one.goes_on("/dev/vdb")
        one.end("/dev/vdb")
        one.verify("/dev/vdb")
        lab.judge()
