# SPDX-License-Identifier: Apache-2.0
"""Volumes of guests, on the same hypervisors: who has which, and what the host has connected."""

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


def volume(rig: Rig, **changed: Any) -> AttachedVolume:
    """One of 1 GiB that this machine has as a file."""
    key = ids.new()
    folder = rig.folder / "volumes"
    folder.mkdir(exist_ok=True)
    folder.chmod(0o711)
    path = folder / f"volume-{key}"
    with path.open("wb") as file:
        file.truncate(GIBIBYTE)
    connection = {"driver_volume_type": "local", "device_path": str(path)}
    return replace(AttachedVolume(key, "/dev/vdb", 1, connection), **changed)


def path_of(volume: AttachedVolume) -> Path:
    return Path(volume.connection["device_path"])


def connectors(folder: Path) -> dict[str, Any]:
    """The options of a driver that reaches the files of ``volume``."""
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
def plugging(rig: Rig) -> Rig:
    """A hypervisor whose guests get disks while they run."""
    if rig.kind == "test":
        pytest.skip("libvirt's mock-up plugs nothing in")
    return rig


def has(rig: Rig, server: str) -> set[str]:
    """The ids of the volumes of a guest: of a running one and of its stored definition."""
    if isinstance(rig.driver, MemoryDriver):
        return {one.volume_id for one in rig.driver.host.guests[server].volumes}
    stored, running = (
        set(volume_xml.find_disks(rig.describe(server, one))) for one in (True, False)
    )
    assert stored == running
    return stored


def connected(rig: Rig, server: str) -> set[str]:
    """The ids of the volumes that the host has connected for the server."""
    if isinstance(rig.driver, MemoryDriver):
        found = rig.driver.host.guests.get(server) or rig.driver.host.files.get(server)
        return set(found.connected) if found else set()
    kept = rig.folder / "instances" / server / "volumes.json"
    if not kept.exists():
        return set()
    assert kept.stat().st_mode & 0o777 == 0o600
    return {one["volume_id"] for one in json.loads(kept.read_text())}


def test_volumes_come_and_go_while_a_guest_runs_or_is_off(plugging: Rig) -> None:
    server, one, two = plugging.ready().server, volume(plugging), volume(plugging)
    for given in (one, two, one):
        assert plugging.driver.attach_volume(server, 2, given, QUIET) == DomainState(
            server, RUNNING, 2
        )
    assert has(plugging, server) == {one.volume_id, two.volume_id}
    assert set(plugging.driver.guests_volumes()[server]) == {one.volume_id, two.volume_id}
    for _ in range(2):
        state = plugging.driver.detach_volume(server, 3, one, QUIET)
        assert state == DomainState(server, RUNNING, 3)
        assert has(plugging, server) == {two.volume_id}
    plugging.driver.ensure_stopped(server, 4, 0, QUIET)
    assert server not in plugging.driver.guests_volumes()  # one that is off has none
    assert connected(plugging, server) == {two.volume_id}
    for _ in range(2):
        state = plugging.driver.attach_volume(server, 5, one, QUIET)
        assert state == DomainState(server, SHUTDOWN, 5)
    assert has(plugging, server) == {two.volume_id, one.volume_id}
    for _ in range(2):
        plugging.driver.detach_volume(server, 6, two, QUIET)
    assert has(plugging, server) == {one.volume_id}
    assert connected(plugging, server) == {one.volume_id}
    assert plugging.driver.ensure_running(server, 7, QUIET).power_state == RUNNING
    assert has(plugging, server) == {one.volume_id}


def in_guest(rig: Rig, server: str) -> dict[str, str]:
    """Device name of each volume, as Linux counts the disks of a guest that has booted."""
    if isinstance(rig.driver, MemoryDriver):
        return dict(rig.driver.host.guests[server].names)
    disks = volume_xml.find_disks(rig.describe(server, False))
    places = volume_xml.addresses(rig.describe(server, False))
    ordered = sorted(disks, key=lambda one: (places[one]["bus"], places[one]["slot"]))
    return {one: f"/dev/vd{letter}" for one, letter in zip(ordered, "bcdef", strict=False)}


