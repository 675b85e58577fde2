# SPDX-License-Identifier: Apache-2.0
"""Volumes of guests, and the volumes that the host has connected.

The tests run on a host in memory, libvirt's mock-up and real QEMU guests.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from common.domain import ids
from common.domain.models import AttachedVolume, Belongings, DomainState
from compute_agent.verb_context import VerbFailed
from compute_agent.virt.driver import PAUSED, RUNNING, SHUTDOWN
from compute_agent.virt.libvirt.xml import volume_xml
from compute_agent.virt.memory.driver import MemoryDriver
from tests.contract import virt_pairs, virt_rigs
from tests.contract.conftest import QEMU
from tests.contract.virt_pairs import LARGER, SECRET, Pair
from tests.contract.virt_rigs import QUIET, Rig

if TYPE_CHECKING:
    from compute_agent.virt.libvirt.driver import LibvirtDriver

GIBIBYTE = 1 << 30


def virsh(rig: Rig, *arguments: str) -> str:
    return subprocess.run(
        ["virsh", "-c", rig.uri, *arguments], check=True, capture_output=True, text=True, timeout=60
    ).stdout


def create_volume(rig: Rig, **changed: Any) -> AttachedVolume:
    """Create a volume of 1 GiB in a file of this machine."""
    key = ids.new()
    folder = rig.folder / "volumes"
    folder.mkdir(exist_ok=True)
    folder.chmod(0o711)
    path = folder / f"volume-{key}"
    with path.open("wb") as file:
        file.truncate(GIBIBYTE)
    connection = {"driver_volume_type": "local", "device_path": str(path)}
    return replace(AttachedVolume(key, "/dev/vdb", 1, connection), **changed)


def volume_path(volume: AttachedVolume) -> Path:
    return Path(volume.connection["device_path"])


def connectors(folder: Path) -> dict[str, Any]:
    """Return the options of a driver that connects the files of ``create_volume``."""
    from compute_agent.virt.libvirt.volumes import connectors

    return {
        "connectors": connectors.of_host(
            connectors.Protocols([str(folder / "volumes")]), None, False, {}
        )
    }


@pytest.fixture(params=["memory", "test", QEMU])
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Rig]:
    yield from virt_rigs.of_kind(request, tmp_path, connectors)


@pytest.fixture
def hotplug_rig(rig: Rig) -> Rig:
    """Return a hypervisor with hotplug of disks."""
    if rig.kind == "test":
        pytest.skip("libvirt's mock-up plugs nothing in")
    return rig


def attached_ids(rig: Rig, server: str) -> set[str]:
    """Return the ids of the guest's volumes.

    They are the same in the running and in the stored domain.
    """
    if isinstance(rig.driver, MemoryDriver):
        return {attached.volume_id for attached in rig.driver.host.guests[server].volumes}
    stored, running = (
        set(volume_xml.find_disks(rig.describe(server, is_stored))) for is_stored in (True, False)
    )
    assert stored == running
    return stored


def connected_ids(rig: Rig, server: str) -> set[str]:
    """Return the ids of the volumes that the host has connected for the server."""
    if isinstance(rig.driver, MemoryDriver):
        guest = rig.driver.host.guests.get(server) or rig.driver.host.files.get(server)
        return set(guest.connected) if guest else set()
    file = rig.folder / "instances" / server / "volumes.json"
    if not file.exists():
        return set()
    assert file.stat().st_mode & 0o777 == 0o600
    return {entry["volume_id"] for entry in json.loads(file.read_text())}


def test_attach_and_detach_volume_are_repeatable_on_running_or_off_guest(hotplug_rig: Rig) -> None:
    server, first, second = (
        hotplug_rig.ready().server,
        create_volume(hotplug_rig),
        create_volume(hotplug_rig),
    )
    for attached in (first, second, first):
        assert hotplug_rig.driver.attach_volume(server, 2, attached, QUIET) == DomainState(
            server, RUNNING, 2
        )
    assert attached_ids(hotplug_rig, server) == {first.volume_id, second.volume_id}
    assert set(hotplug_rig.driver.guests_volumes()[server]) == {first.volume_id, second.volume_id}
    for _ in range(2):
        state = hotplug_rig.driver.detach_volume(server, 3, first, QUIET)
        assert state == DomainState(server, RUNNING, 3)
        assert attached_ids(hotplug_rig, server) == {second.volume_id}
    hotplug_rig.driver.ensure_stopped(server, 4, 0, QUIET)
    # Stopped guests are left out.
    assert server not in hotplug_rig.driver.guests_volumes()
    assert connected_ids(hotplug_rig, server) == {second.volume_id}
    for _ in range(2):
        state = hotplug_rig.driver.attach_volume(server, 5, first, QUIET)
        assert state == DomainState(server, SHUTDOWN, 5)
    assert attached_ids(hotplug_rig, server) == {second.volume_id, first.volume_id}
    for _ in range(2):
        hotplug_rig.driver.detach_volume(server, 6, second, QUIET)
    assert attached_ids(hotplug_rig, server) == {first.volume_id}
    assert connected_ids(hotplug_rig, server) == {first.volume_id}
    assert hotplug_rig.driver.ensure_running(server, 7, QUIET).power_state == RUNNING
    assert attached_ids(hotplug_rig, server) == {first.volume_id}


def names_in_guest(rig: Rig, server: str) -> dict[str, str]:
    """Return the device name of each volume. Linux names the disks of a booted guest by slot."""
    if isinstance(rig.driver, MemoryDriver):
        return dict(rig.driver.host.guests[server].names)
    disks = volume_xml.find_disks(rig.describe(server, False))
    places = volume_xml.addresses(rig.describe(server, False))
    sorted_ids = sorted(
        disks, key=lambda volume_id: (places[volume_id]["bus"], places[volume_id]["slot"])
    )
    return {
        volume_id: f"/dev/vd{letter}"
        for volume_id, letter in zip(sorted_ids, "bcdef", strict=False)
    }


@pytest.mark.parametrize("boot", ["reboot", "stop"])
def test_boot_names_volumes_in_guest_in_order_of_their_device_names(
    hotplug_rig: Rig, boot: str
) -> None:
    server, driver = hotplug_rig.ready().server, hotplug_rig.driver
    first, second, third = (
        create_volume(hotplug_rig, device=f"/dev/vd{letter}") for letter in "bcb"
    )
    for attached in (first, second):
        driver.attach_volume(server, 2, attached, QUIET)
    driver.detach_volume(server, 3, first, QUIET)
    driver.attach_volume(server, 4, third, QUIET)
    for fence, expected in (
        (5, {third.volume_id: "/dev/vdb", second.volume_id: "/dev/vdc"}),
        (6, {second.volume_id: "/dev/vdb"}),
    ):
        if boot == "reboot":
            driver.reboot(server, fence, 0, QUIET)
        else:
            driver.ensure_stopped(server, fence, 0, QUIET)
            driver.ensure_running(server, fence, QUIET)
        assert names_in_guest(hotplug_rig, server) == expected
        if fence == 5:
            driver.detach_volume(server, fence, third, QUIET)


def test_running_guest_gets_qos_and_block_sizes_of_volume(hotplug_rig: Rig) -> None:
    server, attached = hotplug_rig.ready().server, create_volume(hotplug_rig)
    rates = {"read_iops_sec": 50, "read_iops_sec_max": 90, "read_iops_sec_max_length": 5}
    rates |= {"size_iops_sec": 4096, "total_bytes_sec": 1 << 20, "total_bytes_sec_max": 2 << 20}
    attached.connection.update(qos_specs=rates, logical_block_size=512, physical_block_size=4096)
    hotplug_rig.driver.attach_volume(server, 2, attached, QUIET)
    assert attached_ids(hotplug_rig, server) == {attached.volume_id}
    if hotplug_rig.real:
        disk = volume_xml.find_disks(hotplug_rig.describe(server))[attached.volume_id]
        iotune = {rate.tag: rate.text for rate in disk.iterfind("iotune/*")}
        assert iotune == {name: str(number) for name, number in rates.items()}
        block_sizes = disk.find("blockio")
        assert block_sizes is not None and block_sizes.get("physical_block_size") == "4096"


def test_running_guest_gets_scsi_volumes_and_keeps_them_after_restart(hotplug_rig: Rig) -> None:
    server = hotplug_rig.ready().server
    first, second = (
        create_volume(hotplug_rig, bus="scsi", device=f"/dev/sd{name}") for name in "ab"
    )
    for attached in (first, second, first):
        hotplug_rig.driver.attach_volume(server, 2, attached, QUIET)
    assert attached_ids(hotplug_rig, server) == {first.volume_id, second.volume_id}
    hotplug_rig.driver.detach_volume(server, 3, first, QUIET)
    hotplug_rig.driver.ensure_stopped(server, 4, 0, QUIET)
    hotplug_rig.driver.ensure_running(server, 5, QUIET)
    assert attached_ids(hotplug_rig, server) == {second.volume_id}


def test_detach_volume_from_paused_or_suspended_guest_is_refused(hotplug_rig: Rig) -> None:
    server, first, second = (
        hotplug_rig.ready().server,
        create_volume(hotplug_rig),
        create_volume(hotplug_rig),
    )
    hotplug_rig.driver.attach_volume(server, 2, first, QUIET)
    hotplug_rig.driver.ensure_paused(server, 3, QUIET)
    with pytest.raises(VerbFailed, match="paused; resume the server"):
        hotplug_rig.driver.detach_volume(server, 4, first, QUIET)
    assert attached_ids(hotplug_rig, server) == {first.volume_id}
    hotplug_rig.driver.attach_volume(server, 5, second, QUIET)
    assert hotplug_rig.state(server) == (PAUSED, 5)
    hotplug_rig.driver.ensure_running(server, 6, QUIET)
    hotplug_rig.driver.ensure_suspended(server, 7, QUIET)
    for change in (hotplug_rig.driver.attach_volume, hotplug_rig.driver.detach_volume):
        with pytest.raises(VerbFailed, match="resume the server before you change its volumes"):
            change(server, 8, first, QUIET)
    assert hotplug_rig.state(server) == (SHUTDOWN, 7)
    hotplug_rig.driver.ensure_running(server, 9, QUIET)
    assert attached_ids(hotplug_rig, server) == {first.volume_id, second.volume_id}


@pytest.mark.parametrize("verb", ["ensure_running", "reboot"])
def test_start_removes_volumes_detached_while_host_was_unreachable(
    hotplug_rig: Rig, verb: str
) -> None:
    """The host was unreachable during the detach.

    Another guest may have the volume now, or it was deleted.
    """
    server, detached, remaining = (
        hotplug_rig.ready().server,
        create_volume(hotplug_rig),
        create_volume(hotplug_rig),
    )
    for attached in (detached, remaining):
        hotplug_rig.driver.attach_volume(server, 2, attached, QUIET)
    hotplug_rig.driver.pull_plug(server)
    volume_path(detached).unlink()
    start(hotplug_rig, verb, server, 3, Belongings([remaining.volume_id]))
    assert hotplug_rig.state(server) == (RUNNING, 3)
    assert (
        attached_ids(hotplug_rig, server)
        == connected_ids(hotplug_rig, server)
        == {remaining.volume_id}
    )
    # A running guest keeps its volumes.
    start(hotplug_rig, verb, server, 4, Belongings())
    assert hotplug_rig.state(server) == (RUNNING, 4)
    expected = {remaining.volume_id} if verb == "ensure_running" else set()
    assert attached_ids(hotplug_rig, server) == connected_ids(hotplug_rig, server) == expected


@pytest.mark.parametrize("verb", ["ensure_running", "reboot"])
def test_start_reconnects_volumes_needed_by_guest(hotplug_rig: Rig, verb: str) -> None:
    """The guest must not run without its volumes."""
    server, first, second = (
        hotplug_rig.ready().server,
        create_volume(hotplug_rig),
        create_volume(hotplug_rig),
    )
    for attached in (first, second):
        hotplug_rig.driver.attach_volume(server, 2, attached, QUIET)
    hotplug_rig.driver.ensure_stopped(server, 3, 0, QUIET)
    hotplug_rig.driver.disconnect_volumes(server, 3)
    ids = [first.volume_id, second.volume_id]
    unconnected = replace(second, connection={})
    with pytest.raises(VerbFailed, match=f"{second.volume_id} is not connected to this host"):
        start(hotplug_rig, verb, server, 4, Belongings(ids, needed=[first, unconnected]))
    assert hotplug_rig.state(server)[0] == SHUTDOWN
    for fence in (5, 6):
        start(hotplug_rig, verb, server, fence, Belongings(ids, needed=[first, second]))
        assert hotplug_rig.state(server) == (RUNNING, fence)
        assert attached_ids(hotplug_rig, server) == connected_ids(hotplug_rig, server) == set(ids)


def start(rig: Rig, verb: str, server: str, fence: int, belongings: Belongings) -> DomainState:
    if verb == "reboot":
        return rig.driver.reboot(server, fence, 0, QUIET, belongings)
    return rig.driver.ensure_running(server, fence, QUIET, belongings)


@pytest.mark.parametrize("resting_verb", ["ensure_paused", "ensure_suspended"])
def test_resume_of_guest_with_detached_volume_is_refused(
    hotplug_rig: Rig, resting_verb: str
) -> None:
    """Data of the volume in the guest's memory must not reach the volume any more."""
    server, detached = hotplug_rig.ready().server, create_volume(hotplug_rig)
    hotplug_rig.driver.attach_volume(server, 2, detached, QUIET)
    if resting_verb == "ensure_paused":
        hotplug_rig.driver.ensure_paused(server, 3, QUIET)
    else:
        hotplug_rig.driver.ensure_suspended(server, 3, QUIET)
    before = hotplug_rig.state(server)
    with pytest.raises(VerbFailed, match=f"volume {detached.volume_id}, which was detached"):
        hotplug_rig.driver.ensure_running(server, 4, QUIET, Belongings())
    assert hotplug_rig.state(server) == before
    hotplug_rig.driver.reboot(server, 5, 0, QUIET, Belongings())
    assert hotplug_rig.state(server) == (RUNNING, 5)
    assert attached_ids(hotplug_rig, server) == connected_ids(hotplug_rig, server) == set()


