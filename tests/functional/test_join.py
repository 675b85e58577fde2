# SPDX-License-Identifier: Apache-2.0
"""``kilonova host add``, ``kilonova join`` and ``kilonova host remove``.

The tests use RabbitMQ and its users, a database, and the messages of a conductor.
"""

from __future__ import annotations

import json
import os
import pwd
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import sqlalchemy as sa
from cryptography import x509

from common.domain.models import Heartbeat, HeartbeatAnswer, HostInventory
from common.rpc import conductor
from common.rpc.broker import look_in, opener
from common.rpc.host_link import ControlSide, HostSide
from common.security import broker_names
from common.security.broker_identities import Identity
from common.security.host_joins import JoinToken
from common.security.host_keys import OwnKeys, Purpose, derive
from common.service import config
from common.store import schema
from common.store.engine import Store
from common.store.hosts import host_keys, hosts
from conductor.hosts import host_credentials
from deploy.one_machine.cloud.authority import Authority
from deploy.one_machine.cloud.broker import Broker
from deploy.operator.hosts import identity as host_identity
from deploy.operator.main import main
from deploy.testing.servers import Servers
from tests.contract.test_rpc import CallRecorder

pytestmark = pytest.mark.slice("operations")
OWN_USER = pwd.getpwuid(os.geteuid()).pw_name
INVENTORY = HostInventory("QEMU", 7002000, "h1", 4, 8192, 9)


@dataclass
class FakeManagement:
    """Changes users of a broker with rabbitmqctl in place of the management API."""

    broker: Broker

    def make(self, identity: Identity, virtual_host: str) -> str:
        self.remove(identity.user)
        self.broker.control("add_user", identity.user, identity.password)
        broker_address = ("-p", virtual_host, identity.user)
        self.broker.control(
            "set_permissions", *broker_address, identity.configure, identity.write, identity.read
        )
        for topic in identity.topics:
            self.broker.control(
                "set_topic_permissions", *broker_address, topic.exchange, topic.write, topic.read
            )
        return ""

    def disconnect(self, user: str) -> str:
        self.broker.control("close_all_user_connections", user, "test")
        return ""

    def remove(self, user: str) -> str:
        if user in self.broker.control("list_users"):
            self.broker.control("delete_user", user)
        return ""


@pytest.fixture(scope="module")
def broker() -> Iterator[Broker]:
    """Yield a broker for this module only, so that messages of hosts do not reach other tests."""
    with tempfile.TemporaryDirectory(prefix="kn-join-", dir="/tmp") as folder:
        Path(folder).chmod(0o755)
        with Servers(Path(folder)) as servers:
            servers.start("rabbitmq")
            assert servers.broker is not None
            yield servers.broker


