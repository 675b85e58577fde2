# SPDX-License-Identifier: Apache-2.0
"""The check whether this code may use the database.

Upgrades have numbers. The version of the code is the number of its newest upgrade. A database has
two numbers: the newest upgrade that ran, and the oldest version of code that may still use the
database. So a database that was only extended serves this release and the release before.

Every service checks each new connection, so that requests cost nothing extra. If the check fails,
no data is read or written: requests get 503, and processes without requests start with
``await_version``.

Invariant: alembic is not imported, because only upgrades need it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from common.domain import errors
from common.service.log import get_logger
from common.store.engine import Store

log = get_logger(__name__)
#: Seconds between two checks of a waiting process.
PAUSE = 2.0
#: The table with the number of the newest upgrade, which alembic maintains.
UPGRADED_TO = "schema_version"
#: The table with the oldest version of code that may use the database. The release 0.1.0 compares
#: this number with the version of its own code, and so gives the table this name.
USABLE_FROM = "alembic_version"


@dataclass(frozen=True, slots=True)
class DatabaseVersion:
    """The version of a database.

    Attributes:
        upgraded_to: The number of the newest upgrade that ran.
        usable_from: The oldest version of code that may use the database.
    """

    upgraded_to: str
    usable_from: str

    @property
    def is_too_old(self) -> bool:
        """True if the database lacks an upgrade that this code needs."""
        return self.upgraded_to < find_needed()

    @property
    def is_too_new(self) -> bool:
        """True if an upgrade removed something that this code needs."""
        return self.usable_from > find_needed()

    def __str__(self) -> str:
        return self.upgraded_to


@cache
def find_needed() -> str:
    """Return the version that this code needs: the newest upgrade by the file names."""
    return max(
        path.name[:4] for path in (Path(__file__).parent / "upgrades/versions").glob("[0-9]*.py")
    )


def is_usable(found: DatabaseVersion | None) -> bool:
    """Return True if this code may use a database of this version. None: no upgrade yet."""
    return found is not None and not found.is_too_old and not found.is_too_new


def remedy(found: DatabaseVersion | None) -> str:
    """Return the operator's remedy for a database that this code may not use."""
    if found and found.is_too_new:
        return "The database is newer than this code: install the release that has upgraded the database."
    return "Run: kilonova database upgrade"


def guard(store: Store) -> Store:
    """Add a check of the database's version to each new connection, and return the same store.

    If this code may not use the database, the check closes the connection and raises WrongSchema.
    The check logs each change between usable and not, and each change of an unusable version.
    """
    said: list[DatabaseVersion | None] = []

    @sa.event.listens_for(store.engine, "connect")
    def check_version(connection: Any, record: Any) -> None:
        found = read_version(connection, store.engine.dialect.dbapi)
        if is_usable(found):
            if said:
                log.info("the service may use the database now and continues", version=found)
            said.clear()
            return
        connection.close()
        refusal = errors.WrongSchema(
            f"The database has version {found or 'none'}, this service needs {find_needed()} and "
            f"waits for it. {remedy(found)}"
        )
        if said != [found]:
            log.error(
                "the database has another version than this service needs, so the service waits",
                version=found,
                problem=refusal,
            )
        said[:] = [found]
        raise refusal

    return store


def read_version(connection: Any, dbapi: Any) -> DatabaseVersion | None:
    """Return the database's version, or None before the first upgrade.

    The connection's transaction is rolled back.

    Args:
        connection: A connection of the database's driver.
        dbapi: The module of the driver, for its errors.
    """
    for upgraded_to in (UPGRADED_TO, USABLE_FROM):  # A database of 0.1.0 has the latter table only.
        cursor = connection.cursor()
        try:
            # Both names are constants of this module.
            cursor.execute(
                f"SELECT u.version_num, f.version_num FROM {upgraded_to} u, {USABLE_FROM} f"  # noqa: S608
            )
            row = cursor.fetchone()
        except (dbapi.ProgrammingError, dbapi.OperationalError) as problem:
            if upgraded_to not in str(problem):
                raise
            continue
        finally:
            cursor.close()
            connection.rollback()
        return DatabaseVersion(*map(str, row)) if row else None
    return None


def await_version(store: Store, pause: Callable[[float], None] = time.sleep) -> None:
    """Wait until the database answers and has the version that this code needs.

    ``store`` has passed ``guard``, which logs a wrong version. This function logs once that the
    database does not answer.
    """
    said = False
    while True:
        try:
            store.now()
            return
        except errors.NoStore as problem:
            if not said and not isinstance(problem, errors.WrongSchema):
                log.error("the service waits for the database", problem=problem)
                said = True
        pause(PAUSE)
