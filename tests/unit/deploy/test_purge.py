# SPDX-License-Identifier: Apache-2.0
"""``kilonova database purge``: the rows that it removes, its output, and ``--dry-run``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from common.store import schema
from common.store.engine import Store, moment
from common.store.servers import servers
from deploy.operator.commands import ARGUMENTS
from deploy.operator.main import main
from deploy.operator.store.purge import DAY, KINDS
from tests.schemas import upgrade

PURGE = ("database", "purge")


@pytest.fixture
def conf(tmp_path: Path) -> Path:
    path = tmp_path / "kilonova.conf"
    path.write_text(f"[database]\nurl = sqlite:///{tmp_path}/k.db\n")
    return path


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """Yield a database with an Idempotency-Key of 40 days and another of 10 days."""
    new_store = Store(f"sqlite:///{tmp_path}/k.db")
    upgrade(new_store)
    row = {"project_id": "p", "digest": "d", "reservation_id": "r", "server_id": "s"}
    new_store.write(
        lambda tx: servers.remember(tx, [{**row, "key": "old"}, {**row, "key": "young"}])
    )
    with new_store.begin() as tx:
        table, at = schema.idempotency_keys, moment(tx)
        for key, days in (("old", 40), ("young", 10)):
            change = sa.update(table).where(table.c.key == key)
            tx.execute(change.values(created_at=at - days * DAY))
    yield new_store
    new_store.close()


def keys(store: Store) -> set[str]:
    return set(store.read(lambda tx: tx.scalars(sa.select(schema.idempotency_keys.c.key)).all()))


def test_database_purge_dry_run_counts_and_removes_no_rows(
    store: Store, conf: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--config", str(conf), *PURGE, "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "servers: nothing, over for more than 90 days",
        "host-actions: nothing, over for more than 90 days",
        "console-tokens: nothing, over for more than 1 days",
        "idempotency-keys: 1 of idempotency_keys, over for more than 30 days",
        "1 rows would go; nothing was removed",
    ]
    assert keys(store) == {"old", "young"}


@pytest.mark.parametrize(
    ("words", "left"),
    [
        ([], {"young"}),
        (["--older-than", "9"], set()),
        (["--older-than", "50"], {"old", "young"}),
        (["--kind", "servers", "--kind", "actions"], {"old", "young"}),
        (["--kind", "idempotency-keys"], {"young"}),
    ],
)
def test_database_purge_removes_rows_by_age_and_kind(
    store: Store,
    conf: Path,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    left: set[str],
) -> None:
    assert main(["--config", str(conf), *PURGE, *words]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"{2 - len(left)} rows removed"
    assert keys(store) == left


def test_database_purge_refuses_unknown_kind(
    conf: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(["--config", str(conf), *PURGE, "--kind", "guests"])
    assert exit_info.value.code == 2
    assert "'guests' is not one of servers, migrations, actions" in capsys.readouterr().err


def test_database_purge_help_names_every_kind() -> None:
    text = dict(ARGUMENTS[PURGE])["--kind"]["help"]
    assert [kind.name for kind in KINDS if kind.name not in text] == []


def test_purge_kinds_cover_every_table_with_server_id() -> None:
    """A new table with a column server_id must declare how its rows are purged with a server."""
    handled_tables = {reference.column.table.name for kind in KINDS for reference in kind.hanging}
    # The purge keeps a server with a row in these tables.
    kept_with_server = {
        "guests",
        "cleanups",
        "share_mappings",
        "block_devices",
    }
    # The column only names the server of the event.
    informational = {"host_action_events"}
    of_servers = {
        table.name for table in schema.metadata.sorted_tables if "server_id" in table.columns
    }
    assert of_servers - kept_with_server - informational <= handled_tables
