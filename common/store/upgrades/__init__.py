# SPDX-License-Identifier: Apache-2.0
"""Upgrades of the database: numbered files, applied in order by alembic.

``kilonova database upgrade`` calls ``upgrade``. With another version a command ends with an error
(``check``), and a service waits (``common.store.version``).

Invariant: alembic is imported only to upgrade, because its import is slow.
"""

from __future__ import annotations

from pathlib import Path

import sqlalchemy as sa

from common.domain import errors
from common.store.engine import Connection, Store
from common.store.version import find_needed, remedy


def upgrade(store: Store) -> tuple[str | None, str]:
    """Bring the database to the newest version.

    Returns:
        The version before (None: no version), and the newest version. If both are the same, the
        database was not changed.

    Raises:
        Problem: The database is newer than this code.
    """
    from alembic import command
    from alembic.config import Config

    before, options = version(store), Config()
    if before and before > newest():
        raise _mismatch(store, before)
    options.set_main_option("script_location", str(Path(__file__).parent).replace("%", "%%"))
    with store.begin() as tx:
        options.attributes["connection"] = tx
        command.upgrade(options, "head")
    return before, newest()


def version(store: Store) -> str | None:
    """Return the database's version, or None before the first upgrade. Creates no SQLite file."""
    if store.dialect_name == "sqlite" and _is_absent(store.url.database):
        return None
    return store.read(_version)


def _version(tx: Connection) -> str | None:
    if not sa.inspect(tx).has_table("alembic_version"):
        return None
    found: str | None = tx.scalar(sa.text("SELECT version_num FROM alembic_version"))
    return found


def _is_absent(file: str | None) -> bool:
    """Return True if the SQLite file does not exist, so that a connection would create it."""
    return bool(file) and file != ":memory:" and not Path(str(file)).exists()


def newest() -> str:
    """Return the version that this code needs."""
    return find_needed()


def check(store: Store) -> None:
    """Check that the database has the version that this code needs.

    Raises:
        Problem: The database must be upgraded, or is newer than this code.
    """
    found = version(store)
    if found != newest():
        raise _mismatch(store, found)


def _mismatch(store: Store, found: str | None) -> errors.Problem:
    where = store.url.render_as_string(hide_password=True)
    return errors.Problem(
        f"The database {where} is at version {found or 'none'}, this code needs {newest()}. "
        f"If [database] url names the right database: {remedy(found)}"
    )
