# SPDX-License-Identifier: Apache-2.0
"""Metadata service, image gateway and consoles over TLS: both ways, for many at once, and for
nobody else.

Transfers are tests/unit/compute_agent/test_transfer_tls.py's, live migrations
tests/contract/test_virt_live_tls.py's.
"""

from __future__ import annotations

import contextlib
import http.client
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from keystoneauth1.exceptions import ConnectFailure
from keystonemiddleware.auth_token import AuthProtocol

from common.domain import errors
from common.domain.errors import ConfigError
from common.domain.models import Access, Flavor, GuestSpec
from common.security.tls import Tls, of_url
from compute_agent.consoles.consoles import Consoles
from compute_agent.image_access import ImageGatewayAccess
from compute_agent.virt.driver import SERIAL
from compute_agent.virt.libvirt.migration.live_migration import MigrationOptions
from compute_agent.virt.memory.driver import MemoryDriver
from compute_agent.virt.memory.state.script import QUIET
from compute_api.console.sessions import ConsoleSessions
from compute_api.http import authentication
from deploy.one_machine.cloud.authority import Authority
from deploy.one_machine.cloud.probes import answers
from deploy.one_machine.services.network.host.metadata import MetadataUpstream
from deploy.testing.servers import free_ports
from tests.contract.test_tls import load, ours, proofs  # noqa: F401  # fixtures
from tests.contract.tls_peers import peer
from tests.waiting import await_true

SERVER, SECRET, LARGE = "6a1f9e5c-0c4b-4d53-9f1e-2f5f6f0a7b11", "T1CKET", 3_000_000
WRONG = ["another authority's", "another name", "expired", "plain"]
APPLICATION = f"""
import sys
from common.security.tls import Tls
from compute_api.http.worker.limits import ClientLimits
from compute_api.http.worker.server import Server
def application(environ, start_response):
    sent = environ["wsgi.input"].read()
    start_response("200 OK", [("Content-Length", str({LARGE} + len(sent)))])
    return [bytes({LARGE}), sent]
port, cert, key, ca = sys.argv[1:]
Server("test", "127.0.0.1", int(port), lambda: application, lambda: None, threads=4,
    limits=ClientLimits(max_body_bytes=100_000, max_streams=4), tls=Tls(cert, key, ca)).run()
"""


@pytest.fixture(scope="module")
def service(ours: Authority) -> Iterator[int]:  # noqa: F811
    """The port of a service of ours with four threads, with the server's half of TLS."""
    port, proof = free_ports(1), ours.issue("service", "127.0.0.1")
    process = subprocess.Popen(
        [sys.executable, "-c", APPLICATION, str(port), proof.cert, proof.key, proof.ca]
    )
    await_true(lambda: answers(port), story="it listens")
    yield port
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 0


def ask(upstream: MetadataUpstream, body: bytes = b"") -> bytes:
    """As the network service's proxy asks the metadata service."""
    connection = upstream.connection()
    try:
        connection.request("POST", "/", body, {"X-Instance-ID-Signature": SECRET})
        return connection.getresponse().read()
    finally:
        connection.close()


