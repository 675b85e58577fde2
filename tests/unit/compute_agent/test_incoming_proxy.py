# SPDX-License-Identifier: Apache-2.0
"""Who reaches the local libvirtd through the proxy, for how long, and what becomes of everybody
else."""

from __future__ import annotations

import contextlib
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

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
from tests.unit.compute_agent.incoming_calls import (
    ANOTHER,
    OTHER_HOST,
    SERVER,
    SOURCE,
    Local,
    arrival,
    call,
    described,
    opening,
    preparing,
    running,
    text,
)
from tests.waiting import await_true

LOOPBACK = "127.0.0.1"
#: Seconds: of a proxy that is tried, of who waits for it, and of one that is not tried.
SHORT, LONG, PATIENT = 0.2, 10.0, 60.0


class Rig:
    """A proxy of a host at 127.0.0.1 that expects a guest from SOURCE, and what others have to
    show."""

    def __init__(self, folder: Path, shown: dict[str, Tls]) -> None:
        self.source, self.another, self.foreign = (
            shown["source"],
            shown["another"],
            shown["foreign"],
        )
        self.local = Local(folder / "libvirt")
        self.found = HERE
        self.records = Records(folder / "arrivals")
        self.settings = Settings(
            str(folder / "arrivals"),
            LOOPBACK,
            0,
            str(folder / "libvirt"),
            "qemu:///system",
            "",
            shown["here"],
        )
        self.proxy = self.started()
        self.records.write(arrival())

    def started(self, **changed: float) -> Proxy:
        patient = dict.fromkeys(("handshake", "packet", "name"), PATIENT)
        made = Proxy(
            self.settings, lambda server: self.found, **{**patient, "look": 0.05, **changed}
        )
        threading.Thread(target=made.serve, daemon=True).start()
        return made

    def quick(self, **changed: float) -> None:
        """One with little patience in place of the first."""
        self.proxy.drain()
        self.proxy = self.started(**changed)

    def plain(self) -> socket.socket:
        return socket.create_connection((LOOPBACK, self.proxy.port), LONG)

    def connected(self, shows: Tls | None = None) -> ssl.SSLSocket:
        """As libvirt's client: proved, and welcome."""
        shown = shows or self.source
        made = shown.for_client().wrap_socket(self.plain(), server_hostname=LOOPBACK)
        if made.recv(1) != WELCOME:
            raise ConnectionError("not welcome")
        return made

    def has_refused(self, count: int) -> None:
        await_true(lambda: self.proxy.refused == count, LONG, lambda: self.proxy.refused)

    def is_refused(self, count: int = 1) -> None:
        """And nothing of it was passed on."""
        self.has_refused(count)
        assert self.local.heard == []

    def close(self) -> None:
        self.proxy.drain()
        self.local.close()


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tls]:
    """Certificates: of this host, of the source, of another host; and one for the source, of
    another authority."""
    ours, others = (Authority(tmp_path_factory.mktemp(name)) for name in ("ours", "others"))
    return {
        "here": ours.issue("here", LOOPBACK),
        "source": ours.issue("source", SOURCE),
        "another": ours.issue("another", OTHER_HOST),
        "foreign": others.issue("source", SOURCE),
    }


@pytest.fixture
def rig(tmp_path: Path, shown: dict[str, Tls]) -> Iterator[Rig]:
    made = Rig(tmp_path, shown)
    yield made
    made.close()


def asked(connection: socket.socket, packet: bytes) -> bytes:
    """The answer's body; nothing when the connection was closed instead."""
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


def test_the_source_of_an_expected_guest_is_let_in(rig: Rig) -> None:
    with rig.connected() as connection:
        for packet in (call(filters.AUTH_LIST), opening(), preparing()):
            assert asked(connection, packet) == b"answered"
        assert [packet.procedure for packet in rig.local.heard] == [
            filters.AUTH_LIST,
            filters.OPEN,
            filters.PREPARE,
        ]
    assert rig.local.ended.wait(LONG)
    assert rig.proxy.refused == 0


@pytest.mark.parametrize("shows", ["nothing", "another host's", "another authority's"])
def test_nobody_else_is(rig: Rig, shows: str) -> None:
    shown = {
        "nothing": Tls("", "", rig.source.ca),
        "another host's": rig.another,
        "another authority's": replace(rig.foreign, ca=rig.source.ca),
    }[shows]
    with pytest.raises((ConnectionError, ssl.SSLError)):
        rig.connected(shown)
    rig.is_refused()


