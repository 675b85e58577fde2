# SPDX-License-Identifier: Apache-2.0
"""Packets that another host's libvirtd sends in a migration, an expected guest, a fake libvirtd."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from compute_agent.virt.interfaces import Plug
from compute_agent.virt.libvirt.migration.incoming import filter as filters
from compute_agent.virt.libvirt.migration.incoming import rpc
from compute_agent.virt.libvirt.migration.incoming.records import Arrival
from compute_agent.virt.libvirt.migration.incoming.rpc import REMOTE, Packet
from compute_agent.virt.libvirt.xml.domain_xml import Disk, Domain, domain_xml

SERVER, OTHER_SERVER = (
    "7a1f5c8e-3c55-4a0b-9e0a-3f1f4c1f6f10",
    "0b6f5c8e-3c55-4a0b-9e0a-3f1f4c1f6f10",
)
SOURCE, OTHER_HOST, HERE = "192.0.2.1", "192.0.2.9", "192.0.2.2"
PLUG = Plug("p1", "fa:16:3e:00:00:01", "br-a", "tap1")
#: Flags of an encrypted migration with a disk.
FLAGS = 1 | 2 | 8 | 16 | 1 << 7 | 1 << 16
COOKIE = (
    f"<qemu-migration><name>instance-{SERVER}</name><uuid>{SERVER}</uuid><hostname>h1</hostname>"
    "<hostuuid>d625b19a-465b-427c-b2fa-58b879a3d203</hostuuid><feature name='lockstate'/>"
    "<nbd><disk target='vda' capacity='1073741824'/></nbd>"
    "<cpu mode='custom' match='exact'><model fallback='forbid'>qemu64</model></cpu>"
    "<capabilities><cap name='xbzrle' auto='no'/></capabilities></qemu-migration>"
)


def describe_domain(folder: str, server: str = SERVER, **changed: Any) -> str:
    home = Path(folder)
    return domain_xml(
        Domain(
            server,
            5,
            "web",
            1,
            128,
            "qemu",
            Disk(home / "disk", home / "base"),
            home / "console.log",
            **{"interfaces": (PLUG,), **changed},
        )
    )


def new_arrival(**changed: Any) -> Arrival:
    return Arrival(
        **{
            "server": SERVER,
            "fence": 5,
            "source": SOURCE,
            "xml": describe_domain("/here"),
            "address": HERE,
            "shared": False,
            "encrypted": True,
            "until": time.time() + 60,
            **changed,
        }
    )


def describe_running_domain(server: str = SERVER) -> ElementTree.Element:
    """Return the source's description of the running guest, with machine and addresses."""
    root = ElementTree.fromstring(describe_domain("/here", server))
    root.find("os/type").set("machine", "pc-i440fx-7.2")  # type: ignore[union-attr]
    root.find("devices/serial/source").set("path", "/here/tty2")  # type: ignore[union-attr]
    mark = root.find("metadata")[0]  # type: ignore[index]
    mark.attrib.update(fence="4", started="1795402416", moving="5", resumes="1")
    devices = root.find("devices")
    assert devices is not None
    address = {"type": "pci", "domain": "0x0000", "bus": "0x00", "slot": "0x04", "function": "0x0"}
    ElementTree.SubElement(devices.findall("disk")[0], "address", address)
    ElementTree.SubElement(devices.findall("interface")[0], "address", {**address, "slot": "0x09"})
    added = ElementTree.SubElement(devices, "controller", type="virtio-serial", index="0")
    ElementTree.SubElement(added, "address", {**address, "slot": "0x03"})
    return root


def serialize(root: ElementTree.Element) -> bytes:
    return ElementTree.tostring(root)


def new_call(procedure: int, body: bytes = b"", **more: Any) -> bytes:
    return Packet(
        **{"program": REMOTE, "procedure": procedure, "serial": 7, "body": body, **more}
    ).to_bytes()


def encode_params(*pairs: tuple[str, str | bytes]) -> bytes:
    return rpc.strings(
        [(name, value if isinstance(value, str) else value.decode()) for name, value in pairs]
    )


def new_open_call(name: str = "qemu:///system", flags: int = 0) -> bytes:
    return new_call(filters.OPEN, rpc.number(1) + rpc.opaque(name.encode()) + rpc.number(flags))


def new_prepare_call(
    domain: bytes | None = None,
    *more: tuple[str, str | bytes],
    flags: int = FLAGS,
    cookie: str = COOKIE,
) -> bytes:
    sent = encode_params(
        ("destination_xml", domain or serialize(describe_running_domain())),
        ("migrate_uri", "tcp://192.0.2.2"),
        ("migrate_disks", "vda"),
        *more,
    )
    return new_call(filters.PREPARE, sent + rpc.opaque(cookie.encode() + b"\0") + rpc.number(flags))


def new_finish_call(cookie: str = COOKIE, flags: int = FLAGS, cancelled: int = 0) -> bytes:
    sent = encode_params(
        ("destination_xml", serialize(describe_running_domain())),
        ("destination_name", "instance-another"),
    )
    return new_call(
        filters.FINISH,
        sent + rpc.opaque(cookie.encode() + b"\0") + rpc.number(flags) + rpc.number(cancelled),
    )


class LocalLibvirt:
    """A fake local libvirtd: records packets, and answers each call with ``answer``."""

    def __init__(self, path: Path) -> None:
        self.packets: list[Packet] = []
        self.answer = b"answered"
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(str(path))
        self._server.listen()
        self.ended = threading.Event()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._server.accept()
                threading.Thread(target=self._answer_calls, args=(connection,), daemon=True).start()

    def _answer_calls(self, connection: socket.socket) -> None:
        with connection, connection.makefile("rb") as data, contextlib.suppress(OSError):
            while prefix := data.read(4):
                packet = Packet.read(prefix + data.read(int.from_bytes(prefix, "big") - 4))
                self.packets.append(packet)
                connection.sendall(packet.reply(self.answer).to_bytes())
        self.ended.set()

    def close(self) -> None:
        self._server.close()
