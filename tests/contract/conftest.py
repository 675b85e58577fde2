# SPDX-License-Identifier: Apache-2.0
"""What contracts are tested on: databases of the newest version, and the hypervisors of virt
drivers.

Each hypervisor is a rig; QEMU gets a libvirtd of its own.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.store.engine import Store
from deploy.one_machine.machine import libvirtd
from deploy.one_machine.machine.abilities import FOR_GUESTS, FOR_HOSTS
from deploy.testing.servers import free_ports
from tests import standalone
from tests.contract import virt_rigs
from tests.contract.network_lab import lab, network_hosts
from tests.contract.virt_pairs import Machines, Pair, libvirt_test_pair, memory_pair
from tests.contract.virt_rigs import (
    Rig,
    guests_folder,
    tiny_image,
)
from tests.services import demand
from tests.standalone import Cloud
from tests.waiting import await_true

__all__ = ["lab", "network_hosts"]
#: On real guests a test runs in a slice, unless it has a mark of its own.
QEMU = pytest.param("qemu", marks=[pytest.mark.kvm_or_tcg, pytest.mark.slice("guests")])
QEMU_MOVES = pytest.param("qemu", marks=[pytest.mark.kvm_or_tcg, pytest.mark.slice("moves")])
NEEDED = ("libvirtd", "qemu-system-x86_64", "qemu-img", "syslinux", "mcopy")


@pytest.fixture
def store(upgraded_url: str) -> Iterator[Store]:
    """An empty store."""
    made = Store(upgraded_url)
    yield made
    made.close()


@pytest.fixture(scope="session")
def standalone_cloud(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cloud]:
    """The identity and the image service, and ports for the network and the volume service.

    All tests of this process share them, so a test makes its own users, projects and images.
    """
    with standalone.running(
        tmp_path_factory.mktemp("standalone"),
        with_image=True,
        network_port=free_ports(1),
        volume_port=free_ports(1),
    ) as cloud:
        yield cloud
    for log in (cloud.folder / "identity.log", cloud.folder / "image.log"):
        assert " 500 " not in log.read_text()
        assert cloud.service_password not in log.read_text()


@pytest.fixture(scope="module")
def bootable(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_image(tmp_path_factory.getbasetemp().parent)


@pytest.fixture(scope="module")
def private_libvirtd() -> Iterator[Path]:
    """A libvirtd for this module alone, because one of its tests kills it."""
    demand(*FOR_GUESTS, programs=NEEDED)
    folder = guests_folder("kn-virt-")
    libvirtd.start(folder)
    yield folder
    libvirtd.stop(folder)
    assert not libvirtd.is_running(folder)
    _leave_nothing(folder)


@pytest.fixture(scope="module")
def machines() -> Iterator[Machines]:
    """Two real hosts, for this module alone."""
    demand(*FOR_HOSTS, programs=NEEDED)
    folder = guests_folder("kn-")
    made = Machines(folder)
    yield made
    made.end()
    _leave_nothing(folder)


def _leave_nothing(folder: Path) -> None:
    def left() -> list[bytes]:
        told = map(_read, Path("/proc").glob("[0-9]*/cmdline"))
        return [command for command in told if str(folder).encode() in command]

    await_true(lambda: not left(), 10, lambda: f"processes were left: {left()}")
    shutil.rmtree(folder)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


@pytest.fixture(params=["memory", "test", QEMU])
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Rig]:
    yield from virt_rigs.of_kind(request, tmp_path)


def _made_pair(request: pytest.FixtureRequest, folder: Path, shared: bool) -> Iterator[Pair]:
    match request.param:
        case "memory":
            made = memory_pair(folder, shared)
        case "test":
            pytest.importorskip("libvirt")
            made = libvirt_test_pair(folder, shared)
        case _:
            made = request.getfixturevalue("machines").pair(
                request.getfixturevalue("bootable"), shared
            )
    yield made
    made.clean()


@pytest.fixture(params=["memory", "test", QEMU_MOVES])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pair]:
    """Two hosts with disks of their own."""
    yield from _made_pair(request, tmp_path, shared=False)


@pytest.fixture(params=["memory", "test", QEMU_MOVES])
def sharing(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pair]:
    """Two hosts with their disks on the same storage."""
    yield from _made_pair(request, tmp_path, shared=True)


@pytest.fixture(params=[False, True], ids=["local", "shared"])
def shared(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture(params=["memory", QEMU_MOVES])
def live(request: pytest.FixtureRequest, tmp_path: Path, shared: bool) -> Iterator[Pair]:
    """Two hosts of both kinds, between which guests can move while they run; libvirt's mock-up
    cannot do that."""
    yield from _made_pair(request, tmp_path, shared)
