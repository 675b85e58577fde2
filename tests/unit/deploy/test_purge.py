# SPDX-License-Identifier: Apache-2.0
"""``kilonova database purge``: what it says, and that --dry-run removes nothing."""

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
    """An Idempotency-Key of 40 days, and one of 10."""
    made = Store(f"sqlite:///{tmp_path}/k.db")
    upgrade(made)
    row = {"project_id": "p", "digest": "d", "reservation_id": "r", "server_id": "s"}
    made.write(lambda tx: servers.remember(tx, [{**row, "key": "old"}, {**row, "key": "young"}]))
    with made.begin() as tx:
        table, at = schema.idempotency_keys, moment(tx)
        for key, days in (("old", 40), ("young", 10)):
            change = sa.update(table).where(table.c.key == key)
            tx.execute(change.values(created_at=at - days * DAY))
    yield made
    made.close()


def keys(store: Store) -> set[str]:
    return set(store.read(lambda tx: tx.scalars(sa.select(schema.idempotency_keys.c.key)).all()))


def test_dry_run_counts_and_removes_nothing(
    store: Store, conf: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--config", str(conf), *PURGE, "--dry-run"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said == [
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
def test_what_goes(
    store: Store,
    conf: Path,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    left: set[str],
) -> None:
    assert main(["--config", str(conf), *PURGE, *words]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"{2 - len(left)} rows removed"
    assert keys(store) == left


def test_a_kind_that_is_not_there_is_refused(
    conf: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--config", str(conf), *PURGE, "--kind", "guests"])
    assert ended.value.code == 2
    assert "'guests' is not one of servers, migrations, actions" in capsys.readouterr().err


def test_help_names_every_kind() -> None:
    text = dict(ARGUMENTS[PURGE])["--kind"]["help"]
    assert [one.name for one in KINDS if one.name not in text] == []


def test_every_kind_says_what_hangs_on_it_by_columns_that_are_there() -> None:
    """Whatever table gets a server_id has to be told what becomes of its rows with a server."""
    told = {one.column.table.name for kind in KINDS for one in kind.hanging}
    # a server that has such a row is kept
    judged = {
        "guests",
        "cleanups",
        "share_mappings",
        "block_devices",
    }
    noted = {"host_action_events"}  # only says which server was meant
    of_servers = {
        table.name for table in schema.metadata.sorted_tables if "server_id" in table.columns
    }
    assert of_servers - judged - noted <= told
