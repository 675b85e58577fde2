# SPDX-License-Identifier: Apache-2.0
"""A guest's volume is copied to another place while the guest uses it, and goes on there: on the
same hypervisors."""

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
    connectors,
    dying,
    has,
    path_of,
    virsh,
    volume,
)
from tests.contract.virt_rigs import BOOT_SECONDS, QUIET, Rig
from tests.waiting import await_true

MARK = b"what was there before"
SECTOR, PLACES = 512, 4096


@pytest.fixture(params=["memory", QEMU])
def rig(request: pytest.FixtureRequest, tmp_path: Any) -> Iterator[Rig]:
    yield from virt_rigs.of_kind(request, tmp_path, connectors)


def other(rig: Rig, one: AttachedVolume) -> AttachedVolume:
    """The volume at another place, as the service migrates it."""
    there = volume(rig)
    return replace(one, name_id=there.volume_id, connection=there.connection)


def places(rig: Rig, server: str) -> set[str]:
    """Where a guest has its volumes: when it runs, and from its next start on."""
    if isinstance(rig.driver, MemoryDriver):
        return {one.stored_id for one in rig.driver.host.guests[server].volumes}
    found = set()
    for stored in (True, False):
        for disk in volume_xml.find_disks(rig.describe(server, stored)).values():
            source = disk.find("source")
            assert source is not None
            found.add((source.get("file") or source.get("dev", "")).rpartition("volume-")[2])
    return found


def is_copied(rig: Rig, server: str) -> bool:
    if isinstance(rig.driver, MemoryDriver):
        return rig.driver.host.guests[server].copied is not None
    return "<mirror" in rig.describe(server)


def attached(rig: Rig, server: str) -> AttachedVolume:
    """A volume of the server, with something on it."""
    one = volume(rig)
    with path_of(one).open("r+b") as file:
        file.write(MARK)
    rig.driver.attach_volume(server, 2, one, QUIET)
    return one


def test_a_guest_goes_on_at_the_other_place(rig: Rig) -> None:
    server = rig.boot().server
    one = attached(rig, server)
    there = other(rig, one)
    for _ in range(2):
        assert rig.driver.copy_volume(server, 3, there, QUIET) == DomainState(server, RUNNING, 3)
        assert (places(rig, server), is_copied(rig, server)) == ({one.volume_id}, True)
    for _ in range(2):
        assert rig.driver.switch_volume(server, 4, there, QUIET) == DomainState(server, RUNNING, 4)
        assert (places(rig, server), is_copied(rig, server)) == ({there.name_id}, False)
    assert has(rig, server) == {one.volume_id}
    rig.driver.ensure_stopped(server, 5, 0, QUIET)
    if not isinstance(rig.driver, MemoryDriver):
        with path_of(there).open("rb") as file:
            assert file.read(len(MARK)) == MARK
    rig.driver.ensure_running(server, 6, QUIET)
    assert places(rig, server) == {there.name_id}
    back = replace(there, name_id="", connection=one.connection)
    rig.driver.copy_volume(server, 7, back, QUIET)
    rig.driver.switch_volume(server, 7, back, QUIET)
    assert places(rig, server) == {one.volume_id}


def test_a_guest_stays_where_it_is(rig: Rig) -> None:
    server = rig.boot().server
    one = attached(rig, server)
    there = other(rig, one)
    rig.driver.copy_volume(server, 3, there, QUIET)
    for _ in range(2):
        assert rig.driver.keep_volume(server, 4, there, QUIET) == DomainState(server, RUNNING, 4)
        assert (places(rig, server), is_copied(rig, server)) == ({one.volume_id}, False)
    rig.driver.ensure_absent(server, 6)
    assert rig.driver.keep_volume(server, 7, there, QUIET) is None
    assert rig.driver.switch_volume(server, 7, there, QUIET) is None


def test_what_cannot_be_copied_is_refused(rig: Rig) -> None:
    server = rig.boot().server
    with pytest.raises(VerbFailed, match="does not have volume"):
        rig.driver.copy_volume(server, 3, other(rig, volume(rig)), QUIET)
    one = attached(rig, server)
    there = other(rig, one)
    for bad, said in (
        (replace(there, size_gb=2), "only into one of exactly its size"),
        (replace(there, connection={}), "not connected to this host"),
        (replace(there, name_id="../x"), "not a UUID"),
    ):
        with pytest.raises(VerbFailed, match=said):
            rig.driver.copy_volume(server, 3, bad, QUIET)
    if not isinstance(rig.driver, MemoryDriver):
        with path_of(there).open("r+b") as file:
            file.truncate(GIBIBYTE + 512)
        with pytest.raises(VerbFailed, match="only into one of exactly its size"):
            rig.driver.copy_volume(server, 3, there, QUIET)
        with path_of(there).open("r+b") as file:
            file.truncate(GIBIBYTE - 512)
        with pytest.raises(VerbFailed, match="is not that volume"):
            rig.driver.copy_volume(server, 3, there, QUIET)
        with path_of(there).open("r+b") as file:
            file.truncate(GIBIBYTE)
    stop = VerbContext(report_progress=lambda progress: None, cancelled=lambda: True)
    with pytest.raises(Cancelled):
        rig.driver.copy_volume(server, 3, there, stop)
    assert (places(rig, server), is_copied(rig, server)) == ({one.volume_id}, False)
    rig.driver.ensure_stopped(server, 4, 0, QUIET)
    with pytest.raises(VerbFailed, match="is off"):
        rig.driver.copy_volume(server, 5, there, QUIET)
    assert rig.state(server) == (SHUTDOWN, 4)


