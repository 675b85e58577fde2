# SPDX-License-Identifier: Apache-2.0
"""Certificates and servers for tests of TLS.

The fake servers start TLS as a broker, PostgreSQL, MariaDB and Kilonova's own services do. Each
uses any certificate, or plain text only, and handles one client at a time. ``received`` contains
the client's plain text, and ``is_proved`` is set if the client completes the handshake. For real
servers see tests/contract/test_tls_servers.py.
"""

from __future__ import annotations

import contextlib
import datetime
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from oslo_config import cfg

from common.security.tls import Tls
from common.service import config
from deploy.one_machine.cloud.authority import Authority

#: MariaDB's greeting: protocol 10, version, thread, first part of the salt, and capabilities (with
#: or without TLS).
CAN_TLS, CAN_REST = 0x0800, 0xA208 | 0x0001
GREETING = (
    b"\x0a10.11.0-MariaDB\0"
    + b"\1\0\0\0"
    + b"saltsalt\0"
    + b"%b"
    + b"\x2d\2\0"
    + b"\x0f\xa0"
    + b"\x15"
    + b"\0" * 10
    + b"saltsaltsalt\0"
    + b"mysql_native_password\0"
)


class Peer:
    """A server on 127.0.0.1 until ``close``. ``proof`` None: plain text only."""

    def __init__(self, kind: str, proof: Tls | None) -> None:
        self._proof, self._speak = proof, KINDS[kind]
        self.received, self.is_proved = b"", threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(10)
        self.port = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                channel, _ = self._listener.accept()
                channel.settimeout(5)
                with contextlib.suppress(OSError), channel:
                    if self._speak(self, channel) and self._proof is not None:
                        self._prove(channel)

    def _prove(self, channel: socket.socket) -> None:
        assert self._proof is not None
        with self._proof.for_server(proved=False).wrap_socket(channel, server_side=True) as secured:
            secured.settimeout(5)
            # With TLS 1.3, only data from the client shows that the certificate was accepted.
            if secured.recv(1):
                self.is_proved.set()

    def receive(self, channel: socket.socket, most: int = 4096) -> bytes:
        """Read the client's next plain text."""
        data = channel.recv(most)
        self.received += data
        return data

    @property
    def can_tls(self) -> bool:
        return self._proof is not None

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(10)


def _amqp(peer: Peer, channel: socket.socket) -> bool:
    if not peer.can_tls:
        if peer.receive(channel, 8) == b"AMQP\0\0\x09\x01":
            peer.receive(channel)
        return False
    return True


def _at_once(peer: Peer, channel: socket.socket) -> bool:
    if not peer.can_tls:
        peer.receive(channel)
    return peer.can_tls


def _postgresql(peer: Peer, channel: socket.socket) -> bool:
    peer.receive(channel, 8)  # SSLRequest
    channel.sendall(b"S" if peer.can_tls else b"N")
    if not peer.can_tls:
        peer.receive(channel)
    return peer.can_tls


def _mariadb(peer: Peer, channel: socket.socket) -> bool:
    packet = GREETING % (CAN_REST | (CAN_TLS if peer.can_tls else 0)).to_bytes(2, "little")
    channel.sendall(len(packet).to_bytes(3, "little") + b"\0" + packet)
    peer.receive(channel, 36)  # SSLRequest, which contains neither user nor password
    return peer.can_tls


KINDS: dict[str, Callable[[Peer, socket.socket], bool]] = {
    "broker": _amqp,
    "https": _at_once,
    "postgresql": _postgresql,
    "mariadb": _mariadb,
}


@contextlib.contextmanager
def peer(kind: str, proof: Tls | None) -> Iterator[Peer]:
    """Yield a fake server that is closed at the end of the block."""
    server = Peer(kind, proof)
    try:
        yield server
    finally:
        server.close()


# --- fixtures ---
@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ours"))


@pytest.fixture(scope="module")
def server_certificates(
    authority: Authority, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Tls | None]:
    """Certificates of a server at 127.0.0.1, by their fault."""
    other_authority = Authority(tmp_path_factory.mktemp("others"))
    return {
        "another authority's": other_authority.issue("server", "127.0.0.1"),
        "another name": authority.issue("elsewhere", "127.0.0.2", "localhost"),
        "expired": authority.issue("expired", "127.0.0.1", valid=-datetime.timedelta(hours=1)),
        "plain": None,
        "good": authority.issue("server", "127.0.0.1"),
    }


@pytest.fixture
def load(authority: Authority, tmp_path: Path) -> Iterator[Callable[..., cfg.ConfigOpts]]:
    def load_config(**sections: str) -> cfg.ConfigOpts:
        path = tmp_path / "kilonova.conf"
        sections = {"tls": f"ca_file = {authority.path}", **sections}
        path.write_text("".join(f"[{name}]\n{lines}\n" for name, lines in sections.items()))
        return config.load(str(path))

    yield load_config
    config.CONF.clear()
    with contextlib.suppress(cfg.NoSuchGroupError):
        for name in ("ssl", "ssl_ca_file", "ssl_cert_file", "ssl_key_file"):
            config.CONF.clear_default(name, group="oslo_messaging_rabbit")
