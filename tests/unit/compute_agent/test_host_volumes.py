# SPDX-License-Identifier: Apache-2.0
"""Volumes that the host itself reaches: files of NFS exports, and what an operator may choose."""

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
    """What is mounted on a host, and what the file server has: ``files``, name -> bytes."""

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


def test_a_file_of_an_export_is_mounted_and_measured(exports: Exports) -> None:
    exports.files[f"volume-{KEY}"] = GIBIBYTE
    source = exports.host().source(volume())
    assert exports.host().connect(volume()) == Found(GIBIBYTE)
    assert (source.kind, os.path.getsize(source.path)) == ("file", GIBIBYTE)
    [command] = exports.commands
    assert list(command[:3]) == ["mount", "-t", "nfs"] and EXPORT in command
    assert "vers=4" not in str(command)
    exports.host().disconnect(volume())
    assert exports.commands == [command]


def test_a_file_that_is_not_there_or_too_small_is_refused(exports: Exports) -> None:
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
def test_a_file_is_named_in_words(exports: Exports, changed: dict[str, Any]) -> None:
    with pytest.raises(VerbFailed, match="cannot be used on this host"):
        exports.host().connect(volume(**changed))
    assert exports.commands == []


def image(name: str = "", form: str = "raw") -> bytes:
    """The beginning of a qcow2 file that is made upon a file of this name and format."""
    about = extension(0xE2792ACA, form.encode()) if form else b""
    return header(name=name.encode(), extensions=about + bytes(8))


def test_a_qcow2_volume_is_as_big_as_its_guest_sees_it(tmp_path: Path) -> None:
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
def test_what_a_header_names_is_a_file_of_the_volume(tmp_path: Path, below: str, form: str) -> None:
    path = tmp_path / f"volume-{KEY}.1"
    path.write_bytes(image(below, form))
    (tmp_path / "volume-of-another").touch()
    (tmp_path / f"volume-{KEY}").touch()
    (tmp_path / f"volume-{KEY}.link").symlink_to("/etc/passwd")
    with pytest.raises((ValueError, OSError)):
        check_chain(path, KEY)


def test_an_export_is_no_option_of_mount(exports: Exports) -> None:
    for export in ("-o exec:/x", "/local", "h:/a b"):
        with pytest.raises(VerbFailed, match="export location"):
            exports.host().connect(volume(export=export))
    assert exports.commands == []


def test_a_protocol_has_one_speaker() -> None:
    both = Protocols(by_qemu=["iscsi"], by_host=["iscsi"])
    with pytest.raises(ConfigError, match="both name iscsi; take one of them out"):
        connectors.of_host(both, None, False, {"host": "h1"})
    table = connectors.of_host(Protocols(by_host=["nfs"]), None, False, {"host": "h1"}).table
    assert set(table) == {"nbd", "nfs"}
