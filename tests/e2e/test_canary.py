# SPDX-License-Identifier: Apache-2.0
"""A real guest with a canary on its disk, sent through its actions by the ``openstack`` command as
it comes from PyPI.

The guest plants the canary at its first boot and says at each boot what its disks hold, so that its
own words tell whether the disk survived. The tests share one guest and one open client, and leave
the guest ACTIVE with its canary.
"""

from __future__ import annotations

import base64
import re
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import pytest

from tests.contract.virt_rigs import CANARY
from tests.e2e.live import SETTLE, Live, Rest
from tests.waiting import await_true

pytestmark = pytest.mark.slice("guests")

BOOTING = "guest: booting"
SECRET = f"s3cret-{uuid.uuid4().hex}"
ACTION_NAMES = {
    "create",
    "pause",
    "unpause",
    "suspend",
    "resume",
    "createImage",
    "createBackup",
    "rescue",
    "unrescue",
    "rebuild",
    "shelve",
    "unshelve",
    "lock",
    "unlock",
}


@dataclass
class Guest:
    """A guest and how often it has booted since its console began."""

    cloud: Live
    rest: Rest
    name: str
    server: str
    type: Callable[[str], None]
    boots: int = 1

    def does(self, command: str, wanted: str) -> None:
        """Type ``server COMMAND … NAME`` and wait for the status."""
        self.type(f"server {command} {self.name}")
        await_true(lambda: self.rest.server(self.server)["status"] == wanted, SETTLE, self.story)
        self.rest.await_status(self.server, wanted)

    def holds(self) -> dict[str, str]:
        """Disk -> what it holds, in the guest's words at its last boot."""
        console = self.rest.await_ready(self.server, self.boots)
        assert console.count(BOOTING) == self.boots, console
        return dict(
            re.findall(r"^(vd[ab]) holds \[(.*)\]", console.split(BOOTING)[-1], re.MULTILINE)
        )

    def boots_again(self) -> dict[str, str]:
        self.boots += 1
        return self.holds()

    def story(self) -> str:
        return f"{self.rest.server(self.server)}\n{self.rest.console(self.server)[-2000:]}"


@pytest.fixture(scope="module")
def guest(cloud: Live, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guest]:
    rest, name = cloud.rest(), f"canary-{uuid.uuid4().hex[:8]}"
    folder = tmp_path_factory.mktemp("client")
    (folder / "user-data").write_text(CANARY)
    with cloud.typist(folder) as typed:
        typed(
            f"server create --flavor m1.nano --image tiny --nic none --config-drive True --user-data "
            f"{folder}/user-data {name}"
        )
        await_true(lambda: name in {one["name"] for one in rest.servers()}, SETTLE, rest.servers)
        [server] = [one["id"] for one in rest.servers() if one["name"] == name]
        rest.await_status(server, "ACTIVE")
        made = Guest(cloud, rest, name, server, typed)
        assert made.holds() == {"vda": ""}  # and now it is planted
        yield made
        typed(f"server delete --wait {name}")
    rest.await_gone(server)
    for image in cloud.seed.demo.image.images(visibility="private"):
        if image.name.startswith(name):
            cloud.seed.demo.image.delete_image(image)
    cloud.await_nothing_of(server, 30)
    cloud.judge()


def test_paused_suspended_and_locked_guests_go_on_without_a_boot(guest: Guest) -> None:
    guest.does("pause", "PAUSED")
    assert guest.cloud.domain_state(guest.server) == "paused"
    guest.does("unpause", "ACTIVE")
    guest.does("suspend", "SUSPENDED")
    assert guest.cloud.domain_state(guest.server) == "shut off"
    guest.does("resume", "ACTIVE")
    assert guest.cloud.domain_state(guest.server) == "running"
    guest.type(f"server lock {guest.name}")
    await_true(lambda: guest.rest.server(guest.server)["locked"], SETTLE, guest.story)
    assert guest.rest.act(guest.server, "os-stop").status == 409
    guest.type(f"server unlock {guest.name}")
    await_true(lambda: not guest.rest.server(guest.server)["locked"], SETTLE, guest.story)
    assert guest.holds() == {"vda": ""}  # still its first boot


def test_snapshot_boots_with_the_canary(guest: Guest) -> None:
    image, copy = f"{guest.name}-snapshot", f"{guest.name}-copy"
    guest.type(f"server image create --wait --name {image} {guest.name}")
    await_true(lambda: guest.cloud.images().get(image) == "active", SETTLE, guest.cloud.images)
    made = next(iter(guest.cloud.seed.demo.image.images(name=image)))
    assert (made.instance_uuid, made.properties["image_type"]) == (guest.server, "snapshot")
    server = guest.rest.create(
        image=made.id,
        flavor=guest.cloud.flavor(),
        name=copy,
        config_drive=True,
        user_data=base64.b64encode(CANARY.encode()).decode(),
    )
    try:
        guest.rest.await_status(server, "ACTIVE")
        assert Guest(guest.cloud, guest.rest, copy, server, guest.type).holds() == {"vda": "canary"}
    finally:
        guest.type(f"server delete {copy}")
        guest.rest.await_gone(server)
    guest.rest.await_status(guest.server, "ACTIVE")