@pytest.mark.parametrize("boot", ["reboot", "stop"])
def test_booted_guest_counts_volumes_in_order_of_their_names(plugging: Rig, boot: str) -> None:
    server, driver = plugging.ready().server, plugging.driver
    one, two, three = (volume(plugging, device=f"/dev/vd{letter}") for letter in "bcb")
    for given in (one, two):
        driver.attach_volume(server, 2, given, QUIET)
    driver.detach_volume(server, 3, one, QUIET)
    driver.attach_volume(server, 4, three, QUIET)
    for fence, expected in (
        (5, {three.volume_id: "/dev/vdb", two.volume_id: "/dev/vdc"}),
        (6, {two.volume_id: "/dev/vdb"}),
    ):
        if boot == "reboot":
            driver.reboot(server, fence, 0, QUIET)
        else:
            driver.ensure_stopped(server, fence, 0, QUIET)
            driver.ensure_running(server, fence, QUIET)
        assert in_guest(plugging, server) == expected
        if fence == 5:
            driver.detach_volume(server, fence, three, QUIET)


def test_running_guest_gets_qos_and_block_sizes_of_volume(plugging: Rig) -> None:
    server, given = plugging.ready().server, volume(plugging)
    rates = {"read_iops_sec": 50, "read_iops_sec_max": 90, "read_iops_sec_max_length": 5}
    rates |= {"size_iops_sec": 4096, "total_bytes_sec": 1 << 20, "total_bytes_sec_max": 2 << 20}
    given.connection.update(qos_specs=rates, logical_block_size=512, physical_block_size=4096)
    plugging.driver.attach_volume(server, 2, given, QUIET)
    assert has(plugging, server) == {given.volume_id}
    if plugging.real:
        disk = volume_xml.find_disks(plugging.describe(server))[given.volume_id]
        tuned = {rate.tag: rate.text for rate in disk.iterfind("iotune/*")}
        assert tuned == {name: str(number) for name, number in rates.items()}
        sizes = disk.find("blockio")
        assert sizes is not None and sizes.get("physical_block_size") == "4096"


def test_a_running_guest_gets_its_first_disk_on_scsi(plugging: Rig) -> None:
    server = plugging.ready().server
    one, two = (volume(plugging, bus="scsi", device=f"/dev/sd{name}") for name in "ab")
    for given in (one, two, one):
        plugging.driver.attach_volume(server, 2, given, QUIET)
    assert has(plugging, server) == {one.volume_id, two.volume_id}
    plugging.driver.detach_volume(server, 3, one, QUIET)
    plugging.driver.ensure_stopped(server, 4, 0, QUIET)
    plugging.driver.ensure_running(server, 5, QUIET)
    assert has(plugging, server) == {two.volume_id}


def test_a_suspended_or_paused_guest_keeps_its_volumes(plugging: Rig) -> None:
    server, one, two = plugging.ready().server, volume(plugging), volume(plugging)
    plugging.driver.attach_volume(server, 2, one, QUIET)
    plugging.driver.ensure_paused(server, 3, QUIET)
    with pytest.raises(VerbFailed, match="paused; resume it first"):
        plugging.driver.detach_volume(server, 4, one, QUIET)
    assert has(plugging, server) == {one.volume_id}
    plugging.driver.attach_volume(server, 5, two, QUIET)
    assert plugging.state(server) == (PAUSED, 5)
    plugging.driver.ensure_running(server, 6, QUIET)
    plugging.driver.ensure_suspended(server, 7, QUIET)
    for change in (plugging.driver.attach_volume, plugging.driver.detach_volume):
        with pytest.raises(VerbFailed, match="resume it before its volumes"):
            change(server, 8, one, QUIET)
    assert plugging.state(server) == (SHUTDOWN, 7)
    plugging.driver.ensure_running(server, 9, QUIET)
    assert has(plugging, server) == {one.volume_id, two.volume_id}


