# SPDX-License-Identifier: Apache-2.0
"""A disk keeps the base image of its creation even if the server's record names another image.

No guest starts on a base image with other bytes. The images differ for unshelved servers, after a
refused rebuild, and when an image has changed. In these tests the recorded image is a raw image
with other bytes.
"""

from __future__ import annotations

import hashlib
import subprocess
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from common.domain.models import GuestSpec, ImageRef
from compute_agent.verb_context import VerbFailed
from compute_agent.virt.driver import RUNNING, SHUTDOWN
from compute_agent.virt.memory.driver import MemoryDriver
from tests.contract.conftest import QEMU_MOVES
from tests.contract.virt_pairs import LARGER, Pair
from tests.contract.virt_rigs import QUIET, Rig, another
from tests.disks import base

OTHER = b"other" * 4000
#: The image in the server's record.
RECORDED_IMAGE = ImageRef(
    str(uuid.UUID(int=8)), "raw", len(OTHER), "sha512", hashlib.sha512(OTHER).hexdigest()
)


def read_other(image: str) -> Iterator[bytes]:
    yield OTHER


def instance_folder(rig: Rig, spec: GuestSpec) -> Path:
    return rig.folder / "instances" / spec.server


def disks_are_equal(pair: Pair, spec: GuestSpec) -> bool:
    """Return True if the server's disk has the same content on both hosts."""
    source, destination = pair.source.driver, pair.destination.driver
    if isinstance(source, MemoryDriver) and isinstance(destination, MemoryDriver):
        return source.host.guests[spec.server].disk == destination.host.files[spec.server].disk
    process = subprocess.run(
        [
            "qemu-img",
            "compare",
            "-q",
            "-f",
            "qcow2",
            "-F",
            "qcow2",
            *(instance_folder(rig, spec) / "disk" for rig in pair.rigs),
        ],
        check=False,
    )
    return process.returncode == 0


def test_cold_migration_keeps_base_image_when_record_names_another_image(pair: Pair) -> None:
    spec = replace(pair.off_with_canary(), image=RECORDED_IMAGE)
    destination = pair.destination.driver
    destination.prepare(spec, pair.peer(spec.server), read_other, QUIET)
    destination.receive(spec, pair.peer(spec.server), read_other, QUIET)
    assert disks_are_equal(pair, spec)
    assert pair.boot_at_destination(spec)
    back = replace(spec, fence=3)
    destination.ensure_stopped(spec.server, 3, 0, QUIET)
    boots = pair.source.boots(spec.server)
    assert pair.source.driver.install(back, True, QUIET).power_state == RUNNING
    assert pair.source.has_canary(spec.server, boots + 1), "and goes back"


@pytest.mark.parametrize("live", ["memory", QEMU_MOVES], indirect=True)
def test_live_migration_keeps_base_image_of_disk(live: Pair) -> None:
    spec = replace(live.start_counting_guest(), image=RECORDED_IMAGE)
    cpu = live.source.driver.inventory().cpu_info
    destination = live.destination.driver.prepare_incoming(
        spec, live.peer(spec.server), live.shared, cpu, read_other, QUIET
    )
    live.source.driver.live_migrate(spec, destination, live.shared, QUIET)
    live.destination.driver.finish_incoming(spec, QUIET)
    if live.source.real:
        assert (
            base(instance_folder(live.destination, spec)).name
            == f"base.sha512-{live.source.linux_image.hash_value}.qcow2"
        )
    live.destination.driver.ensure_stopped(spec.server, 3, 0, QUIET)
    boots = live.destination.boots(spec.server)
    live.destination.driver.ensure_running(spec.server, 4, QUIET)
    live.destination.await_boots(spec.server, boots + 1)


def test_resize_revert_and_rescue_keep_base_image_of_disk(rig: Rig) -> None:
    spec = replace(rig.boot_with_canary(), image=RECORDED_IMAGE)
    boots, fences = rig.boots(spec.server), iter(range(2, 9))

    def stop_guest() -> GuestSpec:
        rig.driver.ensure_stopped(spec.server, next(fences), 0, QUIET)
        return replace(spec, fence=next(fences), flavor=LARGER)

    resized = stop_guest()
    assert rig.driver.resize_here(resized, True, QUIET).power_state == RUNNING
    assert rig.has_canary(spec.server, boots := boots + 1), "resized"
    rig.driver.settle_resize(replace(stop_guest(), flavor=spec.flavor), True, resized.fence, QUIET)
    rig.driver.ensure_running(spec.server, next(fences), QUIET)
    assert rig.has_canary(spec.server, boots := boots + 1), "reverted"
    rig.driver.rescue(replace(spec, fence=next(fences)), another(rig), rig.read_image, QUIET)
    rig.await_boots(spec.server, boots + 1)
    rig.driver.unrescue(replace(spec, fence=next(fences)), QUIET)
    assert rig.has_canary(spec.server, boots + 2 if rig.has_console else 0), "rescued"


# --- damaged base images ---
def overwrite(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(path.stat().st_size - 4)
        file.write(b"lost")


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-4])


def unlink(path: Path) -> None:
    path.unlink()


def rebase_to_copy(path: Path) -> None:
    """Rebase the disk to a copy of the base image under another name.

    The domain does not contain this name.
    """
    disk, kind = path.with_name("disk"), path.name.rpartition(".")[2]
    other = path.with_name(f"base.sha256-{hashlib.sha256(path.read_bytes()).hexdigest()}.{kind}")
    subprocess.run(
        [
            "qemu-img",
            "rebase",
            "-u",
            "-f",
            "qcow2",
            "-b",
            other,
            "-F",
            kind,
            disk,
        ],
        check=True,
    )
    other.write_bytes(path.read_bytes())


@pytest.mark.parametrize("damage", [overwrite, truncate, unlink, rebase_to_copy])
@pytest.mark.parametrize("pair", ["test", QEMU_MOVES], indirect=True)
def test_guest_with_damaged_base_image_is_not_started(
    pair: Pair, damage: Callable[[Path], None]
) -> None:
    rig, spec = pair.source, pair.off_with_canary()
    folder = instance_folder(rig, spec)
    contents = {path: path.read_bytes() for path in (folder / "disk", base(folder))}
    damage(base(folder))
    starts = [
        lambda: rig.driver.ensure_running(spec.server, 2, QUIET),
        lambda: rig.driver.reboot(spec.server, 3, 0, QUIET),
        lambda: rig.driver.install(spec, True, QUIET),
    ]
    for start in starts[:2] if damage is rebase_to_copy else starts:
        with pytest.raises(VerbFailed, match="server is not started|not on this host's storage"):
            start()
        assert rig.state(spec.server) == (SHUTDOWN, 1)
    for path, content in contents.items():
        path.write_bytes(content)
    assert rig.driver.ensure_running(spec.server, 4, QUIET).power_state == RUNNING
    assert rig.has_canary(spec.server, rig.boots(spec.server) or 1)
