# SPDX-License-Identifier: Apache-2.0
"""Volumes on a host: what the volume service may name, what an NBD server says, and that nothing of
either becomes markup or another file."""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from common.domain.models import AttachedVolume
from common.security.tls import Tls
from compute_agent.verb_context import VerbFailed
from compute_agent.virt.libvirt.volumes import connectors, nbd
from compute_agent.virt.libvirt.xml import volume_xml
from compute_agent.virt.libvirt.xml.volume_xml import VolumeSource

KEY = "5c2d3f64-1f3b-4a4e-9d3c-0b1f6a7d8e90"
GIBIBYTE = 1 << 30
TLS = Tls("cert", "key", "ca")


def volume(**data: Any) -> AttachedVolume:
    return AttachedVolume(KEY, "/dev/vdb", 1, {"driver_volume_type": "nbd", **data})


def local(path: Path | str, **changed: Any) -> AttachedVolume:
    connection = {"driver_volume_type": "local", "data": {"device_path": str(path)}}
    return replace(volume(), connection=connection, **changed)


def host(folder: Path | None = None, **options: Any) -> connectors.Connectors:
    given = {"tls": None, "plain_text": False, "about": {}} | options
    return connectors.of_host(connectors.Protocols([str(folder)] if folder else []), **given)


def made(folder: Path, size: int = GIBIBYTE, name: str = f"volume-{KEY}") -> Path:
    path = folder / name
    with path.open("wb") as file:
        file.truncate(size)
    return path


# --- files ---
def test_a_file_is_the_volume_it_names(tmp_path: Path) -> None:
    path = made(tmp_path)
    source = host(tmp_path).source(local(path))
    assert (source.kind, source.path) == ("file", str(path))
    assert host(tmp_path).connect(local(path)).size_bytes == GIBIBYTE
    assert host(tmp_path).connect(local(made(tmp_path, 3 * GIBIBYTE))).size_bytes == 3 * GIBIBYTE


def test_another_file_is_no_volume(tmp_path: Path) -> None:
    folder, beside = tmp_path / "volumes", tmp_path / "beside"
    for one in (folder, beside):
        one.mkdir()
    made(beside)
    (folder / "out").symlink_to(beside)
    for path in (
        beside / f"volume-{KEY}",
        folder / "out" / f"volume-{KEY}",
        f"{folder}/../beside/volume-{KEY}",
        made(folder, name="volume-of-another"),
        f"volumes/volume-{KEY}",
        f"{folder}/volume-{KEY}/../../beside/volume-{KEY}",
        "",
    ):
        with pytest.raises(VerbFailed, match="cannot be used on this host"):
            host(folder).connect(local(path))
    with pytest.raises(VerbFailed, match="served by local, and the host knows nbd"):
        host().source(local(made(folder)))


def test_what_is_no_file_or_too_small_is_refused(tmp_path: Path) -> None:
    with pytest.raises(VerbFailed, match="does not find volume"):
        host(tmp_path).connect(local(tmp_path / f"volume-{KEY}"))
    with pytest.raises(VerbFailed, match="is not that volume: it has 7 bytes"):
        host(tmp_path).connect(local(made(tmp_path, 7)))
    (tmp_path / f"link-{KEY}").symlink_to("/etc/passwd")
    os.mkfifo(tmp_path / f"pipe-{KEY}")
    (tmp_path / f"folder-{KEY}").mkdir()
    for name in ("link", "pipe", "folder"):
        with pytest.raises(VerbFailed, match="does not find volume"):
            host(tmp_path).connect(local(tmp_path / f"{name}-{KEY}"))


BURSTS = {
    "read_bytes_sec": 100,
    "read_bytes_sec_max": 400,
    "read_bytes_sec_max_length": 5,
    "write_bytes_sec": 100,
    "write_bytes_sec_max": 400,
    "total_iops_sec": "50",
    "total_iops_sec_max": "90",
    "size_iops_sec": "4096",
}


