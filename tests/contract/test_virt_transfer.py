# SPDX-License-Identifier: Apache-2.0
"""Cold migrations of libvirt's guests over the real transfer service.

The tests cover the source of the base image, and refused disks. For the requirements of every
driver see test_virt_moves.py. These tests are about faults of files on disks.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from common.domain import errors
from common.domain.models import GuestSpec
from common.domain.wire import to_wire
from compute_agent.transfer import client
from compute_agent.transfer.service import TransferService
from compute_agent.verb_context import Cancelled, Peer, VerbContext, VerbFailed
from compute_agent.virt.driver import RUNNING, SHUTDOWN
from tests.contract.conftest import QEMU_MOVES
from tests.contract.test_virt_driver import kill_daemon
from tests.contract.virt_pairs import LARGER, SECRET, Machines, Pair, disk_gb
from tests.contract.virt_rigs import QUIET, REPOSITORY
from tests.disks import base, names
from tests.phases import Phases
from tests.waiting import await_true

of_libvirt = pytest.mark.parametrize("pair", ["test", QEMU_MOVES], indirect=True)
of_files = pytest.mark.parametrize("pair", ["test"], indirect=True)
sharing_libvirt = pytest.mark.parametrize("sharing", [QEMU_MOVES], indirect=True)
GONE: list[errors.Problem] = [
    errors.NotFound("No such image."),
    errors.Forbidden("It was deactivated."),
    errors.Unavailable("The image service does not answer."),
]


@contextmanager
def serve_files(pair: Pair, spec: GuestSpec, **options: Any) -> Iterator[Peer]:
    """Serve the guest's files to another host, as the source's agent does."""
    service = pair.transfer_service(**options)
    yield client.peer(service.start(), spec.server, SECRET)
    service.close()


def instance_folder(pair: Pair, spec: GuestSpec) -> Path:
    return pair.destination.folder / "instances" / spec.server


def refuse_with(problem: Exception) -> Callable[[str], Iterator[bytes]]:
    """Return a reader of an image service without the image."""

    def read(image: str) -> Iterator[bytes]:
        raise problem
        yield b""

    return read


@of_libvirt
def test_receive_copies_base_image_from_source_when_image_is_unavailable(pair: Pair) -> None:
    spec = replace(pair.off_with_canary(), flavor=LARGER)
    pair.source.driver.ensure_stopped(spec.server, 1, 0, QUIET)
    destination, reports = pair.destination.driver, []
    phases = Phases()
    with serve_files(pair, spec) as peer:
        for problem in GONE:
            destination.prepare(spec, peer, refuse_with(problem), QUIET)
            totals = destination.receive(
                spec,
                peer,
                refuse_with(problem),
                VerbContext(phases, lambda: False, report_migration=reports.append),
            )
    assert totals["bytes"] >= disk_bytes(pair, spec)
    assert (
        reports[-1]["disk_processed"] == reports[-1]["disk_total"]
        and reports[-1]["disk_remaining"] == 0
    )
    assert "copying files 100 %" in phases
    assert pair.boot_at_destination(spec) and disk_gb(pair.destination, spec.server) == 2
    assert [
        name
        for name in names(instance_folder(pair, spec))
        if not name.startswith(("tty", "console"))
    ] == ["base", "config", "disk"]
    assert base(instance_folder(pair, spec)).samefile(
        next((pair.destination.folder / "images").iterdir())
    )


def disk_bytes(pair: Pair, spec: GuestSpec) -> int:
    return (pair.source.folder / "instances" / spec.server / "disk").stat().st_blocks * 512


@of_files
@pytest.mark.parametrize("problem", GONE, ids=["missing", "forbidden", "unavailable"])
def test_receive_without_base_and_image_fails_with_image_service_reason(
    pair: Pair, problem: errors.Problem
) -> None:
    spec = pair.off_with_canary()
    base(pair.source.folder / "instances" / spec.server).unlink()
    expected = errors.Unavailable if isinstance(problem, errors.Unavailable) else VerbFailed
    with serve_files(pair, spec) as peer, pytest.raises(expected, match=problem.text):
        pair.destination.driver.receive(spec, peer, refuse_with(problem), QUIET)


@of_files
def test_receive_refuses_base_image_with_wrong_checksum(pair: Pair) -> None:
    spec = pair.off_with_canary()
    base(pair.source.folder / "instances" / spec.server).write_bytes(b"imagf" * 1000)
    with serve_files(pair, spec) as peer, pytest.raises(VerbFailed, match="checksum"):
        pair.destination.driver.receive(spec, peer, refuse_with(GONE[0]), QUIET)
    assert not (instance_folder(pair, spec) / "disk").exists()
    assert list((pair.destination.folder / "images").iterdir()) == []


@of_files
@pytest.mark.parametrize(
    "options",
    [
        ["-b", "/etc/passwd", "-F", "raw"],
        ["-b", ""],
        ["-b", "/x/instances/00000000-0000-4000-8000-000000000000/base", "-F", "raw"],
    ],
)
def test_receive_refuses_disk_with_foreign_backing_file(pair: Pair, options: list[str]) -> None:
    spec = pair.off_with_canary()
    subprocess.run(
        [
            "qemu-img",
            "rebase",
            "-u",
            "-f",
            "qcow2",
            *options,
            pair.source.folder / "instances" / spec.server / "disk",
        ],
        check=True,
    )
    with serve_files(pair, spec) as peer, pytest.raises(VerbFailed, match="does not open"):
        pair.destination.driver.receive(spec, peer, pair.destination.read_image, QUIET)
    assert names(instance_folder(pair, spec)) == []
    with pytest.raises(VerbFailed, match="files"):
        pair.destination.driver.install(spec, True, QUIET)


@of_files
def test_receive_and_ensure_absent_remove_partial_files_of_killed_agent(pair: Pair) -> None:
    spec = pair.off_with_canary()
    for name in (
        "disk.part",
        f"{base(pair.source.folder / 'instances' / spec.server).name}.part",
        "config.part",
    ):
        instance_folder(pair, spec).mkdir(exist_ok=True)
        (instance_folder(pair, spec) / name).write_bytes(b"half")
    with serve_files(pair, spec) as peer:
        pair.destination.driver.receive(spec, peer, pair.destination.read_image, QUIET)
    assert names(instance_folder(pair, spec)) == ["base", "config", "disk"]
    (instance_folder(pair, spec) / "disk.part").write_bytes(b"half")
    pair.destination.driver.ensure_absent(spec.server, 3)
    assert pair.destination.files(spec.server) == []


#: An agent process that receives files. Arguments: libvirt URI, state folder, address, secret, and
#: the guest's spec as JSON.
RECEIVER = """
import json, sys
from common.domain.models import GuestSpec
from common.domain.wire import from_wire
from compute_agent.transfer import client
from compute_agent.verb_context import VerbContext
from compute_agent.virt.libvirt.driver import LibvirtDriver
uri, home, address, secret, told = sys.argv[1:]
spec = from_wire(GuestSpec, json.loads(told))
LibvirtDriver(uri, home, "test").receive(spec, client.peer(address, spec.server, secret),
                                         lambda image: iter([b"image" * 1000]), VerbContext(lambda name: None, lambda:
                                         False))
