# SPDX-License-Identifier: Apache-2.0
"""Processes are killed during attach, detach, live migration and delete.

Meanwhile a guest writes to its volumes like a database. The writer numbers its records, adds a
checksum to each, and counts a record after the disk has it. A process is killed with signal 9 when
the step is in the action's journal. The action must complete nevertheless. Afterwards every counted
record is on the disk, each volume is attached once or not at all, and no action is stuck. By
default a run has few steps. With KILONOVA_VOLUME_KILLS=all every process is killed in every step,
which takes an hour or more (docs/testing.md).
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
from tests.e2e.strikes import Strikes, await_back, await_cleanups
from tests.waiting import await_true

#: "few" and "all" also test NBD, with few or with all steps.
MODE = os.environ.get("KILONOVA_VOLUME_KILLS", "")
#: Size of a record in bytes.
RECORD = 512
#: A script with a disk as argument. The script ends after a write error, or when its file in /run
#: is deleted.
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
#: The tested steps of each action.
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
#: The processes to kill in each action. "source" and "destination" are agents.
VICTIMS: dict[str, tuple[str, ...]] = {
    "live_migrate": ("source", "destination", "conductor", "volume"),
    **dict.fromkeys(
        ("attach_volume", "detach_volume", "delete"), ("source", "conductor", "volume")
    ),
}
#: Steps in which the action may fail. The libvirtds of both hosts communicate through the agent of
#: the destination, so without it libvirt cancels the migration. The guest continues on the source,
#: and a client can repeat the request.
GIVEN_UP = {("live_migrate", step, "destination") for step in ("heed", "migrate")}
#: The steps and victims of a default run.
FEW = {
    "attach_volume": [("attach", "source"), ("connect", "volume")],
    "detach_volume": [("detach", "conductor"), ("end_attachment", "volume")],
    "live_migrate": [("migrate", "source")],
    "delete": [("release_volumes", "conductor")],
}


def list_cells(action: str) -> list[tuple[str, str]]:
    """Return the step and the victim of each kill."""
    if MODE != "all":
        return FEW[action]
    return [(step, victim) for step in STEPS[action] for victim in VICTIMS[action]]


@dataclass
class WriterGuest:
    """A guest with a writer, and actions on its volumes."""

    live: Live
    guest: Guest

    # --- the writer ---
    def start_writer(self, disk: str) -> None:
        """Start the writer on a disk, behind the existing records."""
        name = disk.rpartition("/")[2]
        self.guest.run("cat > /run/writer && chmod +x /run/writer", stdin=WRITER.encode())
        self.guest.run(
            f"rm -f /run/{name}.ended; touch /run/{name}.goes; "
            f"setsid /run/writer {disk} < /dev/null > /dev/null 2>&1 &"
        )

    def await_next_record(self, disk: str, seconds: float = 60) -> None:
        """Wait until the writer counts another record, which shows that the disk works."""
        before = self.count_records(disk)
        await_true(
            lambda: self.count_records(disk) > before,
            seconds,
            lambda: f"{disk}: {before} records, {self.guest.ssh('tail /run/*.said; dmesg | tail')}",
        )

    def stop_writer(self, disk: str) -> None:
        name = disk.rpartition("/")[2]
        self.guest.run(f"rm -f /run/{name}.goes")
        await_true(lambda: self.guest.can_run(f"test -e /run/{name}.ended"), 30, "the writer's end")

    def count_records(self, disk: str) -> int:
        name = disk.rpartition("/")[2]
        return int(self.guest.run(f"cat /run/{name}.counted 2> /dev/null || echo 0"))

    def verify(self, disk: str) -> int:
        """Check that every counted record is complete on the disk. Return the number of records."""
        count = self.count_records(disk)
        output = self.guest.run(
            f"dd if={disk} bs={RECORD} skip=1 count={count} iflag=direct 2> /dev/null | base64"
        )
        data = base64.b64decode(output)
        wrong_records = [
            number
            for number in range(1, count + 1)
            if data[(number - 1) * RECORD : number * RECORD].split() != make_record(number)
        ]
        assert count and not wrong_records, (
            f"{disk}: of {count} records these are not there: {wrong_records}"
        )
        return count

    # --- kills ---
    def strike(self, action: str, step: str, victim: str, request: Callable[[], Any]) -> None:
        """Send the request, kill the victim at the step, and wait until the action has ended."""
        names = {"source": self.agent(), "destination": self.agent(elsewhere=True)}
        name = names.get(victim, victim)
        pid = find_process(self.live.cloud, name)
        outcome = Strikes(self.live, self.guest.server).at_step(
            action, step, lambda host: process_control.kill(self.live.cloud, name), request
        )
        await_back(self.live, name, pid)
        if outcome.state == "failed" and (action, step, victim) in GIVEN_UP:
            print(f"{action}: {victim} killed in {step}: {outcome.message}")
            await_cleanups(self.live, self.guest.server)
            outcome = Strikes(self.live, self.guest.server).at_step(
                action, step, strike_nothing, request
            )
        assert outcome.state == "done", f"{victim} killed in {step} of {action}: {outcome.message}"
        print(
            f"{action}: {victim} killed in {step}, which was {outcome.last_event}; {outcome.answer}"
        )

    def agent(self, elsewhere: bool = False) -> str:
        """Return the name of the agent of the guest's host, or of the other host."""
        number = 3 - self.guest.host() if elsewhere else self.guest.host()
        return "agent" if number == 1 else f"agent-{number}"

    # --- volumes ---
    def attach(self, volume: str) -> Any:
        """Attach a volume, and return the status, or the exception of a lost connection."""
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
        return self.guest.rest.insist("DELETE", path, expected=(202,)).status

    def check_volumes(self, volumes: Sequence[str]) -> None:
        """Check that the guest has exactly these volumes, in API, volume service and domain."""
        attachments = self.guest.rest.call(
            "GET", f"/servers/{self.guest.server}/os-volume_attachments"
        ).body["volumeAttachments"]
        assert sorted(row["volumeId"] for row in attachments) == sorted(volumes)
        for volume in volumes:
            volume_record = self.live.seed.demo.block_storage.get_volume(volume)
            users = [row["server_id"] for row in volume_record.attachments]
            assert (volume_record.status, users) == ("in-use", [self.guest.server]), volume_record
        domain_xml = self.live.virsh("dumpxml", self.guest.server, host=self.guest.host())
        serials = Counter(
            line.strip()[len("<serial>") : -len("</serial>")]
            for line in domain_xml.splitlines()
            if line.strip().startswith("<serial>")
        )
        assert serials == Counter(volumes)


