# SPDX-License-Identifier: Apache-2.0
"""The proxy before the local libvirtd, over real TLS connections, and the process that runs it.

Covers permitted sources, time limits, the question whether a guest has arrived, and records.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from common.domain import errors
from common.security.tls import Tls
from compute_agent.verb_context import VerbFailed
from compute_agent.virt.libvirt.migration.incoming import filter as filters
from compute_agent.virt.libvirt.migration.incoming import proxy as proxies
from compute_agent.virt.libvirt.migration.incoming import records
from compute_agent.virt.libvirt.migration.incoming.proxy import (
    ABSENT,
    ARRIVING,
    HERE,
    WELCOME,
    Proxy,
)
from compute_agent.virt.libvirt.migration.incoming.question import has_arrived
from compute_agent.virt.libvirt.migration.incoming.records import (
    Arrival,
    Incoming,
    Records,
    Settings,
)
from compute_agent.virt.libvirt.migration.incoming.rpc import HEADER, REMOTE, Packet
from deploy.one_machine.cloud.authority import Authority
from deploy.testing.servers import free_ports
from tests.log_lines import rendered_lines
from tests.unit.compute_agent.incoming_calls import (
    OTHER_HOST,
    OTHER_SERVER,
    SERVER,
    SOURCE,
    LocalLibvirt,
    describe_domain,
    describe_running_domain,
    new_arrival,
    new_call,
    new_open_call,
    new_prepare_call,
    serialize,
)
from tests.waiting import await_true

LOOPBACK = "127.0.0.1"
#: Seconds: a limit under test, the patience of a test, and a limit that must not be reached.
SHORT, LONG, PATIENT = 0.2, 10.0, 60.0


class Rig:
    """A proxy of a host at 127.0.0.1 that expects a guest from SOURCE, and certificates."""

    def __init__(self, folder: Path, certificates: dict[str, Tls]) -> None:
        self.source, self.another, self.foreign = (
            certificates["source"],
            certificates["another"],
            certificates["foreign"],
        )
        self.local = LocalLibvirt(folder / "libvirt")
        self.arrival_state = HERE
        self.records = Records(folder / "arrivals")
        self.settings = Settings(
            str(folder / "arrivals"),
            LOOPBACK,
            0,
            str(folder / "libvirt"),
            "qemu:///system",
            "",
            certificates["here"],
        )
        self.proxy = self.start_proxy()
        self.records.write(new_arrival())

    def start_proxy(self, **changed: float) -> Proxy:
        patient = dict.fromkeys(("handshake", "packet", "name"), PATIENT)
        proxy = Proxy(
            self.settings, lambda server: self.arrival_state, **{**patient, "look": 0.05, **changed}
        )
        threading.Thread(target=proxy.serve, daemon=True).start()
        return proxy

    def restart_proxy(self, **changed: float) -> None:
        """Replace the proxy by one with these time limits."""
        self.proxy.drain()
        self.proxy = self.start_proxy(**changed)

    def connect_plain(self) -> socket.socket:
        return socket.create_connection((LOOPBACK, self.proxy.port), LONG)

    def connect(self, certificate: Tls | None = None) -> ssl.SSLSocket:
        """Connect as libvirt's client does, or raise ConnectionError if the proxy refuses."""
        tls = certificate or self.source
        connection = tls.for_client().wrap_socket(self.connect_plain(), server_hostname=LOOPBACK)
        if connection.recv(1) != WELCOME:
            raise ConnectionError("not welcome")
        return connection

    def await_refusals(self, count: int) -> None:
        await_true(lambda: self.proxy.refused == count, LONG, lambda: self.proxy.refused)

    def check_refused(self, count: int = 1) -> None:
        """Check that the proxy refused connections and forwarded no packet."""
        self.await_refusals(count)
        assert self.local.packets == []

    def close(self) -> None:
        self.proxy.drain()
        self.local.close()


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tls]:
    """Certificates of this host, the source and another host, and a foreign one for the source.

    The foreign certificate is signed by another authority.
    """
    ours, others = (Authority(tmp_path_factory.mktemp(name)) for name in ("ours", "others"))
    return {
        "here": ours.issue("here", LOOPBACK),
        "source": ours.issue("source", SOURCE),
        "another": ours.issue("another", OTHER_HOST),
        "foreign": others.issue("source", SOURCE),
    }


