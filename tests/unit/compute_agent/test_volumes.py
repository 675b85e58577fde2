# SPDX-License-Identifier: Apache-2.0
"""Local and NBD volumes on a host: accepted connection data, sizes, and disks in the domain's XML.

NBD servers are sockets with recorded answers.
"""

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
    arguments = {"tls": None, "plain_text": False, "about": {}} | options
    return connectors.of_host(connectors.Protocols([str(folder)] if folder else []), **arguments)


def create_file(folder: Path, size: int = GIBIBYTE, name: str = f"volume-{KEY}") -> Path:
    path = folder / name
    with path.open("wb") as file:
        file.truncate(size)
    return path


# --- files ---
def test_local_volume_has_size_of_its_file(tmp_path: Path) -> None:
    path = create_file(tmp_path)
    source = host(tmp_path).source(local(path))
    assert (source.kind, source.path) == ("file", str(path))
    assert host(tmp_path).connect(local(path)).size_bytes == GIBIBYTE
    assert (
        host(tmp_path).connect(local(create_file(tmp_path, 3 * GIBIBYTE))).size_bytes
        == 3 * GIBIBYTE
    )


def test_local_volume_outside_folder_or_of_other_id_is_refused(tmp_path: Path) -> None:
    folder, beside = tmp_path / "volumes", tmp_path / "beside"
    for path in (folder, beside):
        path.mkdir()
    create_file(beside)
    (folder / "out").symlink_to(beside)
    for path in (
        beside / f"volume-{KEY}",
        folder / "out" / f"volume-{KEY}",
        f"{folder}/../beside/volume-{KEY}",
        create_file(folder, name="volume-of-another"),
        f"volumes/volume-{KEY}",
        f"{folder}/volume-{KEY}/../../beside/volume-{KEY}",
        "",
    ):
        with pytest.raises(VerbFailed, match="cannot be used on this host"):
            host(folder).connect(local(path))
    with pytest.raises(VerbFailed, match="served by local. The host supports nbd"):
        host().source(local(create_file(folder)))


def test_local_volume_missing_too_small_or_not_a_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(VerbFailed, match="does not find volume"):
        host(tmp_path).connect(local(tmp_path / f"volume-{KEY}"))
    with pytest.raises(VerbFailed, match="is not that volume: it has 7 bytes"):
        host(tmp_path).connect(local(create_file(tmp_path, 7)))
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


def test_volume_xml_has_qos_burst_limits_and_block_sizes_of_connection(tmp_path: Path) -> None:
    connection = {
        "device_path": str(create_file(tmp_path)),
        "qos_specs": BURSTS | {"of_the_back_end": "gold"},
        "logical_block_size": "512",
        "physical_block_size": 4096,
    }
    attached = volume(driver_volume_type="local", **connection)
    disk = volume_xml.element(attached, host(tmp_path).source(attached), "vdb")
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
def test_volume_with_invalid_qos_or_block_size_is_refused_naming_field(
    tmp_path: Path, connection: dict[str, Any], name: str
) -> None:
    attached = volume(
        driver_volume_type="local", device_path=str(create_file(tmp_path)), **connection
    )
    with pytest.raises(VerbFailed) as failed:
        host(tmp_path).source(attached)
    assert name in str(failed.value) and attached.volume_id in str(failed.value)


def test_volume_limits_are_read_from_qos_specs(tmp_path: Path) -> None:
    connection = {
        "device_path": str(create_file(tmp_path)),
        "qos_specs": {"read_iops_sec": "7", "x": 1},
    }
    attached = replace(volume(), connection={"driver_volume_type": "local", **connection})
    assert host(tmp_path).source(attached).limits == {"read_iops_sec": 7}
    attached.connection["qos_specs"] = {"read_iops_sec": "<b>"}
    with pytest.raises(VerbFailed, match="read_iops_sec '<b>' is not a whole number"):
        host(tmp_path).source(attached)


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
def test_nbd_volume_with_malformed_connection_is_refused(data: dict[str, Any]) -> None:
    with pytest.raises(VerbFailed, match="cannot be used on this host"):
        host().source(volume(**data))


def test_nbd_volume_requires_tls_unless_local_or_plain_text_allowed() -> None:
    far, near = {"port": 1, "export": KEY, "host": "192.0.2.9"}, {"host": "127.0.0.1"}
    with pytest.raises(VerbFailed, match="would be transferred as plain text"):
        host(tls=TLS).source(volume(**far, tls=False))
    assert not host(plain_text=True).source(volume(**far)).tls
    assert not host().source(volume(**far | near)).tls
    with pytest.raises(VerbFailed, match="this host has no certificate"):
        host(plain_text=True).source(volume(**far, tls=True))
    assert host(tls=TLS).source(volume(**far, tls=True)).tls


