# SPDX-License-Identifier: Apache-2.0
"""What the libvirtd of another host says in a migration, made here; an expected guest; a libvirtd
that writes down."""

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

SERVER, ANOTHER = "7a1f5c8e-3c55-4a0b-9e0a-3f1f4c1f6f10", "0b6f5c8e-3c55-4a0b-9e0a-3f1f4c1f6f10"
SOURCE, OTHER_HOST, HERE = "192.0.2.1", "192.0.2.9", "192.0.2.2"
PLUG = Plug("p1", "fa:16:3e:00:00:01", "br-a", "tap1")
#: Of a migration with its disk, with a certificate.
FLAGS = 1 | 2 | 8 | 16 | 1 << 7 | 1 << 16
COOKIE = (
    f"<qemu-migration><name>instance-{SERVER}</name><uuid>{SERVER}</uuid><hostname>h1</hostname>"
    "<hostuuid>d625b19a-465b-427c-b2fa-58b879a3d203</hostuuid><feature name='lockstate'/>"
    "<nbd><disk target='vda' capacity='1073741824'/></nbd>"
    "<cpu mode='custom' match='exact'><model fallback='forbid'>qemu64</model></cpu>"
    "<capabilities><cap name='xbzrle' auto='no'/></capabilities></qemu-migration>"
)


def described(folder: str, server: str = SERVER, **changed: Any) -> str:
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


def arrival(**changed: Any) -> Arrival:
    return Arrival(
        **{
            "server": SERVER,
            "fence": 5,
            "source": SOURCE,
            "xml": described("/here"),
            "address": HERE,
            "shared": False,
            "encrypted": True,
            "until": time.time() + 60,
            **changed,
        }
    )


def running(server: str = SERVER) -> ElementTree.Element:
    """As the other libvirtd describes it: with its own machine, addresses and controllers."""
    root = ElementTree.fromstring(described("/here", server))
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


def text(root: ElementTree.Element) -> bytes:
    return ElementTree.tostring(root)


def call(procedure: int, body: bytes = b"", **more: Any) -> bytes:
    return Packet(
        **{"program": REMOTE, "procedure": procedure, "serial": 7, "body": body, **more}
    ).to_bytes()


def params(*found: tuple[str, str | bytes]) -> bytes:
    return rpc.strings(
        [(name, value if isinstance(value, str) else value.decode()) for name, value in found]
    )


def opening(name: str = "qemu:///system", flags: int = 0) -> bytes:
    return call(filters.OPEN, rpc.number(1) + rpc.opaque(name.encode()) + rpc.number(flags))


def preparing(
    domain: bytes | None = None,
    *more: tuple[str, str | bytes],
    flags: int = FLAGS,
    cookie: str = COOKIE,
) -> bytes:
    sent = params(
        ("destination_xml", domain or text(running())),
        ("migrate_uri", "tcp://192.0.2.2"),
        ("migrate_disks", "vda"),
        *more,
    )
    return call(filters.PREPARE, sent + rpc.opaque(cookie.encode() + b"\0") + rpc.number(flags))


def finishing(cookie: str = COOKIE, flags: int = FLAGS, cancelled: int = 0) -> bytes:
    sent = params(("destination_xml", text(running())), ("destination_name", "instance-another"))
    return call(
        filters.FINISH,
        sent + rpc.opaque(cookie.encode() + b"\0") + rpc.number(flags) + rpc.number(cancelled),
    )


class Local:
    """In place of the local libvirtd: keeps what it is told, and answers each call with
    ``answer``."""

    def __init__(self, path: Path) -> None:
        self.heard: list[Packet] = []
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
                threading.Thread(target=self._hear, args=(connection,), daemon=True).start()

    def _hear(self, connection: socket.socket) -> None:
        with connection, connection.makefile("rb") as data, contextlib.suppress(OSError):
            while begun := data.read(4):
                packet = Packet.read(begun + data.read(int.from_bytes(begun, "big") - 4))
                self.heard.append(packet)
                connection.sendall(packet.reply(self.answer).to_bytes())
        self.ended.set()

    def close(self) -> None:
        self._server.close()