@pytest.mark.parametrize("verb", ["ensure_running", "reboot"])
def test_what_was_detached_elsewhere_is_gone_before_a_start(plugging: Rig, verb: str) -> None:
    """The host was away meanwhile: the volume may be another guest's, or nowhere any more."""
    server, gone, kept = plugging.ready().server, volume(plugging), volume(plugging)
    for given in (gone, kept):
        plugging.driver.attach_volume(server, 2, given, QUIET)
    plugging.driver.pull_plug(server)
    path_of(gone).unlink()
    start(plugging, verb, server, 3, Belongings([kept.volume_id]))
    assert plugging.state(server) == (RUNNING, 3)
    assert has(plugging, server) == connected(plugging, server) == {kept.volume_id}
    start(plugging, verb, server, 4, Belongings())  # one that runs keeps what it has
    assert plugging.state(server) == (RUNNING, 4)
    left = {kept.volume_id} if verb == "ensure_running" else set()
    assert has(plugging, server) == connected(plugging, server) == left


@pytest.mark.parametrize("verb", ["ensure_running", "reboot"])
def test_what_a_host_let_go_of_is_there_again_after_a_start(plugging: Rig, verb: str) -> None:
    """It could not describe the guest with its volumes again: that does not run without them."""
    server, one, two = plugging.ready().server, volume(plugging), volume(plugging)
    for given in (one, two):
        plugging.driver.attach_volume(server, 2, given, QUIET)
    plugging.driver.ensure_stopped(server, 3, 0, QUIET)
    plugging.driver.disconnect_volumes(server, 3)
    ids = [one.volume_id, two.volume_id]
    nowhere = replace(two, connection={})
    with pytest.raises(VerbFailed, match=f"{two.volume_id} is not connected to this host"):
        start(plugging, verb, server, 4, Belongings(ids, needed=[one, nowhere]))
    assert plugging.state(server)[0] == SHUTDOWN
    for fence in (5, 6):
        start(plugging, verb, server, fence, Belongings(ids, needed=[one, two]))
        assert plugging.state(server) == (RUNNING, fence)
        assert has(plugging, server) == connected(plugging, server) == set(ids)


def start(rig: Rig, verb: str, server: str, fence: int, has: Belongings) -> DomainState:
    if verb == "reboot":
        return rig.driver.reboot(server, fence, 0, QUIET, has)
    return rig.driver.ensure_running(server, fence, QUIET, has)


@pytest.mark.parametrize("rests", ["ensure_paused", "ensure_suspended"])
def test_a_guest_does_not_go_on_with_what_was_detached(plugging: Rig, rests: str) -> None:
    """What it has of the volume in its memory must not reach it."""
    server, gone = plugging.ready().server, volume(plugging)
    plugging.driver.attach_volume(server, 2, gone, QUIET)
    if rests == "ensure_paused":
        plugging.driver.ensure_paused(server, 3, QUIET)
    else:
        plugging.driver.ensure_suspended(server, 3, QUIET)
    before = plugging.state(server)
    with pytest.raises(VerbFailed, match=f"volume {gone.volume_id}, which is not the server's"):
        plugging.driver.ensure_running(server, 4, QUIET, Belongings())
    assert plugging.state(server) == before
    plugging.driver.reboot(server, 5, 0, QUIET, Belongings())
    assert plugging.state(server) == (RUNNING, 5)
    assert has(plugging, server) == connected(plugging, server) == set()


def test_what_cannot_be_connected_is_refused_by_name(plugging: Rig) -> None:
    server, one = plugging.ready().server, volume(plugging)
    for bad, said in (
        (replace(one, connection={}), "not connected to this host"),
        (replace(one, connection={"driver_volume_type": "smoke"}), "served by smoke"),
        (replace(one, connection={**one.connection, "encrypted": True}), "is encrypted"),
        (replace(one, connection={"driver_volume_type": "local"}), "cannot be used on this host"),
        (replace(one, volume_id="../../etc"), "not a UUID"),
        (replace(one, bus="ide"), "only while the server is off"),
        (replace(one, bus="<b>"), "a disk on <b>"),
        (replace(one, device_type="lun"), "a lun on virtio"),
    ):
        with pytest.raises(VerbFailed, match=said):
            plugging.driver.attach_volume(server, 2, bad, QUIET)
    assert (has(plugging, server), plugging.state(server)) == (set(), (RUNNING, 1))
    assert connected(plugging, server) == set()