class Site:
    """A controller with a conductor, and the machine that joins.

    ``output`` and ``error_output`` are the texts of the last command.
    """

    def __init__(
        self, folder: Path, broker: Broker, url: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        self.folder, self._capsys, self._broker = folder, capsys, broker
        self.controller, self.agent = folder / "kilonova.conf", folder / "etc/agent.conf"
        self.authority = Authority(folder / "tls")
        self.agent.parent.mkdir()
        self.agent.write_text(f"[DEFAULT]\nstate_dir = {folder}/state\n[agent]\ndriver = memory\n")
        self.controller.write_text(
            f"[DEFAULT]\ntransport_url = {broker.url}\n[database]\nurl = {url}\n"
            "[host_keys]\ncommand_secret = one\nquery_secret = two\n"
            f"[tls]\nca_file = {self.authority.path}\nca_key_file = {self.authority.key_path}\n"
            "[oslo_messaging_rabbit]\nssl = false\n"
        )
        conf, self.store = config.load(str(self.controller)), Store(url)
        self.keys = host_keys.of_all(self.store, conf)
        self.link = ControlSide(opener(conf), self.keys)
        self.joins = host_credentials.HostJoins(
            self.store, self.keys, host_credentials.signer(conf)
        )
        conductor.listen(self.link, CallRecorder(HeartbeatAnswer(True)), self.joins)
        assert self.link.wait_until_ready(10)

    def run_command(self, conf: Path, *words: str) -> int:
        config.CONF.clear()
        status = main(["--config", str(conf), *words])
        captured = self._capsys.readouterr()
        self.output, self.error_output = captured.out, captured.err
        return status

    def add_host(self) -> str:
        words = ("host", "add", "h1", "--address", "127.0.0.1", "--broker", self.broker_address)
        assert self.run_command(self.controller, *words) == 0, self.error_output
        return self.output.strip()

    @property
    def broker_address(self) -> str:
        return f"127.0.0.1:{self._broker.port}"

    def join(self, token: str) -> int:
        return self.run_command(self.agent, "join", token, "--no-start", "--user", OWN_USER)

    def files(self) -> set[str]:
        return {path.name for path in self.agent.parent.iterdir()}

    def close(self) -> None:
        self.link.close()
        self.store.close()
        config.CONF.clear()


@pytest.fixture
def site(
    broker: Broker,
    upgraded_database: Callable[[str], str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Iterator[Site]:
    monkeypatch.setattr(host_identity, "users", lambda conf: FakeManagement(broker))
    # This broker uses plain text on loopback. The authority signs certificates for connections
    # between hosts.
    monkeypatch.setenv("OS_OSLO_MESSAGING_RABBIT__SSL", "false")
    new_site = Site(tmp_path, broker, upgraded_database("sqlite"), capsys)
    new_site.agent.write_text(new_site.agent.read_text() + "[oslo_messaging_rabbit]\nssl = false\n")
    yield new_site
    new_site.close()


def test_join_turns_machine_into_host_with_working_keys(site: Site, broker: Broker) -> None:
    text = site.add_host()
    assert site.join(text) == 0, site.error_output
    assert "kilonova host verify h1" in site.output
    config.CONF.clear()
    conf = config.load(str(site.agent), config.AGENT)
    assert (conf.host, conf.migration.live_migration_inbound_addr) == ("h1", "127.0.0.1")
    keys = OwnKeys.read(Path(conf.state_dir) / "host.key", "h1")
    token = JoinToken.read(text)
    assert keys.newest("h1", Purpose.COMMAND) == derive(
        "one", "h1", token.generation, Purpose.COMMAND
    )
    cert = x509.load_pem_x509_certificate(Path(conf.tls.cert_file).read_bytes())
    names = cert.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert [str(entry.value) for entry in names] == ["127.0.0.1"]
    modes = {path.name: path.stat().st_mode & 0o777 for path in site.agent.parent.iterdir()}
    assert modes == {"agent.conf": 0o640, "ca.pem": 0o644}
    assert Path(conf.tls.cert_file).parent == Path(conf.state_dir), "where the agent may replace it"
    assert Path(conf.tls.cert_file).stat().st_mode & 0o777 == 0o600
    look_in(conf, keys.transport_url)
    link = HostSide(opener(conf, keys.transport_url), keys, "h1")
    beat = conductor.ConductorClient(link).heartbeat(Heartbeat("h1", 3), 5)
    link.close()
    assert beat == HeartbeatAnswer(True)
    secrets = (token.transport_url, *keys.secrets.values(), keys.transport_url)
    assert not any(entry in site.output + site.error_output for entry in secrets)


def test_join_token_is_accepted_only_once(site: Site) -> None:
    token = site.add_host()
    assert site.join(token) == 0, site.error_output
    for path in [*site.agent.parent.glob("*.pem"), *(site.folder / "state").iterdir()]:
        path.unlink()
    before = site.files()
    assert site.join(token) == 1
    assert "was used at" in site.error_output and "kilonova host remove h1" in site.error_output
    assert site.files() == before, "nothing is written for who comes second"
    assert site.join(site.add_host()) == 0, "who was cut off is given another"


def test_join_with_expired_token_changes_nothing(site: Site) -> None:
    token, before = site.add_host(), site.files()
    site.store.write(lambda tx: tx.execute(sa.update(schema.host_joins).values(until=1)))
    assert site.join(token) == 1
    assert "expired at" in site.error_output and "kilonova host add h1" in site.error_output
    assert site.files() == before


def test_join_with_replaced_token_changes_nothing(site: Site) -> None:
    older, _, before = site.add_host(), site.add_host(), site.files()
    assert site.join(older) == 1
    assert "the broker refuses kilonova-join-h1" in site.error_output
    assert site.files() == before


def test_join_token_stays_valid_when_check_on_host_fails(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = site.add_host()
    monkeypatch.setattr("deploy.operator.hosts.join_checks.LEAST_GIB", 1 << 40)
    assert site.join(token) == 1
    assert "left for guests" in site.error_output
    monkeypatch.undo()
    state = site.folder / "state"
    state.mkdir()
    (state / "host.key").write_text(json.dumps({"host": "h9"}))
    assert site.join(token) == 1
    assert "has the keys of host h9" in site.error_output
    (state / "host.key").unlink()
    assert site.join(token) == 0, site.error_output


def test_host_remove_deletes_broker_users_and_refuses_join_token(
    site: Site, broker: Broker
) -> None:
    token = site.add_host()
    assert site.join(token) == 0, site.error_output
    site.store.write(lambda tx: hosts.register(tx, "h1", "boot", INVENTORY))
    assert site.run_command(site.controller, "host", "add", "h1", "--address", "127.0.0.1") == 1
    assert site.run_command(site.controller, "host", "remove", "h1") == 0, site.error_output
    user_list = broker.control("list_users")
    assert broker_names.user_of("h1") not in user_list
    assert broker_names.user_of_join("h1") not in user_list
    assert site.join(token) == 1
    assert "the broker refuses kilonova-join-h1" in site.error_output
