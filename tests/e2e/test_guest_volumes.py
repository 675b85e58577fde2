# SPDX-License-Identifier: Apache-2.0
"""Volumes of guests, with the ``openstack`` command: attachment, data and device names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from deploy.one_machine.connectivity import KEY, PRIVATE
from tests.e2e.guests import Guest, give_address
from tests.e2e.live import Live
from tests.waiting import await_true

pytestmark = pytest.mark.slice("guests")
MARK, AT_MIB = "what must not be lost", 512


@pytest.fixture
def empty_storage(cloud: Live) -> Iterator[None]:
    """Delete all volumes at the end, and check that the cloud is consistent."""
    yield
    storage = cloud.seed.demo.block_storage
    for volume in storage.volumes():
        await_true(
            lambda volume_id=volume: is_free(cloud, volume_id.id), 60, f"{volume.name} is free"
        )  # type: ignore[misc]  # bound here
        storage.delete_volume(volume.id)
    await_true(lambda: not list(storage.volumes()), 60, "no volume")
    cloud.assert_healthy()


def is_free(cloud: Live, volume: str) -> bool:
    return bool(cloud.seed.demo.block_storage.get_volume(volume).status == "available")


def run_for_json(cloud: Live, command: str) -> Any:
    [result] = cloud.openstack(f"{command} -f json")
    return result


def boot_from_volume(cloud: Live, name: str, source: str) -> Guest:
    """Boot a guest with a volume as root disk, and wait for ssh."""
    server = run_for_json(
        cloud,
        f"server create {source} --flavor m1.nano --network {PRIVATE} --key-name {KEY} --wait {name}",
    )
    assert server["status"] == "ACTIVE" and server["image"] == "N/A (booted from volume)"
    return Guest(cloud, server["id"], name, give_address(cloud, server["id"])).await_ssh()


def write(guest: Guest, device: str) -> None:
    guest.run(f"echo '{MARK}' | dd of={device} bs=1M seek={AT_MIB} conv=notrunc,fsync 2> /dev/null")


def read(guest: Guest, device: str) -> str:
    return guest.run(
        f"dd if={device} bs=1M skip={AT_MIB} count=1 2> /dev/null | head -c {len(MARK)}"
    )


def test_volume_keeps_data_after_server_delete(cloud: Live, empty_storage: None) -> None:
    first = boot_from_volume(cloud, "first-of-two", "--boot-from-volume 1 --image tiny")
    [attached] = cloud.rest().server(first.server)["os-extended-volumes:volumes_attached"]
    write(first, "/dev/vda")
    first.remove()
    await_true(lambda: is_free(cloud, attached["id"]), 60, "the volume is free")
    second = boot_from_volume(cloud, "second-of-two", f"--volume {attached['id']}")
    assert read(second, "/dev/vda") == MARK
    second.remove()


def test_volume_attach_and_detach_on_running_guest_keep_data(
    cloud: Live, empty_storage: None
) -> None:
    volume = run_for_json(cloud, "volume create --size 1 data")["id"]
    await_true(lambda: is_free(cloud, volume), 60, "the volume is there")
    guest = boot_from_volume(cloud, "has-data", "--boot-from-volume 1 --image tiny")
    cloud.openstack(f"server add volume has-data {volume}")
    await_true(lambda: guest.can_run("test -b /dev/vdb"), 30, "the guest sees it")
    assert guest.run("cat /sys/block/vdb/serial").strip() == volume[:20]
    write(guest, "/dev/vdb")
    cloud.openstack(f"server remove volume has-data {volume}")
    await_true(lambda: is_free(cloud, volume), 60, "the volume is free again")
    assert not guest.can_run("test -b /dev/vdb")
    cloud.openstack(f"server add volume has-data {volume}")
    await_true(lambda: guest.can_run("test -b /dev/vdb"), 30, "the guest sees it")
    assert read(guest, "/dev/vdb") == MARK
    guest.remove()


def read_serials(guest: Guest) -> dict[str, str]:
    """Return the serial number of each disk in the guest: the begin of the volume's id."""
    lines = guest.run("grep . /sys/block/vd*/serial").split()
    return {f"/dev/{line.split('/')[3]}": line.split(":")[1] for line in lines}


def read_attachments(cloud: Live, guest: Guest) -> dict[str, str]:
    """Return the same mapping from the server's volume attachments in the API."""
    path = f"/servers/{guest.server}/os-volume_attachments"
    return {
        row["device"]: row["volumeId"][:20]
        for row in cloud.rest().call("GET", path).body["volumeAttachments"]
    }


def test_volume_device_names_of_api_and_guest_agree(cloud: Live, empty_storage: None) -> None:
    names = ("first", "second", "third")
    volumes = [run_for_json(cloud, f"volume create --size 1 {name}")["id"] for name in names]
    for volume in volumes:
        await_true(lambda volume=volume: is_free(cloud, volume), 60, "the volume is there")  # type: ignore[misc]  # bound here
    guest = boot_from_volume(cloud, "counts-disks", "--boot-from-volume 1 --image tiny")
    cloud.openstack(f"server add volume --device /dev/vdf counts-disks {volumes[0]}")
    cloud.openstack(f"server add volume counts-disks {volumes[1]}")
    await_true(lambda: len(read_serials(guest)) == 3, 30, "the guest sees them")
    assert read_serials(guest) == read_attachments(cloud, guest)
    cloud.openstack(f"server remove volume counts-disks {volumes[0]}")
    await_true(lambda: is_free(cloud, volumes[0]), 60, "the volume is free again")
    assert read_serials(guest) == read_attachments(cloud, guest)
    cloud.openstack("server reboot --hard --wait counts-disks")
    guest.await_ssh()
    assert read_serials(guest) == read_attachments(cloud, guest)
    cloud.openstack(f"server add volume counts-disks {volumes[2]}")
    await_true(lambda: len(read_serials(guest)) == 3, 30, "the guest sees it")
    assert read_serials(guest) == read_attachments(cloud, guest)
    guest.remove()