def test_plain_text_is_not_answered(rig: Rig) -> None:
    with rig.plain() as connection:
        assert asked(connection, call(filters.AUTH_LIST)) == b""
        rig.is_refused()


def test_a_source_reaches_its_own_guest_alone(rig: Rig) -> None:
    rig.records.write(arrival(server=ANOTHER, source=OTHER_HOST, xml=described("/here", ANOTHER)))
    for shown, domain in ((rig.source, text(running(ANOTHER))), (rig.another, None)):
        with rig.connected(shown) as connection:
            assert asked(connection, preparing(domain)) == b""
    rig.is_refused(2)
    with rig.connected(rig.another) as connection:
        assert asked(connection, preparing(text(running(ANOTHER)))) == b"answered"


def test_a_wrong_call_ends_the_connection(rig: Rig) -> None:
    with rig.connected() as connection:
        assert asked(connection, call(filters.AUTH_LIST)) == b"answered"
        assert asked(connection, call(10)) == b""
    rig.has_refused(1)
    assert [packet.procedure for packet in rig.local.heard] == [filters.AUTH_LIST]
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
def test_a_packet_that_is_too_long_is_not_read(rig: Rig, packet: bytes) -> None:
    with rig.connected() as connection:
        assert asked(connection, packet) == b""
    rig.is_refused()


@pytest.mark.parametrize("at", ["handshake", "packet", "name"])
def test_who_is_too_slow_is_sent_away(rig: Rig, at: str) -> None:
    rig.quick(**{at: SHORT})
    with rig.plain() if at == "handshake" else rig.connected() as connection:
        if at == "packet":
            connection.sendall(preparing()[:200])
        assert is_closed(connection)
    rig.is_refused()


def test_who_takes_no_answers_is_sent_away(rig: Rig) -> None:
    rig.quick(packet=SHORT)
    rig.local.answer = bytes(64 << 20)
    with rig.connected() as connection:
        connection.sendall(call(filters.AUTH_LIST))
        rig.has_refused(1)


def test_silent_connections_keep_no_host_out(rig: Rig) -> None:
    with contextlib.ExitStack() as stack:
        first, *_ = [stack.enter_context(rig.plain()) for _ in range(proxies.MOST_CONNECTIONS)]
        with rig.connected() as connection:
            assert asked(connection, call(filters.AUTH_LIST)) == b"answered"
        assert is_closed(first)


@pytest.mark.parametrize("how", ["removed", "expired", "another fence"])
def test_a_connection_ends_with_what_was_expected(rig: Rig, how: str) -> None:
    with rig.connected() as connection:
        assert asked(connection, preparing()) == b"answered"
        if how == "removed":
            rig.records.remove(SERVER)
        else:
            rig.records.write(arrival(until=0) if how == "expired" else arrival(fence=6))
        assert is_closed(connection)
    assert rig.local.ended.wait(LONG)
    if how != "another fence":
        with pytest.raises((ConnectionError, ssl.SSLError)):
            rig.connected()


def test_nothing_begins_once_it_is_not_expected(rig: Rig) -> None:
    with rig.connected() as connection:
        assert asked(connection, call(filters.AUTH_LIST)) == b"answered"
        rig.records.remove(SERVER)
        assert asked(connection, preparing()) == b""
    assert [packet.procedure for packet in rig.local.heard] == [filters.AUTH_LIST]


def test_a_migration_outlives_the_end_of_listening(rig: Rig) -> None:
    ends = threading.Thread(target=rig.proxy.serve, daemon=True)
    ends.start()
    with rig.connected() as connection:
        assert asked(connection, preparing()) == b"answered"
        rig.proxy.drain()
        with pytest.raises(OSError):
            rig.plain()
        assert ends.is_alive()
        assert asked(connection, call(filters.CLOSE)) == b"answered"
    ends.join(LONG)
    assert not ends.is_alive()


def test_without_tls_its_address_says_who_it_is(rig: Rig) -> None:
    """Where nobody else reaches that network: the configuration says so."""
    rig.settings = replace(rig.settings, tls=None)
    rig.quick()
    with rig.plain() as connection:
        assert is_closed(connection)
    rig.records.write(arrival(source=LOOPBACK))
    with rig.plain() as connection:
        assert asked(connection, preparing()) == b"answered"


