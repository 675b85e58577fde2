# SPDX-License-Identifier: Apache-2.0
"""Regular expressions from users in queries: the one place where a database is given any.

SQLite matches with ``common.domain.patterns``; PostgreSQL's engine does not go back either without
back references, which RE2 does not know. MariaDB's engine does: it is told after how many steps it
gives a row up, which then does not match. [database] statement_timeout ends whatever takes long
all the same.
"""

from __future__ import annotations

import sqlite3
from typing import Any, TypeVar, TypeVarTuple

import sqlalchemy as sa
from sqlalchemy.engine import Connection, CursorResult
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import SQLCompiler

from common.domain import errors, patterns

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
_NO_PATTERN = {"2201B", "1139"}  # what PostgreSQL and MariaDB say of a wrong regular expression
_MAX_STEPS = 100_000  # a few milliseconds


class _Bounded(sa.sql.functions.FunctionElement[str]):
    """The expression as the database's engine is to have it."""

    type = sa.Text()
    inherit_cache = True


@compiles(_Bounded)
def _bounded(element: Any, compiler: SQLCompiler, **more: Any) -> str:
    return compiler.process(element.clauses, **more)


@compiles(_Bounded, "mysql")
@compiles(_Bounded, "mariadb")
def _bounded_mariadb(element: Any, compiler: SQLCompiler, **more: Any) -> str:
    # By its collation MariaDB would not tell capital letters from small ones.
    return (
        f"CONCAT('(*LIMIT_MATCH={_MAX_STEPS})(?-i)', {compiler.process(element.clauses, **more)})"
    )


def matches(field: str, column: sa.ColumnElement[T], pattern: str) -> sa.ColumnElement[bool]:
    """The pattern matches somewhere in the column. Run such queries with ``fetch``.

    Raises:
        BadRequest: it is no regular expression; names the field.
    """
    if not patterns.is_pattern(pattern):
        raise errors.BadRequest(
            f"The value of {field} is not a regular expression, or one that RE2 does not know."
        )
    return column.regexp_match(_Bounded(sa.literal(pattern, sa.Text())))


def fetch(tx: Connection, query: sa.Select[*Ts]) -> CursorResult[*Ts]:
    """Run a query that may hold a regular expression of a user's.

    Raises:
        BadRequest: it is one for RE2 and not for the database.
    """
    try:
        return tx.execute(query)
    except DBAPIError as problem:
        original = problem.orig
        code = getattr(original, "sqlstate", None) or (
            original.args[0] if original and original.args else ""
        )
        if str(code) in _NO_PATTERN:
            raise errors.BadRequest(
                "A filter is not a regular expression that the database understands."
            ) from problem
        raise


def teach(connection: sqlite3.Connection) -> None:
    """SQLite has the operator REGEXP and leaves its meaning to who connects; SQLAlchemy would mean
    Python's ``re``."""
    connection.create_function("regexp", 2, patterns.is_found, deterministic=True)