def test_a_guest_that_is_not_here_has_no_volume(plugging: Rig) -> None:
    server, one = plugging.ready().server, volume(plugging)
    plugging.driver.attach_volume(server, 2, one, QUIET)
    plugging.driver.ensure_absent(server, 3)
    assert connected(plugging, server) == set()
    assert plugging.driver.detach_volume(server, 4, one, QUIET) is None
    plugging.driver.disconnect_volumes(server, 4)
    with pytest.raises(VerbFailed, match="no guest on this host"):
        plugging.driver.attach_volume(server, 4, one, QUIET)
    with pytest.raises(VerbFailed, match="no guest on this host"):
        plugging.driver.extend_volume(server, one, QUIET)


def test_a_host_lets_go_of_what_goes_elsewhere(plugging: Rig) -> None:
    server, one, two = plugging.ready().server, volume(plugging), volume(plugging)
    for given in (one, two):
        plugging.driver.attach_volume(server, 2, given, QUIET)
    with pytest.raises(VerbFailed, match="stop it"):
        plugging.driver.disconnect_volumes(server, 3)
    assert connected(plugging, server) == {one.volume_id, two.volume_id}
    plugging.driver.ensure_stopped(server, 3, 0, QUIET)
    for _ in range(2):
        plugging.driver.disconnect_volumes(server, 4)
        assert (has(plugging, server), connected(plugging, server)) == (set(), set())
    assert plugging.state(server) == (SHUTDOWN, 4)


def test_a_volume_that_grew_is_seen(plugging: Rig) -> None:
    server, one = plugging.ready().server, volume(plugging)
    with pytest.raises(VerbFailed, match="does not have volume"):
        plugging.driver.extend_volume(server, one, QUIET)
    plugging.driver.attach_volume(server, 2, one, QUIET)
    with path_of(one).open("r+b") as file:
        file.truncate(2 << 30)
    for _ in range(2):
        plugging.driver.extend_volume(server, replace(one, size_gb=2), QUIET)
    assert sizes(plugging, server) == {one.volume_id: 2}
    plugging.driver.ensure_stopped(server, 3, 0, QUIET)
    plugging.driver.ensure_running(server, 4, QUIET)
    assert sizes(plugging, server) == {one.volume_id: 2}


def sizes(rig: Rig, server: str) -> dict[str, int]:
    """GiB of a guest's volumes, by id."""
    if isinstance(rig.driver, MemoryDriver):
        return {one.volume_id: one.size_gb for one in rig.driver.host.guests[server].volumes}
    told = virsh(rig, "domblkinfo", server, "--all").split()
    return {
        serial: int(told[told.index(volume_xml.name_of(disk)) + 1]) // GIBIBYTE
        for serial, disk in volume_xml.find_disks(rig.describe(server)).items()
    }


def test_a_guest_boots_from_a_volume(rig: Rig) -> None:
    root, data = volume(rig, boot_index=0, device="/dev/vda"), volume(rig)
    spec = rig.boot(image=None, volumes=[root, data])
    assert has(rig, spec.server) == {root.volume_id, data.volume_id}
    assert connected(rig, spec.server) == {root.volume_id, data.volume_id}
    assert rig.driver.ensure_guest(spec, rig.read_image, QUIET).power_state == RUNNING
    rescued = replace(spec, fence=2)
    rig.driver.rescue(rescued, rig.image, rig.read_image, QUIET)
    assert has(rig, spec.server) == {root.volume_id, data.volume_id}
    rig.driver.unrescue(replace(spec, fence=3), QUIET)
    rig.driver.rebuild(replace(spec, fence=4), rig.read_image, True, QUIET)
    assert has(rig, spec.server) == {root.volume_id, data.volume_id}
    rig.driver.ensure_absent(spec.server, 5)
    assert connected(rig, spec.server) == set()


def test_a_guest_whose_volume_cannot_be_had_is_not_made(rig: Rig) -> None:
    spec = rig.spec(volumes=[volume(rig), volume(rig, connection={})])
    with pytest.raises(VerbFailed, match="not connected to this host"):
        rig.driver.ensure_guest(spec, rig.read_image, QUIET)
    assert (rig.state(spec.server), connected(rig, spec.server)) == (None, set())


