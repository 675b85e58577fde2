# SPDX-License-Identifier: Apache-2.0
"""``kilonova upgrade check``: one line per finding, and an exit status."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from common import __version__
from common.domain.service_binaries import Binary
from common.store import schema
from common.store.engine import Store
from common.store.hosts import services
from common.store.version import USABLE_FROM
from deploy.operator.hosts import broker_restore
from deploy.operator.hosts.broker_users import Management
from deploy.operator.main import main
from tests.schemas import upgrade


@pytest.fixture
def conf(tmp_path: Path) -> Path:
    path = tmp_path / "kilonova.conf"
    path.write_text(
        f"[DEFAULT]\ntransport_url = rabbit://kilonova:x@127.0.0.1:9/\n"
        f"[database]\nurl = sqlite:///{tmp_path}/k.db\n"
        f"[host_keys]\ncommand_secret = {'c' * 32}\nmanagement_url = http://root:x@127.0.0.1:9\n"
    )
    return path


@pytest.fixture
def store(conf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """Return the store of a cloud that runs this release, whose broker has today's rights."""
    monkeypatch.setattr(Management, "users_without_rights", lambda *_: [])
    store = upgrade(Store(f"sqlite:///{tmp_path}/k.db"))
    enrol(store, Binary.CONDUCTOR, "c1", __version__)
    enrol(store, Binary.COMPUTE, "h1", __version__)
    return store


def enrol(store: Store, binary: Binary, host: str, version: str | None) -> None:
    store.write(lambda tx: services.enrol(tx, host, binary, version))


def check(conf: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Return the exit status and the output of the command."""
    capsys.readouterr()
    status = main(["--config", str(conf), "upgrade", "check"])
    return status, capsys.readouterr().out


def test_check_finds_nothing_when_all_services_run_this_release(
    conf: Path, store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    status, output = check(conf, capsys)
    assert (status, {line.partition(":")[0] for line in output.splitlines()}) == (0, {"fine"})
    assert f"2 services of version {__version__}" in output


@pytest.mark.parametrize(
    ("version", "status", "text"),
    [
        (
            "0.1.0",
            1,
            f"of version 0.1.0: nova-compute on h2. Upgrade each service to {__version__}",
        ),
        (None, 1, "of an unknown version: nova-compute on h2. 0.1.0 does not record"),
        ("0.0.9", 2, "of version 0.0.9: nova-compute on h2. Only 0.1 and later run beside"),
        ("99.0.0", 2, "of version 99.0.0, newer than this code: nova-compute on h2"),
    ],
)
def test_check_names_services_of_other_versions(
    version: str | None,
    status: int,
    text: str,
    conf: Path,
    store: Store,
    capsys: pytest.CaptureFixture[str],
) -> None:
    enrol(store, Binary.COMPUTE, "h2", version)
    found, output = check(conf, capsys)
    assert found == status and text in output


def test_upgrade_check_lists_down_services(
    conf: Path, store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    store.write(lambda tx: tx.execute(sa.update(schema.heartbeats).values(up=False)))
    status, output = check(conf, capsys)
    assert (
        status == 1 and "down: nova-conductor on c1, nova-compute on h1. Start or remove" in output
    )


def test_check_names_users_without_rights_at_broker(
    conf: Path, store: Store, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def users_without_rights(self: Management, identities: Any, virtual_host: str) -> list[str]:
        return [identity.user for identity in identities]

    monkeypatch.setattr(Management, "users_without_rights", users_without_rights)
    status, output = check(conf, capsys)
    assert status == 1 and "1 of 1 users at the broker lack rights" in output
    assert "kilonova. Run where a conductor runs: kilonova broker restore" in output


def test_check_says_when_rights_at_broker_cannot_be_checked(
    conf: Path, store: Store, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.undo()  # The management API of ``conf`` does not exist.
    status, output = check(conf, capsys)
    assert status == 1 and "the rights at the broker are not checked. " in output
    conf.write_text(conf.read_text().partition("[host_keys]")[0])
    status, output = check(conf, capsys)
    assert status == 1 and "management_url or command_secret is not set" in output


def test_check_of_cloud_of_up_finds_nothing_to_do_at_its_broker(
    conf: Path, store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    without_management = conf.read_text().partition("[host_keys]")[0]
    conf.write_text(f"{broker_restore.MADE_BY_UP}; do not edit\n{without_management}")
    status, output = check(conf, capsys)
    assert status == 0 and "./deploy/up gives the users at the broker their rights" in output


def test_check_of_database_before_its_upgrade(
    conf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, output = check(conf, capsys)
    assert status == 1 and "the database is empty. Run: kilonova database upgrade" in output
    store = upgrade(Store(f"sqlite:///{tmp_path}/k.db"))
    store.write(lambda tx: tx.execute(sa.text("DROP TABLE schema_version")))
    status, output = check(conf, capsys)
    assert status == 1 and "has version 0001, this release needs" in output
    assert "Make a backup (docs/backup.md), then run: kilonova database upgrade" in output
    assert "services" not in output  # 0.1.0 does not record their versions.


def test_upgrade_check_returns_2_for_database_of_incompatible_newer_release(
    conf: Path, store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    store.write(lambda tx: tx.execute(sa.text(f"UPDATE {USABLE_FROM} SET version_num = '9999'")))
    status, output = check(conf, capsys)
    assert status == 2 and "not possible: a newer release has upgraded the database" in output


def test_status_shows_version_of_each_service(
    conf: Path, store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    enrol(store, Binary.COMPUTE, "h2", None)
    capsys.readouterr()
    main(["--config", str(conf), "status"])
    versions = {
        line.split()[1]: line.split()[2]
        for line in capsys.readouterr().out.splitlines()
        if line.startswith("nova-")
    }
    assert versions == {"c1": __version__, "h1": __version__, "h2": "unknown"}


def test_enrolment_without_version_keeps_the_recorded_version(store: Store) -> None:
    """A heartbeat enrols a service again without its version."""
    store.write(lambda tx: services.beat(tx, ["c1"], Binary.CONDUCTOR))
    enrol(store, Binary.CONDUCTOR, "c1", None)
    [row] = store.read(lambda tx: services.list_all(tx, "c1"))
    assert row.version == __version__
    enrol(store, Binary.CONDUCTOR, "c1", "0.3.0")
    [row] = store.read(lambda tx: services.list_all(tx, "c1"))
    assert row.version == "0.3.0"
