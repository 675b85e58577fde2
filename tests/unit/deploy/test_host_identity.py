# SPDX-License-Identifier: Apache-2.0
"""``kilonova host add``, ``rotate`` and ``remove``.

The tests cover the join token or key file, the keys that are valid afterwards, and the commands
that they print for the broker.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from common.domain import ids, states
from common.domain.models import Flavor, HostInventory
from common.domain.wire import to_wire
from common.security.host_joins import JoinToken
from common.security.host_keys import Generations, OwnKeys, Purpose, derive
from common.store import schema
from common.store.engine import Store
from common.store.hosts import host_joins, host_keys, hosts, services
from common.store.servers import servers
from deploy.one_machine.cloud.authority import Authority
from deploy.operator.main import main
from tests.schemas import upgrade


class Operator:
    """Runs ``kilonova host``. ``output`` and ``error_output`` are the texts of the last command."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.conf, self.file, self._capsys = folder / "kilonova.conf", folder / "h1.key", capsys
        self.conf.write_text(
            f"[DEFAULT]\ntransport_url = rabbit://kilonova:S3CRET@broker:5671/\n[database]\nurl = sqlite:///{folder}/k.db\n"
            "[host_keys]\ncommand_secret = one\nquery_secret = two\n[tls]\nallow_plain_text = true\n"
        )

    def run_host(self, *words: str) -> int:
        status = main(["--config", str(self.conf), "host", *words])
        captured = self._capsys.readouterr()
        self.output, self.error_output = captured.out, captured.err
        return status

    def issue_key_file(self, verb: str, *words: str) -> OwnKeys:
        assert self.run_host(verb, "h1", "--file", str(self.file), *words) == 0, self.error_output
        return OwnKeys.read(self.file, "h1")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    new_store = upgrade(Store(f"sqlite:///{tmp_path}/k.db"))
    yield new_store
    new_store.close()


@pytest.fixture
def operator(tmp_path: Path, store: Store, capsys: pytest.CaptureFixture[str]) -> Operator:
    return Operator(tmp_path, capsys)


def test_host_add_with_file_writes_keys_and_prints_broker_commands(
    operator: Operator, store: Store
) -> None:
    own = operator.issue_key_file("add")
    number = own.generation
    assert own.newest("h1", Purpose.COMMAND) == derive("one", "h1", number, Purpose.COMMAND)
    assert own.newest("h1", Purpose.QUERY) == derive("two", "h1", number, Purpose.QUERY)
    assert own.transport_url.startswith(
        "rabbit://kilonova-host-h1:"
    ) and own.transport_url.endswith("@broker:5671/")
    assert "S3CRET" not in operator.file.read_text(), "the cloud's own password is no host's"
    assert operator.file.stat().st_mode & 0o777 == 0o600
    assert store.read(host_keys.generations) == {"h1": Generations(number)}
    assert "rabbitmqctl add_user kilonova-host-h1" in operator.error_output
    assert "rabbitmqctl set_user_limits kilonova-host-h1" in operator.error_output
    assert all(
        secret not in operator.output + operator.error_output
        for secret in (own.transport_url.split(":")[2].split("@")[0], *own.secrets.values())
    )
    assert operator.run_host("add", "h1", "--file", str(operator.file)) == 1
    assert "kilonova host rotate h1" in operator.error_output


def test_host_rotate_keeps_previous_keys_valid_unless_now_is_set(
    operator: Operator, store: Store
) -> None:
    assert operator.run_host("rotate", "h1") == 1
    assert "kilonova host add h1" in operator.error_output
    first = operator.issue_key_file("add")
    second = operator.issue_key_file("rotate")
    assert second.generation == first.generation + 1
    assert second.transport_url != first.transport_url
    assert store.read(host_keys.generations) == {
        "h1": Generations(second.generation, accepts_previous=True)
    }
    assert "close_all_user_connections" not in operator.error_output
    assert "A running agent of host h1 fetches the new keys" in operator.output
    assert operator.issue_key_file("rotate", "--now").generation == first.generation + 2
    assert store.read(host_keys.generations) == {"h1": Generations(first.generation + 2)}
    assert "close_all_user_connections kilonova-host-h1" in operator.error_output
    assert "fetches" not in operator.output


def report_secrets(store: Store, digest: str) -> None:
    """Register h1, with the digest that its agent reports."""
    inventory = HostInventory("QEMU", 7002000, "h1", 4, 8192, 9, facts={"secrets": digest})
    store.write(lambda tx: hosts.register(tx, "h1", "boot", inventory))