def test_attach_of_unusable_volume_is_refused_with_reason(hotplug_rig: Rig) -> None:
    server, usable = hotplug_rig.ready().server, create_volume(hotplug_rig)
    for bad, message in (
        (replace(usable, connection={}), "not connected to this host"),
        (replace(usable, connection={"driver_volume_type": "smoke"}), "served by smoke"),
        (replace(usable, connection={**usable.connection, "encrypted": True}), "is encrypted"),
        (
            replace(usable, connection={"driver_volume_type": "local"}),
            "cannot be used on this host",
        ),
        (replace(usable, volume_id="../../etc"), "not a UUID"),
        (replace(usable, bus="ide"), "does not support hot plug"),
        (replace(usable, bus="<b>"), "a disk on <b>"),
        (replace(usable, device_type="lun"), "a lun on virtio"),
    ):
        with pytest.raises(VerbFailed, match=message):
            hotplug_rig.driver.attach_volume(server, 2, bad, QUIET)
    assert (attached_ids(hotplug_rig, server), hotplug_rig.state(server)) == (set(), (RUNNING, 1))
    assert connected_ids(hotplug_rig, server) == set()


def test_detach_volume_of_absent_guest_succeeds_and_attach_fails(hotplug_rig: Rig) -> None:
    server, attached = hotplug_rig.ready().server, create_volume(hotplug_rig)
    hotplug_rig.driver.attach_volume(server, 2, attached, QUIET)
    hotplug_rig.driver.ensure_absent(server, 3)
    assert connected_ids(hotplug_rig, server) == set()
    assert hotplug_rig.driver.detach_volume(server, 4, attached, QUIET) is None
    hotplug_rig.driver.disconnect_volumes(server, 4)
    with pytest.raises(VerbFailed, match="no guest on this host"):
        hotplug_rig.driver.attach_volume(server, 4, attached, QUIET)
    with pytest.raises(VerbFailed, match="no guest on this host"):
        hotplug_rig.driver.extend_volume(server, attached, QUIET)


