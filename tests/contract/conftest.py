# SPDX-License-Identifier: Apache-2.0
"""Shared fixtures: databases with the newest schema, embedded services, and hypervisors.

Each hypervisor is a rig. QEMU has a libvirtd of its own.
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
from tests.contract.tls_peers import authority, load, server_certificates
from tests.contract.virt_pairs import Machines, Pair, libvirt_test_pair, memory_pair
from tests.contract.virt_rigs import (
    Rig,
    guests_folder,
    tiny_image,
)
from tests.services import demand
from tests.standalone import Cloud
from tests.waiting import await_true

__all__ = ["authority", "lab", "load", "network_hosts", "server_certificates"]
#: Tests on real guests run in a slice, unless they have another mark.
QEMU = pytest.param("qemu", marks=[pytest.mark.kvm_or_tcg, pytest.mark.slice("guests")])
QEMU_MOVES = pytest.param("qemu", marks=[pytest.mark.kvm_or_tcg, pytest.mark.slice("moves")])
NEEDED = ("libvirtd", "qemu-system-x86_64", "qemu-img", "syslinux", "mcopy")


@pytest.fixture
def store(upgraded_url: str) -> Iterator[Store]:
    """Yield an empty store, on each database."""
    store = Store(upgraded_url)
    yield store
    store.close()


@pytest.fixture(scope="session")
def standalone_cloud(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cloud]:
    """Yield the embedded identity and image services, with ports for networks and volumes.

    All tests of this process share them, so each test creates separate users, projects and images.
    """
    with standalone.running(
        tmp_path_factory.mktemp("standalone"),
        with_image=True,
        network_port=free_ports(1),
        volume_port=free_ports(1),
    ) as cloud:
        yield cloud
    for log in (cloud.folder / "identity.log", cloud.folder / "image.log"):
        assert "status=500" not in log.read_text()
        assert cloud.service_password not in log.read_text()


@pytest.fixture(scope="module")
def bootable(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_image(tmp_path_factory.getbasetemp().parent)


@pytest.fixture(scope="module")
def private_libvirtd() -> Iterator[Path]:
    """Yield a libvirtd for this module only, because a test kills the daemon."""
    demand(*FOR_GUESTS, programs=NEEDED)
    folder = guests_folder("kn-virt-")
    libvirtd.start(folder)
    yield folder
    libvirtd.stop(folder)
    assert not libvirtd.is_running(folder)
    _remove_folder_of_guests(folder)


@pytest.fixture(scope="module")
def machines() -> Iterator[Machines]:
    """Two real hosts, for this module only."""
    demand(*FOR_HOSTS, programs=NEEDED)
    folder = guests_folder("kn-")
    machines = Machines(folder)
    yield machines
    machines.end()
    _remove_folder_of_guests(folder)


def _remove_folder_of_guests(folder: Path) -> None:
    def remaining() -> list[bytes]:
        commands = map(_read, Path("/proc").glob("[0-9]*/cmdline"))
        return [command for command in commands if str(folder).encode() in command]

    await_true(lambda: not remaining(), 10, lambda: f"processes were left: {remaining()}")
    shutil.rmtree(folder)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


@pytest.fixture(params=["memory", "test", QEMU])
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Rig]:
    yield from virt_rigs.of_kind(request, tmp_path)


def _open_pair(request: pytest.FixtureRequest, folder: Path, shared: bool) -> Iterator[Pair]:
    match request.param:
        case "memory":
            pair = memory_pair(folder, shared)
        case "test":
            pytest.importorskip("libvirt")
            pair = libvirt_test_pair(folder, shared)
        case _:
            pair = request.getfixturevalue("machines").pair(
                request.getfixturevalue("bootable"), shared
            )
    yield pair
    pair.clean()


@pytest.fixture(params=["memory", "test", QEMU_MOVES])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pair]:
    """Two hosts with separate storage for disks."""
    yield from _open_pair(request, tmp_path, shared=False)


@pytest.fixture(params=["memory", "test", QEMU_MOVES])
def sharing(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pair]:
    """Two hosts with the same storage for disks."""
    yield from _open_pair(request, tmp_path, shared=True)


@pytest.fixture(params=[False, True], ids=["local", "shared"])
def shared(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture(params=["memory", QEMU_MOVES])
def live(request: pytest.FixtureRequest, tmp_path: Path, shared: bool) -> Iterator[Pair]:
    """Two hosts, with separate and with shared disks, that support live migration.

    libvirt's test driver does not support live migration.
    """
    yield from _open_pair(request, tmp_path, shared)
