# SPDX-License-Identifier: Apache-2.0
"""Broker and databases over TLS: a server that cannot be proved is told nothing, and nobody falls
back to plain text.

Each client meets servers under a wrong authority, under another's name, with a certificate that has
expired, and one that speaks no TLS.
"""

from __future__ import annotations

import datetime
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from oslo_config import cfg

from common.domain import errors
from common.rpc.broker import BROKEN, opener
from common.rpc.transport import Transport
from common.security.tls import Tls
from common.service import config
from common.store.engine import Store
from deploy.one_machine.cloud.authority import Authority
from tests.contract.tls_peers import Peer, peer

PASSWORD = "S3CRET"


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ours"))


@pytest.fixture(scope="module")
def proofs(ours: Authority, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tls | None]:
    """What a server shows that is dialled at 127.0.0.1."""
    others = Authority(tmp_path_factory.mktemp("others"))
    return {
        "another authority's": others.issue("server", "127.0.0.1"),
        "another name": ours.issue("elsewhere", "127.0.0.2", "localhost"),
        "expired": ours.issue("expired", "127.0.0.1", valid=-datetime.timedelta(hours=1)),
        "plain": None,
        "good": ours.issue("server", "127.0.0.1"),
    }


@pytest.fixture
def load(ours: Authority, tmp_path: Path) -> Iterator[Callable[..., cfg.ConfigOpts]]:
    def read(**sections: str) -> cfg.ConfigOpts:
        path = tmp_path / "kilonova.conf"
        sections = {"tls": f"ca_file = {ours.path}", **sections}
        path.write_text("".join(f"[{name}]\n{lines}\n" for name, lines in sections.items()))
        return config.load(str(path))

    yield read
    config.CONF.clear()
    with suppress(cfg.NoSuchGroupError):
        for name in ("ssl", "ssl_ca_file", "ssl_cert_file", "ssl_key_file"):
            config.CONF.clear_default(name, group="oslo_messaging_rabbit")


@contextmanager
def through_kombu(conf: Any, url: str) -> Iterator[None]:
    with pytest.raises(BROKEN), opener(conf, url)() as connection:
        connection.default_channel  # noqa: B018  # connects
    yield


@contextmanager
def through_oslo(conf: Any, url: str) -> Iterator[None]:
    transport = Transport(conf, url)
    threading.Thread(
        target=lambda: transport.cast("kilonova-conductor", "wake"), daemon=True
    ).start()
    yield
    transport.close()


@contextmanager
def through_store(conf: Any, url: str) -> Iterator[None]:
    conf.set_override("url", url, "database")
    try:
        store = Store.opened(conf)
    finally:
        conf.clear_override("url", "database")
    with pytest.raises(errors.NoStore):
        store.read(lambda tx: tx.execute(sa.text("SELECT 1")))
    store.close()
    yield


#: -> the server, its URL, and who connects to it
CLIENTS = {
    "kombu": ("broker", "rabbit://host:{password}@127.0.0.1:{port}/", through_kombu),
    "oslo.messaging": ("broker", "rabbit://host:{password}@127.0.0.1:{port}/", through_oslo),
    "postgresql": (
        "postgresql",
        "postgresql+psycopg://kilonova:{password}@127.0.0.1:{port}/k?sslmode=disable",
        through_store,
    ),
    "mariadb": (
        "mariadb",
        "mysql+pymysql://kilonova:{password}@127.0.0.1:{port}/k?ssl_disabled=true",
        through_store,
    ),
}


def meets(conf: cfg.ConfigOpts, client: str, proof: Tls | None, seconds: float) -> Peer:
    """The server that this client has met for so long."""
    kind, url, connect = CLIENTS[client]
    with peer(kind, proof) as met, connect(conf, url.format(password=PASSWORD, port=met.port)):
        met.is_proved.wait(seconds)
    return met


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("shown", ["another authority's", "another name", "expired", "plain"])
def test_a_server_that_is_not_proved_is_told_nothing(load, proofs, client: str, shown: str) -> None:
    met = meets(load(), client, proofs[shown], 0.3 if client == "oslo.messaging" else 0)
    assert not met.is_proved.is_set()
    assert (
        PASSWORD.encode() not in met.heard
        and b"kilonova" not in met.heard
        and b"AMQP" not in met.heard
    )


