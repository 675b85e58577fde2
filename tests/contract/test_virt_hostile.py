# SPDX-License-Identifier: Apache-2.0
"""Hostile images on every path by which foreign data reach a host and leave the host again.

Each image is refused with a reason and leaves no files, or is treated as plain data. The images
refer to a canary file of the host. The canary must not appear in a file that the host creates, nor
in messages or uploads.
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
    """A host that sends arbitrary files as disk, config drive and base image."""

    def __init__(self, base: str, content: bytes, disk: bytes) -> None:
        self._files = {"config": b"config", "disk": disk, **({base: content} if base else {})}

    def parts(self) -> list[Part]:
        return [Part(name, len(content), len(content)) for name, content in self._files.items()]

    def read(self, name: str) -> Iterator[tuple[int, bytes]]:
        content = self._files[name]
        return ((at, content[at : at + (1 << 20)]) for at in range(0, len(content), 1 << 20))


def build_image_ref(hostile: Hostile) -> ImageRef:
    return ImageRef(
        str(uuid.uuid4()),
        hostile.declared,
        len(hostile.content),
        "sha512",
        hashlib.sha512(hostile.content).hexdigest(),
    )


def create_reader(content: bytes) -> Callable[[str], Iterator[bytes]]:
    return lambda image: (content[at : at + 4096] for at in range(0, len(content), 4096))


EntryPath = Callable[[Rig, Driver, Hostile, GuestSpec], object]


def boot(rig: Rig, driver: Driver, hostile: Hostile, spec: GuestSpec) -> object:
    """Create a new server, or unshelve one. Both use this verb."""
    return driver.ensure_guest(
        rig.spec(image=build_image_ref(hostile)), create_reader(hostile.content), QUIET
    )


def prefetch(rig: Rig, driver: Driver, hostile: Hostile, spec: GuestSpec) -> object:
    driver.ensure_image(build_image_ref(hostile), create_reader(hostile.content), QUIET)
    # The flavor is not known at the fetch, so images of any size may be fetched.
    return boot(rig, driver, hostile, spec)


def rebuild(rig: Rig, driver: Driver, hostile: Hostile, spec: GuestSpec) -> object:
    return driver.rebuild(
        replace(spec, fence=spec.fence + 1, image=build_image_ref(hostile)),
        create_reader(hostile.content),
        True,
        QUIET,
    )


def rescue(rig: Rig, driver: Driver, hostile: Hostile, spec: GuestSpec) -> object:
    state = driver.rescue(
        replace(spec, fence=spec.fence + 1),
        build_image_ref(hostile),
        create_reader(hostile.content),
        QUIET,
    )
    driver.unrescue(replace(spec, fence=spec.fence + 2), QUIET)
    return state


def create_peer(hostile: Hostile) -> Peer:
    name = f"base.sha512-{hashlib.sha512(hostile.content).hexdigest()}.{hostile.declared}"
    return Peer(name, hostile.content, b"")


def prepare(rig: Rig, driver: Driver, hostile: Hostile, spec: GuestSpec) -> object:
    """Prepare for a resize or cold migration. The other host sends the base image."""
    return driver.prepare(rig.spec(image=None), create_peer(hostile), create_reader(b""), QUIET)


def prepare_with_image(rig: Rig, driver: Driver, hostile: Hostile, spec: GuestSpec) -> object:
    return driver.prepare(
        rig.spec(image=build_image_ref(hostile)),
        create_peer(hostile),
        create_reader(hostile.content),
        QUIET,
    )


def receive(rig: Rig, driver: Driver, hostile: Hostile, spec: GuestSpec) -> object:
    return driver.receive(rig.spec(image=None), create_peer(hostile), create_reader(b""), QUIET)


def receive_disk(rig: Rig, driver: Driver, hostile: Hostile, spec: GuestSpec) -> object:
    """Receive the server's own disk.

    This disk has no backing file and is always qcow2, even if another format is declared.
    """
    return driver.receive(
        rig.spec(image=None), Peer("", b"", hostile.content), create_reader(b""), QUIET
    )


ENTRY_PATHS: list[EntryPath] = [
    boot,
    prefetch,
    rebuild,
    rescue,
    prepare,
    prepare_with_image,
    receive,
    receive_disk,
]


#: Combinations without harm. The source decides the size of a server's own disk, and a file that is
#: no base image is not fetched.
NOT_HOSTILE = {
    (receive_disk, "4 TiB with all its tables"),
    (prepare, "vmdk, as what it is"),
    (prepare_with_image, "vmdk, as what it is"),
}


@pytest.mark.parametrize(
    ("rig", "path"),
    [
        *(("test", path) for path in ENTRY_PATHS),
        *(
            pytest.param("qemu", path, marks=pytest.mark.kvm_or_tcg)
            for path in (boot, rebuild, rescue)
        ),
    ],
    indirect=["rig"],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_hostile_image_on_every_path_is_refused_or_data_and_leaks_nothing(
    rig: Rig, canary: Path, path: EntryPath
) -> None:
    spec, problems = rig.boot(paused=True), {}
    messages: list[str] = []
    for hostile in corpus(canary):
        if (path, hostile.name) in NOT_HOSTILE:
            continue
        before, spec = len(rig.servers), replace(spec, fence=spec.fence + 3)
        try:
            path(rig, rig.driver, hostile, spec)
            refused = False
        except VerbFailed as failure:
            messages += [str(failure), failure.details]
            refused = True
            if (failure.retryable and path is not receive) or str(canary) in str(failure):
                problems[hostile.name] = f"{failure} ({failure.details})"
        if refused == hostile.opaque and not (refused and path in (receive, receive_disk)):
            problems[hostile.name] = "was refused" if refused else "was taken"
        for server in rig.servers[before:]:
            if refused and list_files(rig, server):
                problems[hostile.name] = f"left {list_files(rig, server)}"
            rig.driver.ensure_absent(server, 9)
    assert not problems, "\n".join(f"{name}: {problem}" for name, problem in problems.items())
    assert not any(SECRET.decode() in text for text in messages)
    assert files_with_canary(rig.folder) == []


def list_files(rig: Rig, server: str) -> list[str]:
    folder = rig.folder / "instances" / server
    return names(folder) if folder.exists() else []


def files_with_canary(folder: Path) -> list[Path]:
    """Return the files below this folder that contain the canary."""
    return [path for path in folder.rglob("*") if path.is_file() and SECRET in path.read_bytes()]


#: Image headers that a guest writes at the start of its own disk.
GUEST_WRITES = {
    "qcow2": lambda canary: standing_on(str(canary)),
    "vmdk": lambda canary: (
        (f'# Disk DescriptorFile\ncreateType="monolithicFlat"\nRW 2048 FLAT "{canary}" 0\n')
        .encode()
        .ljust(4096, b"\0")
    ),
}


@libvirt_rigs
@pytest.mark.parametrize("kind", GUEST_WRITES)
def test_image_header_written_by_guest_is_treated_as_data(
    rig: Rig, canary: Path, kind: str, tmp_path: Path
) -> None:
    """The disk is uploaded by a snapshot, grows in a resize, and a server boots from the snapshot.

    Backups and shelve use the same upload.
    """
    spec = rig.boot(paused=True)
    rig.driver.ensure_stopped(spec.server, 1, 0, QUIET)
    (tmp_path / "written").write_bytes(GUEST_WRITES[kind](canary)[: 64 << 10])
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
    chunks: list[bytes] = []
    rig.driver.snapshot(spec.server, 2, chunks.extend, QUIET)
    copy = tmp_path / "copy"
    copy.write_bytes(b"".join(chunks))
    process = subprocess.run(
        ["qemu-img", "info", "-f", "qcow2", "--output=json", copy], check=True, capture_output=True
    )
    assert b"backing" not in process.stdout and SECRET not in copy.read_bytes()
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
    assert raw.read_bytes() == GUEST_WRITES[kind](canary)[:4096]
    larger = replace(spec, fence=3, flavor=replace(spec.flavor, root_gb=2))
    rig.driver.resize_here(larger, False, QUIET)
    hostile = Hostile("its snapshot", copy.read_bytes(), "qcow2")
    snapshot_spec = rig.spec(image=build_image_ref(hostile))
    rig.driver.ensure_guest(snapshot_spec, create_reader(hostile.content), QUIET)
    assert files_with_canary(rig.folder) == []