def test_another_device_keeps_its_guest_off(rig: Rig) -> None:
    if isinstance(rig.driver, MemoryDriver):
        pytest.skip("a host in memory has no devices")
    server, one = rig.boot(paused=True).server, volume(rig)
    rig.driver.ensure_stopped(server, 2, 0, QUIET)
    rig.driver.attach_volume(server, 3, one, QUIET)
    with path_of(one).open("r+b") as file:
        file.truncate(GIBIBYTE - 1)
    with pytest.raises(VerbFailed, match=f"found as volume {one.volume_id} is not that volume"):
        rig.driver.ensure_running(server, 4, QUIET)
    assert rig.state(server) == (SHUTDOWN, 3)
    two = volume(rig)
    path_of(two).unlink()
    with pytest.raises(VerbFailed, match="does not find volume"):
        rig.driver.attach_volume(server, 5, two, QUIET)
    assert connected(rig, server) == has(rig, server) == {one.volume_id}
    with path_of(one).open("r+b") as file:
        file.truncate(GIBIBYTE)
    assert rig.driver.ensure_running(server, 6, QUIET).power_state == RUNNING


#: User data that says what is on the disk that it booted from, and leaves something there.
KEEPS = """#!/bin/sh
echo "kept: [$(cat /tmp/kept 2> /dev/null)]"
echo "by $(hostname)" > /tmp/kept
sync
"""


@pytest.mark.slice("guests")
@pytest.mark.kvm_or_tcg
@pytest.mark.parametrize("rig", ["qemu"], indirect=True)
def test_what_one_server_wrote_another_boots_from(rig: Rig) -> None:
    root = volume(rig, boot_index=0, device="/dev/vda")
    image = rig.folder / "image"
    image.write_bytes(rig.content)
    convert = ["qemu-img", "convert", "-n", "-f", "qcow2", "-O", "raw", image, path_of(root)]
    subprocess.run(convert, check=True, timeout=60)
    for kept in ("kept: []", "kept: [by web-1]"):
        spec = rig.boot(image=None, volumes=[root], user_data=KEEPS, ready=True)
        assert kept in rig.console(spec.server)
        rig.driver.ensure_stopped(spec.server, 2, virt_rigs.BOOT_SECONDS, QUIET)
        rig.driver.ensure_absent(spec.server, 3)
        assert rig.files(spec.server) == []


@pytest.mark.slice("guests")
@pytest.mark.kvm_or_tcg
@pytest.mark.parametrize("rig", ["qemu"], indirect=True)
def test_two_guests_have_a_volume_only_if_it_may_be_so(rig: Rig) -> None:
    shared, single = volume(rig, multiattach=True), volume(rig)
    for _ in range(2):
        server = rig.boot(paused=True, volumes=[shared]).server
        assert rig.state(server) == (PAUSED, 1)
    rig.boot(paused=True, volumes=[single])
    with pytest.raises(VerbFailed, match="could not start the guest") as failed:
        rig.boot(paused=True, volumes=[single])
    assert "lock" in failed.value.details
    assert rig.state(rig.servers[-1]) is None


def test_an_agent_that_begins_anew_knows_its_volumes(plugging: Rig) -> None:
    server, one = plugging.ready().server, volume(plugging)
    plugging.driver.attach_volume(server, 2, one, QUIET)
    assert plugging.restart().ensure_running(server, 3, QUIET).power_state == RUNNING
    assert (has(plugging, server), connected(plugging, server)) == (
        {one.volume_id},
        {one.volume_id},
    )


def test_after_a_reboot_of_the_host_they_are_connected_again(tmp_path: Path) -> None:
    rig = virt_rigs.memory_rig(tmp_path)
    server, one = rig.boot().server, volume(rig)
    rig.driver.attach_volume(server, 2, one, QUIET)
    assert isinstance(rig.driver, MemoryDriver)
    rig.driver.host.reboot()
    assert connected(rig, server) == set()
    rig.driver.ensure_running(server, 3, QUIET)
    assert connected(rig, server) == {one.volume_id}
    rig.driver.host.guests[server].holds_volumes = True
    with pytest.raises(VerbFailed, match="did not let go of volume"):
        rig.driver.detach_volume(server, 4, one, QUIET)
    assert has(rig, server) == {one.volume_id}
    rig.clean()