def test_disconnect_volumes_needs_stopped_guest_and_is_repeatable(hotplug_rig: Rig) -> None:
    server, first, second = (
        hotplug_rig.ready().server,
        create_volume(hotplug_rig),
        create_volume(hotplug_rig),
    )
    for attached in (first, second):
        hotplug_rig.driver.attach_volume(server, 2, attached, QUIET)
    with pytest.raises(VerbFailed, match="stop the server"):
        hotplug_rig.driver.disconnect_volumes(server, 3)
    assert connected_ids(hotplug_rig, server) == {first.volume_id, second.volume_id}
    hotplug_rig.driver.ensure_stopped(server, 3, 0, QUIET)
    for _ in range(2):
        hotplug_rig.driver.disconnect_volumes(server, 4)
        assert (attached_ids(hotplug_rig, server), connected_ids(hotplug_rig, server)) == (
            set(),
            set(),
        )
    assert hotplug_rig.state(server) == (SHUTDOWN, 4)


def test_extend_volume_of_running_guest_shows_new_size(hotplug_rig: Rig) -> None:
    server, attached = hotplug_rig.ready().server, create_volume(hotplug_rig)
    with pytest.raises(VerbFailed, match="does not have volume"):
        hotplug_rig.driver.extend_volume(server, attached, QUIET)
    hotplug_rig.driver.attach_volume(server, 2, attached, QUIET)
    with volume_path(attached).open("r+b") as file:
        file.truncate(2 << 30)
    for _ in range(2):
        hotplug_rig.driver.extend_volume(server, replace(attached, size_gb=2), QUIET)
    assert read_sizes(hotplug_rig, server) == {attached.volume_id: 2}
    hotplug_rig.driver.ensure_stopped(server, 3, 0, QUIET)
    hotplug_rig.driver.ensure_running(server, 4, QUIET)
    assert read_sizes(hotplug_rig, server) == {attached.volume_id: 2}


