# SPDX-License-Identifier: Apache-2.0
"""Copies of a volume to another place while a guest uses the volume, and the switch to the copy.

The tests run on a host in memory and real QEMU guests.
"""

from __future__ import annotations

import os
import re
import stat
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from common.domain.models import AttachedVolume, DomainState
from compute_agent.verb_context import Cancelled, VerbContext, VerbFailed
from compute_agent.virt.driver import PAUSED, RUNNING, SHUTDOWN
from compute_agent.virt.libvirt.xml import volume_xml
from compute_agent.virt.memory.driver import MemoryDriver
from tests.contract import virt_rigs
from tests.contract.conftest import QEMU
from tests.contract.test_virt_volumes import (
    GIBIBYTE,
    Killed,
    attached_ids,
    connectors,
    create_volume,
    die_after_calls,
    virsh,
    volume_path,
)
from tests.contract.virt_rigs import BOOT_SECONDS, QUIET, Rig
from tests.waiting import await_true

MARK = b"what was there before"
SECTOR, PLACES = 512, 4096


@pytest.fixture(params=["memory", QEMU])
def rig(request: pytest.FixtureRequest, tmp_path: Any) -> Iterator[Rig]:
    yield from virt_rigs.of_kind(request, tmp_path, connectors)


def create_target(rig: Rig, source: AttachedVolume) -> AttachedVolume:
    """Create a target for the volume, as the volume service does for a migration."""
    target = create_volume(rig)
    return replace(source, name_id=target.volume_id, connection=target.connection)


def read_places(rig: Rig, server: str) -> set[str]:
    """Return the places of the guest's volumes, in the running and in the stored domain."""
    if isinstance(rig.driver, MemoryDriver):
        return {attached.stored_id for attached in rig.driver.host.guests[server].volumes}
    stored_ids = set()
    for stored in (True, False):
        for disk in volume_xml.find_disks(rig.describe(server, stored)).values():
            source = disk.find("source")
            assert source is not None
            stored_ids.add((source.get("file") or source.get("dev", "")).rpartition("volume-")[2])
    return stored_ids


def is_copied(rig: Rig, server: str) -> bool:
    if isinstance(rig.driver, MemoryDriver):
        return rig.driver.host.guests[server].copied is not None
    return "<mirror" in rig.describe(server)


def attach_marked_volume(rig: Rig, server: str) -> AttachedVolume:
    """Attach a volume that contains a mark."""
    marked = create_volume(rig)
    with volume_path(marked).open("r+b") as file:
        file.write(MARK)
    rig.driver.attach_volume(server, 2, marked, QUIET)
    return marked


def test_copy_and_switch_volume_move_guest_to_target_and_back(rig: Rig) -> None:
    server = rig.boot().server
    source = attach_marked_volume(rig, server)
    target = create_target(rig, source)
    for _ in range(2):
        assert rig.driver.copy_volume(server, 3, target, QUIET) == DomainState(server, RUNNING, 3)
        assert (read_places(rig, server), is_copied(rig, server)) == ({source.volume_id}, True)
    for _ in range(2):
        assert rig.driver.switch_volume(server, 4, target, QUIET) == DomainState(server, RUNNING, 4)
        assert (read_places(rig, server), is_copied(rig, server)) == ({target.name_id}, False)
    assert attached_ids(rig, server) == {source.volume_id}
    rig.driver.ensure_stopped(server, 5, 0, QUIET)
    if not isinstance(rig.driver, MemoryDriver):
        with volume_path(target).open("rb") as file:
            assert file.read(len(MARK)) == MARK
    rig.driver.ensure_running(server, 6, QUIET)
    assert read_places(rig, server) == {target.name_id}
    former = replace(target, name_id="", connection=source.connection)
    rig.driver.copy_volume(server, 7, former, QUIET)
    rig.driver.switch_volume(server, 7, former, QUIET)
    assert read_places(rig, server) == {source.volume_id}


def test_keep_volume_ends_copy_and_keeps_source(rig: Rig) -> None:
    server = rig.boot().server
    source = attach_marked_volume(rig, server)
    target = create_target(rig, source)
    rig.driver.copy_volume(server, 3, target, QUIET)
    for _ in range(2):
        assert rig.driver.keep_volume(server, 4, target, QUIET) == DomainState(server, RUNNING, 4)
        assert (read_places(rig, server), is_copied(rig, server)) == ({source.volume_id}, False)
    rig.driver.ensure_absent(server, 6)
    assert rig.driver.keep_volume(server, 7, target, QUIET) is None
    assert rig.driver.switch_volume(server, 7, target, QUIET) is None


