# SPDX-License-Identifier: Apache-2.0
"""The check whether the database has the version that this code needs.

Every service checks each new connection, so that requests cost nothing extra. With another version,
no data is read or written: requests get 503, and processes without requests start with
``await_version``.

Invariant: alembic is not imported, because only upgrades need it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
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


@cache
def find_needed() -> str:
    """Return the version that this code needs: the newest upgrade by the file names."""
    return max(
        path.name[:4] for path in (Path(__file__).parent / "upgrades/versions").glob("[0-9]*.py")
    )


def remedy(found: str | None) -> str:
    """Return the operator's remedy for a database of version ``found``. None: no upgrade yet."""
    if found and found > find_needed():
        return "The database is newer than this code: install the release that has upgraded the database."
    return "Run: kilonova database upgrade"


def guard(store: Store) -> Store:
    """Add a check of the database's version to each new connection, and return the same store.

    With another version, the check closes the connection and raises WrongSchema. The check logs
    each change of the version. The first check compares with the needed version.
    """
    said: list[str | None] = [find_needed()]

    @sa.event.listens_for(store.engine, "connect")
    def check_version(connection: Any, record: Any) -> None:
        found = _read_version(connection, store.engine.dialect.dbapi)
        if found == find_needed():
            if said[0] != found:
                log.info(
                    "the database has the needed version now: the service continues", version=found
                )
            said[0] = found
            return
        connection.close()
        refusal = errors.WrongSchema(
            f"The database has version {found or 'none'}, this service needs {find_needed()} and "
            f"waits for it. {remedy(found)}"
        )
        if said[0] != found:
            log.error(
                "the database has another version than this service needs, so the service waits",
                version=found,
                problem=refusal,
            )
        said[0] = found
        raise refusal

    return store


def _read_version(connection: Any, dbapi: Any) -> str | None:
    """Return the database's version, or None before the first upgrade."""
    cursor = connection.cursor()
    try:
        cursor.execute("SELECT version_num FROM alembic_version")
        row = cursor.fetchone()
    except (dbapi.ProgrammingError, dbapi.OperationalError) as problem:
        if "alembic_version" not in str(problem):
            raise
        row = None
    finally:
        cursor.close()
        connection.rollback()
    return str(row[0]) if row else None


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