@pytest.fixture(params=["memory", "test"])
def pair_of_hosts(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pair]:
    """Two hosts that reach the files of the first one."""
    if request.param == "memory":
        made = virt_pairs.memory_pair(tmp_path, shared=False)
    else:
        pytest.importorskip("libvirt")
        made = virt_pairs.libvirt_test_pair(tmp_path, shared=False, **connectors(tmp_path / "h1"))
    yield made
    made.clean()


@pytest.mark.parametrize("boot_index", [0, None])
def test_volumes_are_at_one_host_at_a_time(pair_of_hosts: Pair, boot_index: int | None) -> None:
    """Local disks travel; what is on a volume stays where it is."""
    source, destination = pair_of_hosts.rigs
    source.folder.mkdir(exist_ok=True)
    one = volume(source, boot_index=boot_index)
    image = source.image if boot_index is None else None
    spec = source.boot(paused=True, image=image, volumes=[one])
    server = spec.server
    source.driver.ensure_stopped(server, 1, 0, QUIET)
    source.driver.offer(server, 1, SECRET, QUIET)
    there = replace(spec, fence=2, paused=False)
    peer = pair_of_hosts.peer(server)
    destination.driver.prepare(replace(there), peer, destination.read_image, QUIET)
    source.driver.disconnect_volumes(server, 1)
    assert connected(source, server) == has(source, server) == set()
    for _ in range(2):
        destination.driver.receive(there, peer, destination.read_image, QUIET)
        assert connected(destination, server) == set()
    for _ in range(2):
        destination.driver.install(there, False, QUIET)
    assert connected(destination, server) == has(destination, server) == {one.volume_id}
    destination.driver.ensure_absent(server, 3)
    assert connected(destination, server) == set()
    source.driver.install(replace(spec, fence=4), False, QUIET)
    assert connected(source, server) == has(source, server) == {one.volume_id}


@pytest.mark.parametrize("boot_index", [0, None])
def test_a_resized_guest_keeps_its_volumes(rig: Rig, boot_index: int | None) -> None:
    one = volume(rig, boot_index=boot_index)
    image = rig.image if boot_index is None else None
    spec = rig.boot(paused=True, image=image, volumes=[one])
    rig.driver.ensure_stopped(spec.server, 1, 0, QUIET)
    for back in (True, False):
        larger = replace(spec, fence=2 if back else 4, flavor=LARGER)
        rig.driver.resize_here(larger, False, QUIET)
        assert has(rig, spec.server) == {one.volume_id}
        settled = replace(spec, fence=3) if back else replace(larger, fence=5)
        rig.driver.settle_resize(settled, back, larger.fence, QUIET)
        assert connected(rig, spec.server) == has(rig, spec.server) == {one.volume_id}


class Killed(BaseException):
    """The agent died."""


def dying(driver: LibvirtDriver, at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent dies after so many of its calls of libvirt."""
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
def test_an_agent_that_dies_in_between_goes_on(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    from compute_agent.virt.libvirt.driver import LibvirtDriver

    server, one = rig.ready().server, volume(rig)
    for verb, wanted in (("attach_volume", {one.volume_id}), ("detach_volume", set())):
        died = 0
        while True:
            assert isinstance(rig.driver, LibvirtDriver)
            dying(rig.driver, died + 1, monkeypatch)
            try:
                getattr(rig.driver, verb)(server, 2, one, QUIET)
                break
            except Killed:
                died += 1
            rig.restart()
            # Nothing is there that no file names.
            running, stored = (
                volume_xml.find_disks(rig.describe(server, one)) for one in (False, True)
            )
            assert {*running, *stored} <= connected(rig, server)
            # And from here the other way, or on.
            if died % 3 == 0:
                undo = rig.driver.detach_volume if wanted else rig.driver.attach_volume
                undo(server, 2, one, QUIET)
            rig.restart()
        assert died > 3
        rig.restart()
        getattr(rig.driver, verb)(server, 2, one, QUIET)
        assert (has(rig, server), connected(rig, server)) == (wanted, wanted)