@pytest.mark.parametrize("length", [0, 50_000, 2_000_000], ids=["none", "waited for", "streamed"])
def test_what_is_sent_and_answered_passes_whole(service: int, ours, length: int) -> None:  # noqa: F811
    body = bytes(range(256)) * (length // 256)
    told = ask(MetadataUpstream(f"https://127.0.0.1:{service}", "h1", "key", str(ours.path)), body)
    assert told == bytes(LARGE) + body


def test_many_ask_at_once(service: int, ours: Authority) -> None:  # noqa: F811
    upstream, lengths = (
        MetadataUpstream(f"https://127.0.0.1:{service}", "h1", "key", str(ours.path)),
        list[int](),
    )
    threads = [
        threading.Thread(target=lambda: lengths.append(len(ask(upstream, b"x" * 20_000))))
        for _ in range(12)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert lengths == [LARGE + 20_000] * 12


def test_who_speaks_plain_text_is_not_answered(service: int) -> None:
    with socket.create_connection(("127.0.0.1", service), 10) as client:
        client.sendall(b"GET / HTTP/1.0\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            assert b"200 OK" not in client.recv(1000)


def test_who_stalls_in_the_handshake_holds_up_nobody(service: int, ours: Authority) -> None:  # noqa: F811
    """More than it has threads."""
    with contextlib.ExitStack() as stalled:
        for _ in range(10):
            client = stalled.enter_context(socket.create_connection(("127.0.0.1", service), 10))
            client.sendall(b"\x16\x03\x01")
        assert (
            len(ask(MetadataUpstream(f"https://127.0.0.1:{service}", "h1", "key", str(ours.path))))
            == LARGE
        )


# --- who asks tells nothing to whom it cannot prove ---
def by_proxy(port: int, ca: str) -> None:
    with pytest.raises((OSError, http.client.HTTPException)):
        ask(MetadataUpstream(f"https://127.0.0.1:{port}", "h1", "key", ca))


def by_agent(port: int, ca: str) -> None:
    with pytest.raises(errors.Unavailable):
        list(
            ImageGatewayAccess(lambda url: ca).download(
                Access(f"https://127.0.0.1:{port}", SECRET), "image"
            )
        )


def by_console_service(port: int, ca: str) -> None:
    with pytest.raises(OSError):
        sessions_of(Tls("", "", ca))._connect("127.0.0.1", port).recv(1)


ASKING: dict[str, Callable[[int, str], None]] = {
    "the proxy": by_proxy,
    "an agent": by_agent,
    "the console service": by_console_service,
}


@pytest.mark.parametrize("who", ASKING)
@pytest.mark.parametrize("shown", WRONG)
def test_nothing_is_told_to_who_is_not_proved(ours, proofs, who: str, shown: str) -> None:  # noqa: F811
    with peer("https", proofs[shown]) as met:
        ASKING[who](met.port, str(ours.path))
        assert not met.is_proved.is_set() and SECRET.encode() not in met.heard


# --- consoles ---
def sessions_of(proof: Tls | None) -> Any:
    return ConsoleSessions(
        None,
        None,
        None,
        None,  # type: ignore[arg-type]  # it connects only
        most=9,
        per_server=9,
        per_user=9,
        seconds=9,
        protect=lambda host: proof,
    )


@pytest.fixture
def relay(ours: Authority) -> Iterator[Consoles]:  # noqa: F811
    driver = MemoryDriver()
    driver.ensure_guest(
        GuestSpec(SERVER, 1, "vm", Flavor("1", "n", 1, 64, 1)), lambda image: iter(()), QUIET
    )
    made = Consoles(driver.console, "127.0.0.1", tls=ours.issue("host", "127.0.0.1"))
    thread = made.start()
    yield made
    made.close()
    thread.join(5)


def test_a_console_passes_both_ways_at_once(relay: Consoles, ours: Authority) -> None:  # noqa: F811
    everything, offer = bytes(range(256)) * 8192, relay.offer(SERVER, SERIAL)
    console = sessions_of(ours.issue("console", "127.0.0.9"))._connect(
        offer["host"], offer["port"]
    )
    console.sendall(offer["secret"].encode())
    console.settimeout(20)
    writer = threading.Thread(target=console.sendall, args=(everything,))
    writer.start()
    found = bytearray()
    while len(found) < len(everything):
        found += console.recv(65536)
    writer.join(5)
    assert bytes(found) == everything
    relay.close()
    assert console.recv(1) == b"", "the other side sees the end"
    console.close()


@pytest.mark.parametrize("shown", ["nothing", "no certificate", "another authority's", "expired"])
def test_a_console_is_not_opened_for_who_is_not_proved(relay, ours, proofs, shown: str) -> None:  # noqa: F811
    proof = {"nothing": None, "no certificate": Tls("", "", str(ours.path))}.get(
        shown
    ) or proofs.get(shown)
    proof = proof and Tls(proof.cert, proof.key, str(ours.path))
    offer = relay.offer(SERVER, SERIAL)
    with pytest.raises(OSError):
        console = sessions_of(proof)._connect(offer["host"], offer["port"])
        console.settimeout(10)
        console.sendall(offer["secret"].encode())
        console.sendall(b"hello")
        if console.recv(5) == b"":
            raise OSError("it was closed")
    assert relay._sessions[0].peer is None


# --- what may be plain ---
def test_images_are_not_fetched_over_plain_http_from_elsewhere(load, ours: Authority) -> None:  # noqa: F811
    for more, tls in (({}, True), ({"tls": ""}, False)):
        conf = load(**more)
        images = ImageGatewayAccess(lambda url, conf=conf: of_url(conf, "[image_gateway] url", url))
        with pytest.raises(
            errors.Unavailable, match=r"gateway.example is no loopback .* \[image_gateway\] url"
        ):
            list(images.download(Access("http://gateway.example:9293", SECRET), "image"))
        assert of_url(conf, "x", "https://gateway.example") == (str(ours.path) if tls else True)
        assert of_url(conf, "x", "http://127.0.0.1:9293") is True
    with pytest.raises(ConfigError, match="allow_plain_text"):
        of_url(conf, "[image_gateway] url", "http://10.0.0.7:9293")
    assert of_url(load(tls="allow_plain_text = true"), "x", "http://10.0.0.7:9293") is True


@pytest.mark.parametrize(
    ("uri", "address", "encrypted", "plain"),
    [
        ("qemu+tls://10.0.0.7:16598/system", "10.0.0.7", True, ""),
        ("qemu+tls://10.0.0.7:16598/system", "10.0.0.7", False, "native_tls is false"),
        ("qemu+tcp://10.0.0.7:16598/system", "10.0.0.7", True, "ca_file is not set there"),
        ("qemu+tcp://127.0.0.1/system", "127.0.0.1", False, ""),
        ("qemu+tcp://h7/system", "127.0.0.1", False, "there"),
        ("qemu+tls://127.0.0.1/system", "10.0.0.7", False, "native_tls"),
    ],
)
def test_servers_do_not_move_as_plain_text(
    uri: str, address: str, encrypted: bool, plain: str
) -> None:
    to, tls = {"uri": uri, "address": address}, Tls("cert", "key", "ca")
    found = MigrationOptions(native_tls=encrypted, tls=tls).plain_text_to(to)
    assert plain in found and bool(plain) == bool(found)
    assert MigrationOptions(native_tls=encrypted, plain_text=True).plain_text_to(to) == ""
    if uri.startswith("qemu+tls") and plain == "":
        assert (
            MigrationOptions(native_tls=True).plain_text_to(to) == "[tls] ca_file is not set here"
        )


def no_fault(status: int, text: str) -> object:
    raise AssertionError(f"{status} {text}")


def test_where_tokens_are_validated_is_judged_as_well(load) -> None:  # noqa: F811
    """Configured, and where the catalogue says that the identity service is."""
    elsewhere = "http://10.0.0.5:5000/v3"
    with pytest.raises(
        ConfigError, match=r"\[identity\] auth_url: http://10.0.0.5:5000 is no https://"
    ):
        authentication.authenticated(None, load(identity=f"auth_url = {elsewhere}"), no_fault)
    entry = authentication.authenticated(
        None, load(identity="auth_url = https://identity.example"), no_fault
    )
    [middleware] = [
        cell.cell_contents
        for cell in entry.__closure__
        if isinstance(cell.cell_contents, AuthProtocol)
    ]
    with pytest.raises(
        ConnectFailure,
        match="the identity service's endpoint in the catalogue: http://10.0.0.5:5000",
    ):
        middleware._session.get(f"{elsewhere}/auth/tokens", connect_retries=0)
