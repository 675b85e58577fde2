# SPDX-License-Identifier: Apache-2.0
"""Actions of the ``openstack`` command from PyPI on a guest with a canary on its disk.

The guest writes the canary to the disk at the first boot, and prints the contents of its disks at
each boot. The tests share a guest and an open client, and leave the guest ACTIVE with the canary.
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
    """A guest, and the number of its boots in the current console log."""

    cloud: Live
    rest: Rest
    name: str
    server: str
    type: Callable[[str], None]
    boots: int = 1

    def run_command_until(self, command: str, status: str) -> None:
        """Run ``openstack server COMMAND … NAME``, and wait for the status."""
        self.type(f"server {command} {self.name}")
        await_true(lambda: self.rest.server(self.server)["status"] == status, SETTLE, self.describe)
        self.rest.await_status(self.server, status)

    def read_disks(self) -> dict[str, str]:
        """Return the content of each disk, as the guest printed at its last boot."""
        console = self.rest.await_ready(self.server, self.boots)
        assert console.count(BOOTING) == self.boots, console
        return dict(
            re.findall(r"^(vd[ab]) holds \[(.*)\]", console.split(BOOTING)[-1], re.MULTILINE)
        )

    def read_disks_after_boot(self) -> dict[str, str]:
        self.boots += 1
        return self.read_disks()

    def describe(self) -> str:
        return f"{self.rest.server(self.server)}\n{self.rest.console(self.server)[-2000:]}"


@pytest.fixture(scope="module")
def guest(cloud: Live, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guest]:
    rest, name = cloud.rest(), f"canary-{uuid.uuid4().hex[:8]}"
    folder = tmp_path_factory.mktemp("client")
    (folder / "user-data").write_text(CANARY)
    with cloud.typist(folder) as type_command:
        type_command(
            f"server create --flavor m1.nano --image tiny --nic none --config-drive True --user-data "
            f"{folder}/user-data {name}"
        )
        await_true(
            lambda: name in {server["name"] for server in rest.servers()}, SETTLE, rest.servers
        )
        [server] = [server["id"] for server in rest.servers() if server["name"] == name]
        rest.await_status(server, "ACTIVE")
        new_guest = Guest(cloud, rest, name, server, type_command)
        # The first boot finds an empty disk, and then writes the canary.
        assert new_guest.read_disks() == {"vda": ""}
        yield new_guest
        type_command(f"server delete --wait {name}")
    rest.await_gone(server)
    for image in cloud.seed.demo.image.images(visibility="private"):
        if image.name.startswith(name):
            cloud.seed.demo.image.delete_image(image)
    cloud.await_removed(server, 30)
    cloud.assert_healthy()


def test_pause_suspend_and_lock_do_not_reboot_guest(guest: Guest) -> None:
    guest.run_command_until("pause", "PAUSED")
    assert guest.cloud.domain_state(guest.server) == "paused"
    guest.run_command_until("unpause", "ACTIVE")
    guest.run_command_until("suspend", "SUSPENDED")
    assert guest.cloud.domain_state(guest.server) == "shut off"
    guest.run_command_until("resume", "ACTIVE")
    assert guest.cloud.domain_state(guest.server) == "running"
    guest.type(f"server lock {guest.name}")
    await_true(lambda: guest.rest.server(guest.server)["locked"], SETTLE, guest.describe)
    assert guest.rest.act(guest.server, "os-stop").status == 409
    guest.type(f"server unlock {guest.name}")
    await_true(lambda: not guest.rest.server(guest.server)["locked"], SETTLE, guest.describe)
    # This is still the output of the first boot.
    assert guest.read_disks() == {"vda": ""}


def test_snapshot_of_server_boots_with_data_of_server(guest: Guest) -> None:
    image, copy = f"{guest.name}-snapshot", f"{guest.name}-copy"
    guest.type(f"server image create --wait --name {image} {guest.name}")
    await_true(lambda: guest.cloud.images().get(image) == "active", SETTLE, guest.cloud.images)
    image_record = next(iter(guest.cloud.seed.demo.image.images(name=image)))
    assert (image_record.instance_uuid, image_record.properties["image_type"]) == (
        guest.server,
        "snapshot",
    )
    server = guest.rest.create(
        image=image_record.id,
        flavor=guest.cloud.flavor(),
        name=copy,
        config_drive=True,
        user_data=base64.b64encode(CANARY.encode()).decode(),
    )
    try:
        guest.rest.await_status(server, "ACTIVE")
        assert Guest(guest.cloud, guest.rest, copy, server, guest.type).read_disks() == {
            "vda": "canary"
        }
    finally:
        guest.type(f"server delete {copy}")
        guest.rest.await_gone(server)
    guest.rest.await_status(guest.server, "ACTIVE")


def test_rescue_boots_from_rescue_disk_and_unrescue_from_own_disk(guest: Guest) -> None:
    guest.run_command_until("rescue --image tiny", "RESCUE")
    assert guest.read_disks_after_boot() == {"vda": "", "vdb": "canary"}
    guest.run_command_until("unrescue", "ACTIVE")
    assert guest.read_disks_after_boot() == {"vda": "canary"}


def test_shelve_removes_guest_from_host_and_unshelve_restores_its_disk(guest: Guest) -> None:
    guest.run_command_until("shelve", "SHELVED_OFFLOADED")
    assert guest.cloud.leftovers(guest.server) == []
    assert guest.cloud.images()[f"{guest.name}-shelved"] == "active"
    guest.run_command_until("unshelve", "ACTIVE")
    # The console log of a new domain is empty.
    guest.boots = 1
    assert guest.read_disks() == {"vda": "canary"}
    await_true(
        lambda: f"{guest.name}-shelved" not in guest.cloud.images(), SETTLE, guest.cloud.images
    )


def test_backup_rotation_keeps_newest_image_of_each_type(guest: Guest) -> None:
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
    [backup] = guest.cloud.seed.demo.image.images(name=second)
    assert (
        backup.instance_uuid,
        backup.properties["image_type"],
        backup.properties["backup_type"],
    ) == (
        guest.server,
        "backup",
        "daily",
    )


def test_rebuild_gives_new_disk_and_keeps_server_identity(guest: Guest) -> None:
    before = guest.rest.server(guest.server)
    guest.type(f"server rebuild --image tiny --wait --property made=anew {guest.name}")
    await_true(
        lambda: guest.rest.server(guest.server)["metadata"] == {"made": "anew"},
        SETTLE,
        guest.describe,
    )
    after = guest.rest.await_status(guest.server, "ACTIVE")
    # The boot writes the canary to the new disk.
    assert guest.read_disks_after_boot() == {"vda": ""}
    assert [after[key] for key in ("id", "addresses", "flavor", "created")] == [
        before[key] for key in ("id", "addresses", "flavor", "created")
    ]


def test_guest_without_guest_agent_gets_nmi_and_diagnostics_but_no_password(guest: Guest) -> None:
    refused = guest.rest.act(guest.server, "changePassword", {"adminPass": SECRET})
    kind, code, message = refused.fault
    assert (kind, code, "agent" in message) == ("conflictingRequest", 409, True)
    guest.rest.await_status(guest.server, "ACTIVE")
    files = [
        *guest.cloud.home.glob("log/*"),
        *guest.cloud.home.glob("data/*"),
        *guest.cloud.home.glob("state/*.db*"),
    ]
    assert guest.cloud.home / "data/kilonova.db" in files
    assert [path for path in files if path.is_file() and SECRET.encode() in path.read_bytes()] == []

    assert guest.rest.act(guest.server, "trigger_crash_dump").status == 202
    await_true(lambda: "NMI received" in guest.rest.console(guest.server), 30, guest.describe)
    diagnostics_response = guest.cloud.rest("kilonova-admin").call(
        "GET", f"/servers/{guest.server}/diagnostics"
    )
    assert diagnostics_response.status == 200
    diagnostics = diagnostics_response.body
    assert {key: diagnostics[key] for key in ("state", "driver", "config_drive", "num_cpus")} == {
        "state": "running",
        "driver": "libvirt",
        "config_drive": True,
        "num_cpus": 1,
    }
    assert diagnostics["memory_details"]["maximum"] == 128
    assert len(diagnostics["disk_details"]) == diagnostics["num_disks"] > 0
    assert guest.rest.call("GET", f"/servers/{guest.server}/diagnostics").status == 403


def test_instance_actions_list_known_actions_with_expected_event_results(guest: Guest) -> None:
    path = f"/servers/{guest.server}/os-instance-actions"
    rows = guest.rest.call("GET", path).body["instanceActions"]
    get = partial(guest.rest.call, "GET")
    actions = [get(f"{path}/{action['request_id']}").body["instanceAction"] for action in rows]
    assert {action["action"] for action in rows} >= {"create"}
    assert {action["action"] for action in rows} <= ACTION_NAMES | {
        "changePassword",
        "trigger_crash_dump",
    }
    for action in actions:
        results = {event["event"]: event["result"] for event in action["events"]}
        expected_results = {"Error"} if action["action"] == "changePassword" else {"Success"}
        assert set(results.values()) <= expected_results, (action["action"], results)
