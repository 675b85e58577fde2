# SPDX-License-Identifier: Apache-2.0
"""Volumes that the host itself connects: files of NFS exports, with a fake mount program."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from common.domain.errors import ConfigError
from common.domain.models import AttachedVolume
from compute_agent.verb_context import VerbFailed
from compute_agent.virt.libvirt.volumes import connectors
from compute_agent.virt.libvirt.volumes.connector import Found
from compute_agent.virt.libvirt.volumes.connectors import Protocols
from compute_agent.virt.libvirt.volumes.host_connectors import NfsConnector, check_chain
from compute_agent.virt.mounts import Mounts
from tests.unit.compute_agent.test_qcow2 import extension, header
from tests.unit.compute_agent.test_volumes import GIBIBYTE, KEY

EXPORT = "192.0.2.9:/volumes"


class Exports:
    """An NFS connector whose mount program creates ``files`` (name -> bytes) in the folder."""

    def __init__(self, folder: Path) -> None:
        self.commands: list[Sequence[str]] = []
        self.files: dict[str, int] = {}
        self.connector = NfsConnector(folder, Mounts(run=self.mount, table=folder / "none"))
        folder.mkdir()
        (folder / "none").touch()

    def mount(self, command: Sequence[str]) -> None:
        self.commands.append(command)
        for name, size in self.files.items():
            with Path(command[-1], name).open("wb") as file:
                file.truncate(size)

    def host(self) -> connectors.Connectors:
        return connectors.Connectors({"nfs": self.connector})


@pytest.fixture
def exports(tmp_path: Path) -> Exports:
    return Exports(tmp_path / "mounts")


def volume(**changed: Any) -> AttachedVolume:
    data = {"export": EXPORT, "name": f"volume-{KEY}", "options": "-o vers=4", "format": "raw"}
    return AttachedVolume(KEY, "/dev/vdb", 1, {"driver_volume_type": "nfs", **data, **changed})


def test_nfs_volume_is_mounted_and_measured(exports: Exports) -> None:
    exports.files[f"volume-{KEY}"] = GIBIBYTE
    source = exports.host().source(volume())
    assert exports.host().connect(volume()) == Found(GIBIBYTE)
    assert (source.kind, os.path.getsize(source.path)) == ("file", GIBIBYTE)
    [command] = exports.commands
    assert list(command[:3]) == ["mount", "-t", "nfs"] and EXPORT in command
    assert "vers=4" not in str(command)
    exports.host().disconnect(volume())
    assert exports.commands == [command]


def test_nfs_volume_is_refused_when_missing_too_small_or_symlink(exports: Exports) -> None:
    with pytest.raises(VerbFailed, match="does not find volume"):
        exports.host().connect(volume())
    exports.files[f"volume-{KEY}"] = 7
    with pytest.raises(VerbFailed, match="is not that volume: it has 7 bytes"):
        exports.host().connect(volume())
    place = Path(exports.host().source(volume()).path)
    place.unlink()
    exports.files.clear()
    place.symlink_to("/etc/passwd")
    with pytest.raises(VerbFailed, match="does not find volume"):
        exports.host().connect(volume())


@pytest.mark.parametrize(
    "changed",
    [
        {"name": "volume-of-another"},
        {"name": f"../volume-{KEY}"},
        {"name": f"volume-{KEY}/x"},
        {"export": ""},
        {"format": "vmdk"},
    ],
)
def test_nfs_volume_with_invalid_name_export_or_format_is_refused(
    exports: Exports, changed: dict[str, Any]
) -> None:
    with pytest.raises(VerbFailed, match="cannot be used on this host"):
        exports.host().connect(volume(**changed))
    assert exports.commands == []


def image(name: str = "", form: str = "raw") -> bytes:
    """Return the beginning of a qcow2 file with this backing file and backing format."""
    about = extension(0xE2792ACA, form.encode()) if form else b""
    return header(name=name.encode(), extensions=about + bytes(8))


def test_qcow2_volume_has_virtual_size_of_its_header(tmp_path: Path) -> None:
    names = [f"volume-{KEY}", f"volume-{KEY}.1", f"volume-{KEY}.2"]
    (tmp_path / names[0]).write_bytes(b"whatever a guest wrote")
    (tmp_path / names[1]).write_bytes(image(names[0]))
    (tmp_path / names[2]).write_bytes(image(names[1], "qcow2"))
    assert check_chain(tmp_path / names[2], KEY) == GIBIBYTE
    (tmp_path / names[1]).write_bytes(image())
    assert check_chain(tmp_path / names[2], KEY) == GIBIBYTE


@pytest.mark.parametrize(
    ("below", "form"),
    [
        ("volume-of-another", "raw"),
        ("/etc/passwd", "raw"),
        (f"../volume-{KEY}", "raw"),
        (f"json:{{volume-{KEY}}}", "raw"),
        (f"volume-{KEY}", "vmdk"),
        (f"volume-{KEY}", ""),
        (f"volume-{KEY}.1", "qcow2"),
        (f"volume-{KEY}.link", "raw"),
        (f"volume-{KEY}.missing", "raw"),
    ],
)
def test_qcow2_volume_with_foreign_missing_or_bad_backing_file_is_refused(
    tmp_path: Path, below: str, form: str
) -> None:
    path = tmp_path / f"volume-{KEY}.1"
    path.write_bytes(image(below, form))
    (tmp_path / "volume-of-another").touch()
    (tmp_path / f"volume-{KEY}").touch()
    (tmp_path / f"volume-{KEY}.link").symlink_to("/etc/passwd")
    with pytest.raises((ValueError, OSError)):
        check_chain(path, KEY)


def test_nfs_volume_with_malformed_export_is_refused_unmounted(exports: Exports) -> None:
    for export in ("-o exec:/x", "/local", "h:/a b"):
        with pytest.raises(VerbFailed, match="export location"):
            exports.host().connect(volume(export=export))
    assert exports.commands == []


def test_volume_protocol_configured_for_both_qemu_and_host_is_refused() -> None:
    both = Protocols(by_qemu=["iscsi"], by_host=["iscsi"])
    with pytest.raises(ConfigError, match="both name iscsi; remove each protocol"):
        connectors.of_host(both, None, False, {"host": "h1"})
    table = connectors.of_host(Protocols(by_host=["nfs"]), None, False, {"host": "h1"}).table
    assert set(table) == {"nbd", "nfs"}