def test_bursts_and_block_sizes_of_volume_type_are_written(tmp_path: Path) -> None:
    connection = {
        "device_path": str(made(tmp_path)),
        "qos_specs": BURSTS | {"of_the_back_end": "gold"},
        "logical_block_size": "512",
        "physical_block_size": 4096,
    }
    given = volume(driver_volume_type="local", **connection)
    disk = volume_xml.element(given, host(tmp_path).source(given), "vdb")
    rates = {rate.tag: rate.text for rate in disk.iterfind("iotune/*")}
    assert rates == {name: str(number) for name, number in BURSTS.items()}
    sizes = disk.find("blockio")
    assert sizes is not None
    assert sizes.attrib == {"logical_block_size": "512", "physical_block_size": "4096"}


@pytest.mark.parametrize(
    ("connection", "name"),
    [
        ({"qos_specs": {"total_bytes_sec": 1, "read_bytes_sec": 1}}, "total_bytes_sec"),
        ({"qos_specs": {"read_iops_sec_max": 9}}, "read_iops_sec_max"),
        ({"qos_specs": {"read_iops_sec": 9, "read_iops_sec_max": 8}}, "read_iops_sec_max"),
        ({"qos_specs": {"total_bytes_sec": 1, "size_iops_sec": 9}}, "size_iops_sec"),
        (
            {"qos_specs": {"read_iops_sec": 9, "read_iops_sec_max_length": 8}},
            "read_iops_sec_max_length",
        ),
        ({"qos_specs": {"total_bytes_sec": "-1"}}, "total_bytes_sec"),
        ({"qos_specs": {"total_bytes_sec": 10**19}}, "total_bytes_sec"),
        ({"qos_specs": ["total_bytes_sec"]}, "qos_specs"),
        ({"logical_block_size": 513}, "logical_block_size"),
        ({"physical_block_size": "<b>"}, "physical_block_size"),
        ({"logical_block_size": 4096, "physical_block_size": 512}, "physical_block_size"),
    ],
)
def test_qos_that_hosts_cannot_carry_out_is_refused_by_name(
    tmp_path: Path, connection: dict[str, Any], name: str
) -> None:
    given = volume(driver_volume_type="local", device_path=str(made(tmp_path)), **connection)
    with pytest.raises(VerbFailed) as failed:
        host(tmp_path).source(given)
    assert name in str(failed.value) and given.volume_id in str(failed.value)


def test_rates_are_the_volume_types(tmp_path: Path) -> None:
    connection = {"device_path": str(made(tmp_path)), "qos_specs": {"read_iops_sec": "7", "x": 1}}
    given = replace(volume(), connection={"driver_volume_type": "local", **connection})
    assert host(tmp_path).source(given).limits == {"read_iops_sec": 7}
    given.connection["qos_specs"] = {"read_iops_sec": "<b>"}
    with pytest.raises(VerbFailed, match="read_iops_sec '<b>' is not a whole number"):
        host(tmp_path).source(given)


# --- exports ---
@pytest.mark.parametrize(
    "data",
    [
        {"host": "127.0.0.1", "port": 1, "export": "another"},
        {"host": "127.0.0.1", "port": 1, "export": f"{KEY}'/><b>"},
        {"host": "127.0.0.1", "port": "1", "export": KEY},
        {"host": "127.0.0.1", "port": 70000, "export": KEY},
        {"host": "a b", "port": 1, "export": KEY},
        {"host": "", "port": 1, "export": KEY},
        {"export": KEY},
    ],
)
def test_an_export_is_named_in_words(data: dict[str, Any]) -> None:
    with pytest.raises(VerbFailed, match="cannot be used on this host"):
        host().source(volume(**data))


