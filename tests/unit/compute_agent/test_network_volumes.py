# SPDX-License-Identifier: Apache-2.0
"""Volumes that QEMU itself connects (iSCSI, RBD): accepted connection data, XML, command lines.

Targets are sockets with recorded answers.
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from common.domain.models import AttachedVolume
from compute_agent.verb_context import VerbFailed
from compute_agent.virt import volumes
from compute_agent.virt.libvirt.volumes import connectors, iscsi
from compute_agent.virt.libvirt.volumes.connector import Found
from compute_agent.virt.libvirt.xml import volume_xml
from tests.unit.compute_agent.test_volumes import GIBIBYTE, KEY, serve

SECRET = "6f1d8b0e-6f0e-4f0e-8e9a-0f3c5d7a9b11"
ISCSI: dict[str, Any] = {
    "target_portal": "192.0.2.9:3260",
    "target_iqn": f"iqn.2010-10.org.openstack:volume-{KEY}",
    "target_lun": 1,
    "auth_method": "CHAP",
    "auth_username": "someone",
    "auth_password": "s3cret",
}
RBD: dict[str, Any] = {
    "name": f"volumes/volume-{KEY}",
    "hosts": ["192.0.2.1", "[2001:db8::2]"],
    "ports": ["6789", "3300"],
    "auth_enabled": True,
    "auth_username": "cinder",
    "secret_uuid": SECRET,
}


class SecretStore:
    """A store of secrets in place of libvirt."""

    def __init__(self) -> None:
        self.values: dict[str, tuple[str, str]] = {}

    def keep(self, key: str, kind: str, value: str) -> None:
        self.values[key] = (kind, value)

    def drop(self, key: str) -> None:
        self.values.pop(key, None)

    def read(self, key: str) -> bytes:
        return {SECRET: b"\x00the key"}[key]


def volume(protocol: str, data: dict[str, Any]) -> AttachedVolume:
    return AttachedVolume(KEY, "/dev/vdb", 1, {"driver_volume_type": protocol, **data})


def host(secrets: SecretStore | None = None) -> connectors.Connectors:
    table = connectors.of_host(
        connectors.Protocols(by_qemu=["iscsi", "rbd"]), None, False, {"host": "H1 of\tus"}
    )
    return replace(table, secrets=secrets or SecretStore())


def read_source_xml(attached: AttachedVolume) -> dict[str, dict[str, str]]:
    """Return tag -> attributes of the volume's disk XML, of the first element of each tag."""
    disk = volume_xml.element(attached, host().source(attached), "vdb")
    elements: dict[str, dict[str, str]] = {}
    for element in ElementTree.fromstring(volume_xml.text(disk)).iter():
        elements.setdefault(element.tag, dict(element.attrib))
    return elements


def test_connect_volume_of_unconfigured_protocol_names_protocol() -> None:
    plain = connectors.of_host(connectors.Protocols(), None, False, {"host": "h1"})
    for protocol, data in (("iscsi", ISCSI), ("rbd", RBD)):
        with pytest.raises(VerbFailed, match=rf"served by {protocol}.*qemu_volume_protocols"):
            plain.connect(volume(protocol, data))
    for protocol in sorted(volumes.EVERY_PROTOCOL - {"iscsi", "rbd", "nbd", "local"}):
        with pytest.raises(VerbFailed, match=f"served by {protocol}"):
            host().connect(volume(protocol, {"x": 1}))


# --- iSCSI ---
def test_iscsi_volume_source_contains_no_password() -> None:
    attached = volume("iscsi", ISCSI)
    elements = read_source_xml(attached)
    assert elements["source"] == {"protocol": "iscsi", "name": f"{ISCSI['target_iqn']}/1"}
    assert elements["host"] == {"name": "192.0.2.9", "port": "3260"}
    assert elements["iqn"] == {"name": "iqn.2026-11.org.kilonova:h1-of-us"}
    assert (elements["auth"], elements["secret"]) == (
        {"username": "someone"},
        {"type": "iscsi", "uuid": KEY},
    )
    assert "s3cret" not in repr(host().source(attached)) and "auth" not in read_source_xml(
        volume("iscsi", {**ISCSI, "auth_method": None, "auth_username": None})
    )


