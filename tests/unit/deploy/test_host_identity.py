# SPDX-License-Identifier: Apache-2.0
"""``kilonova host add|rotate|remove``: the key file, what counts afterwards, and what is to be
done at the broker.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from common.host_keys import Generations, OwnKeys, Purpose, derive
from common.models import HostInventory
from common.store.engine import Store
from common.store.hosts import host_keys, hosts, services
from deploy.cli.main import main
from tests.schemas import upgrade


class Operator:
    """Gives commands; ``said`` and ``complained`` are what the last one printed."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.conf, self.file, self._capsys = folder / "kilonova.conf", folder / "h1.key", capsys
        self.conf.write_text(
            f"[DEFAULT]\ntransport_url = rabbit://kilonova:S3CRET@broker:5671/\n[database]\nurl = sqlite:///{folder}/k.db\n"
            "[host_keys]\ncommand_secret = one\nquery_secret = two\n"
        )

    def gives(self, *words: str) -> int:
        status = main(["--config", str(self.conf), "host", *words])
        told = self._capsys.readouterr()
        self.said, self.complained = told.out, told.err
        return status

    def issues(self, verb: str, *words: str) -> OwnKeys:
        assert self.gives(verb, "h1", "--file", str(self.file), *words) == 0, self.complained
        return OwnKeys.read(self.file, "h1")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    made = upgrade(Store(f"sqlite:///{tmp_path}/k.db"))
    yield made
    made.close()


@pytest.fixture
def operator(tmp_path: Path, store: Store, capsys: pytest.CaptureFixture[str]) -> Operator:
    return Operator(tmp_path, capsys)


def test_a_host_that_is_added_has_keys_and_a_name_at_the_broker(
    operator: Operator, store: Store
) -> None:
    own = operator.issues("add")
    number = own.generation
    assert own.newest("h1", Purpose.COMMAND) == derive("one", "h1", number, Purpose.COMMAND)
    assert own.newest("h1", Purpose.QUERY) == derive("two", "h1", number, Purpose.QUERY)
    assert own.transport_url.startswith(
        "rabbit://kilonova-host-h1:"
    ) and own.transport_url.endswith("@broker:5671/")
    assert "S3CRET" not in operator.file.read_text(), "the cloud's own password is no host's"
    assert operator.file.stat().st_mode & 0o777 == 0o600
    assert store.read(host_keys.generations) == {"h1": Generations(number)}
    assert "rabbitmqctl add_user kilonova-host-h1" in operator.complained
    assert all(
        secret not in operator.said + operator.complained
        for secret in (own.transport_url.split(":")[2].split("@")[0], *own.secrets.values())
    )
    assert operator.gives("add", "h1") == 1
    assert "kilonova host rotate h1" in operator.complained


def test_keys_that_are_replaced_count_for_an_hour_or_no_more(
    operator: Operator, store: Store
) -> None:
    assert operator.gives("rotate", "h1") == 1
    assert "kilonova host add h1" in operator.complained
    first = operator.issues("add")
    second = operator.issues("rotate")
    assert second.generation == first.generation + 1
    assert second.transport_url != first.transport_url
    assert store.read(host_keys.generations) == {
        "h1": Generations(second.generation, accepts_previous=True)
    }
    assert "close_all_user_connections" not in operator.complained
    assert operator.issues("rotate", "--now").generation == first.generation + 2
    assert store.read(host_keys.generations) == {"h1": Generations(first.generation + 2)}
    assert "close_all_user_connections kilonova-host-h1" in operator.complained


def test_a_host_is_removed_when_nothing_is_on_it(operator: Operator, store: Store) -> None:
    operator.issues("add")
    store.write(
        lambda tx: hosts.register(
            tx, "h1", "boot", HostInventory("QEMU", 7002000, "h1", 4, 8192, 9)
        )
    )
    assert operator.gives("remove", "h1") == 0
    assert "rabbitmqctl delete_user kilonova-host-h1" in operator.complained
    assert store.read(host_keys.generations) == {}
    assert store.read(lambda tx: services.list_all(tx, "h1")) == []
    assert operator.gives("remove", "h1") == 1
    assert "has no keys" in operator.complained


@pytest.mark.parametrize("name", ["h1/../h2", "h1\n", "", "h 1", ".*", "h1$", "x" * 300])
def test_a_name_that_is_none_is_refused(operator: Operator, name: str) -> None:
    assert operator.gives("add", name) == 1
    assert "is no name of a host" in operator.complained


def test_where_the_secrets_are_not_no_keys_can_be_made(operator: Operator) -> None:
    operator.conf.write_text(operator.conf.read_text().replace("command_secret = one\n", ""))
    assert operator.gives("add", "h1") == 1
    assert "there is no [host_keys] command_secret" in operator.complained
