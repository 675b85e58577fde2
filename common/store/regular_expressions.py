# SPDX-License-Identifier: Apache-2.0
"""Users' regular expressions in queries. Only this file passes them to a database.

SQLite matches with ``common.domain.patterns``. PostgreSQL's engine backtracks only for back
references, which RE2 rejects. MariaDB's engine backtracks, so it gets a limit of steps, after which
a row does not match. Also, [database] statement_timeout limits every query.
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
# Errors of PostgreSQL and MariaDB for an invalid regular expression.
_NO_PATTERN = {"2201B", "1139"}
# A few milliseconds.
_MAX_STEPS = 100_000


class _Bounded(sa.sql.functions.FunctionElement[str]):
    """A regular expression as SQL, in the form that the database's engine needs."""

    type = sa.Text()
    inherit_cache = True


@compiles(_Bounded)
def _compile_bounded(element: Any, compiler: SQLCompiler, **more: Any) -> str:
    return compiler.process(element.clauses, **more)


@compiles(_Bounded, "mysql")
@compiles(_Bounded, "mariadb")
def _bounded_mariadb(element: Any, compiler: SQLCompiler, **more: Any) -> str:
    # MariaDB's collation would ignore case.
    return (
        f"CONCAT('(*LIMIT_MATCH={_MAX_STEPS})(?-i)', {compiler.process(element.clauses, **more)})"
    )


def matches(field: str, column: sa.ColumnElement[T], pattern: str) -> sa.ColumnElement[bool]:
    """Return the SQL condition that the regular expression matches anywhere in the column.

    Run queries with this condition by ``fetch``, because the database may refuse a pattern that
    this function accepts.

    Raises:
        BadRequest: The pattern is invalid. The message names the field.
    """
    if not patterns.is_pattern(pattern):
        raise errors.BadRequest(
            f"The value of {field} is not a valid regular expression in the syntax of RE2."
        )
    return column.regexp_match(_Bounded(sa.literal(pattern, sa.Text())))


def fetch(tx: Connection, query: sa.Select[*Ts]) -> CursorResult[*Ts]:
    """Run a query that may contain a user's regular expression, and return the result.

    Raises:
        BadRequest: The expression is valid for RE2, but not for the database.
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
                "A filter of this request is a regular expression that the database does not support."
            ) from problem
        raise


def teach(connection: sqlite3.Connection) -> None:
    """Define the operator REGEXP for an SQLite connection, with ``common.domain.patterns``.

    Otherwise SQLAlchemy would use Python's ``re``, which can take exponential time.
    """
    connection.create_function("regexp", 2, patterns.is_found, deterministic=True)