"""


@of_files
def test_agent_killed_during_receive_leaves_only_partial_disk(pair: Pair) -> None:
    spec = pair.off_with_canary()
    subprocess.run(
        [
            "qemu-io",
            "-f",
            "qcow2",
            "-c",
            "write -P 5 200M 16M",
            pair.source.folder / "instances" / spec.server / "disk",
        ],
        check=True,
        capture_output=True,
    )
    service = TransferService(pair.source.driver, "127.0.0.1", rate=4)
    command = [
        sys.executable,
        "-c",
        RECEIVER,
        "test:///default",
        pair.destination.folder,
        service.start(),
        SECRET,
        json.dumps(to_wire(spec)),
    ]
    with subprocess.Popen(command, cwd=REPOSITORY) as agent:
        disk = instance_folder(pair, spec) / "disk.part"
        await_true(
            lambda: agent.poll() is not None or (disk.exists() and disk.stat().st_blocks > 2048),
            30,
            lambda: "it receives nothing",
        )
        agent.kill()
    file_names = names(instance_folder(pair, spec))
    assert "disk.part" in file_names and "disk" not in file_names
    with pytest.raises(VerbFailed, match="files"):
        pair.destination.driver.install(spec, True, QUIET)
    service.close()
    with serve_files(pair, spec) as peer:
        pair.destination.driver.receive(spec, peer, pair.destination.read_image, QUIET)
    assert names(instance_folder(pair, spec)) == [
        "base",
        "config",
        "disk",
    ] and pair.boot_at_destination(spec)


@of_files
def test_receive_fails_when_guest_is_started_on_source(pair: Pair) -> None:
    spec = pair.off_with_canary()

    class StartingPeer:
        """A peer that starts the guest on the source while the disk is read."""

        def __init__(self, peer: Peer) -> None:
            self.parts, self._peer = peer.parts, peer

        def read(self, name: str) -> Iterator[tuple[int, bytes]]:
            for piece in self._peer.read(name):
                if name == "disk":
                    pair.source.driver.ensure_running(spec.server, 1, QUIET)
                yield piece

    with serve_files(pair, spec, rate=1) as peer, pytest.raises(VerbFailed) as failure:
        (pair.source.folder / "instances" / spec.server / "disk").open("r+b").truncate(3 << 20)
        pair.destination.driver.receive(
            spec, StartingPeer(peer), pair.destination.read_image, QUIET
        )
    assert "started" in failure.value.details
    assert names(instance_folder(pair, spec)) == []


@of_files
def test_receive_continues_after_restart_of_transfer_service(pair: Pair) -> None:
    spec = pair.off_with_canary()
    first = TransferService(pair.source.driver, "127.0.0.1", rate=1)
    address, new_services = first.start(), []
    peer = client.peer(address, spec.server, SECRET)

    def replace_agent() -> None:
        first.close()
        new_services.append(
            TransferService(pair.source.driver, "127.0.0.1", int(address.rpartition(":")[2]))
        )
        new_services[0].start()

    is_replaced = threading.Event()

    def replace_once(numbers: Any) -> None:
        if not is_replaced.is_set():
            is_replaced.set()
            replace_agent()

    pair.destination.driver.receive(
        spec,
        peer,
        pair.destination.read_image,
        VerbContext(lambda name: None, lambda: False, report_migration=replace_once),
    )
    assert is_replaced.is_set() and pair.boot_at_destination(spec)
    new_services[0].close()


@pytest.mark.parametrize("pair", [QEMU_MOVES], indirect=True)
def test_receive_continues_after_kill_of_libvirtd_on_source(pair: Pair, machines: Machines) -> None:
    spec = pair.off_with_canary()
    with serve_files(pair, spec) as peer:
        kill_daemon(machines.home(machines.names[0]))
        pair.destination.driver.receive(spec, peer, pair.destination.read_image, QUIET)
    pair.destination.driver.install(spec, False, QUIET)
    assert pair.destination.state(spec.server) == (SHUTDOWN, 2)


@sharing_libvirt
def test_receive_on_shared_storage_refuses_disk_of_running_guest(sharing: Pair) -> None:
    spec = sharing.source.boot()
    destination = sharing.destination.driver
    larger = replace(spec, fence=2, flavor=LARGER)
    with pytest.raises(VerbFailed):
        destination.receive(larger, None, sharing.destination.read_image, QUIET)
    assert disk_gb(sharing.source, spec.server) == 1
    with pytest.raises(VerbFailed):
        destination.install(larger, True, QUIET)
    assert sharing.source.state(spec.server) == (RUNNING, 1)
    assert sharing.destination.state(spec.server) in (None, (SHUTDOWN, 2))


@of_files
def test_receive_is_cancelled_in_seconds_when_source_does_not_answer(pair: Pair) -> None:
    spec = pair.off_with_canary()
    cancelled = threading.Event()
    with serve_files(pair, spec) as peer:
        peer.parts()
    threading.Timer(0.5, cancelled.set).start()
    start = time.monotonic()
    with pytest.raises(Cancelled):
        pair.destination.driver.receive(
            spec,
            peer,
            pair.destination.read_image,
            VerbContext(lambda name: None, cancelled.is_set),
        )
    assert time.monotonic() - start < 5
    assert not instance_folder(pair, spec).exists() or names(instance_folder(pair, spec)) == []