def read_sizes(rig: Rig, server: str) -> dict[str, int]:
    """Return the size in GiB of each of the guest's volumes."""
    if isinstance(rig.driver, MemoryDriver):
        return {
            attached.volume_id: attached.size_gb
            for attached in rig.driver.host.guests[server].volumes
        }
    words = virsh(rig, "domblkinfo", server, "--all").split()
    return {
        serial: int(words[words.index(volume_xml.name_of(disk)) + 1]) // GIBIBYTE
        for serial, disk in volume_xml.find_disks(rig.describe(server)).items()
    }


def test_guest_booted_from_volume_keeps_volumes_on_rescue_and_rebuild(rig: Rig) -> None:
    root, data = create_volume(rig, boot_index=0, device="/dev/vda"), create_volume(rig)
    spec = rig.boot(image=None, volumes=[root, data])
    assert attached_ids(rig, spec.server) == {root.volume_id, data.volume_id}
    assert connected_ids(rig, spec.server) == {root.volume_id, data.volume_id}
    assert rig.driver.ensure_guest(spec, rig.read_image, QUIET).power_state == RUNNING
    rescued = replace(spec, fence=2)
    rig.driver.rescue(rescued, rig.image, rig.read_image, QUIET)
    assert attached_ids(rig, spec.server) == {root.volume_id, data.volume_id}
    rig.driver.unrescue(replace(spec, fence=3), QUIET)
    rig.driver.rebuild(replace(spec, fence=4), rig.read_image, True, QUIET)
    assert attached_ids(rig, spec.server) == {root.volume_id, data.volume_id}
    rig.driver.ensure_absent(spec.server, 5)
    assert connected_ids(rig, spec.server) == set()


