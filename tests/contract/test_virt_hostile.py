# SPDX-License-Identifier: Apache-2.0
"""Every hostile image on every path by which bytes of others come to a host, and what leaves it
again.

Each is refused with a reason and leaves nothing, or is used as the bytes that it is. A canary
stands in a file of the host to which the images refer: it is in no file that the host makes, and in
nothing that it says or gives away.
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
from compute_agent.verb_context import Part, VerbFailed
from compute_agent.virt.driver import Driver
from tests.contract.conftest import QEMU
from tests.contract.hostile_images import Hostile, corpus, standing_on
from tests.contract.virt_rigs import QUIET, Rig
from tests.disks import names

pytestmark = pytest.mark.slice("guests")
SECRET = b"what only this host may know"
libvirt_rigs = pytest.mark.parametrize("rig", ["test", QEMU], indirect=True)


@pytest.fixture
def canary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("elsewhere") / "canary"
    path.write_bytes(SECRET.ljust(64 << 10, b"!"))
    path.chmod(0o644)
    return path


class Peer:
    """A host that gives what it wants: its own disk, config drive and base."""

    def __init__(self, base: str, content: bytes, disk: bytes) -> None:
        self._files = {"config": b"config", "disk": disk, **({base: content} if base else {})}

    def parts(self) -> list[Part]:
        return [Part(name, len(content), len(content)) for name, content in self._files.items()]

    def read(self, name: str) -> Iterator[tuple[int, bytes]]:
        content = self._files[name]
        return ((at, content[at : at + (1 << 20)]) for at in range(0, len(content), 1 << 20))


def image_of(one: Hostile) -> ImageRef:
    return ImageRef(
        str(uuid.uuid4()),
        one.declared,
        len(one.content),
        "sha512",
        hashlib.sha512(one.content).hexdigest(),
    )


def reader(content: bytes) -> Callable[[str], Iterator[bytes]]:
    return lambda image: (content[at : at + 4096] for at in range(0, len(content), 4096))


Way = Callable[[Rig, Driver, Hostile, GuestSpec], object]


def boot(rig: Rig, driver: Driver, one: Hostile, there: GuestSpec) -> object:
    """A new server, and a shelved one that comes back: the same verb."""
    return driver.ensure_guest(rig.spec(image=image_of(one)), reader(one.content), QUIET)


def prefetch(rig: Rig, driver: Driver, one: Hostile, there: GuestSpec) -> object:
    driver.ensure_image(image_of(one), reader(one.content), QUIET)
    # what is too large for a flavor may be fetched before its flavor is known
    return boot(rig, driver, one, there)


def rebuild(rig: Rig, driver: Driver, one: Hostile, there: GuestSpec) -> object:
    return driver.rebuild(
        replace(there, fence=there.fence + 1, image=image_of(one)), reader(one.content), True, QUIET
    )


def rescue(rig: Rig, driver: Driver, one: Hostile, there: GuestSpec) -> object:
    made = driver.rescue(
        replace(there, fence=there.fence + 1), image_of(one), reader(one.content), QUIET
    )
    driver.unrescue(replace(there, fence=there.fence + 2), QUIET)
    return made


def peer_of(one: Hostile) -> Peer:
    name = f"base.sha512-{hashlib.sha512(one.content).hexdigest()}.{one.declared}"
    return Peer(name, one.content, b"")


def arrive(rig: Rig, driver: Driver, one: Hostile, there: GuestSpec) -> object:
    """Resize and cold migration: the other host gives what lies under the disk."""
    return driver.prepare(rig.spec(image=None), peer_of(one), reader(b""), QUIET)


def arrive_with_the_image(rig: Rig, driver: Driver, one: Hostile, there: GuestSpec) -> object:
    return driver.prepare(rig.spec(image=image_of(one)), peer_of(one), reader(one.content), QUIET)


def receive(rig: Rig, driver: Driver, one: Hostile, there: GuestSpec) -> object:
    return driver.receive(rig.spec(image=None), peer_of(one), reader(b""), QUIET)


def receive_its_disk(rig: Rig, driver: Driver, one: Hostile, there: GuestSpec) -> object:
    """It is the server's own disk, and stands on nothing; whatever it was declared as, a disk is
    qcow2."""
    return driver.receive(rig.spec(image=None), Peer("", b"", one.content), reader(b""), QUIET)


WAYS: list[Way] = [
    boot,
    prefetch,
    rebuild,
    rescue,
    arrive,
    arrive_with_the_image,
    receive,
    receive_its_disk,
]


#: What does no harm by that way: how large a server's own disk is its source says, and what is no
#: base is not fetched.
NOT_HOSTILE = {
    (receive_its_disk, "4 TiB with all its tables"),
    (arrive, "vmdk, as what it is"),
    (arrive_with_the_image, "vmdk, as what it is"),
}


@pytest.mark.parametrize(
    ("rig", "way"),
    [
        *(("test", way) for way in WAYS),
        *(
            pytest.param("qemu", way, marks=pytest.mark.kvm_or_tcg)
            for way in (boot, rebuild, rescue)
        ),
    ],
    indirect=["rig"],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_hostile_images_come_in_by_no_way(rig: Rig, canary: Path, way: Way) -> None:
    there, wrong = rig.boot(paused=True), {}
    said: list[str] = []
    for one in corpus(canary):
        if (way, one.name) in NOT_HOSTILE:
            continue
        before, there = len(rig.servers), replace(there, fence=there.fence + 3)
        try:
            way(rig, rig.driver, one, there)
            refused = False
        except VerbFailed as failed:
            said += [str(failed), failed.details]
            refused = True
            if (failed.retryable and way is not receive) or str(canary) in str(failed):
                wrong[one.name] = f"{failed} ({failed.details})"
        if refused == one.opaque and not (refused and way in (receive, receive_its_disk)):
            wrong[one.name] = "was refused" if refused else "was taken"
        for server in rig.servers[before:]:
            if refused and names_of(rig, server):
                wrong[one.name] = f"left {names_of(rig, server)}"
            rig.driver.ensure_absent(server, 9)
    assert not wrong, "\n".join(f"{name}: {what}" for name, what in wrong.items())
    assert not any(SECRET.decode() in text for text in said)
    assert shown_in(rig.folder) == []


def names_of(rig: Rig, server: str) -> list[str]:
    folder = rig.folder / "instances" / server
    return names(folder) if folder.exists() else []


def shown_in(folder: Path) -> list[Path]:
    """Files below it that hold the canary."""
    return [path for path in folder.rglob("*") if path.is_file() and SECRET in path.read_bytes()]


#: What a guest writes at the beginning of its own disk.
WRITTEN = {
    "qcow2": lambda canary: standing_on(str(canary)),
    "vmdk": lambda canary: (
        (f'# Disk DescriptorFile\ncreateType="monolithicFlat"\nRW 2048 FLAT "{canary}" 0\n')
        .encode()
        .ljust(4096, b"\0")
    ),
}


@libvirt_rigs
@pytest.mark.parametrize("kind", WRITTEN)
def test_what_a_guest_writes_is_bytes_wherever_it_goes(
    rig: Rig, canary: Path, kind: str, tmp_path: Path
) -> None:
    """Snapshot, backup and shelve give it to the image service; resized it grows; it boots
    again."""
    spec = rig.boot(paused=True)
    rig.driver.ensure_stopped(spec.server, 1, 0, QUIET)
    (tmp_path / "written").write_bytes(WRITTEN[kind](canary)[: 64 << 10])
    subprocess.run(
        [
            "qemu-io",
            "-f",
            "qcow2",
            "-c",
            f"write -s {tmp_path}/written 0 4096",
            rig.folder / "instances" / spec.server / "disk",
        ],
        check=True,
        capture_output=True,
    )
    given: list[bytes] = []
    rig.driver.snapshot(spec.server, 2, given.extend, QUIET)
    copy = tmp_path / "copy"
    copy.write_bytes(b"".join(given))
    told = subprocess.run(
        ["qemu-img", "info", "-f", "qcow2", "--output=json", copy], check=True, capture_output=True
    )
    assert b"backing" not in told.stdout and SECRET not in copy.read_bytes()
    raw = tmp_path / "raw"
    subprocess.run(
        [
            "qemu-img",
            "dd",
            "-f",
            "qcow2",
            "-O",
            "raw",
            "bs=4096",
            "count=1",
            f"if={copy}",
            f"of={raw}",
        ],
        check=True,
    )
    assert raw.read_bytes() == WRITTEN[kind](canary)[:4096]
    larger = replace(spec, fence=3, flavor=replace(spec.flavor, root_gb=2))
    rig.driver.resize_here(larger, False, QUIET)
    one = Hostile("its snapshot", copy.read_bytes(), "qcow2")
    again = rig.spec(image=image_of(one))
    rig.driver.ensure_guest(again, reader(one.content), QUIET)
    assert shown_in(rig.folder) == []