@pytest.mark.parametrize(
    "changed",
    [
        {"target_portal": "192.0.2.9:0"},
        {"target_portal": "a b:1"},
        {"target_portal": ""},
        {"target_portal": "192.0.2.9:x"},
        {"target_iqn": "iqn.x'/><b>"},
        {"target_iqn": ""},
        {"target_lun": "1"},
        {"target_lun": -1},
        {"target_lun": 1 << 14},
        {"auth_username": 'a"b'},
        {"auth_password": ""},
        {"auth_method": "KRB5"},
    ],
)
def test_iscsi_volume_with_malformed_connection_is_refused(changed: dict[str, Any]) -> None:
    with pytest.raises(VerbFailed, match="cannot be used on this host"):
        host().source(volume("iscsi", ISCSI | changed))


@pytest.mark.parametrize(
    ("portal", "address"),
    [
        ("h:1", ("h", 1)),
        ("192.0.2.1", ("192.0.2.1", 3260)),
        ("[2001:db8::1]:3261,1", ("2001:db8::1", 3261)),
        ("[2001:db8::1]", ("2001:db8::1", 3260)),
    ],
)
def test_iscsi_portal_is_parsed_to_host_and_port(portal: str, address: tuple[str, int]) -> None:
    assert iscsi.address(portal) == address


def designator(kind: int, name: bytes, association: int = 0) -> bytes:
    return bytes([1, association << 4 | kind, 0, len(name)]) + name


@pytest.mark.parametrize(
    ("names", "serial"),
    [
        (b"", ""),
        (designator(3, bytes.fromhex("6001405abc")), "6001405abc"),
        (designator(3, bytes.fromhex("3000000100000001")), ""),
        (designator(2, b"\x01\x02") + designator(3, bytes.fromhex("3001")), "0102"),
        (designator(3, bytes.fromhex("5001"), association=1), ""),
        (designator(1, b"IET     00010001"), ""),
        (b"\x01\x03\x00\xff\x50", "50"),
    ],
)
def test_iscsi_serial_is_world_wide_name_of_unit(names: bytes, serial: str) -> None:
    assert iscsi.world_wide_name(names) == serial


def answer(opcode: int, flags: int, data: bytes = b"", **words: int) -> bytes:
    head = bytearray(48)
    head[0], head[1] = opcode, flags
    head[5:8] = len(data).to_bytes(3, "big")
    head[3], head[36], head[37] = (words.get(name, 0) for name in ("status", "kind", "detail"))
    return bytes(head) + data + b"\0" * (-len(data) % 4)