@pytest.mark.parametrize("client", CLIENTS)
def test_a_server_that_is_proved_is_spoken_to(load, proofs, client: str) -> None:
    assert meets(load(), client, proofs["good"], 5).is_proved.is_set()


def test_connection_to_mariadb_without_tls_setting_ignores_offered_tls(load, proofs) -> None:
    """Unverified TLS proves nothing, and PyMySQL takes 50 ms of CPU time to prepare it."""
    url = f"mysql+pymysql://kilonova:{PASSWORD}@127.0.0.1:"
    with (
        peer("mariadb", proofs["good"]) as met,
        through_store(load(tls=""), f"{url}{met.port}/k"),
    ):
        assert not met.is_proved.wait(0.3)


@pytest.mark.parametrize("client", ["kombu", "oslo.messaging"])
def test_each_node_of_a_broker_is_verified_under_its_own_name(
    load, ours: Authority, client: str
) -> None:
    one, two = ours.issue("one", "127.0.0.1"), ours.issue("two", "localhost")
    with peer("broker", one) as first, peer("broker", two) as second:

        def meet(url: str, seconds: float) -> bool:
            """True once both nodes were accepted."""
            for _ in range(8):  # The order of the nodes is random.
                with CLIENTS[client][2](load(), url):
                    if all(met.is_proved.wait(seconds / 2) for met in (first, second)):
                        return True
            return False

        exchanged = f"rabbit://h:x@localhost:{first.port},h:x@127.0.0.1:{second.port}/"
        meet(exchanged, 0.2)
        assert not first.is_proved.is_set() and not second.is_proved.is_set()
        assert meet(f"rabbit://h:x@127.0.0.1:{first.port},h:x@localhost:{second.port}/", 2)


# --- refused at start ---
@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({}, "broker.example is no loopback address and"),
        (
            {"tls": "allow_plain_text = false"},
            r"Set \[tls\] ca_file, cert_file and key_file; or \[tls\] allow_plain_text",
        ),
        ({"oslo_messaging_rabbit": "ssl = true"}, "no authority to verify"),
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
def test_a_broker_elsewhere_without_tls_is_refused(
    load, ours, sections: dict[str, str], said: str
) -> None:
    conf = load(
        **{"tls": "", **{name: lines.format(ca=ours.path) for name, lines in sections.items()}}
    )
    for connect in (opener, Transport):
        with pytest.raises(errors.ConfigError, match=said):
            connect(conf, "rabbit://h:x@127.0.0.1:5672,h:x@broker.example:5672/")


def test_a_url_cannot_turn_the_brokers_tls_off(load) -> None:
    with pytest.raises(errors.ConfigError, match="transport_url says something of ssl"):
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
def test_a_database_elsewhere_without_tls_is_refused(load, url: str) -> None:
    for more in ({"tls": "", "database": ""}, {"database": "tls = false"}):
        conf = load(**{**more, "database": f"url = {url}\n{more['database']}"})
        with pytest.raises(
            errors.ConfigError, match=r"\[database\] url: .* is no loopback address"
        ):
            Store.opened(conf)
    conf = load(tls="allow_plain_text = true", database=f"url = {url}")
    Store.opened(conf).close()


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
def test_on_one_machine_nothing_need_be_set_up(load, url: str) -> None:
    conf = load(tls="", database=f"url = {url}")
    Store.opened(conf).close()
    opener(conf, "rabbit://h:x@localhost:5672/")


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ("key_file = {key}", "set cert_file too"),
        ("cert_file = {cert}", "ca_file is not"),
        ("ca_file = {ca}\ncert_file = {cert}", "give PEM files"),
        ("cert_file = {cert}\nkey_file = {key}", "ca_file is not"),
        ("ca_file = {key}", "give PEM files"),
        ("ca_file = {ca}\ncert_file = {key}\nkey_file = {cert}", "give PEM files"),
    ],
)
def test_files_that_do_not_fit_are_refused(load, ours: Authority, lines: str, said: str) -> None:
    mine = ours.issue("server", "127.0.0.1")
    conf = load(tls=lines.format(ca=mine.ca, cert=mine.cert, key=mine.key))
    with pytest.raises(errors.ConfigError, match=said):
        opener(conf, "rabbit://h:x@localhost:5672/")
