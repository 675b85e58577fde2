# SPDX-License-Identifier: Apache-2.0
"""Guests of libvirt that move over the real transfer service: where the base comes from, and what a
disk may say.

What every driver must do with guests that move is in test_virt_moves; here is what only files on
disks can get wrong.
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
def served(pair: Pair, spec: GuestSpec, **options: Any) -> Iterator[Peer]:
    """The guest's files as the source's agent gives them to another's."""
    service = pair.transfer_service(**options)
    yield client.peer(service.start(), spec.server, SECRET)
    service.close()


def home(pair: Pair, spec: GuestSpec) -> Path:
    return pair.destination.folder / "instances" / spec.server


def refusing(problem: Exception) -> Callable[[str], Iterator[bytes]]:
    """An image service that has not the image."""

    def read(image: str) -> Iterator[bytes]:
        raise problem
        yield b""

    return read


@of_libvirt
def test_guest_moves_when_nobody_but_its_host_has_its_image(pair: Pair) -> None:
    spec = replace(pair.off_with_canary(), flavor=LARGER)
    pair.source.driver.ensure_stopped(spec.server, 1, 0, QUIET)
    there, told = pair.destination.driver, []
    phases = Phases()
    with served(pair, spec) as peer:
        for problem in GONE:
            there.prepare(spec, peer, refusing(problem), QUIET)
            got = there.receive(
                spec,
                peer,
                refusing(problem),
                VerbContext(phases, lambda: False, report_migration=told.append),
            )
    assert got["bytes"] >= disk_bytes(pair, spec)
    assert told[-1]["disk_processed"] == told[-1]["disk_total"] and told[-1]["disk_remaining"] == 0
    assert "copying files 100 %" in phases
    assert pair.booted_there(spec) and disk_gb(pair.destination, spec.server) == 2
    assert [
        name for name in names(home(pair, spec)) if not name.startswith(("tty", "console"))
    ] == ["base", "config", "disk"]
    assert base(home(pair, spec)).samefile(next((pair.destination.folder / "images").iterdir()))


def disk_bytes(pair: Pair, spec: GuestSpec) -> int:
    return (pair.source.folder / "instances" / spec.server / "disk").stat().st_blocks * 512


@of_files
@pytest.mark.parametrize("problem", GONE, ids=["missing", "forbidden", "unavailable"])
def test_what_nobody_has_is_said_as_the_image_service_says_it(
    pair: Pair, problem: errors.Problem
) -> None:
    spec = pair.off_with_canary()
    base(pair.source.folder / "instances" / spec.server).unlink()
    expected = errors.Unavailable if isinstance(problem, errors.Unavailable) else VerbFailed
    with served(pair, spec) as peer, pytest.raises(expected, match=problem.text):
        pair.destination.driver.receive(spec, peer, refusing(problem), QUIET)


@of_files
def test_base_that_its_host_altered_is_no_base(pair: Pair) -> None:
    spec = pair.off_with_canary()
    base(pair.source.folder / "instances" / spec.server).write_bytes(b"imagf" * 1000)
    with served(pair, spec) as peer, pytest.raises(VerbFailed, match="checksum"):
        pair.destination.driver.receive(spec, peer, refusing(GONE[0]), QUIET)
    assert not (home(pair, spec) / "disk").exists()
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
def test_disk_that_names_what_is_not_the_servers_is_not_opened(
    pair: Pair, options: list[str]
) -> None:
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
    with served(pair, spec) as peer, pytest.raises(VerbFailed, match="may open"):
        pair.destination.driver.receive(spec, peer, pair.destination.read_image, QUIET)
    assert names(home(pair, spec)) == []
    with pytest.raises(VerbFailed, match="files"):
        pair.destination.driver.install(spec, True, QUIET)


@of_files
def test_what_a_killed_agent_left_is_gone_after_the_next_try(pair: Pair) -> None:
    spec = pair.off_with_canary()
    for name in (
        "disk.part",
        f"{base(pair.source.folder / 'instances' / spec.server).name}.part",
        "config.part",
    ):
        home(pair, spec).mkdir(exist_ok=True)
        (home(pair, spec) / name).write_bytes(b"half")
    with served(pair, spec) as peer:
        pair.destination.driver.receive(spec, peer, pair.destination.read_image, QUIET)
    assert names(home(pair, spec)) == ["base", "config", "disk"]
    (home(pair, spec) / "disk.part").write_bytes(b"half")
    pair.destination.driver.ensure_absent(spec.server, 3)
    assert pair.destination.files(spec.server) == []