def test_host_secrets_names_hosts_without_secrets_of_today(
    operator: Operator, store: Store
) -> None:
    own = operator.issue_key_file("add")
    assert operator.run_host("secrets") == 1
    assert "0 of 1 hosts" in operator.output and "h1 is not up" in operator.output
    report_secrets(store, own.fetched)
    assert operator.run_host("secrets", "--wait") == 0
    assert operator.output == "1 of 1 hosts have today's secrets\n"
    text = operator.conf.read_text()
    operator.conf.write_text(text.replace("query_secret = two", "query_secret = two, new"))
    assert operator.run_host("secrets") == 1
    assert "h1 is up and has others" in operator.output
    report_secrets(store, operator.issue_key_file("rotate").fetched)
    assert operator.run_host("secrets") == 0
    operator.conf.write_text(text.replace("command_secret = one", ""))
    assert operator.run_host("secrets") == 1
    assert "command_secret is not set" in operator.error_output


def test_host_remove_deletes_keys_and_services_of_empty_host(
    operator: Operator, store: Store
) -> None:
    operator.issue_key_file("add")
    store.write(
        lambda tx: hosts.register(
            tx, "h1", "boot", HostInventory("QEMU", 7002000, "h1", 4, 8192, 9)
        )
    )
    assert operator.run_host("remove", "h1") == 0
    assert "rabbitmqctl delete_user kilonova-host-h1" in operator.error_output
    assert store.read(host_keys.generations) == {}
    assert store.read(lambda tx: services.list_all(tx, "h1")) == []
    assert operator.run_host("remove", "h1") == 1
    assert "has no keys" in operator.error_output


def test_host_remove_repeated_after_interruption_prints_broker_commands(
    operator: Operator,
) -> None:
    assert operator.run_host("remove", "h1") == 1
    assert "has no keys" in operator.error_output
    for name in ("kilonova-host-h1", "kilonova-join-h1"):
        assert f"rabbitmqctl delete_user {name}" in operator.error_output


@pytest.mark.parametrize("name", ["h1/../h2", "h1\n", "", "h 1", ".*", "h1$", "x" * 300])
def test_host_add_refuses_invalid_host_name(operator: Operator, name: str) -> None:
    assert operator.run_host("add", name) == 1
    assert "is not a host name" in operator.error_output


def test_host_add_without_command_secret_is_refused(operator: Operator) -> None:
    operator.conf.write_text(operator.conf.read_text().replace("command_secret = one\n", ""))
    assert operator.run_host("add", "h1") == 1
    assert "[host_keys] command_secret is not set" in operator.error_output


# --- tokens ---
@pytest.fixture
def working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the current folder of the test, to which the commands write files."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def add_host(operator: Operator, *words: str) -> JoinToken:
    assert operator.run_host("add", "h1", *words) == 0, operator.error_output
    return JoinToken.read(operator.output)


def test_host_add_token_contains_join_secret_but_no_host_keys(
    operator: Operator, store: Store, working_folder: Path
) -> None:
    token = add_host(operator)
    number = token.generation
    assert store.read(host_keys.generations) == {"h1": Generations(number)}
    assert (token.host, token.ca, token.allow_plain_text) == ("h1", "", True)
    assert token.secret == derive("one", "h1", number, Purpose.JOIN).secret.hex()
    joins, own = (
        line.split() for line in reversed((working_folder / "h1-broker.txt").open().readlines())
    )
    assert token.transport_url == f"rabbit://kilonova-join-h1:{joins[1]}@broker:5671/"
    assert (joins[0], own[0]) == ("kilonova-join-h1", "kilonova-host-h1")
    assert (working_folder / "h1-broker.txt").stat().st_mode & 0o777 == 0o600
    for name in (joins[0], own[0]):
        assert f"rabbitmqctl add_user {name}" in operator.error_output
    secrets = [own[1]] + [
        derive(secret, "h1", number, purpose).secret.hex()
        for secret, purpose in (("one", Purpose.COMMAND), ("two", Purpose.QUERY))
    ]
    assert all(secret not in repr(dataclasses.asdict(token)) for secret in (*secrets, "S3CRET"))
    assert all(
        secret not in operator.output + operator.error_output for secret in (*secrets, joins[1])
    )
    assert "kilonova join TOKEN" in operator.error_output


def test_host_add_uses_configured_broker_addresses(
    operator: Operator, working_folder: Path
) -> None:
    operator.conf.write_text(
        operator.conf.read_text().replace(
            "command_secret", "broker_addresses = 192.0.2.1:5671,192.0.2.2\ncommand_secret"
        )
    )
    assert "@192.0.2.1:5671," in add_host(operator).transport_url
    assert "@192.0.2.9:5672/" in add_host(operator, "--broker", "192.0.2.9").transport_url


def test_host_add_replaces_token_until_host_has_joined(
    operator: Operator, store: Store, working_folder: Path
) -> None:
    first, second = add_host(operator), add_host(operator)
    assert second.generation == first.generation + 1
    store.write(
        lambda tx: hosts.register(
            tx, "h1", "boot", HostInventory("QEMU", 7002000, "h1", 4, 8192, 9)
        )
    )
    assert operator.run_host("add", "h1") == 1
    assert "Host h1 has joined" in operator.error_output and operator.output == ""
    assert store.read(host_keys.generations) == {"h1": Generations(second.generation)}