def test_ensure_guest_with_unconnected_volume_creates_no_guest(rig: Rig) -> None:
    spec = rig.spec(volumes=[create_volume(rig), create_volume(rig, connection={})])
    with pytest.raises(VerbFailed, match="not connected to this host"):
        rig.driver.ensure_guest(spec, rig.read_image, QUIET)
    assert (rig.state(spec.server), connected_ids(rig, spec.server)) == (None, set())


def test_start_fails_when_device_of_volume_has_another_size(rig: Rig) -> None:
    if isinstance(rig.driver, MemoryDriver):
        pytest.skip("a host in memory has no devices")
    server, attached = rig.boot(paused=True).server, create_volume(rig)
    rig.driver.ensure_stopped(server, 2, 0, QUIET)
    rig.driver.attach_volume(server, 3, attached, QUIET)
    with volume_path(attached).open("r+b") as file:
        file.truncate(GIBIBYTE - 1)
    with pytest.raises(
        VerbFailed, match=f"found for volume {attached.volume_id} is not that volume"
    ):
        rig.driver.ensure_running(server, 4, QUIET)
    assert rig.state(server) == (SHUTDOWN, 3)
    missing = create_volume(rig)
    volume_path(missing).unlink()
    with pytest.raises(VerbFailed, match="does not find volume"):
        rig.driver.attach_volume(server, 5, missing, QUIET)
    assert connected_ids(rig, server) == attached_ids(rig, server) == {attached.volume_id}
    with volume_path(attached).open("r+b") as file:
        file.truncate(GIBIBYTE)
    assert rig.driver.ensure_running(server, 6, QUIET).power_state == RUNNING


