# SPDX-License-Identifier: Apache-2.0
"""TLS of the metadata service, the image gateway and the consoles.

The tests cover bodies in both directions, parallel requests, and refused peers. For transfers see
tests/unit/compute_agent/test_transfer_tls.py, for live migrations
tests/contract/test_virt_live_tls.py.
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
def service(authority: Authority) -> Iterator[int]:
    """Run a service with four threads and TLS, and return the port."""
    port, proof = free_ports(1), authority.issue("service", "127.0.0.1")
    process = subprocess.Popen(
        [sys.executable, "-c", APPLICATION, str(port), proof.cert, proof.key, proof.ca]
    )
    await_true(lambda: answers(port), story="it listens")
    yield port
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 0


def send_request(upstream: MetadataUpstream, body: bytes = b"") -> bytes:
    """Send a request in the same way as the network service's proxy to the metadata service."""
    connection = upstream.connection()
    try:
        connection.request("POST", "/", body, {"X-Instance-ID-Signature": SECRET})
        return connection.getresponse().read()
    finally:
        connection.close()


@pytest.mark.parametrize("length", [0, 50_000, 2_000_000], ids=["none", "waited for", "streamed"])
def test_tls_service_passes_request_and_response_bodies_unchanged(
    service: int,
    authority,
    length: int,
) -> None:
    body = bytes(range(256)) * (length // 256)
    response = send_request(
        MetadataUpstream(f"https://127.0.0.1:{service}", "h1", "key", str(authority.path)), body
    )
    assert response == bytes(LARGE) + body


def test_tls_service_answers_parallel_requests(service: int, authority: Authority) -> None:
    upstream, lengths = (
        MetadataUpstream(f"https://127.0.0.1:{service}", "h1", "key", str(authority.path)),
        list[int](),
    )
    threads = [
        threading.Thread(target=lambda: lengths.append(len(send_request(upstream, b"x" * 20_000))))
        for _ in range(12)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert lengths == [LARGE + 20_000] * 12


def test_tls_service_does_not_answer_plain_text_request(service: int) -> None:
    with socket.create_connection(("127.0.0.1", service), 10) as client:
        client.sendall(b"GET / HTTP/1.0\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            assert b"200 OK" not in client.recv(1000)


def test_tls_service_answers_while_other_handshakes_stall(
    service: int,
    authority: Authority,
) -> None:
    """More clients stall than the service has threads."""
    with contextlib.ExitStack() as stalled_clients:
        for _ in range(10):
            client = stalled_clients.enter_context(
                socket.create_connection(("127.0.0.1", service), 10)
            )
            client.sendall(b"\x16\x03\x01")
        assert (
            len(
                send_request(
                    MetadataUpstream(
                        f"https://127.0.0.1:{service}", "h1", "key", str(authority.path)
                    )
                )
            )
            == LARGE
        )


# --- callers of servers without a valid certificate ---
def call_as_proxy(port: int, ca: str) -> None:
    with pytest.raises((OSError, http.client.HTTPException)):
        send_request(MetadataUpstream(f"https://127.0.0.1:{port}", "h1", "key", ca))


def call_as_agent(port: int, ca: str) -> None:
    with pytest.raises(errors.Unavailable):
        list(
            ImageGatewayAccess(lambda url: ca).download(
                Access(f"https://127.0.0.1:{port}", SECRET), "image"
            )
        )


def call_as_console_service(port: int, ca: str) -> None:
    with pytest.raises(OSError):
        create_sessions(Tls("", "", ca))._connect("127.0.0.1", port).recv(1)


CALLERS: dict[str, Callable[[int, str], None]] = {
    "the proxy": call_as_proxy,
    "an agent": call_as_agent,
    "the console service": call_as_console_service,
}


@pytest.mark.parametrize("caller", CALLERS)
@pytest.mark.parametrize("certificate", WRONG)
def test_proxy_agent_and_console_send_no_secret_to_unverified_server(
    authority,
    server_certificates,
    caller: str,
    certificate: str,
) -> None:
    with peer("https", server_certificates[certificate]) as server:
        CALLERS[caller](server.port, str(authority.path))
        assert not server.is_proved.is_set() and SECRET.encode() not in server.received


# --- consoles ---
def create_sessions(proof: Tls | None) -> Any:
    return ConsoleSessions(
        None,
        None,
        None,
        None,  # type: ignore[arg-type]  # only connections are made
        most=9,
        per_server=9,
        per_user=9,
        seconds=9,
        protect=lambda host: proof,
    )


@pytest.fixture
def relay(authority: Authority) -> Iterator[Consoles]:
    driver = MemoryDriver()
    driver.ensure_guest(
        GuestSpec(SERVER, 1, "vm", Flavor("1", "n", 1, 64, 1)), lambda image: iter(()), QUIET
    )
    consoles = Consoles(driver.console, "127.0.0.1", tls=authority.issue("host", "127.0.0.1"))
    thread = consoles.start()
    yield consoles
    consoles.close()
    thread.join(5)


def test_console_over_tls_transfers_both_ways_at_once(
    relay: Consoles,
    authority: Authority,
) -> None:
    content, offer = bytes(range(256)) * 8192, relay.offer(SERVER, SERIAL)
    console = create_sessions(authority.issue("console", "127.0.0.9"))._connect(
        offer["host"], offer["port"]
    )
    console.sendall(offer["secret"].encode())
    console.settimeout(20)
    writer = threading.Thread(target=console.sendall, args=(content,))
    writer.start()
    received_bytes = bytearray()
    while len(received_bytes) < len(content):
        received_bytes += console.recv(65536)
    writer.join(5)
    assert bytes(received_bytes) == content
    relay.close()
    assert console.recv(1) == b"", "the other side sees the end"
    console.close()


@pytest.mark.parametrize(
    "certificate", ["nothing", "no certificate", "another authority's", "expired"]
)
def test_console_relay_refuses_client_without_valid_certificate(
    relay,
    authority,
    server_certificates,
    certificate: str,
) -> None:
    proof = {"nothing": None, "no certificate": Tls("", "", str(authority.path))}.get(
        certificate
    ) or server_certificates.get(certificate)
    proof = proof and Tls(proof.cert, proof.key, str(authority.path))
    offer = relay.offer(SERVER, SERIAL)
    with pytest.raises(OSError):
        console = create_sessions(proof)._connect(offer["host"], offer["port"])
        console.settimeout(10)
        console.sendall(offer["secret"].encode())
        console.sendall(b"hello")
        if console.recv(5) == b"":
            raise OSError("it was closed")
    assert relay._sessions[0].peer is None


# --- plain text ---
def test_image_download_over_plain_http_from_remote_gateway_is_refused(
    load,
    authority: Authority,
) -> None:
    for settings, tls in (({}, True), ({"tls": ""}, False)):
        conf = load(**settings)
        images = ImageGatewayAccess(lambda url, conf=conf: of_url(conf, "[image_gateway] url", url))
        with pytest.raises(
            errors.Unavailable, match=r"gateway.example is no loopback .* \[image_gateway\] url"
        ):
            list(images.download(Access("http://gateway.example:9293", SECRET), "image"))
        assert of_url(conf, "x", "https://gateway.example") == (
            str(authority.path) if tls else True
        )
        assert of_url(conf, "x", "http://127.0.0.1:9293") is True
    with pytest.raises(ConfigError, match="allow_plain_text"):
        of_url(conf, "[image_gateway] url", "http://10.0.0.7:9293")
    assert of_url(load(tls="allow_plain_text = true"), "x", "http://10.0.0.7:9293") is True


@pytest.mark.parametrize(
    ("uri", "address", "encrypted", "plain"),
    [
        ("qemu+tls://10.0.0.7:16598/system", "10.0.0.7", True, ""),
        ("qemu+tls://10.0.0.7:16598/system", "10.0.0.7", False, "native_tls is false"),
        (
            "qemu+tcp://10.0.0.7:16598/system",
            "10.0.0.7",
            True,
            "ca_file is not set at the destination",
        ),
        ("qemu+tcp://127.0.0.1/system", "127.0.0.1", False, ""),
        ("qemu+tcp://h7/system", "127.0.0.1", False, "destination"),
        ("qemu+tls://127.0.0.1/system", "10.0.0.7", False, "native_tls"),
    ],
)
def test_migration_options_refuse_plain_text_to_remote_host_unless_allowed(
    uri: str, address: str, encrypted: bool, plain: str
) -> None:
    destination, tls = {"uri": uri, "address": address}, Tls("cert", "key", "ca")
    reason = MigrationOptions(native_tls=encrypted, tls=tls).plain_text_to(destination)
    assert plain in reason and bool(plain) == bool(reason)
    assert MigrationOptions(native_tls=encrypted, plain_text=True).plain_text_to(destination) == ""
    if uri.startswith("qemu+tls") and plain == "":
        assert (
            MigrationOptions(native_tls=True).plain_text_to(destination)
            == "[tls] ca_file is not set at the source"
        )


def fail_on_fault(status: int, text: str) -> object:
    raise AssertionError(f"{status} {text}")


def test_token_validation_at_remote_identity_over_plain_http_is_refused(load) -> None:
    """The check applies to the configured URL and to the endpoint in the catalogue."""
    elsewhere = "http://10.0.0.5:5000/v3"
    with pytest.raises(
        ConfigError, match=r"\[identity\] auth_url: http://10.0.0.5:5000 is no https://"
    ):
        authentication.authenticate(None, load(identity=f"auth_url = {elsewhere}"), fail_on_fault)
    entry = authentication.authenticate(
        None, load(identity="auth_url = https://identity.example"), fail_on_fault
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