@pytest.fixture
def rig(tmp_path: Path, certificates: dict[str, Tls]) -> Iterator[Rig]:
    new_rig = Rig(tmp_path, certificates)
    yield new_rig
    new_rig.close()


def send(connection: socket.socket, packet: bytes) -> bytes:
    """Send a packet and return the answer's body, or b"" if the connection was closed."""
    connection.sendall(packet)
    with contextlib.suppress(ConnectionError, ssl.SSLError):
        read = connection.recv(4096)
        return read[HEADER.size :] if read else b""
    return b""


def is_closed(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except (ConnectionError, ssl.SSLError):
        return True


def test_incoming_proxy_accepts_source_host_of_expected_guest(rig: Rig) -> None:
    with rig.connect() as connection:
        for packet in (new_call(filters.AUTH_LIST), new_open_call(), new_prepare_call()):
            assert send(connection, packet) == b"answered"
        assert [packet.procedure for packet in rig.local.packets] == [
            filters.AUTH_LIST,
            filters.OPEN,
            filters.PREPARE,
        ]
    assert rig.local.ended.wait(LONG)
    assert rig.proxy.refused == 0


@pytest.mark.parametrize("certificate", ["nothing", "another host's", "another authority's"])
def test_incoming_proxy_refuses_missing_or_foreign_certificate(rig: Rig, certificate: str) -> None:
    tls = {
        "nothing": Tls("", "", rig.source.ca),
        "another host's": rig.another,
        "another authority's": replace(rig.foreign, ca=rig.source.ca),
    }[certificate]
    with pytest.raises((ConnectionError, ssl.SSLError)):
        rig.connect(tls)
    rig.check_refused()


def test_incoming_proxy_logs_continuous_refusals_once_per_interval(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = SimpleNamespace(monotonic=lambda: now, sleep=time.sleep)
    monkeypatch.setattr(proxies, "time", clock)
    for number in range(10):
        now = 1000 + number * proxies.LOG_EVERY * 0.4
        rig.proxy.refuse(OTHER_HOST, "no certificate")
    assert len(rendered_lines(caplog)) == 4
    assert rig.proxy.refused == 10


def test_proxy_does_not_answer_plain_text(rig: Rig) -> None:
    with rig.connect_plain() as connection:
        assert send(connection, new_call(filters.AUTH_LIST)) == b""
        rig.check_refused()


def test_proxy_limits_source_to_its_own_guest(rig: Rig) -> None:
    rig.records.write(
        new_arrival(
            server=OTHER_SERVER, source=OTHER_HOST, xml=describe_domain("/here", OTHER_SERVER)
        )
    )
    for certificate, domain in (
        (rig.source, serialize(describe_running_domain(OTHER_SERVER))),
        (rig.another, None),
    ):
        with rig.connect(certificate) as connection:
            assert send(connection, new_prepare_call(domain)) == b""
    rig.check_refused(2)
    with rig.connect(rig.another) as connection:
        assert (
            send(connection, new_prepare_call(serialize(describe_running_domain(OTHER_SERVER))))
            == b"answered"
        )


def test_proxy_closes_connection_after_forbidden_call(rig: Rig) -> None:
    with rig.connect() as connection:
        assert send(connection, new_call(filters.AUTH_LIST)) == b"answered"
        assert send(connection, new_call(10)) == b""
    rig.await_refusals(1)
    assert [packet.procedure for packet in rig.local.packets] == [filters.AUTH_LIST]
    assert rig.local.ended.wait(LONG)


@pytest.mark.parametrize(
    "packet",
    [
        HEADER.pack(1 << 31, REMOTE, 1, filters.PREPARE, 0, 0, 0),
        HEADER.pack(filters.MOST + 1, REMOTE, 1, 303, 0, 0, 0),
        HEADER.pack(filters.MOST_PLAIN + 1, REMOTE, 1, filters.OPEN, 0, 0, 0),
        HEADER.pack(3, 0, 0, 0, 0, 0, 0),
    ],
)
def test_proxy_refuses_packet_of_invalid_length(rig: Rig, packet: bytes) -> None:
    with rig.connect() as connection:
        assert send(connection, packet) == b""
    rig.check_refused()


@pytest.mark.parametrize("limit", ["handshake", "packet", "name"])
def test_proxy_closes_connection_beyond_time_limit(rig: Rig, limit: str) -> None:
    rig.restart_proxy(**{limit: SHORT})
    with rig.connect_plain() if limit == "handshake" else rig.connect() as connection:
        if limit == "packet":
            connection.sendall(new_prepare_call()[:200])
        assert is_closed(connection)
    rig.check_refused()


def test_proxy_closes_connection_of_client_not_reading_answers(rig: Rig) -> None:
    rig.restart_proxy(packet=SHORT)
    rig.local.answer = bytes(64 << 20)
    with rig.connect() as connection:
        connection.sendall(new_call(filters.AUTH_LIST))
        rig.await_refusals(1)


def test_silent_connections_do_not_block_proxy(rig: Rig) -> None:
    with contextlib.ExitStack() as stack:
        first, *_ = [
            stack.enter_context(rig.connect_plain()) for _ in range(proxies.MOST_CONNECTIONS)
        ]
        with rig.connect() as connection:
            assert send(connection, new_call(filters.AUTH_LIST)) == b"answered"
        assert is_closed(first)


@pytest.mark.parametrize("reason", ["removed", "expired", "another fence"])
def test_proxy_closes_connection_when_arrival_record_ends_or_changes(rig: Rig, reason: str) -> None:
    with rig.connect() as connection:
        assert send(connection, new_prepare_call()) == b"answered"
        if reason == "removed":
            rig.records.remove(SERVER)
        else:
            rig.records.write(new_arrival(until=0) if reason == "expired" else new_arrival(fence=6))
        assert is_closed(connection)
    assert rig.local.ended.wait(LONG)
    if reason != "another fence":
        with pytest.raises((ConnectionError, ssl.SSLError)):
            rig.connect()


def test_proxy_refuses_prepare_call_after_arrival_is_removed(rig: Rig) -> None:
    with rig.connect() as connection:
        assert send(connection, new_call(filters.AUTH_LIST)) == b"answered"
        rig.records.remove(SERVER)
        assert send(connection, new_prepare_call()) == b""
    assert [packet.procedure for packet in rig.local.packets] == [filters.AUTH_LIST]


def test_proxy_drain_lets_running_migration_continue(rig: Rig) -> None:
    server = threading.Thread(target=rig.proxy.serve, daemon=True)
    server.start()
    with rig.connect() as connection:
        assert send(connection, new_prepare_call()) == b"answered"
        rig.proxy.drain()
        with pytest.raises(OSError):
            rig.connect_plain()
        assert server.is_alive()
        assert send(connection, new_call(filters.CLOSE)) == b"answered"
    server.join(LONG)
    assert not server.is_alive()


def test_proxy_without_tls_identifies_source_by_address(rig: Rig) -> None:
    """Permitted on a network that only hosts can reach."""
    rig.settings = replace(rig.settings, tls=None)
    rig.restart_proxy()
    with rig.connect_plain() as connection:
        assert is_closed(connection)
    rig.records.write(new_arrival(source=LOOPBACK))
    with rig.connect_plain() as connection:
        assert send(connection, new_prepare_call()) == b"answered"


# --- the question ---
@pytest.mark.parametrize(
    ("state", "answer"),
    [(HERE, True), (ABSENT, False), (ARRIVING, "still waits"), (b"perhaps", "invalid answer")],
)
def test_has_arrived_returns_yes_or_no_of_destination_else_raises_no_answer(
    rig: Rig, state: bytes, answer: bool | str
) -> None:
    rig.arrival_state = state
    if isinstance(answer, str):
        with pytest.raises(errors.NoAnswer, match=answer):
            has_arrived(LOOPBACK, rig.proxy.port, SERVER, rig.source)
    else:
        assert has_arrived(LOOPBACK, rig.proxy.port, SERVER, rig.source) is answer


def test_has_arrived_is_answered_only_for_guest_of_caller(rig: Rig) -> None:
    for server, certificate in (
        (SERVER, rig.another),
        (OTHER_SERVER, rig.source),
        (SERVER, rig.foreign),
    ):
        with pytest.raises(errors.NoAnswer, match="does not answer"):
            has_arrived(LOOPBACK, rig.proxy.port, server, certificate)
    rig.proxy.drain()
    with pytest.raises(errors.NoAnswer, match="does not answer"):
        has_arrived(LOOPBACK, rig.proxy.port, SERVER, rig.source)


# --- records, and the process ---
def test_arrival_records_ignore_unreadable_files(tmp_path: Path) -> None:
    arrivals = Records(tmp_path / "arrivals")
    assert (arrivals.all(), arrivals.find(SERVER), arrivals.find("../x")) == ([], None, None)
    with pytest.raises(ValueError, match="not a UUID"):
        arrivals.write(new_arrival(server="../x"))
    arrivals.write(new_arrival())
    assert (tmp_path / "arrivals").stat().st_mode & 0o777 == 0o700
    for broken in ("", "[]", '{"server": "x"}'):
        (tmp_path / "arrivals" / OTHER_SERVER).write_text(broken)
        assert [record.server for record in arrivals.all()] == [SERVER]


def incoming(tmp_path: Path, port: int) -> Incoming:
    return Incoming(
        records.settings(
            tmp_path, f"qemu+unix:///system?socket={tmp_path}/libvirt", LOOPBACK, port, None
        )
    )


def is_open(port: int) -> bool:
    with socket.socket() as knock:
        return knock.connect_ex((LOOPBACK, port)) == 0


def test_incoming_proxy_listens_only_while_guest_is_expected(tmp_path: Path) -> None:
    port, local = free_ports(1), LocalLibvirt(tmp_path / "libvirt")
    expected: Arrival = new_arrival(source=LOOPBACK, until=0)
    first = incoming(tmp_path, port)
    first.keep()
    assert not is_open(port)
    first.expect(expected)
    with socket.create_connection((LOOPBACK, port), LONG) as connection:
        assert send(connection, new_prepare_call()) == b"answered"
        # The agent ends. The next agent reads the records, and the migration continues meanwhile.
        first.close()
        second = incoming(tmp_path, port)
        second.keep()
        assert is_open(port)
        assert send(connection, new_call(filters.CLOSE)) == b"answered"
        second.withdraw(SERVER)
        second.keep()
        await_true(
            lambda: is_closed(connection) and not is_open(port), LONG, lambda: "it still listens"
        )
    assert [packet.procedure for packet in local.packets] == [filters.PREPARE, filters.CLOSE]
    local.close()


def test_killed_incoming_proxy_is_restarted_and_ends_with_agent(tmp_path: Path) -> None:
    port = free_ports(1)
    agent = subprocess.Popen(
        [
            sys.executable,
            "-c",
            # Sleeps until the test kills the process.
            (
                "import sys, time; from pathlib import Path; "
                "from tests.unit.compute_agent.test_incoming_proxy import new_arrival, incoming; "
                "one = incoming(Path(sys.argv[1]), int(sys.argv[2])); one.expect(new_arrival()); one._proxy.kill(); "
                "one._proxy.wait(); one.keep(); print('kept', flush=True); time.sleep(60)"
            ),
            str(tmp_path),
            str(port),
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert agent.stdout is not None and agent.stdout.readline() == "kept\n"
    assert is_open(port)
    agent.kill()
    agent.wait()
    agent.stdout.close()
    await_true(lambda: not is_open(port), LONG, lambda: "it listens without an agent")


def test_incoming_expect_fails_with_reason_when_address_is_foreign(tmp_path: Path) -> None:
    elsewhere = Incoming(Settings(str(tmp_path / "arrivals"), OTHER_HOST, 16598, "", "", ""))
    with pytest.raises(VerbFailed) as failed:
        elsewhere.expect(new_arrival())
    assert "live_migration_port 16598" in failed.value.details and "assign" in failed.value.details


def test_proxy_waits_for_port_of_previous_proxy(rig: Rig) -> None:
    settings = replace(rig.settings, port=rig.proxy.port)
    with pytest.raises(OSError, match="in use"):
        Proxy(settings, lambda server: HERE, bind=0)
    threading.Timer(SHORT, rig.proxy.drain).start()
    successor = Proxy(settings, lambda server: HERE, bind=LONG)
    assert successor.port == settings.port
    successor.drain()


def test_packet_is_read_back_unchanged() -> None:
    packet = Packet(REMOTE, 303, serial=9, body=b"body")
    assert Packet.read(packet.to_bytes()) == packet and packet.reply(b"x").serial == 9