@contextmanager
def serve(*answers: bytes) -> Iterator[int]:
    """Yield the port of a server that sends these answers to any request."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            connection, _ = listening.accept()
            with connection, suppress(ConnectionError):  # the client may close early
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


def test_nbd_volume_has_size_reported_by_server() -> None:
    size = struct.pack(">HQH", 0, GIBIBYTE, 1)
    other = struct.pack(">HI", 3, 1)
    with serve(
        GREETING + reply(nbd.INFO_REPLY, other) + reply(nbd.INFO_REPLY, size) + reply(nbd.ACK)
    ) as port:
        attached = volume(host="127.0.0.1", port=port, export=KEY)
        assert host().connect(attached).size_bytes == GIBIBYTE
    with serve(GREETING + reply(nbd.INFO_REPLY, size) + reply(nbd.ACK)) as port:
        attached = replace(volume(host="127.0.0.1", port=port, export=KEY), size_gb=2)
        with pytest.raises(VerbFailed, match="is not that volume"):
            host().connect(attached)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (GREETING + reply(1 << 31 | 6, b"no such export"), "does not serve volume"),
        (GREETING + reply(nbd.ACK), "does not serve volume"),
        (b"220 mail server, ready and willing", "does not answer this host"),
        (GREETING + reply(nbd.ACK, about=7), "does not answer this host"),
        (GREETING + struct.pack(">QIII", nbd.REPLY_MAGIC, 6, 3, 1 << 30), "does not answer"),
    ],
)
def test_nbd_server_with_unexpected_answer_is_refused(answer: bytes, message: str) -> None:
    with serve(answer) as port, pytest.raises(VerbFailed, match=message):
        host().connect(volume(host="127.0.0.1", port=port, export=KEY))


def test_connect_nbd_volume_fails_when_port_is_closed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    with pytest.raises(VerbFailed, match="does not answer this host"):
        host().connect(volume(host="127.0.0.1", port=port, export=KEY))


def test_nbd_server_without_tls_is_refused_when_tls_is_required() -> None:
    with (
        serve(GREETING + reply(1 << 31 | 1, about=nbd.STARTTLS)) as port,
        pytest.raises(VerbFailed, match="does not support TLS"),
    ):
        nbd.export_size("127.0.0.1", port, KEY, TLS)


# --- XML ---
HOSTILE = '\'/><source file="/etc/shadow"/>&lt;\x00'


def test_volume_xml_keeps_hostile_characters_as_text() -> None:
    source = VolumeSource("network", host=HOSTILE[:-1], port=1, export=HOSTILE[:-1])
    attached = replace(volume(), volume_id=HOSTILE[:-1], device=HOSTILE, bus="virtio")
    text = volume_xml.text(volume_xml.element(attached, source, "vdb"))
    disk = ElementTree.fromstring(text)
    assert [element.tag for element in disk.iter()] == [
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
def test_volume_device_name_is_used_only_when_valid(device: str, name: str) -> None:
    assert volume_xml.wanted_name(replace(volume(), device=device)) == name


def test_volume_disk_is_added_to_domain_xml_once_and_removed() -> None:
    description = "<domain><devices><disk><target dev='vda'/></disk><input/></devices></domain>"
    source = VolumeSource("file", f"/v/{KEY}")
    disk = volume_xml.element(replace(volume(), bus="scsi"), source, "sda")
    once = volume_xml.with_disk(description, disk, "virtio-scsi")
    twice = volume_xml.with_disk(once, disk, "virtio-scsi")
    assert once == twice
    assert set(volume_xml.find_disks(once)) == {KEY}
    assert volume_xml.names(once, "") == {"vda", "sda"}
    assert volume_xml.has_scsi(once) and not volume_xml.has_scsi(description)
    assert volume_xml.find_disks(volume_xml.without(once, KEY)) == {}


def build_domain_xml(*disks: tuple[str, str, str, str]) -> str:
    """Build domain XML from (name, bus, serial, slot) of each disk."""
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


def read_places(description: str) -> dict[str, tuple[str, str | None]]:
    """Return serial -> (name, slot) of each volume."""
    return {
        serial: (volume_xml.name_of(disk), None if place is None else place.get("slot"))
        for serial, disk in volume_xml.find_disks(description).items()
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
def test_volume_xml_in_order_sorts_device_names_and_slots_of_volumes(
    disks: list[tuple[str, str, str, str]], ordered: dict[str, tuple[str, str | None]]
) -> None:
    once = volume_xml.in_order(build_domain_xml(*disks))
    assert read_places(once) == ordered
    assert volume_xml.in_order(once) == once


def test_volume_xml_in_order_returns_sorted_description_unchanged() -> None:
    description = build_domain_xml(("vda", "virtio", "", "0x04"), ("vdb", "virtio", "b", "0x05"))
    assert volume_xml.in_order(description) is description