#: User data that prints a file of the boot disk, and then writes this file.
PRINT_AND_WRITE = """#!/bin/sh
echo "kept: [$(cat /tmp/kept 2> /dev/null)]"
echo "by $(hostname)" > /tmp/kept
sync
"""


@pytest.mark.slice("guests")
@pytest.mark.kvm_or_tcg
@pytest.mark.parametrize("rig", ["qemu"], indirect=True)
def test_second_server_boots_from_volume_written_by_first(rig: Rig) -> None:
    root = create_volume(rig, boot_index=0, device="/dev/vda")
    image = rig.folder / "image"
    image.write_bytes(b"".join(rig.read_image(rig.linux_image.id)))
    convert = ["qemu-img", "convert", "-n", "-f", "qcow2", "-O", "raw", image, volume_path(root)]
    subprocess.run(convert, check=True, timeout=60)
    for output in ("kept: []", "kept: [by web-1]"):
        spec = rig.boot(image=None, volumes=[root], user_data=PRINT_AND_WRITE, ready=True)
        assert output in rig.console(spec.server)
        rig.driver.ensure_stopped(spec.server, 2, virt_rigs.BOOT_SECONDS, QUIET)
        rig.driver.ensure_absent(spec.server, 3)
        assert rig.files(spec.server) == []


@pytest.mark.slice("guests")
@pytest.mark.kvm_or_tcg
@pytest.mark.parametrize("rig", ["qemu"], indirect=True)
def test_two_guests_share_volume_only_with_multiattach(rig: Rig) -> None:
    shared, single = create_volume(rig, multiattach=True), create_volume(rig)
    for _ in range(2):
        server = rig.boot(paused=True, volumes=[shared]).server
        assert rig.state(server) == (PAUSED, 1)
    rig.boot(paused=True, volumes=[single])
    with pytest.raises(VerbFailed, match="could not start the guest") as failure:
        rig.boot(paused=True, volumes=[single])
    assert "lock" in failure.value.details
    assert rig.state(rig.servers[-1]) is None


def test_restarted_driver_keeps_volumes_of_guest(hotplug_rig: Rig) -> None:
    server, attached = hotplug_rig.ready().server, create_volume(hotplug_rig)
    hotplug_rig.driver.attach_volume(server, 2, attached, QUIET)
    assert hotplug_rig.restart().ensure_running(server, 3, QUIET).power_state == RUNNING
    assert (attached_ids(hotplug_rig, server), connected_ids(hotplug_rig, server)) == (
        {attached.volume_id},
        {attached.volume_id},
    )


def test_start_after_host_reboot_connects_volumes_again(tmp_path: Path) -> None:
    rig = virt_rigs.memory_rig(tmp_path)
    server, attached = rig.boot().server, create_volume(rig)
    rig.driver.attach_volume(server, 2, attached, QUIET)
    assert isinstance(rig.driver, MemoryDriver)
    rig.driver.host.reboot()
    assert connected_ids(rig, server) == set()
    rig.driver.ensure_running(server, 3, QUIET)
    assert connected_ids(rig, server) == {attached.volume_id}
    rig.driver.host.guests[server].holds_volumes = True
    with pytest.raises(VerbFailed, match="did not release volume"):
        rig.driver.detach_volume(server, 4, attached, QUIET)
    assert attached_ids(rig, server) == {attached.volume_id}
    rig.clean()


@pytest.fixture(params=["memory", "test"])
def pair_of_hosts(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pair]:
    """Two hosts that both reach the volumes of the first one."""
    if request.param == "memory":
        pair = virt_pairs.memory_pair(tmp_path, shared=False)
    else:
        pytest.importorskip("libvirt")
        pair = virt_pairs.libvirt_test_pair(tmp_path, shared=False, **connectors(tmp_path / "h1"))
    yield pair
    pair.clean()


