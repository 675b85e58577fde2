# SPDX-License-Identifier: Apache-2.0
"""Types and names of columns, the same on every database."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, TypedDict, Unpack

import orjson
from sqlalchemy import BigInteger, Column, Integer, MetaData, String, Text
from sqlalchemy.dialects import mysql
from sqlalchemy.engine import Dialect
from sqlalchemy.types import TypeDecorator

from common.service.json_text import to_json
from common.service.log import get_logger

log = get_logger(__name__)

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "pk": "pk_%(table_name)s",
    }
)

LongText = Text().with_variant(mysql.MEDIUMTEXT(), "mysql", "mariadb")
BigKey = BigInteger().with_variant(Integer(), "sqlite")
#: Options of tables with numbered rows. A number is never reused, so that an old number never names
#: a new row.
NUMBERED: dict[str, Any] = {"sqlite_autoincrement": True}


class Unreadable(str):
    """The text of a JSON document that cannot be parsed.

    Reading the row succeeds, and only code that uses the document fails.
    """


class Json(TypeDecorator[object]):
    """A JSON document stored as text, the same on every database. Damaged text: ``Unreadable``."""

    impl = LongText
    cache_ok = True

    def process_bind_param(self, value: object, dialect: Dialect) -> str | None:
        if value is None or isinstance(value, Unreadable):
            return value
        return to_json(value).decode()

    def process_result_value(self, value: str | None, dialect: Dialect) -> object:
        try:
            return None if value is None else orjson.loads(value)
        except ValueError:
            return Unreadable(value)


class DamagedObject(dict[str, Any]):
    """The empty object in place of a damaged document.

    A reader that would permit more for an empty document than for the damaged one must test for
    this type. For example, an aggregate without metadata accepts servers of every project.
    """


class JsonObjectColumn(Json):
    """A JSON object that requests and placements read.

    A document that is damaged, or is no object, is logged and read as ``DamagedObject``.
    """

    cache_ok = True

    def process_result_value(self, value: str | None, dialect: Dialect) -> object:
        found = super().process_result_value(value, dialect)
        if found is None or isinstance(found, dict):
            return found
        log.error(
            "a JSON object in the database is damaged and treated as empty", value=str(value)[:200]
        )
        return DamagedObject()


class EnumColumn(TypeDecorator[str]):
    """A member of a StrEnum, stored as text. Unknown texts are returned unchanged."""

    impl = String
    cache_ok = True

    def __init__(self, kind: type[StrEnum], length: int) -> None:
        super().__init__(length)
        self.kind = kind
        self.members: Mapping[str | None, StrEnum] = {member.value: member for member in kind}

    @property
    def python_type(self) -> type[StrEnum]:
        return self.kind

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        return None if value is None else str(value)

    def process_result_value(self, value: str | None, dialect: Dialect) -> str | None:
        return self.members.get(value, value)


class ColumnOptions(TypedDict, total=False):
    """Further options of a column."""

    primary_key: bool
    nullable: bool
    unique: bool
    index: bool


def uuid_column(name: str, **more: Unpack[ColumnOptions]) -> Column[str]:
    """Return a column for a uuid as text."""
    return Column(name, String(36), **more)


def time_column(name: str, **more: Unpack[ColumnOptions]) -> Column[int]:
    """Return a column for a time in µs since the epoch, by the database's clock."""
    return Column(name, BigInteger, **more)
