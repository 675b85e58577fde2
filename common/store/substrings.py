# SPDX-License-Identifier: Apache-2.0
"""Case-sensitive substrings in queries, the same on every database.

LIKE differs: SQLite ignores the case of ASCII letters, MariaDB that of all letters by its
collation, and PostgreSQL none.
"""

from __future__ import annotations

from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import SQLCompiler

T = TypeVar("T")


class _Holds(sa.sql.functions.FunctionElement[bool]):
    """The SQL condition that the first argument contains the second."""

    type = sa.Boolean()
    inherit_cache = True


def holds(column: sa.ColumnElement[T], text: str) -> sa.ColumnElement[bool]:
    """Return the SQL condition that the column contains the text. Case matters."""
    return _Holds(column, sa.literal(text, sa.Text()))


def _compile_holds(function: str, argument: str) -> Any:
    def compile_call(element: Any, compiler: SQLCompiler, **more: Any) -> str:
        found, searched = (
            argument.format(compiler.process(part, **more)) for part in element.clauses
        )
        return f"({function}({found}, {searched}) > 0)"

    return compile_call


compiles(_Holds, "sqlite")(_compile_holds("instr", "{}"))
compiles(_Holds, "postgresql")(_compile_holds("strpos", "{}"))
for _dialect in ("mysql", "mariadb"):
    compiles(_Holds, _dialect)(_compile_holds("INSTR", "CAST({} AS BINARY)"))
