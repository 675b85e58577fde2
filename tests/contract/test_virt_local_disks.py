# SPDX-License-Identifier: Apache-2.0
"""What every virt driver must do with a server's ephemeral disks and swap: how they begin, what
keeps them, what not.

On hosts in memory, of libvirt's mock-up and with real QEMU guests. A canary on a disk tells that it
is still the same.
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
#: With more of everything.
LARGER = Flavor("4", "m1.more", 1, 160, 2, ephemeral_gb=2, swap_mb=96)
LARGER_DISKS = [LocalDisk("ephemeral0", 2048), LocalDisk("swap", 96, "swap")]
BARE = Flavor("5", "m1.bare", 1, 128, 1)
FORMATTED = {"ephemeral0": (1024, "ext4"), "swap": (64, "swap")}
LARGER_FORMATTED = {"ephemeral0": (2048, "ext4"), "swap": (96, "swap")}
#: User data that writes what tests write, where they do.
WRITES = f"""#!/bin/sh
for disk in vdb vdc; do
    head -c {local_disks.SECTOR} /dev/zero | tr '\\0' c | dd of=/dev/$disk bs={local_disks.SECTOR} \\
        seek={local_disks.CANARY_AT // local_disks.SECTOR} conv=notrunc 2>/dev/null && sync && echo "$disk is written."
done
"""
#: User data that says how many sectors each disk has.
SIZES = """#!/bin/sh
for disk in vdb vdc vdd; do
    [ -b /dev/$disk ] && echo "$disk has $(cat /sys/block/$disk/size)."
done
"""


def linux(rig: Rig) -> ImageRef:
    return replace(rig.image, properties={"os_type": "linux"})


def boot(rig: Rig, user_data: str = "") -> GuestSpec:
    return rig.boot(image=linux(rig), flavor=FLAVOR, disks=[EPHEMERAL, SWAP], user_data=user_data)


def off(rig: Rig) -> GuestSpec:
    """A guest that is off, with a canary on each of its disks."""
    spec = boot(rig)
    rig.driver.ensure_stopped(spec.server, 1, 0, QUIET)
    write(rig, spec.server)
    return spec


def folder(rig: Rig, server: str) -> Path:
    return rig.folder / "instances" / server


def made(rig: Rig, server: str) -> dict[str, tuple[int, str]]:
    """Name -> MiB and file system."""
    if isinstance(rig.driver, MemoryDriver):
        local = (rig.driver.host.files | rig.driver.host.guests)[server].local
        return {name: (disk["size_mb"], disk["format"]) for name, disk in local.items()}
    return local_disks.read_local_disks(folder(rig, server))


def write(rig: Rig, server: str) -> None:
    for name in made(rig, server):
        if isinstance(rig.driver, MemoryDriver):
            rig.driver.host.write_file(server, "canary", "canary", name)
        else:
            local_disks.write(folder(rig, server) / name)


def kept(rig: Rig, server: str) -> set[str]:
    """The disks that have their canary."""
    if isinstance(rig.driver, MemoryDriver):
        local = (rig.driver.host.files | rig.driver.host.guests)[server].local
        return {name for name, disk in local.items() if "canary" in disk["files"]}
    return {
        name for name in made(rig, server) if local_disks.is_written(folder(rig, server) / name)
    }


# --- where they come from ---
def test_guest_finds_its_disks_formatted(rig: Rig) -> None:
    spec = boot(rig, SIZES)
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
    assert made(rig, spec.server) == FORMATTED
    write(rig, spec.server)
    rig.driver.ensure_guest(replace(spec, fence=3), rig.read_image, QUIET)
    rig.driver.reboot(spec.server, 4, 0, QUIET)
    rig.driver.ensure_stopped(spec.server, 5, 0, QUIET)
    assert kept(rig, spec.server) == {"ephemeral0", "swap"}, "they are not made again"
    rig.driver.ensure_absent(spec.server, 6)
    assert rig.files(spec.server) == []


def test_file_system_is_the_one_that_was_asked_for(rig: Rig) -> None:
    disks = [LocalDisk("ephemeral0", 1024, "ext2"), LocalDisk("ephemeral1", 1024)]
    spec = rig.boot(flavor=replace(FLAVOR, ephemeral_gb=2), disks=disks)
    rig.driver.ensure_stopped(spec.server, 2, 0, QUIET)
    assert made(rig, spec.server) == {"ephemeral0": (1024, "ext2"), "ephemeral1": (1024, "vfat")}


# --- what keeps them ---
@pytest.mark.parametrize("keeps", [True, False], ids=["kept", "new"])
def test_rebuild_makes_them_anew_unless_told_otherwise(rig: Rig, keeps: bool) -> None:
    spec = off(rig)
    anew = replace(spec, fence=2, image=replace(another(rig), properties={"os_type": "linux"}))
    for _ in range(2):
        assert rig.driver.rebuild(anew, rig.read_image, True, QUIET, keeps).power_state == RUNNING
    rig.driver.ensure_stopped(spec.server, 3, 0, QUIET)
    assert made(rig, spec.server) == FORMATTED
    assert kept(rig, spec.server) == ({"ephemeral0"} if keeps else set())


def test_rebuild_without_an_image_leaves_them(rig: Rig) -> None:
    spec = off(rig)

    def gone(image: str) -> Iterator[bytes]:
        raise VerbFailed("No image was found.")
        yield b""

    files = rig.files(spec.server)
    with pytest.raises(VerbFailed, match="No image was found"):
        rig.driver.rebuild(replace(spec, fence=2, image=another(rig)), gone, True, QUIET)
    assert kept(rig, spec.server) == {"ephemeral0", "swap"}
    assert rig.files(spec.server) == files


@pytest.mark.parametrize("rig", ["test"], indirect=True)
def test_rebuild_that_cannot_make_them_changes_nothing(rig: Rig) -> None:
    spec = off(rig)
    files = sorted(rig.files(spec.server))
    impossible = replace(spec, fence=2, disks=[EPHEMERAL, LocalDisk("swap", 0, "swap")])
    with pytest.raises(VerbFailed, match="could not make the disk"):
        rig.driver.rebuild(impossible, rig.read_image, True, QUIET)
    assert kept(rig, spec.server) == {"ephemeral0", "swap"}
    assert sorted(rig.files(spec.server)) == files


def test_rescue_has_the_own_disk_alone_beside_it(rig: Rig) -> None:
    spec = off(rig)
    rig.driver.ensure_running(spec.server, 2, QUIET)
    before = rig.driver.diagnostics(spec.server)["num_disks"]
    rig.driver.rescue(replace(spec, fence=3), another(rig), rig.read_image, QUIET)
    assert rig.driver.diagnostics(spec.server)["num_disks"] == before - 1
    rig.driver.unrescue(replace(spec, fence=4), QUIET)
    assert rig.driver.diagnostics(spec.server)["num_disks"] == before
    rig.driver.ensure_stopped(spec.server, 5, 0, QUIET)
    assert kept(rig, spec.server) == {"ephemeral0", "swap"}


@pytest.mark.parametrize("rig", ["test", QEMU], indirect=True)
def test_rescue_on_a_bus_of_its_own_has_all_disks(rig: Rig) -> None:
    spec = boot(rig)
    before = rig.driver.diagnostics(spec.server)["num_disks"]
    image = replace(another(rig), properties={"hw_rescue_bus": "virtio"})
    rig.driver.rescue(replace(spec, fence=2), image, rig.read_image, QUIET)
    assert rig.driver.diagnostics(spec.server)["num_disks"] == before + 1


@pytest.mark.parametrize("rig", [QEMU], indirect=True)
def test_rescue_that_finds_no_room_on_its_bus_changes_nothing(rig: Rig) -> None:
    image = replace(rig.image, properties={"hw_disk_bus": "ide"})
    spec = rig.boot(image=image, flavor=FLAVOR, disks=[EPHEMERAL, SWAP])
    with pytest.raises(VerbFailed, match="cannot make the server's hardware"):
        rig.driver.rescue(
            replace(spec, fence=2),
            replace(another(rig), properties={"hw_rescue_bus": "ide"}),
            rig.read_image,
            QUIET,
        )
    assert rig.state(spec.server) == (RUNNING, 1)


@pytest.mark.parametrize("rig", [QEMU], indirect=True)
def test_snapshot_has_the_root_disk_alone(rig: Rig) -> None:
    spec, content = boot(rig), bytearray()
    files = rig.files(spec.server)
    assert rig.driver.snapshot(
        spec.server, 2, lambda chunks: content.extend(b"".join(chunks)), QUIET
    ) == len(content)
    assert content.startswith(b"QFI\xfb")
    assert rig.files(spec.server) == files, "nothing is left of a copy of any disk"


# --- resized where it is ---
@pytest.mark.parametrize("back", [True, False], ids=["back", "settled"])
def test_resize_here_makes_them_larger_until_it_is_taken_back(rig: Rig, back: bool) -> None:
    spec = off(rig)
    files = sorted(rig.files(spec.server))
    larger = replace(spec, fence=2, flavor=LARGER, disks=LARGER_DISKS)
    for _ in range(2):
        rig.driver.resize_here(larger, False, QUIET)
    assert made(rig, spec.server) == LARGER_FORMATTED
    assert kept(rig, spec.server) == {"ephemeral0"}
    settled = replace(spec if back else larger, fence=3)
    for _ in range(2):
        rig.driver.settle_resize(settled, back, 2, QUIET)
    assert made(rig, spec.server) == (FORMATTED if back else LARGER_FORMATTED)
    assert kept(rig, spec.server) == {"ephemeral0"}
    assert sorted(rig.files(spec.server)) == files
    assert rig.driver.ensure_running(spec.server, 4, QUIET).power_state == RUNNING


@pytest.mark.parametrize("back", [True, False], ids=["back", "settled"])
def test_resize_here_adds_disks_and_takes_them_away(rig: Rig, back: bool) -> None:
    spec = rig.boot(image=linux(rig), flavor=BARE)
    rig.driver.ensure_stopped(spec.server, 1, 0, QUIET)
    more = replace(spec, fence=2, flavor=FLAVOR, disks=[EPHEMERAL, SWAP])
    for _ in range(2):
        rig.driver.resize_here(more, False, QUIET)
    assert made(rig, spec.server) == FORMATTED
    rig.driver.settle_resize(replace(spec if back else more, fence=3), back, 2, QUIET)
    assert made(rig, spec.server) == ({} if back else FORMATTED)
    if not back:
        without = replace(more, fence=4, flavor=replace(FLAVOR, swap_mb=0), disks=[EPHEMERAL])
        rig.driver.resize_here(without, False, QUIET)
        rig.driver.settle_resize(replace(without, fence=5), False, 4, QUIET)
        assert made(rig, spec.server) == {"ephemeral0": (1024, "ext4")}
    assert rig.driver.ensure_running(spec.server, 6, QUIET).power_state == RUNNING


def test_what_is_written_after_a_resize_here_is_given_up_with_it(rig: Rig) -> None:
    spec = boot(rig)
    rig.driver.ensure_stopped(spec.server, 1, 0, QUIET)
    rig.driver.resize_here(replace(spec, fence=2, flavor=LARGER, disks=LARGER_DISKS), False, QUIET)
    write(rig, spec.server)
    rig.driver.settle_resize(replace(spec, fence=3), True, 2, QUIET)
    assert (made(rig, spec.server), kept(rig, spec.server)) == (FORMATTED, set())


# --- on their way ---
def test_ephemeral_disks_move_with_a_guest_that_is_off(pair: Pair) -> None:
    spec = off(pair.source)
    pair.source.driver.offer(spec.server, 1, SECRET, QUIET)
    there = replace(spec, fence=2, flavor=LARGER, disks=LARGER_DISKS)
    pair.destination.driver.prepare(
        there, pair.peer(spec.server), pair.destination.read_image, QUIET
    )
    for _ in range(2):
        pair.received(there)
    assert made(pair.destination, spec.server) == LARGER_FORMATTED
    assert kept(pair.destination, spec.server) == {"ephemeral0"}, "swap is made anew"
    assert pair.destination.driver.install(there, True, QUIET).power_state == RUNNING
    assert pair.source.driver.install(replace(spec, fence=3), True, QUIET).power_state == RUNNING
    pair.source.driver.ensure_stopped(spec.server, 4, 0, QUIET)
    assert (made(pair.source, spec.server), kept(pair.source, spec.server)) == (
        FORMATTED,
        {"ephemeral0", "swap"},
    )


def test_disks_that_a_guest_had_not_are_made_where_it_goes(pair: Pair) -> None:
    spec = pair.source.boot(image=linux(pair.source), flavor=BARE)
    pair.source.driver.ensure_stopped(spec.server, 1, 0, QUIET)
    pair.source.driver.offer(spec.server, 1, SECRET, QUIET)
    there = replace(spec, fence=2, flavor=FLAVOR, disks=[EPHEMERAL, SWAP])
    pair.received(there)
    assert made(pair.destination, spec.server) == FORMATTED
    assert pair.destination.driver.install(there, True, QUIET).power_state == RUNNING


def test_disks_that_a_guest_had_not_are_made_on_shared_storage(sharing: Pair) -> None:
    spec = sharing.source.boot(image=linux(sharing.source), flavor=BARE)
    sharing.source.driver.ensure_stopped(spec.server, 1, 0, QUIET)
    there = replace(spec, fence=2, flavor=FLAVOR, disks=[EPHEMERAL, SWAP])
    sharing.received(there)
    assert made(sharing.destination, spec.server) == FORMATTED
    assert sharing.destination.driver.install(there, True, QUIET).power_state == RUNNING


def test_disks_on_shared_storage_are_found_there(sharing: Pair) -> None:
    spec = off(sharing.source)
    there = replace(spec, fence=2, flavor=LARGER, disks=LARGER_DISKS)
    for _ in range(2):
        sharing.received(there)
    assert sharing.destination.driver.install(there, True, QUIET).power_state == RUNNING
    sharing.destination.driver.ensure_stopped(spec.server, 3, 0, QUIET)
    assert made(sharing.destination, spec.server) == LARGER_FORMATTED
    assert kept(sharing.destination, spec.server) == {"ephemeral0"}


def go(live: Pair, spec: GuestSpec) -> None:
    """It moves while it runs."""
    live.source.driver.offer(spec.server, 1, SECRET, QUIET)
    to = live.destination.driver.prepare_incoming(
        spec, live.peer(spec.server), live.shared, {}, live.destination.read_image, QUIET
    )
    live.source.driver.live_migrate(spec, to, live.shared, QUIET)
    assert live.destination.driver.finish_incoming(spec, QUIET).power_state == RUNNING


def test_running_guest_moves_with_all_its_disks(live: Pair) -> None:
    spec = off(live.source)
    live.source.driver.ensure_running(spec.server, 1, QUIET)
    go(live, replace(spec, fence=2))
    live.destination.driver.ensure_stopped(spec.server, 3, 0, QUIET)
    assert made(live.destination, spec.server) == FORMATTED
    assert kept(live.destination, spec.server) == {"ephemeral0", "swap"}
    assert live.destination.driver.ensure_running(spec.server, 4, QUIET).power_state == RUNNING


def written_by_its_guest(rig: Rig) -> GuestSpec:
    """A guest that runs, and has written onto its disks."""
    spec = boot(rig, WRITES)
    await_true(
        lambda: "vdc is written." in rig.console(spec.server),
        BOOT_SECONDS,
        lambda: rig.console(spec.server)[-2000:],
    )
    assert "vdb is written." in rig.console(spec.server)
    return spec


@pytest.mark.parametrize("pair", [QEMU_MOVES], indirect=True)
def test_what_a_guest_wrote_moves_while_it_is_off(pair: Pair) -> None:
    spec = written_by_its_guest(pair.source)
    pair.source.driver.ensure_stopped(spec.server, 1, 0, QUIET)
    pair.source.driver.offer(spec.server, 1, SECRET, QUIET)
    there = replace(spec, fence=2)
    pair.received(there)
    assert kept(pair.destination, spec.server) == {"ephemeral0"}
    assert pair.destination.driver.install(there, True, QUIET).power_state == RUNNING


@pytest.mark.parametrize("live", [QEMU_MOVES], indirect=True)
def test_what_a_guest_wrote_moves_while_it_runs(live: Pair) -> None:
    spec = written_by_its_guest(live.source)
    moves = replace(spec, fence=2)
    go(live, moves)
    live.destination.driver.ensure_stopped(spec.server, 3, 0, QUIET)
    assert kept(live.destination, spec.server) == {"ephemeral0", "swap"}


# --- what must not be made up ---
@pytest.mark.parametrize("pair", ["test"], indirect=True)
def test_ephemeral_disk_that_is_lost_is_not_made_up(pair: Pair) -> None:
    rig, spec = pair.source, off(pair.source)
    rig.driver.offer(spec.server, 1, SECRET, QUIET)
    (folder(rig, spec.server) / "ephemeral0").unlink()
    with pytest.raises(VerbFailed, match="not on its host's storage any more"):
        pair.received(replace(spec, fence=3))
    assert made(pair.destination, spec.server) == {}
    for start in (
        lambda: rig.driver.ensure_running(spec.server, 2, QUIET),
        lambda: rig.driver.install(replace(spec, fence=2), True, QUIET),
    ):
        with pytest.raises(VerbFailed, match="not on this host's storage"):
            start()


@pytest.mark.parametrize("pair", ["test"], indirect=True)
def test_disk_that_stands_on_another_file_is_refused(pair: Pair) -> None:
    rig, spec = pair.source, off(pair.source)
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
            folder(rig, spec.server) / "ephemeral0",
        ],
        check=True,
    )
    with pytest.raises(VerbFailed, match="not one that this host may open"):
        pair.received(replace(spec, fence=2))
    with pytest.raises(VerbFailed, match="not one that this host may open"):
        rig.driver.ensure_running(spec.server, 2, QUIET)
    assert made(pair.destination, spec.server) == {}


def test_stopped_server_of_a_dead_host_gets_new_ones(rig: Rig) -> None:
    spec = rig.spec(image=linux(rig), flavor=FLAVOR, disks=[EPHEMERAL, SWAP])
    rig.driver.rebuild(spec, rig.read_image, False, QUIET)
    assert made(rig, spec.server) == FORMATTED