def test_a_paused_guest_goes_on_there(rig: Rig) -> None:
    server = rig.boot(paused=True).server
    one = attached(rig, server)
    there = other(rig, one)
    rig.driver.copy_volume(server, 3, there, QUIET)
    rig.driver.switch_volume(server, 4, there, QUIET)
    assert (places(rig, server), rig.state(server)) == ({there.name_id}, (PAUSED, 4))


@pytest.mark.parametrize("rig", [QEMU], indirect=True)
def test_a_guest_goes_on_at_a_device_of_the_kernel(rig: Rig) -> None:
    """As os-brick's are."""
    server = rig.boot().server
    one = attached(rig, server)
    there = other(rig, one)
    file = path_of(there).rename(rig.folder / "behind-the-device")
    loop = subprocess.run(
        ["losetup", "--find", "--show", file], check=True, capture_output=True, text=True
    ).stdout.strip()
    try:
        os.mknod(path_of(there), stat.S_IFBLK | 0o600, os.stat(loop).st_rdev)
        rig.driver.copy_volume(server, 3, there, QUIET)
        rig.driver.switch_volume(server, 4, there, QUIET)
        assert (places(rig, server), is_copied(rig, server)) == ({there.name_id}, False)
        rig.driver.ensure_stopped(server, 5, 0, QUIET)
        rig.driver.ensure_running(server, 6, QUIET)
        rig.driver.detach_volume(server, 7, there, QUIET)
    finally:
        subprocess.run(["losetup", "--detach", loop], check=True)
    with file.open("rb") as content:
        assert content.read(len(MARK)) == MARK


@pytest.mark.parametrize("rig", [QEMU], indirect=True)
def test_one_that_went_off_begins_at_the_other_place(rig: Rig) -> None:
    """Both were the same; and where they were not, nobody is told that it is there."""
    server = rig.boot().server
    one = attached(rig, server)
    there = other(rig, one)
    rig.driver.copy_volume(server, 3, there, QUIET)
    virsh(rig, "destroy", server)
    rig.driver.switch_volume(server, 4, there, QUIET)
    assert places(rig, server) == {there.name_id}
    rig.driver.ensure_running(server, 5, QUIET)
    further = other(rig, there)
    rig.driver.copy_volume(server, 6, further, QUIET)
    virsh(rig, "destroy", server)
    rig.driver.ensure_running(server, 7, QUIET)  # it writes where it was
    rig.driver.ensure_stopped(server, 8, 0, QUIET)
    with pytest.raises(VerbFailed, match="went off before the copy"):
        rig.driver.switch_volume(server, 9, further, QUIET)
    assert places(rig, server) == {there.name_id}
    rig.driver.ensure_running(server, 10, QUIET)
    rig.driver.switch_volume(server, 11, further, QUIET)
    assert places(rig, server) == {further.name_id}


#: User data that writes numbered sectors on the second disk as fast as it can, and says of each
#: when it is on the disk; and how many sectors that disk has, whenever it is another number.
WRITES = f"""#!/bin/sh
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


def wrote(rig: Rig, server: str) -> int:
    said = re.findall(r"^wrote (\d+)\n", rig.console(server).replace("\r", ""), re.MULTILINE)
    return int(said[-1]) if said else 0


def goes_on(rig: Rig, server: str) -> int:
    before = wrote(rig, server)
    await_true(
        lambda: wrote(rig, server) > before + 5,
        BOOT_SECONDS,
        lambda: rig.console(server)[-1000:],
    )
    return wrote(rig, server)


def highest(one: AttachedVolume) -> int:
    """The last number on the volume; every other one that fits is there too."""
    with path_of(one).open("rb") as file:
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
def test_nothing_is_lost_of_what_a_guest_writes(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent dies after each of its calls in turn, while the guest writes: what the guest was
    told is written is there, and after the switch the old place is written to no more. It sees that
    the volume grows meanwhile."""
    server, one = rig.boot(user_data=WRITES, ready=True).server, volume(rig)
    rig.driver.attach_volume(server, 2, one, QUIET)
    goes_on(rig, server)
    here = one
    for verbs in (("copy_volume", "switch_volume"), ("copy_volume", "keep_volume")):
        there = other(rig, here)
        for verb in verbs:
            died = 0
            while True:
                dying(rig.driver, died + 1, monkeypatch)  # type: ignore[arg-type]
                with suppress(Killed):
                    getattr(rig.driver, verb)(server, 3, there, QUIET)
                    break
                died += 1
                rig.restart()
            assert died > 2
            rig.restart()
            getattr(rig.driver, verb)(server, 3, there, QUIET)
            said = wrote(rig, server)
            if verb == "copy_volume":
                assert min(highest(here), highest(there)) >= said
        if verbs[-1] == "switch_volume":
            old, here = here, there
        before = highest(old)
        count = goes_on(rig, server)
        assert highest(old) == before < count <= highest(here) + 1
    with path_of(here).open("r+b") as file:
        file.truncate(2 * GIBIBYTE)
    rig.driver.extend_volume(server, replace(here, size_gb=2), QUIET)
    await_true(
        lambda: f"sectors {2 * GIBIBYTE // SECTOR}\n" in rig.console(server).replace("\r", ""),
        BOOT_SECONDS,
        lambda: f"the guest does not see that it grew: {rig.console(server)[-1000:]}",
    )
    goes_on(rig, server)
    virsh(rig, "destroy", server)
    assert highest(here) >= wrote(rig, server) > 20