def strike_nothing(host: str | None) -> None:
    """Kill no process, because the repeated action must complete."""


def make_record(number: int) -> list[bytes]:
    """Return the fields of a record: its number, and the checksum of its text."""
    return [str(number).encode(), sha256(f"record {number}\n".encode()).hexdigest().encode()]


def make_volume(live: Live, name: str) -> str:
    volume = live.seed.demo.block_storage.create_volume(name=name, size=1)
    await_true(lambda: is_free(live, volume.id), 60, f"{name} is there")
    return str(volume.id)


def is_free(live: Live, volume: str) -> bool:
    return bool(live.seed.demo.block_storage.get_volume(volume).status == "available")


@contextmanager
def volumes(live: Live, *names: str) -> Iterator[list[str]]:
    """Create volumes for a with block. At the end they must be available, and are deleted."""
    volume_ids = [make_volume(live, name) for name in names]
    yield volume_ids
    for volume in volume_ids:
        await_true(lambda volume_id=volume: is_free(live, volume_id), SETTLE, f"{volume} is free")  # type: ignore[misc]  # bound here
        live.seed.demo.block_storage.delete_volume(volume)


@contextmanager
def writer_guest(live: Live, name: str) -> Iterator[WriterGuest]:
    guest = guests.make(live, f"{name}-{uuid.uuid4().hex[:6]}")
    try:
        guest.await_ssh(3 * BOOT, guests.PATIENT)
        yield WriterGuest(live, guest)
    finally:
        guest.remove()


def test_volume_kill_steps_and_exceptions_cover_each_workflow_step() -> None:
    for action, steps in STEPS.items():
        step_names = {step.name for step in WORKFLOWS[action].steps}
        assert step_names == {*steps, *NOT_HERE.get(action, ())}, action