def test_copy_volume_is_refused_for_unusable_target_or_stopped_guest(rig: Rig) -> None:
    server = rig.boot().server
    with pytest.raises(VerbFailed, match="does not have volume"):
        rig.driver.copy_volume(server, 3, create_target(rig, create_volume(rig)), QUIET)
    source = attach_marked_volume(rig, server)
    target = create_target(rig, source)
    for bad, message in (
        (replace(target, size_gb=2), "only to a target of the same size"),
        (replace(target, connection={}), "not connected to this host"),
        (replace(target, name_id="../x"), "not a UUID"),
    ):
        with pytest.raises(VerbFailed, match=message):
            rig.driver.copy_volume(server, 3, bad, QUIET)
    if not isinstance(rig.driver, MemoryDriver):
        with volume_path(target).open("r+b") as file:
            file.truncate(GIBIBYTE + 512)
        with pytest.raises(VerbFailed, match="only to a target of the same size"):
            rig.driver.copy_volume(server, 3, target, QUIET)
        with volume_path(target).open("r+b") as file:
            file.truncate(GIBIBYTE - 512)
        with pytest.raises(VerbFailed, match="is not that volume"):
            rig.driver.copy_volume(server, 3, target, QUIET)
        with volume_path(target).open("r+b") as file:
            file.truncate(GIBIBYTE)
    stop = VerbContext(report_progress=lambda progress: None, cancelled=lambda: True)
    with pytest.raises(Cancelled):
        rig.driver.copy_volume(server, 3, target, stop)
    assert (read_places(rig, server), is_copied(rig, server)) == ({source.volume_id}, False)
    rig.driver.ensure_stopped(server, 4, 0, QUIET)
    with pytest.raises(VerbFailed, match="is off"):
        rig.driver.copy_volume(server, 5, target, QUIET)
    assert rig.state(server) == (SHUTDOWN, 4)


def test_copy_and_switch_volume_of_paused_guest_keep_it_paused(rig: Rig) -> None:
    server = rig.boot(paused=True).server
    source = attach_marked_volume(rig, server)
    target = create_target(rig, source)
    rig.driver.copy_volume(server, 3, target, QUIET)
    rig.driver.switch_volume(server, 4, target, QUIET)
    assert (read_places(rig, server), rig.state(server)) == ({target.name_id}, (PAUSED, 4))


@pytest.mark.parametrize("rig", [QEMU], indirect=True)
def test_copy_and_switch_volume_work_with_block_device_as_target(rig: Rig) -> None:
    """Volumes of os-brick are also block devices."""
    # Only a guest with an operating system releases a volume.
    server = rig.boot(image=rig.linux_image).server
    source = attach_marked_volume(rig, server)
    target = create_target(rig, source)
    file = volume_path(target).rename(rig.folder / "behind-the-device")
    loop = subprocess.run(
        ["losetup", "--find", "--show", file], check=True, capture_output=True, text=True
    ).stdout.strip()
    try:
        os.mknod(volume_path(target), stat.S_IFBLK | 0o600, os.stat(loop).st_rdev)
        rig.driver.copy_volume(server, 3, target, QUIET)
        rig.driver.switch_volume(server, 4, target, QUIET)
        assert (read_places(rig, server), is_copied(rig, server)) == ({target.name_id}, False)
        rig.driver.ensure_stopped(server, 5, 0, QUIET)
        rig.driver.ensure_running(server, 6, QUIET)
        rig.driver.detach_volume(server, 7, target, QUIET)
    finally:
        subprocess.run(["losetup", "--detach", loop], check=True)
    with file.open("rb") as content:
        assert content.read(len(MARK)) == MARK


@pytest.mark.parametrize("rig", [QEMU], indirect=True)
def test_switch_volume_of_stopped_guest_needs_complete_copy(rig: Rig) -> None:
    """The first copy is complete when the guest stops.

    After the second stop the guest writes to the old place, so the copy is not complete.
    """
    server = rig.boot().server
    source = attach_marked_volume(rig, server)
    target = create_target(rig, source)
    rig.driver.copy_volume(server, 3, target, QUIET)
    virsh(rig, "destroy", server)
    rig.driver.switch_volume(server, 4, target, QUIET)
    assert read_places(rig, server) == {target.name_id}
    rig.driver.ensure_running(server, 5, QUIET)
    second_target = create_target(rig, target)
    rig.driver.copy_volume(server, 6, second_target, QUIET)
    virsh(rig, "destroy", server)
    # The guest writes to the old place.
    rig.driver.ensure_running(server, 7, QUIET)
    rig.driver.ensure_stopped(server, 8, 0, QUIET)
    with pytest.raises(VerbFailed, match="was stopped before the copy"):
        rig.driver.switch_volume(server, 9, second_target, QUIET)
    assert read_places(rig, server) == {target.name_id}
    rig.driver.ensure_running(server, 10, QUIET)
    rig.driver.switch_volume(server, 11, second_target, QUIET)
    assert read_places(rig, server) == {second_target.name_id}