@pytest.mark.parametrize("boot_index", [0, None])
def test_cold_migration_connects_volumes_on_one_host_at_a_time(
    pair_of_hosts: Pair, boot_index: int | None
) -> None:
    """Local disks are copied. The content of a volume is not copied."""
    source, destination = pair_of_hosts.rigs
    source.folder.mkdir(exist_ok=True)
    attached = create_volume(source, boot_index=boot_index)
    image = source.image if boot_index is None else None
    spec = source.boot(paused=True, image=image, volumes=[attached])
    server = spec.server
    source.driver.ensure_stopped(server, 1, 0, QUIET)
    source.driver.offer(server, 1, SECRET, QUIET)
    new_spec = replace(spec, fence=2, paused=False)
    peer = pair_of_hosts.peer(server)
    destination.driver.prepare(replace(new_spec), peer, destination.read_image, QUIET)
    source.driver.disconnect_volumes(server, 1)
    assert connected_ids(source, server) == attached_ids(source, server) == set()
    for _ in range(2):
        destination.driver.receive(new_spec, peer, destination.read_image, QUIET)
        assert connected_ids(destination, server) == set()
    for _ in range(2):
        destination.driver.install(new_spec, False, QUIET)
    assert (
        connected_ids(destination, server)
        == attached_ids(destination, server)
        == {attached.volume_id}
    )
    destination.driver.ensure_absent(server, 3)
    assert connected_ids(destination, server) == set()
    source.driver.install(replace(spec, fence=4), False, QUIET)
    assert connected_ids(source, server) == attached_ids(source, server) == {attached.volume_id}


@pytest.mark.parametrize("boot_index", [0, None])
def test_resize_here_and_its_revert_keep_volumes(rig: Rig, boot_index: int | None) -> None:
    attached = create_volume(rig, boot_index=boot_index)
    image = rig.image if boot_index is None else None
    spec = rig.boot(paused=True, image=image, volumes=[attached])
    rig.driver.ensure_stopped(spec.server, 1, 0, QUIET)
    for reverts in (True, False):
        larger = replace(spec, fence=2 if reverts else 4, flavor=LARGER)
        rig.driver.resize_here(larger, False, QUIET)
        assert attached_ids(rig, spec.server) == {attached.volume_id}
        final_spec = replace(spec, fence=3) if reverts else replace(larger, fence=5)
        rig.driver.settle_resize(final_spec, reverts, larger.fence, QUIET)
        assert (
            connected_ids(rig, spec.server)
            == attached_ids(rig, spec.server)
            == {attached.volume_id}
        )


class Killed(BaseException):
    """The death of the agent."""


def die_after_calls(driver: LibvirtDriver, at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the agent die after so many calls of libvirt."""
    connection, calls = driver._libvirt, 0
    call = connection._call

    def count(what: str, work: Any) -> Any:
        nonlocal calls
        calls += 1
        answer = call(what, work)
        if calls == at:
            raise Killed
        return answer

    monkeypatch.setattr(connection, "_call", count)


@pytest.mark.slice("guests")
@pytest.mark.kvm_or_tcg
@pytest.mark.parametrize("rig", ["qemu"], indirect=True)
def test_attach_and_detach_volume_continue_if_agent_dies_at_any_libvirt_call(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    from compute_agent.virt.libvirt.driver import LibvirtDriver

    server, attached = rig.ready().server, create_volume(rig)
    for verb, expected in (("attach_volume", {attached.volume_id}), ("detach_volume", set())):
        deaths = 0
        while True:
            assert isinstance(rig.driver, LibvirtDriver)
            die_after_calls(rig.driver, deaths + 1, monkeypatch)
            try:
                getattr(rig.driver, verb)(server, 2, attached, QUIET)
                break
            except Killed:
                deaths += 1
            rig.restart()
            # The host's file lists every volume of the domain.
            running, stored = (
                volume_xml.find_disks(rig.describe(server, is_stored))
                for is_stored in (False, True)
            )
            assert {*running, *stored} <= connected_ids(rig, server)
            # From here the verb is undone or continued.
            if deaths % 3 == 0:
                undo = rig.driver.detach_volume if expected else rig.driver.attach_volume
                undo(server, 2, attached, QUIET)
            rig.restart()
        assert deaths > 3
        rig.restart()
        getattr(rig.driver, verb)(server, 2, attached, QUIET)
        assert (attached_ids(rig, server), connected_ids(rig, server)) == (expected, expected)