def test_plain_text_and_tls_are_as_the_host_says() -> None:
    far, near = {"port": 1, "export": KEY, "host": "192.0.2.9"}, {"host": "127.0.0.1"}
    with pytest.raises(VerbFailed, match="would travel as plain text"):
        host(tls=TLS).source(volume(**far, tls=False))
    assert not host(plain_text=True).source(volume(**far)).tls
    assert not host().source(volume(**far | near)).tls
    with pytest.raises(VerbFailed, match="this host has no certificate"):
        host(plain_text=True).source(volume(**far, tls=True))
    assert host(tls=TLS).source(volume(**far, tls=True)).tls


@contextmanager
def served(*answers: bytes) -> Iterator[int]:
    """The port of a server that gives these answers, whatever it is asked."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            connection, _ = listening.accept()
            with connection, suppress(ConnectionError):  # whoever asked may have heard enough
                for answer in answers:
                    connection.sendall(answer)
                while connection.recv(4096):
                    pass

        thread = threading.Thread(target=serve)
        thread.start()
        yield listening.getsockname()[1]
        thread.join(10)


GREETING = nbd.MAGIC + nbd.OPTION_MAGIC + struct.pack(">H", nbd.FIXED_NEWSTYLE)


def reply(kind: int, data: bytes = b"", about: int = nbd.INFO) -> bytes:
    return struct.pack(">QIII", nbd.REPLY_MAGIC, about, kind, len(data)) + data


def test_an_export_has_the_size_that_its_server_says() -> None:
    size = struct.pack(">HQH", 0, GIBIBYTE, 1)
    other = struct.pack(">HI", 3, 1)
    with served(
        GREETING + reply(nbd.INFO_REPLY, other) + reply(nbd.INFO_REPLY, size) + reply(nbd.ACK)
    ) as port:
        given = volume(host="127.0.0.1", port=port, export=KEY)
        assert host().connect(given).size_bytes == GIBIBYTE
    with served(GREETING + reply(nbd.INFO_REPLY, size) + reply(nbd.ACK)) as port:
        given = replace(volume(host="127.0.0.1", port=port, export=KEY), size_gb=2)
        with pytest.raises(VerbFailed, match="is not that volume"):
            host().connect(given)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (GREETING + reply(1 << 31 | 6, b"no such export"), "is not served where"),
        (GREETING + reply(nbd.ACK), "is not served where"),
        (b"220 mail server, ready and willing", "does not answer this host"),
        (GREETING + reply(nbd.ACK, about=7), "does not answer this host"),
        (GREETING + struct.pack(">QIII", nbd.REPLY_MAGIC, 6, 3, 1 << 30), "does not answer"),
    ],
)
def test_a_server_that_says_something_else_is_refused(answer: bytes, said: str) -> None:
    with served(answer) as port, pytest.raises(VerbFailed, match=said):
        host().connect(volume(host="127.0.0.1", port=port, export=KEY))


def test_nobody_at_the_port_is_said() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    with pytest.raises(VerbFailed, match="does not answer this host"):
        host().connect(volume(host="127.0.0.1", port=port, export=KEY))


def test_a_server_without_tls_is_told_nothing() -> None:
    with (
        served(GREETING + reply(1 << 31 | 1, about=nbd.STARTTLS)) as port,
        pytest.raises(VerbFailed, match="speaks no TLS"),
    ):
        nbd.export_size("127.0.0.1", port, KEY, TLS)


# --- XML ---
HOSTILE = '\'/><source file="/etc/shadow"/>&lt;\x00'


def test_odd_characters_stay_text() -> None:
    source = VolumeSource("network", host=HOSTILE[:-1], port=1, export=HOSTILE[:-1])
    given = replace(volume(), volume_id=HOSTILE[:-1], device=HOSTILE, bus="virtio")
    text = volume_xml.text(volume_xml.element(given, source, "vdb"))
    disk = ElementTree.fromstring(text)
    assert [one.tag for one in disk.iter()] == [
        "disk",
        "driver",
        "source",
        "host",
        "target",
        "serial",
    ]
    assert disk.findtext("serial") == HOSTILE[:-1]


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("/dev/vdb", "vdb"),
        ("sdaa", "sdaa"),
        ("/dev/xvdc", "xvdc"),
        ("/dev/vd1", ""),
        ("/dev/../vdb", ""),
        ("", ""),
        ("vdb\n", ""),
        ("/dev/nvme0n1", ""),
    ],
)
def test_only_a_disks_name_is_taken_over(device: str, name: str) -> None:
    assert volume_xml.wanted_name(replace(volume(), device=device)) == name


def test_a_disk_goes_into_a_description_and_out_again() -> None:
    described = "<domain><devices><disk><target dev='vda'/></disk><input/></devices></domain>"
    source = VolumeSource("file", f"/v/{KEY}")
    disk = volume_xml.element(replace(volume(), bus="scsi"), source, "sda")
    once = volume_xml.with_disk(described, disk, "virtio-scsi")
    twice = volume_xml.with_disk(once, disk, "virtio-scsi")
    assert once == twice
    assert set(volume_xml.find_disks(once)) == {KEY}
    assert volume_xml.names(once, "") == {"vda", "sda"}
    assert volume_xml.has_scsi(once) and not volume_xml.has_scsi(described)
    assert volume_xml.find_disks(volume_xml.without(once, KEY)) == {}


def domain(*disks: tuple[str, str, str, str]) -> str:
    """A domain's description: name, bus, serial and slot of each disk."""
    root = ElementTree.Element("domain")
    devices = ElementTree.SubElement(root, "devices")
    for name, bus, serial, slot in disks:
        disk = ElementTree.SubElement(devices, "disk", device="disk")
        ElementTree.SubElement(disk, "target", dev=name, bus=bus)
        if serial:
            ElementTree.SubElement(disk, "serial").text = serial
        address = {"type": "pci", "bus": "0x00", "slot": slot} if slot else {"type": "drive"}
        ElementTree.SubElement(disk, "address", address)
    return ElementTree.tostring(root, encoding="unicode")