def test_rescued_guest_has_its_disk_beside_the_rescue_disk_and_gets_it_back(guest: Guest) -> None:
    guest.does("rescue --image tiny", "RESCUE")
    assert guest.boots_again() == {"vda": "", "vdb": "canary"}
    guest.does("unrescue", "ACTIVE")
    assert guest.boots_again() == {"vda": "canary"}


def test_shelved_guest_leaves_its_host_and_comes_back_with_the_canary(guest: Guest) -> None:
    guest.does("shelve", "SHELVED_OFFLOADED")
    assert guest.cloud.remains(guest.server) == []
    assert guest.cloud.images()[f"{guest.name}-shelved"] == "active"
    guest.does("unshelve", "ACTIVE")
    guest.boots = 1  # a new domain: its console begins anew
    assert guest.holds() == {"vda": "canary"}
    await_true(
        lambda: f"{guest.name}-shelved" not in guest.cloud.images(), SETTLE, guest.cloud.images
    )


def test_backup_rotation_keeps_the_youngest(guest: Guest) -> None:
    first, second, weekly = (f"{guest.name}-{kind}" for kind in ("first", "second", "weekly"))
    for image, kind in ((first, "daily"), (weekly, "weekly"), (second, "daily")):
        guest.type(f"server backup create --name {image} --type {kind} --rotate 1 {guest.name}")
        await_true(
            lambda name=image: guest.cloud.images().get(name) == "active",
            SETTLE,
            guest.cloud.images,
        )
        guest.rest.await_status(guest.server, "ACTIVE")
    await_true(
        lambda: {first, second, weekly} & set(guest.cloud.images()) == {second, weekly},
        SETTLE,
        guest.cloud.images,
    )
    [kept] = guest.cloud.seed.demo.image.images(name=second)
    assert (kept.instance_uuid, kept.properties["image_type"], kept.properties["backup_type"]) == (
        guest.server,
        "backup",
        "daily",
    )


def test_rebuilt_guest_has_a_new_disk_and_is_the_same_server(guest: Guest) -> None:
    before = guest.rest.server(guest.server)
    guest.type(f"server rebuild --image tiny --wait --property made=anew {guest.name}")
    await_true(
        lambda: guest.rest.server(guest.server)["metadata"] == {"made": "anew"}, SETTLE, guest.story
    )
    after = guest.rest.await_status(guest.server, "ACTIVE")
    assert guest.boots_again() == {"vda": ""}  # and planted anew
    assert [after[key] for key in ("id", "addresses", "flavor", "created")] == [
        before[key] for key in ("id", "addresses", "flavor", "created")
    ]


def test_guest_without_agent_is_interrupted_and_described(guest: Guest) -> None:
    refused = guest.rest.act(guest.server, "changePassword", {"adminPass": SECRET})
    kind, code, message = refused.fault
    assert (kind, code, "agent" in message) == ("conflictingRequest", 409, True)
    guest.rest.await_status(guest.server, "ACTIVE")
    written = [
        *guest.cloud.home.glob("log/*"),
        *guest.cloud.home.glob("data/*"),
        *guest.cloud.home.glob("state/*.db*"),
    ]
    assert guest.cloud.home / "data/kilonova.db" in written
    assert [
        path for path in written if path.is_file() and SECRET.encode() in path.read_bytes()
    ] == []

    assert guest.rest.act(guest.server, "trigger_crash_dump").status == 202
    await_true(lambda: "NMI received" in guest.rest.console(guest.server), 30, guest.story)
    found = guest.cloud.rest("kilonova-admin").call("GET", f"/servers/{guest.server}/diagnostics")
    assert found.status == 200
    described = found.body
    assert {key: described[key] for key in ("state", "driver", "config_drive", "num_cpus")} == {
        "state": "running",
        "driver": "libvirt",
        "config_drive": True,
        "num_cpus": 1,
    }
    assert described["memory_details"]["maximum"] == 128
    assert len(described["disk_details"]) == described["num_disks"] > 0
    assert guest.rest.call("GET", f"/servers/{guest.server}/diagnostics").status == 403


def test_every_action_is_in_the_log_with_its_events(guest: Guest) -> None:
    path = f"/servers/{guest.server}/os-instance-actions"
    listed = guest.rest.call("GET", path).body["instanceActions"]
    told = partial(guest.rest.call, "GET")
    shown = [told(f"{path}/{one['request_id']}").body["instanceAction"] for one in listed]
    assert {one["action"] for one in listed} >= {"create"}
    assert {one["action"] for one in listed} <= ACTION_NAMES | {
        "changePassword",
        "trigger_crash_dump",
    }
    for one in shown:
        results = {event["event"]: event["result"] for event in one["events"]}
        wanted = {"Error"} if one["action"] == "changePassword" else {"Success"}
        assert set(results.values()) <= wanted, (one["action"], results)