IN = (answer(0x23, 0x81), answer(0x23, 0x87))
SIZE = answer(0x25, 0x81, struct.pack(">QI20x", GIBIBYTE // 512 - 1, 512))
RESET = answer(0x21, 0x80, b"\x00\x12\x70\x00\x06" + bytes(13), status=2)
BUSY = answer(0x21, 0x80, b"\x00\x12\x70\x00\x02" + bytes(13), status=2)
NAMES = answer(0x25, 0x81, b"\x00\x83\x00\x0c" + designator(3, bytes.fromhex("6001405abc000000")))


def look(port: int) -> iscsi.Unit:
    return iscsi.look_at(iscsi.UnitAddress("127.0.0.1", port, "iqn.t", 1, "iqn.i"))


def test_iscsi_command_is_repeated_after_unit_reset() -> None:
    with serve(*IN, RESET, SIZE, NAMES, answer(0x26, 0x80)) as port:
        assert look(port) == iscsi.Unit(GIBIBYTE, "6001405abc000000")


def test_iscsi_login_follows_redirection_to_other_portal() -> None:
    with (
        serve(*IN, SIZE, BUSY, answer(0x26, 0x80)) as there,
        serve(
            answer(0x23, 0, f"TargetAddress=127.0.0.1:{there},1\0".encode(), kind=1, detail=1)
        ) as here,
    ):
        assert look(here) == iscsi.Unit(GIBIBYTE, "")


@pytest.mark.parametrize(
    ("answers", "reason"),
    [
        ((b"220 mail server, ready and willing to hear you.\r\n",), "does not find volume"),
        ((answer(0x23, 0, kind=2, detail=1),), "refuses this host"),
        ((answer(0x23, 0),) * iscsi.MAX_LOGIN_STEPS, "refuses this host"),
        ((answer(0x25, 0x81),), "does not find volume"),
        ((*IN, BUSY), "refuses this host"),
        ((*IN, *(RESET,) * iscsi.ATTEMPTS), "refuses this host"),
        ((*IN, answer(0x25, 0x80, bytes(64))), "does not find volume"),
        ((*IN, answer(0x3F, 0x80)), "does not find volume"),
        ((*IN, answer(0x25, 0x81, bytes(4))), "does not find volume"),
        ((answer(0x23, 0x81, b"")[:5] + b"\xff\xff\xff" + bytes(40),), "does not find volume"),
    ],
)
def test_connect_iscsi_volume_fails_after_unexpected_or_refusing_answer(
    answers: tuple[bytes, ...], reason: str
) -> None:
    secrets = SecretStore()
    with serve(*answers) as port, pytest.raises(VerbFailed, match=reason):
        plain = ISCSI | {"target_portal": f"127.0.0.1:{port}", "auth_username": None}
        host(secrets).connect(volume("iscsi", plain))
    assert secrets.values == {}


def test_connect_iscsi_volume_fails_when_challenge_lacks_identifier() -> None:
    with (
        serve(answer(0x23, 0, b"CHAP_A=5\0CHAP_C=0x00\0")) as port,
        pytest.raises(VerbFailed, match="does not find volume"),
    ):
        host().connect(volume("iscsi", ISCSI | {"target_portal": f"127.0.0.1:{port}"}))


def test_connect_iscsi_volume_fails_when_portal_is_closed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    with pytest.raises(VerbFailed, match="does not find volume"):
        host().connect(volume("iscsi", ISCSI | {"target_portal": f"127.0.0.1:{port}"}))


# --- RBD ---
def test_rbd_volume_source_lists_all_monitors() -> None:
    attached = volume("rbd", RBD)
    disk = volume_xml.element(attached, host().source(attached), "vdb")
    assert [dict(element.attrib) for element in disk.iterfind("source/host")] == [
        {"name": "192.0.2.1", "port": "6789"},
        {"name": "2001:db8::2", "port": "3300"},
    ]
    elements = read_source_xml(attached)
    assert elements["source"] == {"protocol": "rbd", "name": RBD["name"]}
    assert (elements["auth"], elements["secret"]) == (
        {"username": "cinder"},
        {"type": "ceph", "uuid": SECRET},
    )


@pytest.mark.parametrize(
    "changed",
    [
        {"name": "volumes/another"},
        {"name": KEY},
        {"name": f"volumes/volume-{KEY},x=y"},
        {"name": f"a/b/c/volume-{KEY}"},
        {"hosts": [], "ports": []},
        {"hosts": ["a,b"], "ports": ["1"]},
        {"hosts": ["h"], "ports": ["0"]},
        {"hosts": ["h"] * 17, "ports": ["1"] * 17},
        {"secret_uuid": None},
        {"auth_username": "a,b"},
    ],
)
def test_rbd_volume_with_malformed_connection_is_refused(changed: dict[str, Any]) -> None:
    with pytest.raises(VerbFailed, match="cannot be used on this host"):
        host().source(volume("rbd", RBD | changed))


@pytest.fixture
def fake_qemu_img(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Return a function that installs a fake qemu-img, which records arguments and key."""

    def install(ending: str) -> Path:
        path = tmp_path / "qemu-img"
        path.write_text(
            '#!/bin/sh\nprintf "%s\\n" "$@" > "$0.told"\n'
            'for one; do case $one in secret,*) cat "${one##*file=}" > "$0.key" ;; esac; done\n'
            f"{ending}\n"
        )
        path.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
        return path

    return install


def test_rbd_key_is_not_an_argument_of_qemu_img(fake_qemu_img: Callable[[str], Path]) -> None:
    path = fake_qemu_img(f"echo '{json.dumps({'virtual-size': GIBIBYTE})}'")
    assert host().connect(volume("rbd", RBD)) == Found(GIBIBYTE)
    arguments = path.with_name("qemu-img.told").read_text()
    assert path.with_name("qemu-img.key").read_bytes() == b"\x00the key"
    assert "the key" not in arguments
    assert arguments.splitlines()[-1] == (
        f"driver=raw,file.driver=rbd,file.pool=volumes,file.image=volume-{KEY},"
        "file.server.0.host=192.0.2.1,file.server.0.port=6789,"
        "file.server.1.host=2001:db8::2,file.server.1.port=3300,"
        "file.user=cinder,file.key-secret=key,file.auth-client-required.0=cephx"
    )


def test_connect_rbd_volume_fails_when_cluster_refuses_or_size_is_wrong(
    fake_qemu_img: Callable[[str], Path],
) -> None:
    fake_qemu_img("echo 'error connecting: Permission denied' >&2; exit 1")
    with pytest.raises(VerbFailed, match="does not find volume") as refused:
        host().connect(volume("rbd", RBD))
    assert "Permission denied" in refused.value.details
    fake_qemu_img(f"echo '{json.dumps({'virtual-size': 7})}'")
    with pytest.raises(VerbFailed, match="is not that volume: it has 7 bytes"):
        host().connect(volume("rbd", RBD))
