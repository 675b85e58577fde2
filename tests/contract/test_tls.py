# SPDX-License-Identifier: Apache-2.0
"""TLS of broker and databases.

Clients send no data to a server without a valid certificate, and never fall back to plain text. The
servers have a certificate of another authority, of another name, an expired one, or no TLS.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import sqlalchemy as sa
from oslo_config import cfg

from common.domain import errors
from common.rpc.broker import BROKEN, opener
from common.rpc.transport import Transport
from common.security.tls import Tls
from common.store.engine import Store
from deploy.one_machine.cloud.authority import Authority
from tests.contract.tls_peers import Peer, peer

PASSWORD = "S3CRET"


@contextmanager
def connect_kombu(conf: Any, url: str) -> Iterator[None]:
    with pytest.raises(BROKEN), opener(conf, url)() as connection:
        connection.default_channel  # noqa: B018  # connects
    yield


@contextmanager
def connect_oslo(conf: Any, url: str) -> Iterator[None]:
    transport = Transport(conf, url)
    threading.Thread(
        target=lambda: transport.cast("kilonova-conductor", "wake"), daemon=True
    ).start()
    yield
    transport.close()


@contextmanager
def connect_store(conf: Any, url: str) -> Iterator[None]:
    conf.set_override("url", url, "database")
    try:
        store = Store.open(conf)
    finally:
        conf.clear_override("url", "database")
    with pytest.raises(errors.NoStore):
        store.read(lambda tx: tx.execute(sa.text("SELECT 1")))
    store.close()
    yield


#: Client -> kind of the server, URL, and connecting function.
CLIENTS = {
    "kombu": ("broker", "rabbit://host:{password}@127.0.0.1:{port}/", connect_kombu),
    "oslo.messaging": ("broker", "rabbit://host:{password}@127.0.0.1:{port}/", connect_oslo),
    "postgresql": (
        "postgresql",
        "postgresql+psycopg://kilonova:{password}@127.0.0.1:{port}/k?sslmode=disable",
        connect_store,
    ),
    "mariadb": (
        "mariadb",
        "mysql+pymysql://kilonova:{password}@127.0.0.1:{port}/k?ssl_disabled=true",
        connect_store,
    ),
}


def connect_client(
    conf: cfg.ConfigOpts, client: str, certificate: Tls | None, seconds: float
) -> Peer:
    """Connect with this client, wait for this time, and return the server."""
    kind, url, connect = CLIENTS[client]
    with (
        peer(kind, certificate) as server,
        connect(conf, url.format(password=PASSWORD, port=server.port)),
    ):
        server.is_proved.wait(seconds)
    return server


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("certificate", ["another authority's", "another name", "expired", "plain"])
def test_broker_and_database_clients_send_no_data_to_unverified_server(
    load, server_certificates, client: str, certificate: str
) -> None:
    server = connect_client(
        load(), client, server_certificates[certificate], 0.3 if client == "oslo.messaging" else 0
    )
    assert not server.is_proved.is_set()
    assert (
        PASSWORD.encode() not in server.received
        and b"kilonova" not in server.received
        and b"AMQP" not in server.received
    )


@pytest.mark.parametrize("client", CLIENTS)
def test_broker_and_database_clients_connect_to_verified_server(
    load, server_certificates, client: str
) -> None:
    assert connect_client(load(), client, server_certificates["good"], 5).is_proved.is_set()


def test_mariadb_client_without_tls_setting_does_not_use_offered_tls(
    load, server_certificates
) -> None:
    """TLS without verification gives no security.

    PyMySQL needs 50 ms of CPU time to prepare TLS.
    """
    url = f"mysql+pymysql://kilonova:{PASSWORD}@127.0.0.1:"
    with (
        peer("mariadb", server_certificates["good"]) as server,
        connect_store(load(tls=""), f"{url}{server.port}/k"),
    ):
        assert not server.is_proved.wait(0.3)


@pytest.mark.parametrize("client", ["kombu", "oslo.messaging"])
def test_broker_nodes_are_each_verified_by_their_own_name(
    load, authority: Authority, client: str
) -> None:
    first_certificate, second_certificate = (
        authority.issue("one", "127.0.0.1"),
        authority.issue("two", "localhost"),
    )
    with peer("broker", first_certificate) as first, peer("broker", second_certificate) as second:

        def connect_until(url: str, seconds: float) -> bool:
            """Return True once both nodes were accepted."""
            # The order of the nodes is random.
            for _ in range(8):
                with CLIENTS[client][2](load(), url):
                    if all(node.is_proved.wait(seconds / 2) for node in (first, second)):
                        return True
            return False

        swapped_url = f"rabbit://h:x@localhost:{first.port},h:x@127.0.0.1:{second.port}/"
        connect_until(swapped_url, 0.2)
        assert not first.is_proved.is_set() and not second.is_proved.is_set()
        assert connect_until(f"rabbit://h:x@127.0.0.1:{first.port},h:x@localhost:{second.port}/", 2)


# --- refused at start ---
@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({}, "broker.example is no loopback address and"),
        (
            {"tls": "allow_plain_text = false"},
            r"Set \[tls\] ca_file, cert_file and key_file; or \[tls\] allow_plain_text",
        ),
        ({"oslo_messaging_rabbit": "ssl = true"}, "no CA file is set to verify"),
        (
            {"tls": "ca_file = {ca}", "oslo_messaging_rabbit": "ssl = false"},
            "broker.example is no loopback address and "
            r"\[oslo_messaging_rabbit\] ssl is false",
        ),
        (
            {
                "tls": "ca_file = {ca}",
                "oslo_messaging_rabbit": "ssl_enforce_hostname_verification = false",
            },
            "always verified",
        ),
        ({"tls": "ca_file = {ca}.gone"}, "give PEM files"),
    ],
)
def test_remote_broker_without_verified_tls_raises_config_error(
    load, authority, sections: dict[str, str], message: str
) -> None:
    conf = load(
        **{"tls": "", **{name: lines.format(ca=authority.path) for name, lines in sections.items()}}
    )
    for connect in (opener, Transport):
        with pytest.raises(errors.ConfigError, match=message):
            connect(conf, "rabbit://h:x@127.0.0.1:5672,h:x@broker.example:5672/")


def test_transport_url_with_ssl_option_raises_config_error(load) -> None:
    with pytest.raises(errors.ConfigError, match="transport_url contains ssl options"):
        Transport(load(), "rabbit://h:x@127.0.0.1:5671/?ssl=0")


@pytest.mark.parametrize(
    "url",
    [
        "postgresql+psycopg://k:x@db.example/k",
        "mysql+pymysql://k:x@10.0.0.7/k",
        "mysql+pymysql://k:x@0.0.0.0/k",
        "postgresql+psycopg://k:x@/k?host=127.0.0.1:5432,db.example:5432",
        "postgresql+psycopg://k:x@[2001:db8::1]/k",
        "postgresql+psycopg://k:x@localhost/k?hostaddr=10.0.0.7",
    ],
)
def test_remote_database_without_tls_raises_config_error(load, url: str) -> None:
    for settings in ({"tls": "", "database": ""}, {"database": "tls = false"}):
        conf = load(**{**settings, "database": f"url = {url}\n{settings['database']}"})
        with pytest.raises(
            errors.ConfigError, match=r"\[database\] url: .* is no loopback address"
        ):
            Store.open(conf)
    conf = load(tls="allow_plain_text = true", database=f"url = {url}")
    Store.open(conf).close()


@pytest.mark.parametrize(
    "url",
    [
        "postgresql+psycopg://k:x@127.0.0.1/k",
        "mysql+pymysql://k:x@localhost/k",
        "postgresql+psycopg://k:x@[::1]/k",
        "postgresql+psycopg://k:x@/k?host=/run/postgresql",
        "sqlite:///:memory:",
    ],
)
def test_local_database_and_broker_need_no_tls(load, url: str) -> None:
    conf = load(tls="", database=f"url = {url}")
    Store.open(conf).close()
    opener(conf, "rabbit://h:x@localhost:5672/")


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("key_file = {key}", "set cert_file too"),
        ("cert_file = {cert}", "ca_file is not"),
        ("ca_file = {ca}\ncert_file = {cert}", "give PEM files"),
        ("cert_file = {cert}\nkey_file = {key}", "ca_file is not"),
        ("ca_file = {key}", "give PEM files"),
        ("ca_file = {ca}\ncert_file = {key}\nkey_file = {cert}", "give PEM files"),
    ],
)
def test_inconsistent_tls_files_raise_config_error(
    load, authority: Authority, lines: str, message: str
) -> None:
    certificate = authority.issue("server", "127.0.0.1")
    conf = load(tls=lines.format(ca=certificate.ca, cert=certificate.cert, key=certificate.key))
    with pytest.raises(errors.ConfigError, match=message):
        opener(conf, "rabbit://h:x@localhost:5672/")
