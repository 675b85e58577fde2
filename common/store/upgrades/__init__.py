# SPDX-License-Identifier: Apache-2.0
"""Upgrades of the database: numbered files, applied in order by alembic.

``kilonova database upgrade`` calls ``upgrade``. If this code may not use a database, a command ends
with an error (``check``), and a service waits (``common.store.version``).

A release and the release before run side by side. So an upgrade adds tables, columns and indices
that the code before ignores, and a later release removes what no code uses. ``USABLE_FROM``
of each upgrade is the oldest version of code that may use the database afterwards. An upgrade may
run again after an interruption, because MariaDB commits each change of a table.

Invariant: alembic is imported only to upgrade, because its import is slow.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import sqlalchemy as sa

from common.domain import errors
from common.store import schema
from common.store.engine import Connection, Store
from common.store.version import (
    UPGRADED_TO,
    USABLE_FROM,
    DatabaseVersion,
    find_needed,
    is_usable,
    read_version,
    remedy,
)

if TYPE_CHECKING:
    from alembic.config import Config

_usable_from = sa.Table(
    USABLE_FROM, sa.MetaData(), sa.Column("version_num", sa.String(32), primary_key=True)
)


def upgrade(store: Store) -> tuple[DatabaseVersion | None, DatabaseVersion]:
    """Bring the database to the newest version. A newer database that this code may use stays.

    Returns:
        The version before (None: no version), and the newest version. If both are the same, the
        database was not changed.

    Raises:
        Problem: The database is newer than this code, which may not use the database.
    """
    from alembic import command

    before = version(store)
    if before and before.is_too_new:
        raise _mismatch(store, before)
    if before and before.upgraded_to > find_needed():
        return before, before
    with store.begin() as tx:
        options = _alembic(tx)
        if before is None:
            schema.metadata.create_all(tx)
            command.stamp(options, find_needed())
        else:
            if not sa.inspect(tx).has_table(UPGRADED_TO):  # a database of 0.1.0
                command.stamp(options, before.upgraded_to)
            command.upgrade(options, find_needed())
        _record_usable_from(tx, options)
    after = version(store)
    assert after is not None
    return before, after


def _alembic(tx: Connection) -> Config:
    """Return alembic's options for upgrades on this connection."""
    from alembic.config import Config

    options = Config()
    options.set_main_option("script_location", str(Path(__file__).parent).replace("%", "%%"))
    options.attributes["connection"] = tx
    return options


def _record_usable_from(tx: Connection, options: Config) -> None:
    from alembic.script import ScriptDirectory

    newest = ScriptDirectory.from_config(options).get_revision(find_needed())
    _usable_from.create(tx, checkfirst=True)
    tx.execute(_usable_from.delete())
    tx.execute(_usable_from.insert().values(version_num=newest.module.USABLE_FROM))


def version(store: Store) -> DatabaseVersion | None:
    """Return the database's version, or None before the first upgrade. Creates no SQLite file."""
    if store.dialect_name == "sqlite" and _is_absent(store.url.database):
        return None
    dbapi = store.engine.dialect.dbapi
    return store.read(lambda tx: read_version(tx.connection, dbapi))


def _is_absent(file: str | None) -> bool:
    """Return True if the SQLite file does not exist, so that a connection would create it."""
    return bool(file) and file != ":memory:" and not Path(str(file)).exists()


def check(store: Store) -> None:
    """Check that this code may use the database.

    Raises:
        Problem: The database must be upgraded, or is newer than this code.
    """
    found = version(store)
    if not is_usable(found):
        raise _mismatch(store, found)


def _mismatch(store: Store, found: DatabaseVersion | None) -> errors.Problem:
    where = store.url.render_as_string(hide_password=True)
    return errors.Problem(
        f"The database {where} is at version {found or 'none'}, this code needs {find_needed()}. "
        f"If [database] url names the right database: {remedy(found)}"
    )