def test_host_add_with_broker_on_loopback_requires_broker_option(
    operator: Operator, store: Store, working_folder: Path
) -> None:
    operator.conf.write_text(operator.conf.read_text().replace("broker:5671", "127.0.0.1:5671"))
    assert operator.run_host("add", "h1") == 1
    assert "--broker HOST[:PORT]" in operator.error_output
    assert store.read(host_keys.generations) == {}
    for addresses, url_end in (
        (("192.0.2.1",), "@192.0.2.1:5672/"),
        (("a.example:5671", "[2001:db8::1]:5671"), "@[2001:db8::1]:5671/"),
        (("127.0.0.1",), "@127.0.0.1:5672/"),
    ):
        words = [word for address in addresses for word in ("--broker", address)]
        assert add_host(operator, *words).transport_url.endswith(url_end)
    for wrong in ("a:b", "", "user@a", "a:99999", "a/b"):
        assert operator.run_host("add", "h1", "--broker", wrong) == 1
        assert "is not an address of a broker" in operator.error_output


def test_host_add_token_has_certificate_authority_of_cloud_with_tls(
    operator: Operator, working_folder: Path, store: Store
) -> None:
    authority = Authority(working_folder / "tls")
    files = authority.issue("control", "127.0.0.1")
    text = operator.conf.read_text().replace("[tls]\nallow_plain_text = true\n", "")
    operator.conf.write_text(
        text + f"[tls]\nca_file = {files.ca}\ncert_file = {files.cert}\nkey_file = {files.key}\n"
    )
    token = add_host(operator)
    assert (token.ca, token.allow_plain_text) == (authority.path.read_text(), False)
    operator.conf.write_text(operator.conf.read_text() + f"ca_key_file = {authority.key_path}\n")
    assert operator.run_host("add", "h1") == 1
    assert "--address IP" in operator.error_output
    add_host(operator, "--address", "192.0.2.7")
    join_row = store.read(
        lambda tx: host_joins.look(tx, "h1", host_keys.generations(tx)["h1"].newest)
    )
    assert join_row.address == "192.0.2.7"
    with pytest.raises(SystemExit):
        operator.run_host("add", "h1", "--address", "a name")


# --- removal ---
def test_host_remove_with_servers_is_refused_and_names_them(
    operator: Operator, store: Store
) -> None:
    operator.issue_key_file("add")
    store.write(
        lambda tx: hosts.register(
            tx, "h1", "boot", HostInventory("QEMU", 7002000, "h1", 4, 8192, 9)
        )
    )
    names = [f"web{number}" for number in range(7)]
    store.write(lambda tx: servers.insert(tx, [server(name) for name in names]))
    assert operator.run_host("remove", "h1") == 1
    assert "Host h1 has 7 servers: web0 (" in operator.error_output
    assert "and 2 more" in operator.error_output
    assert "First: kilonova host drain h1" in operator.error_output
    assert "rabbitmqctl" not in operator.error_output
    assert store.read(lambda tx: services.list_all(tx, "h1")) != []
    [row] = store.read(lambda tx: services.list_all(tx, "h1"))
    store.write(lambda tx: services.set_state(tx, row.uuid, forced_down=True))
    assert operator.run_host("remove", "h1") == 1
    assert "First: kilonova host evacuate h1" in operator.error_output


def test_host_remove_deletes_all_rows_and_prints_broker_user_deletions(
    operator: Operator, store: Store, working_folder: Path
) -> None:
    def rows() -> dict[str, int]:
        return store.read(
            lambda tx: {
                table.name: tx.scalar(sa.select(sa.func.count()).select_from(table)) or 0
                for table in schema.metadata.sorted_tables
            }
        )

    before = rows()
    add_host(operator)
    store.write(
        lambda tx: hosts.register(
            tx, "h1", "boot", HostInventory("QEMU", 7002000, "h1", 4, 8192, 9)
        )
    )
    assert rows() != before
    assert operator.run_host("remove", "h1") == 0, operator.error_output
    assert rows() == before
    for name in ("kilonova-host-h1", "kilonova-join-h1"):
        assert f"rabbitmqctl delete_user {name}" in operator.error_output
        assert f"rabbitmqctl close_all_user_connections {name}" in operator.error_output


def server(name: str) -> dict[str, object]:
    return {
        "id": ids.new(),
        "project_id": "p",
        "user_id": "u",
        "name": name,
        "hostname": name,
        "vm_state": states.ACTIVE,
        "host": "h1",
        "flavor": to_wire(Flavor("1", "m1.nano", 1, 128, 1)),
        "flavor_id": "1",
        "vcpus": 1,
        "memory_mb": 128,
        "disk_gb": 1,
        "meta": {},
        "tags": [],
        "scheduler_hints": {},
        "security_groups": [],
        "reservation_id": "r",
    }