#: User data that writes numbered sectors to the second disk as fast as possible, and prints each
#: number after the write to the disk. It also prints each new size of the disk, in sectors.
WRITE_BLOCKS = f"""#!/bin/sh
(n=0; while true; do
    [ -b /dev/vdb ] || {{ usleep 50000; continue; }}
    read -r now < /sys/block/vdb/size
    [ "$now" = "$size" ] || echo "sectors $now"
    size=$now
    n=$((n + 1))
    printf 'block %08d' $n | dd of=/dev/vdb bs={SECTOR} seek=$((n % {PLACES})) \\
        conv=notrunc,fsync 2> /dev/null && echo "wrote $n"
done) &
"""


def count_written(rig: Rig, server: str) -> int:
    numbers = re.findall(r"^wrote (\d+)\n", rig.console(server).replace("\r", ""), re.MULTILINE)
    return int(numbers[-1]) if numbers else 0


def await_more_writes(rig: Rig, server: str) -> int:
    before = count_written(rig, server)
    await_true(
        lambda: count_written(rig, server) > before + 5,
        BOOT_SECONDS,
        lambda: rig.console(server)[-1000:],
    )
    return count_written(rig, server)


def read_last_block(attached_volume: AttachedVolume) -> int:
    """Return the last number on the volume, and check that no earlier number is missing."""
    with volume_path(attached_volume).open("rb") as file:
        content = file.read(PLACES * SECTOR)
    numbers = {
        int(content[at + 6 : at + 14])
        for at in range(0, len(content), SECTOR)
        if content[at : at + 6] == b"block "
    }
    last = max(numbers, default=0)
    assert numbers == set(range(max(1, last - PLACES + 1), last + 1))
    return last


@pytest.mark.slice("guests")
@pytest.mark.kvm_or_tcg
@pytest.mark.parametrize("rig", ["qemu"], indirect=True)
def test_volume_copy_loses_no_writes_when_agent_dies_after_any_libvirt_call(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent dies after each call in turn, while the guest writes.

    The volume contains all writes that the guest reports. After the switch the old place is not
    written to any more. At the end the guest sees that the volume has grown.
    """
    server, source = rig.boot(user_data=WRITE_BLOCKS, ready=True).server, create_volume(rig)
    rig.driver.attach_volume(server, 2, source, QUIET)
    await_more_writes(rig, server)
    current = source
    for verbs in (("copy_volume", "switch_volume"), ("copy_volume", "keep_volume")):
        target = create_target(rig, current)
        for verb in verbs:
            deaths = 0
            while True:
                die_after_calls(rig.driver, deaths + 1, monkeypatch)  # type: ignore[arg-type]
                with suppress(Killed):
                    getattr(rig.driver, verb)(server, 3, target, QUIET)
                    break
                deaths += 1
                rig.restart()
            assert deaths > 2
            rig.restart()
            getattr(rig.driver, verb)(server, 3, target, QUIET)
            reported = count_written(rig, server)
            if verb == "copy_volume":
                assert min(read_last_block(current), read_last_block(target)) >= reported
        if verbs[-1] == "switch_volume":
            old, current = current, target
        before = read_last_block(old)
        count = await_more_writes(rig, server)
        assert read_last_block(old) == before < count <= read_last_block(current) + 1
    with volume_path(current).open("r+b") as file:
        file.truncate(2 * GIBIBYTE)
    rig.driver.extend_volume(server, replace(current, size_gb=2), QUIET)
    await_true(
        lambda: f"sectors {2 * GIBIBYTE // SECTOR}\n" in rig.console(server).replace("\r", ""),
        BOOT_SECONDS,
        lambda: f"the guest does not see that it grew: {rig.console(server)[-1000:]}",
    )
    await_more_writes(rig, server)
    virsh(rig, "destroy", server)
    assert read_last_block(current) >= count_written(rig, server) > 20