def places(described: str) -> dict[str, tuple[str, str | None]]:
    """Name and slot of each volume."""
    return {
        serial: (volume_xml.name_of(disk), None if place is None else place.get("slot"))
        for serial, disk in volume_xml.find_disks(described).items()
        for place in [disk.find("address")]
    }


@pytest.mark.parametrize(
    ("disks", "ordered"),
    [
        ([("vda", "virtio", "", "0x04"), ("vdc", "virtio", "b", "0x06")], {"b": ("vdb", "0x06")}),
        (
            # An interface took the slot of a detached volume, so the newer vdb is behind vdc.
            [
                ("vda", "virtio", "", "0x04"),
                ("vdc", "virtio", "b", "0x06"),
                ("vdb", "virtio", "c", "0x0a"),
            ],
            {"c": ("vdb", "0x06"), "b": ("vdc", "0x0a")},
        ),
        (
            # A new flavor brought a local disk.
            [
                ("vda", "virtio", "", "0x04"),
                ("vdb", "virtio", "", "0x07"),
                ("vdc", "virtio", "b", "0x05"),
            ],
            {"b": ("vdc", "0x07")},
        ),
        (
            [("vda", "virtio", "", "0x04"), ("sdc", "scsi", "s", ""), ("sdb", "scsi", "t", "")],
            {"t": ("sda", None), "s": ("sdb", None)},
        ),
    ],
)
def test_disks_of_guest_that_is_off_are_put_in_order_of_their_names(
    disks: list[tuple[str, str, str, str]], ordered: dict[str, tuple[str, str | None]]
) -> None:
    once = volume_xml.in_order(domain(*disks))
    assert places(once) == ordered
    assert volume_xml.in_order(once) == once


def test_disks_in_order_keep_the_description() -> None:
    described = domain(("vda", "virtio", "", "0x04"), ("vdb", "virtio", "b", "0x05"))
    assert volume_xml.in_order(described) is described
