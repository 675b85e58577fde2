# SPDX-License-Identifier: Apache-2.0
"""The hypervisors that the contract of virt drivers is tested on, each as a rig; QEMU gets a libvirtd of its own."""
from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy import libvirtd
from tests.contract.network_lab import lab, network_hosts
from tests.contract.virt_rigs import Rig, libvirt_test_rig, memory_rig, qemu_rig, tiny_image

__all__ = ["lab", "network_hosts"]
NEEDED = ("libvirtd", "qemu-system-x86_64", "qemu-img", "syslinux", "mcopy")


@pytest.fixture(scope="module")
def bootable(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_image(tmp_path_factory.getbasetemp().parent)


@pytest.fixture(scope="module")
def private_libvirtd() -> Iterator[Path]:
    """A libvirtd for this module alone, because one of its tests kills it."""
    missing = [tool for tool in NEEDED if shutil.which(tool, path=f"{os.environ['PATH']}:/usr/sbin") is None]
    if missing and os.environ.get("KILONOVA_TEST"):
        pytest.fail(f"not installed: {', '.join(missing)}")
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}; run: ./deploy/test contract")
    folder = Path(tempfile.mkdtemp(prefix="kn-virt-"))
    libvirtd.start(folder)
    yield folder
    libvirtd.stop(folder)
    assert not libvirtd.is_running(folder)
    assert [path for path in Path("/proc").glob("[0-9]*/cmdline") if str(folder).encode() in _read(path)] == []
    shutil.rmtree(folder)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


@pytest.fixture(params=["memory", "test", pytest.param("qemu", marks=pytest.mark.kvm_or_tcg)])
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Rig]:
    match request.param:
        case "memory":
            made = memory_rig(tmp_path)
        case "test":
            pytest.importorskip("libvirt")
            made = libvirt_test_rig(tmp_path)
        case _:
            folder = request.getfixturevalue("private_libvirtd")
            short = Path(tempfile.mkdtemp(prefix="kn-", dir=folder))    # the paths of sockets are
            made = qemu_rig(short, libvirtd.uri(folder), request.getfixturevalue("bootable"))
    yield made
    made.clean()