def attach_and_detach(live: Live) -> None:
    """Attach and detach a volume repeatedly, while the guest writes to another volume."""
    with (
        volumes(live, "stays", "comes-and-goes") as (stays, other),
        writer_guest(live, "writes") as writer,
    ):
        assert writer.attach(stays) == 200
        await_true(lambda: writer.guest.can_run("test -b /dev/vdb"), 60, "the guest sees it")
        writer.start_writer("/dev/vdb")
        coming, going = list_cells("attach_volume"), list_cells("detach_volume")
        for number in range(max(len(coming), len(going))):
            step, victim = coming[number % len(coming)]
            writer.strike("attach_volume", step, victim, lambda: writer.attach(other))
            await_true(lambda: writer.guest.can_run("test -b /dev/vdc"), 60, "the guest sees it")
            writer.check_volumes([stays, other])
            if number:
                writer.verify("/dev/vdc")
            writer.start_writer("/dev/vdc")
            writer.await_next_record("/dev/vdc")
            writer.await_next_record("/dev/vdb")
            writer.stop_writer("/dev/vdc")
            step, victim = going[number % len(going)]
            writer.strike("detach_volume", step, victim, lambda: writer.detach(other))
            writer.check_volumes([stays])
            assert is_free(live, other) and not writer.guest.can_run("test -b /dev/vdc")
            writer.await_next_record("/dev/vdb")
        writer.stop_writer("/dev/vdb")
        writer.verify("/dev/vdb")
        live.assert_healthy()


@pytest.mark.slice("guests")
@pytest.mark.timeout(3600)
def test_volume_attach_and_detach_survive_killed_processes(cloud: Live) -> None:
    attach_and_detach(cloud)


@pytest.mark.slice("guests")
@pytest.mark.timeout(3600)
def test_volume_keeps_data_when_processes_die_during_server_delete(cloud: Live) -> None:
    """Another server finds the records on the volume."""
    delete_servers(cloud)


def delete_servers(live: Live) -> None:
    count = 0
    with volumes(live, "outlives") as (volume,):
        for step, victim in list_cells("delete"):
            with writer_guest(live, "goes") as writer:
                assert writer.attach(volume) == 200
                await_true(
                    lambda: writer.guest.can_run("test -b /dev/vdb"), 60, "the guest sees it"
                )
                if count:
                    writer.guest.run(f"echo {count} > /run/vdb.counted")
                    writer.verify("/dev/vdb")
                writer.start_writer("/dev/vdb")
                writer.await_next_record("/dev/vdb")
                count = writer.count_records("/dev/vdb")
                writer.strike("delete", step, victim, lambda: delete_server(writer))
                await_true(lambda: is_free(live, volume), SETTLE, "the volume is free")
        with writer_guest(live, "finds") as writer:
            assert writer.attach(volume) == 200
            await_true(lambda: writer.guest.can_run("test -b /dev/vdb"), 60, "the guest sees it")
            writer.guest.run(f"echo {count} > /run/vdb.counted")
            writer.verify("/dev/vdb")
            live.assert_healthy()


def delete_server(writer: WriterGuest) -> int:
    path = f"/servers/{writer.guest.server}"
    return writer.guest.rest.insist("DELETE", path, expected=(204, 404)).status


AT_LENGTH = pytest.mark.skipif(not MODE, reason="takes KILONOVA_VOLUME_KILLS, few or all")


@AT_LENGTH
@pytest.mark.slice("moves")
@pytest.mark.timeout(3600)
def test_nbd_volume_attach_and_detach_survive_killed_processes(lab: LiveLab) -> None:
    attach_and_detach(lab)


@AT_LENGTH
@pytest.mark.slice("moves")
@pytest.mark.timeout(3600)
def test_nbd_volume_keeps_data_when_processes_die_during_server_delete(lab: LiveLab) -> None:
    delete_servers(lab)


@pytest.mark.slice("moves")
@pytest.mark.timeout(5400)
def test_live_migration_with_nbd_volume_survives_killed_processes(lab: LiveLab) -> None:
    """The volume is connected over NBD, and the guest writes during the migrations."""
    admin = lab.rest("kilonova-admin")
    with volumes(lab, "travels") as (volume,), writer_guest(lab, "travels") as writer:
        assert writer.attach(volume) == 200
        await_true(lambda: writer.guest.can_run("test -b /dev/vdb"), 60, "the guest sees it")
        writer.start_writer("/dev/vdb")
        writer.await_next_record("/dev/vdb")
        for step, victim in list_cells("live_migrate"):
            before = lab.host_of(writer.guest.server)
            new_host = next(host for host in lab.cloud.hosts[:2] if host != before)
            writer.strike(
                "live_migrate",
                step,
                victim,
                lambda: (
                    admin.act(
                        writer.guest.server,
                        "os-migrateLive",
                        {"host": new_host, "block_migration": "auto"},  # noqa: B023
                    ).status
                ),
            )
            assert lab.host_of(writer.guest.server) == new_host
            assert lab.find_domains(writer.guest.server) == {new_host: "running"}
            writer.check_volumes([volume])
            writer.await_next_record("/dev/vdb")
        writer.stop_writer("/dev/vdb")
        writer.verify("/dev/vdb")
        lab.assert_healthy()