#: An agent that receives, in a process of its own: node, state folder, address, secret, guest as
#: JSON.
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
def test_killed_agent_leaves_nothing_that_looks_whole(pair: Pair) -> None:
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
        disk = home(pair, spec) / "disk.part"
        await_true(
            lambda: agent.poll() is not None or (disk.exists() and disk.stat().st_blocks > 2048),
            30,
            lambda: "it receives nothing",
        )
        agent.kill()
    left = names(home(pair, spec))
    assert "disk.part" in left and "disk" not in left
    with pytest.raises(VerbFailed, match="files"):
        pair.destination.driver.install(spec, True, QUIET)
    service.close()
    with served(pair, spec) as peer:
        pair.destination.driver.receive(spec, peer, pair.destination.read_image, QUIET)
    assert names(home(pair, spec)) == ["base", "config", "disk"] and pair.booted_there(spec)


@of_files
def test_disk_of_a_guest_that_is_started_meanwhile_does_not_arrive(pair: Pair) -> None:
    spec = pair.off_with_canary()

    class Starting:
        """Starts the guest at its host while its disk is read."""

        def __init__(self, peer: Peer) -> None:
            self.parts, self._peer = peer.parts, peer

        def read(self, name: str) -> Iterator[tuple[int, bytes]]:
            for piece in self._peer.read(name):
                if name == "disk":
                    pair.source.driver.ensure_running(spec.server, 1, QUIET)
                yield piece

    with served(pair, spec, rate=1) as peer, pytest.raises(VerbFailed) as failed:
        (pair.source.folder / "instances" / spec.server / "disk").open("r+b").truncate(3 << 20)
        pair.destination.driver.receive(spec, Starting(peer), pair.destination.read_image, QUIET)
    assert "started" in failed.value.details
    assert names(home(pair, spec)) == []


@of_files
def test_agent_that_is_replaced_meanwhile_is_asked_for_the_rest(pair: Pair) -> None:
    spec = pair.off_with_canary()
    first = TransferService(pair.source.driver, "127.0.0.1", rate=1)
    address, again = first.start(), []
    peer = client.peer(address, spec.server, SECRET)

    def replace_agent() -> None:
        first.close()
        again.append(
            TransferService(pair.source.driver, "127.0.0.1", int(address.rpartition(":")[2]))
        )
        again[0].start()

    once = threading.Event()

    def measured(numbers: Any) -> None:
        if not once.is_set():
            once.set()
            replace_agent()

    pair.destination.driver.receive(
        spec,
        peer,
        pair.destination.read_image,
        VerbContext(lambda name: None, lambda: False, report_migration=measured),
    )
    assert once.is_set() and pair.booted_there(spec)
    again[0].close()


@pytest.mark.parametrize("pair", [QEMU_MOVES], indirect=True)
def test_libvirtd_that_dies_at_the_source_is_waited_for(pair: Pair, machines: Machines) -> None:
    spec = pair.off_with_canary()
    with served(pair, spec) as peer:
        kill_daemon(machines.home(machines.names[0]))
        pair.destination.driver.receive(spec, peer, pair.destination.read_image, QUIET)
    pair.destination.driver.install(spec, False, QUIET)
    assert pair.destination.state(spec.server) == (SHUTDOWN, 2)


@sharing_libvirt
def test_disk_that_runs_elsewhere_is_not_touched_on_shared_storage(sharing: Pair) -> None:
    spec = sharing.source.boot()
    there = sharing.destination.driver
    larger = replace(spec, fence=2, flavor=LARGER)
    with pytest.raises(VerbFailed):
        there.receive(larger, None, sharing.destination.read_image, QUIET)
    assert disk_gb(sharing.source, spec.server) == 1
    with pytest.raises(VerbFailed):
        there.install(larger, True, QUIET)
    assert sharing.source.state(spec.server) == (RUNNING, 1)
    assert sharing.destination.state(spec.server) in (None, (SHUTDOWN, 2))


@of_files
def test_copy_is_cancelled_within_seconds_whatever_the_other_host_does(pair: Pair) -> None:
    spec = pair.off_with_canary()
    cancelled = threading.Event()
    with served(pair, spec) as peer:
        peer.parts()
    threading.Timer(0.5, cancelled.set).start()
    began = time.monotonic()
    with pytest.raises(Cancelled):
        pair.destination.driver.receive(
            spec,
            peer,
            pair.destination.read_image,
            VerbContext(lambda name: None, cancelled.is_set),
        )
    assert time.monotonic() - began < 5
    assert not home(pair, spec).exists() or names(home(pair, spec)) == []
