# SPDX-License-Identifier: Apache-2.0
"""Does the database have the version that this code needs? Asked of each new connection, so by no
request.

Called by every service when it opens its store. While the versions differ nothing is read or
written: requests are answered 503, and ``await_version`` is what processes without requests start
with. Must stay true: alembic is not imported, which only upgrades need.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from common.domain import errors
from common.store.engine import Store

log = logging.getLogger(__name__)
PAUSE = 2.0  #: seconds between two looks of a process that waits


@cache
def needed() -> str:
    """The newest of the upgrades, by the names of their files."""
    return max(
        path.name[:4] for path in (Path(__file__).parent / "upgrades/versions").glob("[0-9]*.py")
    )


def remedy(found: str | None) -> str:
    """Return what the operator can do about a database of another version than this code needs."""
    if found and found > needed():
        return (
            "The database is newer than this code: install the release on this machine that the "
            "database was upgraded with."
        )
    return "Run: kilonova database upgrade"


def guarded(store: Store) -> Store:
    """The same store, whose connections are only to a database of this version."""
    said: list[str | None] = [needed()]

    @sa.event.listens_for(store.engine, "connect")
    def connected(connection: Any, record: Any) -> None:
        found = _found(connection, store.engine.dialect.dbapi)
        if found == needed():
            if said[0] != found:
                log.info("the database has version %s now: going on", found)
            said[0] = found
            return
        connection.close()
        refusal = errors.WrongSchema(
            f"The database has version {found or 'none'}, this service needs {needed()}; it "
            f"waits until they fit. {remedy(found)}"
        )
        if said[0] != found:
            log.error("%s", refusal)
        said[0] = found
        raise refusal

    return store


def _found(connection: Any, dbapi: Any) -> str | None:
    """The version, on a connection of the driver; None before the first upgrade."""
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
    """Return when the database answers and has this version; says once why it waits."""
    said = False
    while True:
        try:
            store.now()
            return
        except errors.NoStore as problem:
            if not said and not isinstance(problem, errors.WrongSchema):
                log.error("waiting for the database: %s", problem)
                said = True
        pause(PAUSE)