# --- the question ---
@pytest.mark.parametrize(
    ("found", "answer"),
    [(HERE, True), (ABSENT, False), (ARRIVING, "still waits"), (b"perhaps", "answer is not valid")],
)
def test_the_source_is_told_whether_its_guest_has_arrived(
    rig: Rig, found: bytes, answer: bool | str
) -> None:
    rig.found = found
    if isinstance(answer, str):
        with pytest.raises(errors.NoAnswer, match=answer):
            has_arrived(LOOPBACK, rig.proxy.port, SERVER, rig.source)
    else:
        assert has_arrived(LOOPBACK, rig.proxy.port, SERVER, rig.source) is answer


def test_nobody_else_is_told_and_nothing_of_others(rig: Rig) -> None:
    for server, shows in ((SERVER, rig.another), (ANOTHER, rig.source), (SERVER, rig.foreign)):
        with pytest.raises(errors.NoAnswer, match="does not answer"):
            has_arrived(LOOPBACK, rig.proxy.port, server, shows)
    rig.proxy.drain()
    with pytest.raises(errors.NoAnswer, match="does not answer"):
        has_arrived(LOOPBACK, rig.proxy.port, SERVER, rig.source)


# --- records, and the process ---
def test_what_is_no_record_lets_nobody_in(tmp_path: Path) -> None:
    found = Records(tmp_path / "arrivals")
    assert (found.all(), found.find(SERVER), found.find("../x")) == ([], None, None)
    with pytest.raises(ValueError, match="no id"):
        found.write(arrival(server="../x"))
    found.write(arrival())
    assert (tmp_path / "arrivals").stat().st_mode & 0o777 == 0o700
    for broken in ("", "[]", '{"server": "x"}'):
        (tmp_path / "arrivals" / ANOTHER).write_text(broken)
        assert [one.server for one in found.all()] == [SERVER]


def incoming(tmp_path: Path, port: int) -> Incoming:
    return Incoming(
        records.settings(
            tmp_path, f"qemu+unix:///system?socket={tmp_path}/libvirt", LOOPBACK, port, None
        )
    )


def is_open(port: int) -> bool:
    with socket.socket() as knock:
        return knock.connect_ex((LOOPBACK, port)) == 0


def test_something_listens_only_while_a_guest_is_expected(tmp_path: Path) -> None:
    port, local = free_ports(1), Local(tmp_path / "libvirt")
    expected: Arrival = arrival(source=LOOPBACK, until=0)
    first = incoming(tmp_path, port)
    first.keep()
    assert not is_open(port)
    first.expect(expected)
    with socket.create_connection((LOOPBACK, port), LONG) as connection:
        assert asked(connection, preparing()) == b"answered"
        # The agent ends; the next one finds what is expected, and the migration goes on meanwhile.
        first.close()
        second = incoming(tmp_path, port)
        second.keep()
        assert is_open(port)
        assert asked(connection, call(filters.CLOSE)) == b"answered"
        second.withdraw(SERVER)
        second.keep()
        await_true(
            lambda: is_closed(connection) and not is_open(port), LONG, lambda: "it still listens"
        )
    assert [packet.procedure for packet in local.heard] == [filters.PREPARE, filters.CLOSE]
    local.close()


def test_it_is_started_again_and_ends_with_its_agent(tmp_path: Path) -> None:
    port = free_ports(1)
    agent = subprocess.Popen(
        [
            sys.executable,
            "-c",
            # until it is killed
            (
                "import sys, time; from pathlib import Path; "
                "from tests.unit.compute_agent.test_incoming_proxy import arrival, incoming; "
                "one = incoming(Path(sys.argv[1]), int(sys.argv[2])); one.expect(arrival()); one._proxy.kill(); "
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


def test_where_nothing_can_listen_is_told(tmp_path: Path) -> None:
    elsewhere = Incoming(Settings(str(tmp_path / "arrivals"), OTHER_HOST, 16598, "", "", ""))
    with pytest.raises(VerbFailed) as failed:
        elsewhere.expect(arrival())
    assert "live_migration_port 16598" in failed.value.details and "assign" in failed.value.details


def test_the_proxy_of_the_last_agent_is_waited_for(rig: Rig) -> None:
    taken = replace(rig.settings, port=rig.proxy.port)
    with pytest.raises(OSError, match="in use"):
        Proxy(taken, lambda server: HERE, bind=0)
    threading.Timer(SHORT, rig.proxy.drain).start()
    again = Proxy(taken, lambda server: HERE, bind=LONG)
    assert again.port == taken.port
    again.drain()


def test_a_packet_is_what_it_says() -> None:
    packet = Packet(REMOTE, 303, serial=9, body=b"body")
    assert Packet.read(packet.to_bytes()) == packet and packet.reply(b"x").serial == 9
