# SPDX-License-Identifier: Apache-2.0
"""Real RabbitMQ, PostgreSQL and MariaDB servers with TLS, configured as by an operator."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from common.domain import errors
from common.domain.models import Heartbeat, HeartbeatAnswer
from common.rpc import conductor
from common.rpc.transport import Transport
from common.service import config
from common.store.engine import Store
from deploy.one_machine.cloud.authority import Authority
from deploy.testing.servers import Servers
from tests.contract.test_host_link import World
from tests.contract.test_rpc import CallRecorder

pytestmark = pytest.mark.slice("operations")
ENCRYPTED = {
    "postgresql": "SELECT version FROM pg_stat_ssl WHERE pid = pg_backend_pid()",
    "mariadb": "SELECT variable_value FROM information_schema.session_status "
    "WHERE variable_name = 'Ssl_version'",
}


@pytest.fixture(scope="module")
def urls(authority: Authority) -> Iterator[dict[str, str]]:
    """Yield the URLs of servers with a certificate for 127.0.0.1."""
    with tempfile.TemporaryDirectory(prefix="kn-tls-", dir="/tmp") as folder:
        Path(folder).chmod(0o755)
        with Servers(Path(folder), authority.issue("servers", "127.0.0.1")) as servers:
            yield {kind: servers.start(kind) for kind in ("rabbitmq", *ENCRYPTED)}


def test_rpc_call_and_host_heartbeat_are_answered_over_tls(load, urls: dict[str, str]) -> None:
    conf = load(DEFAULT=f"transport_url = {urls['rabbitmq']}")
    server, client = Transport(conf), Transport(conf)
    server.serve("kilonova-tls", "one", {"twice": lambda number: 2 * number})
    assert client.call("kilonova-tls", "twice", number=21) == 42
    for transport in (client, server):
        transport.close()
    world = World(urls["rabbitmq"], conf)
    world.serve_conductor(CallRecorder(HeartbeatAnswer(True, "c")))
    link = conductor.ConductorClient(world.host())
    for _ in range(3):
        assert link.heartbeat(Heartbeat("h1", 3), 5) == HeartbeatAnswer(True, "c")
    world.close()


@pytest.mark.parametrize("kind", ENCRYPTED)
@pytest.mark.parametrize("own", [False, True], ids=["without a certificate", "with one"])
def test_database_connection_uses_tls(load, authority, urls, kind: str, own: bool) -> None:
    certificate = authority.issue("conductor", "127.0.0.1")
    lines = f"ca_file = {authority.path}\n" + (
        f"cert_file = {certificate.cert}\nkey_file = {certificate.key}" if own else ""
    )
    store = Store.open(load(tls=lines, database=f"url = {urls[kind]}"))
    assert store.read(lambda tx: str(tx.scalar(sa.text(ENCRYPTED[kind])))) in ("TLSv1.3", "TLSv1.2")
    store.close()


@pytest.mark.parametrize("kind", ENCRYPTED)
def test_database_server_with_certificate_of_another_name_is_refused(
    load,
    urls: dict[str, str],
    kind: str,
) -> None:
    store = Store.open(load(database=f"url = {urls[kind].replace('@127.0.0.1', '@localhost')}"))
    with pytest.raises(errors.NoStore):
        store.read(lambda tx: tx.scalar(sa.text("SELECT 1")))
    store.close()


def test_plain_text_rpc_call_to_tls_broker_gets_no_answer(load, urls: dict[str, str]) -> None:
    conf = load(tls="")
    with pytest.raises(errors.NoAnswer):
        Transport(conf, urls["rabbitmq"]).call("kilonova-tls", "twice", timeout=1, number=1)
    config.CONF.clear()
