# SPDX-License-Identifier: Apache-2.0
"""Ephemeral disks and swap of servers.

The tests cover their creation, and the actions that keep, enlarge, copy or replace them. The tests
run on a host in memory, libvirt's mock-up and real QEMU guests. A canary on a disk shows that the
disk is still the same.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from common.domain.models import Flavor, GuestSpec, ImageRef, LocalDisk
from compute_agent.verb_context import VerbFailed
from compute_agent.virt.driver import RUNNING
from compute_agent.virt.memory.driver import MemoryDriver
from tests import local_disks
from tests.contract.conftest import QEMU, QEMU_MOVES
from tests.contract.virt_pairs import SECRET, Pair
from tests.contract.virt_rigs import BOOT_SECONDS, QUIET, Rig, another
from tests.waiting import await_true

EPHEMERAL, SWAP = LocalDisk("ephemeral0", 1024), LocalDisk("swap", 64, "swap")
FLAVOR = Flavor("3", "m1.disks", 1, 128, 1, ephemeral_gb=1, swap_mb=64)
LARGER = Flavor("4", "m1.more", 1, 160, 2, ephemeral_gb=2, swap_mb=96)
LARGER_DISKS = [LocalDisk("ephemeral0", 2048), LocalDisk("swap", 96, "swap")]
BARE = Flavor("5", "m1.bare", 1, 128, 1)
FORMATTED = {"ephemeral0": (1024, "ext4"), "swap": (64, "swap")}
LARGER_FORMATTED = {"ephemeral0": (2048, "ext4"), "swap": (96, "swap")}
#: User data that writes the tests' canary to the disks.
WRITE_CANARIES = f"""#!/bin/sh
for disk in vdb vdc; do
    head -c {local_disks.SECTOR} /dev/zero | tr '\\0' c | dd of=/dev/$disk bs={local_disks.SECTOR} \\
        seek={local_disks.CANARY_AT // local_disks.SECTOR} conv=notrunc 2>/dev/null && sync && echo "$disk is written."
done
"""
#: User data that prints the number of sectors of each disk.
PRINT_SIZES = """#!/bin/sh
for disk in vdb vdc vdd; do
    [ -b /dev/$disk ] && echo "$disk has $(cat /sys/block/$disk/size)."
done
"""


def typed(image: ImageRef) -> ImageRef:
    return replace(image, properties={"os_type": "linux"})


def boot(rig: Rig, user_data: str = "") -> GuestSpec:
    image = typed(rig.linux_image if user_data else rig.image)
    return rig.boot(image=image, flavor=FLAVOR, disks=[EPHEMERAL, SWAP], user_data=user_data)


def boot_and_stop_with_canaries(rig: Rig) -> GuestSpec:
    """Boot and stop a guest, and write a canary to each local disk."""
    spec = boot(rig)
    rig.driver.ensure_stopped(spec.server, 1, 0, QUIET)
    write_canaries(rig, spec.server)
    return spec


def instance_folder(rig: Rig, server: str) -> Path:
    return rig.folder / "instances" / server


def read_disks(rig: Rig, server: str) -> dict[str, tuple[int, str]]:
    """Return the size in MiB and the file system of each local disk."""
    if isinstance(rig.driver, MemoryDriver):
        local = (rig.driver.host.files | rig.driver.host.guests)[server].local
        return {name: (disk["size_mb"], disk["format"]) for name, disk in local.items()}
    return local_disks.read_local_disks(instance_folder(rig, server))


def write_canaries(rig: Rig, server: str) -> None:
    for name in read_disks(rig, server):
        if isinstance(rig.driver, MemoryDriver):
            rig.driver.host.write_file(server, "canary", "canary", name)
        else:
            local_disks.write(instance_folder(rig, server) / name)


def disks_with_canary(rig: Rig, server: str) -> set[str]:
    """Return the disks that contain their canary."""
    if isinstance(rig.driver, MemoryDriver):
        local = (rig.driver.host.files | rig.driver.host.guests)[server].local
        return {name for name, disk in local.items() if "canary" in disk["files"]}
    return {
        name
        for name in read_disks(rig, server)
        if local_disks.is_written(instance_folder(rig, server) / name)
    }


# --- creation ---
def test_guest_has_formatted_local_disks_and_keeps_them_on_reboot(rig: Rig) -> None:
    spec = boot(rig, PRINT_SIZES)
    if rig.real:
        await_true(
            lambda: "vdc has 131072." in rig.console(spec.server),
            BOOT_SECONDS,
            lambda: rig.console(spec.server)[-2000:],
        )
        assert "vdb has 2097152." in rig.console(spec.server)
        assert "vdd has" not in rig.console(spec.server)
    count = rig.driver.diagnostics(spec.server)["num_disks"]
    assert count == (3 if rig.kind == "memory" else 4), (
        "root, ephemeral, swap, and what is the config drive"
    )
    rig.driver.ensure_stopped(spec.server, 2, 0, QUIET)
    assert read_disks(rig, spec.server) == FORMATTED
    write_canaries(rig, spec.server)
    rig.driver.ensure_guest(replace(spec, fence=3), rig.read_image, QUIET)
    rig.driver.reboot(spec.server, 4, 0, QUIET)
    rig.driver.ensure_stopped(spec.server, 5, 0, QUIET)
    assert disks_with_canary(rig, spec.server) == {"ephemeral0", "swap"}, "they are not made again"
    rig.driver.ensure_absent(spec.server, 6)
    assert rig.files(spec.server) == []


def test_ephemeral_disks_have_requested_file_system_or_vfat_by_default(rig: Rig) -> None:
    disks = [LocalDisk("ephemeral0", 1024, "ext2"), LocalDisk("ephemeral1", 1024)]
    spec = rig.boot(flavor=replace(FLAVOR, ephemeral_gb=2), disks=disks)
    rig.driver.ensure_stopped(spec.server, 2, 0, QUIET)
    assert read_disks(rig, spec.server) == {
        "ephemeral0": (1024, "ext2"),
        "ephemeral1": (1024, "vfat"),
    }


# --- rebuild, rescue and snapshot ---
@pytest.mark.parametrize("preserve", [True, False], ids=["preserved", "new"])
def test_rebuild_replaces_swap_always_and_ephemeral_disk_unless_preserved(
    rig: Rig, preserve: bool
) -> None:
    spec = boot_and_stop_with_canaries(rig)
    new_spec = replace(spec, fence=2, image=replace(another(rig), properties={"os_type": "linux"}))
    for _ in range(2):
        assert (
            rig.driver.rebuild(new_spec, rig.read_image, True, QUIET, preserve).power_state
            == RUNNING
        )
    rig.driver.ensure_stopped(spec.server, 3, 0, QUIET)
    assert read_disks(rig, spec.server) == FORMATTED
    assert disks_with_canary(rig, spec.server) == ({"ephemeral0"} if preserve else set())


def test_rebuild_fails_and_keeps_local_disks_when_image_is_not_found(rig: Rig) -> None:
    spec = boot_and_stop_with_canaries(rig)

    def raise_not_found(image: str) -> Iterator[bytes]:
        raise VerbFailed("No image was found.")
        yield b""

    files = rig.files(spec.server)
    with pytest.raises(VerbFailed, match="No image was found"):
        rig.driver.rebuild(replace(spec, fence=2, image=another(rig)), raise_not_found, True, QUIET)
    assert disks_with_canary(rig, spec.server) == {"ephemeral0", "swap"}
    assert rig.files(spec.server) == files


@pytest.mark.parametrize("rig", ["test"], indirect=True)
def test_rebuild_with_local_disk_of_size_0_fails_and_changes_no_disk(rig: Rig) -> None:
    spec = boot_and_stop_with_canaries(rig)
    files = sorted(rig.files(spec.server))
    impossible = replace(spec, fence=2, disks=[EPHEMERAL, LocalDisk("swap", 0, "swap")])
    with pytest.raises(VerbFailed, match="could not make a disk"):
        rig.driver.rebuild(impossible, rig.read_image, True, QUIET)
    assert disks_with_canary(rig, spec.server) == {"ephemeral0", "swap"}
    assert sorted(rig.files(spec.server)) == files


def test_rescue_attaches_root_disk_but_not_ephemeral_and_swap_disks(rig: Rig) -> None:
    spec = boot_and_stop_with_canaries(rig)
    rig.driver.ensure_running(spec.server, 2, QUIET)
    before = rig.driver.diagnostics(spec.server)["num_disks"]
    rig.driver.rescue(replace(spec, fence=3), another(rig), rig.read_image, QUIET)
    assert rig.driver.diagnostics(spec.server)["num_disks"] == before - 1
    rig.driver.unrescue(replace(spec, fence=4), QUIET)
    assert rig.driver.diagnostics(spec.server)["num_disks"] == before
    rig.driver.ensure_stopped(spec.server, 5, 0, QUIET)
    assert disks_with_canary(rig, spec.server) == {"ephemeral0", "swap"}


@pytest.mark.parametrize("rig", ["test", QEMU], indirect=True)
def test_stable_rescue_attaches_all_disks(rig: Rig) -> None:
    spec = boot(rig)
    before = rig.driver.diagnostics(spec.server)["num_disks"]
    image = replace(another(rig), properties={"hw_rescue_bus": "virtio"})
    rig.driver.rescue(replace(spec, fence=2), image, rig.read_image, QUIET)
    assert rig.driver.diagnostics(spec.server)["num_disks"] == before + 1


@pytest.mark.parametrize("rig", [QEMU], indirect=True)
def test_stable_rescue_fails_and_guest_runs_on_when_ide_bus_is_full(rig: Rig) -> None:
    image = replace(rig.image, properties={"hw_disk_bus": "ide"})
    spec = rig.boot(image=image, flavor=FLAVOR, disks=[EPHEMERAL, SWAP])
    with pytest.raises(VerbFailed, match="does not support the hardware of the server"):
        rig.driver.rescue(
            replace(spec, fence=2),
            replace(another(rig), properties={"hw_rescue_bus": "ide"}),
            rig.read_image,
            QUIET,
        )
    assert rig.state(spec.server) == (RUNNING, 1)


@pytest.mark.parametrize("rig", [QEMU], indirect=True)
def test_snapshot_of_guest_with_local_disks_is_one_qcow2_without_leftovers(rig: Rig) -> None:
    spec, content = boot(rig), bytearray()
    files = rig.files(spec.server)
    assert rig.driver.snapshot(
        spec.server, 2, lambda chunks: content.extend(b"".join(chunks)), QUIET
    ) == len(content)
    assert content.startswith(b"QFI\xfb")
    assert rig.files(spec.server) == files, "nothing is left of a copy of any disk"


# --- resize on the same host ---
@pytest.mark.parametrize("reverts", [True, False], ids=["revert", "confirm"])
def test_resize_here_enlarges_local_disks_until_revert(rig: Rig, reverts: bool) -> None:
    spec = boot_and_stop_with_canaries(rig)
    files = sorted(rig.files(spec.server))
    larger = replace(spec, fence=2, flavor=LARGER, disks=LARGER_DISKS)
    for _ in range(2):
        rig.driver.resize_here(larger, False, QUIET)
    assert read_disks(rig, spec.server) == LARGER_FORMATTED
    assert disks_with_canary(rig, spec.server) == {"ephemeral0"}
    final_spec = replace(spec if reverts else larger, fence=3)
    for _ in range(2):
        rig.driver.settle_resize(final_spec, reverts, 2, QUIET)
    assert read_disks(rig, spec.server) == (FORMATTED if reverts else LARGER_FORMATTED)
    assert disks_with_canary(rig, spec.server) == {"ephemeral0"}
    assert sorted(rig.files(spec.server)) == files
    assert rig.driver.ensure_running(spec.server, 4, QUIET).power_state == RUNNING


@pytest.mark.parametrize("reverts", [True, False], ids=["revert", "confirm"])
def test_resize_here_adds_and_removes_local_disks(rig: Rig, reverts: bool) -> None:
    spec = rig.boot(image=typed(rig.image), flavor=BARE)
    rig.driver.ensure_stopped(spec.server, 1, 0, QUIET)
    larger = replace(spec, fence=2, flavor=FLAVOR, disks=[EPHEMERAL, SWAP])
    for _ in range(2):
        rig.driver.resize_here(larger, False, QUIET)
    assert read_disks(rig, spec.server) == FORMATTED
    rig.driver.settle_resize(replace(spec if reverts else larger, fence=3), reverts, 2, QUIET)
    assert read_disks(rig, spec.server) == ({} if reverts else FORMATTED)
    if not reverts:
        smaller = replace(larger, fence=4, flavor=replace(FLAVOR, swap_mb=0), disks=[EPHEMERAL])
        rig.driver.resize_here(smaller, False, QUIET)
        rig.driver.settle_resize(replace(smaller, fence=5), False, 4, QUIET)
        assert read_disks(rig, spec.server) == {"ephemeral0": (1024, "ext4")}
    assert rig.driver.ensure_running(spec.server, 6, QUIET).power_state == RUNNING


def test_revert_of_resize_here_discards_later_writes_to_local_disks(rig: Rig) -> None:
    spec = boot(rig)
    rig.driver.ensure_stopped(spec.server, 1, 0, QUIET)
    rig.driver.resize_here(replace(spec, fence=2, flavor=LARGER, disks=LARGER_DISKS), False, QUIET)
    write_canaries(rig, spec.server)
    rig.driver.settle_resize(replace(spec, fence=3), True, 2, QUIET)
    assert (read_disks(rig, spec.server), disks_with_canary(rig, spec.server)) == (FORMATTED, set())


# --- moves ---
def test_cold_migration_copies_ephemeral_disks_and_replaces_swap(pair: Pair) -> None:
    spec = boot_and_stop_with_canaries(pair.source)
    pair.source.driver.offer(spec.server, 1, SECRET, QUIET)
    new_spec = replace(spec, fence=2, flavor=LARGER, disks=LARGER_DISKS)
    pair.destination.driver.prepare(
        new_spec, pair.peer(spec.server), pair.destination.read_image, QUIET
    )
    for _ in range(2):
        pair.transfer(new_spec)
    assert read_disks(pair.destination, spec.server) == LARGER_FORMATTED
    assert disks_with_canary(pair.destination, spec.server) == {"ephemeral0"}, "swap is made anew"
    assert pair.destination.driver.install(new_spec, True, QUIET).power_state == RUNNING
    assert pair.source.driver.install(replace(spec, fence=3), True, QUIET).power_state == RUNNING
    pair.source.driver.ensure_stopped(spec.server, 4, 0, QUIET)
    assert (read_disks(pair.source, spec.server), disks_with_canary(pair.source, spec.server)) == (
        FORMATTED,
        {"ephemeral0", "swap"},
    )


def test_cold_migration_creates_local_disks_of_new_flavor(pair: Pair) -> None:
    spec = pair.source.boot(image=typed(pair.source.image), flavor=BARE)
    pair.source.driver.ensure_stopped(spec.server, 1, 0, QUIET)
    pair.source.driver.offer(spec.server, 1, SECRET, QUIET)
    new_spec = replace(spec, fence=2, flavor=FLAVOR, disks=[EPHEMERAL, SWAP])
    pair.transfer(new_spec)
    assert read_disks(pair.destination, spec.server) == FORMATTED
    assert pair.destination.driver.install(new_spec, True, QUIET).power_state == RUNNING


def test_cold_migration_on_shared_storage_creates_disks_added_by_flavor(sharing: Pair) -> None:
    spec = sharing.source.boot(image=typed(sharing.source.image), flavor=BARE)
    sharing.source.driver.ensure_stopped(spec.server, 1, 0, QUIET)
    new_spec = replace(spec, fence=2, flavor=FLAVOR, disks=[EPHEMERAL, SWAP])
    sharing.transfer(new_spec)
    assert read_disks(sharing.destination, spec.server) == FORMATTED
    assert sharing.destination.driver.install(new_spec, True, QUIET).power_state == RUNNING


def test_cold_migration_on_shared_storage_keeps_ephemeral_disk(sharing: Pair) -> None:
    spec = boot_and_stop_with_canaries(sharing.source)
    new_spec = replace(spec, fence=2, flavor=LARGER, disks=LARGER_DISKS)
    for _ in range(2):
        sharing.transfer(new_spec)
    assert sharing.destination.driver.install(new_spec, True, QUIET).power_state == RUNNING
    sharing.destination.driver.ensure_stopped(spec.server, 3, 0, QUIET)
    assert read_disks(sharing.destination, spec.server) == LARGER_FORMATTED
    assert disks_with_canary(sharing.destination, spec.server) == {"ephemeral0"}


def live_migrate(live: Pair, spec: GuestSpec) -> None:
    """Live-migrate the guest to the destination."""
    live.source.driver.offer(spec.server, 1, SECRET, QUIET)
    to = live.destination.driver.prepare_incoming(
        spec, live.peer(spec.server), live.shared, {}, live.destination.read_image, QUIET
    )
    live.source.driver.live_migrate(spec, to, live.shared, QUIET)
    assert live.destination.driver.finish_incoming(spec, QUIET).power_state == RUNNING


def test_live_migration_moves_all_local_disks(live: Pair) -> None:
    spec = boot_and_stop_with_canaries(live.source)
    live.source.driver.ensure_running(spec.server, 1, QUIET)
    live_migrate(live, replace(spec, fence=2))
    live.destination.driver.ensure_stopped(spec.server, 3, 0, QUIET)
    assert read_disks(live.destination, spec.server) == FORMATTED
    assert disks_with_canary(live.destination, spec.server) == {"ephemeral0", "swap"}
    assert live.destination.driver.ensure_running(spec.server, 4, QUIET).power_state == RUNNING


def boot_guest_with_written_disks(rig: Rig) -> GuestSpec:
    """Boot a guest that writes canaries to the local disks."""
    spec = boot(rig, WRITE_CANARIES)
    await_true(
        lambda: "vdc is written." in rig.console(spec.server),
        BOOT_SECONDS,
        lambda: rig.console(spec.server)[-2000:],
    )
    assert "vdb is written." in rig.console(spec.server)
    return spec


@pytest.mark.parametrize("pair", [QEMU_MOVES], indirect=True)
def test_cold_migration_copies_guest_data_on_ephemeral_disk(pair: Pair) -> None:
    spec = boot_guest_with_written_disks(pair.source)
    pair.source.driver.ensure_stopped(spec.server, 1, 0, QUIET)
    pair.source.driver.offer(spec.server, 1, SECRET, QUIET)
    new_spec = replace(spec, fence=2)
    pair.transfer(new_spec)
    assert disks_with_canary(pair.destination, spec.server) == {"ephemeral0"}
    assert pair.destination.driver.install(new_spec, True, QUIET).power_state == RUNNING


@pytest.mark.parametrize("live", [QEMU_MOVES], indirect=True)
def test_live_migration_copies_guest_data_on_local_disks(live: Pair) -> None:
    spec = boot_guest_with_written_disks(live.source)
    new_spec = replace(spec, fence=2)
    live_migrate(live, new_spec)
    live.destination.driver.ensure_stopped(spec.server, 3, 0, QUIET)
    assert disks_with_canary(live.destination, spec.server) == {"ephemeral0", "swap"}


# --- lost and foreign disks ---
@pytest.mark.parametrize("pair", ["test"], indirect=True)
def test_missing_ephemeral_disk_fails_cold_migration_copy_and_start(pair: Pair) -> None:
    rig, spec = pair.source, boot_and_stop_with_canaries(pair.source)
    rig.driver.offer(spec.server, 1, SECRET, QUIET)
    (instance_folder(rig, spec.server) / "ephemeral0").unlink()
    with pytest.raises(VerbFailed, match="has lost the disk ephemeral0"):
        pair.transfer(replace(spec, fence=3))
    assert read_disks(pair.destination, spec.server) == {}
    for start in (
        lambda: rig.driver.ensure_running(spec.server, 2, QUIET),
        lambda: rig.driver.install(replace(spec, fence=2), True, QUIET),
    ):
        with pytest.raises(VerbFailed, match="not on this host's storage"):
            start()


@pytest.mark.parametrize("pair", ["test"], indirect=True)
def test_ephemeral_disk_with_backing_file_fails_cold_migration_and_start(pair: Pair) -> None:
    rig, spec = pair.source, boot_and_stop_with_canaries(pair.source)
    rig.driver.offer(spec.server, 1, SECRET, QUIET)
    subprocess.run(
        [
            "qemu-img",
            "rebase",
            "-u",
            "-f",
            "qcow2",
            "-b",
            "/etc/passwd",
            "-F",
            "raw",
            instance_folder(rig, spec.server) / "ephemeral0",
        ],
        check=True,
    )
    with pytest.raises(VerbFailed, match="this host does not open"):
        pair.transfer(replace(spec, fence=2))
    with pytest.raises(VerbFailed, match="this host does not open"):
        rig.driver.ensure_running(spec.server, 2, QUIET)
    assert read_disks(pair.destination, spec.server) == {}


def test_evacuation_of_stopped_server_creates_new_local_disks(rig: Rig) -> None:
    spec = rig.spec(image=typed(rig.image), flavor=FLAVOR, disks=[EPHEMERAL, SWAP])
    rig.driver.rebuild(spec, rig.read_image, False, QUIET)
    assert read_disks(rig, spec.server) == FORMATTED
