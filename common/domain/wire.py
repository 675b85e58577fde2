# SPDX-License-Identifier: Apache-2.0
"""Conversion of records to plain dictionaries and back, for RabbitMQ and JSON columns.

A reader ignores unknown fields of a newer sender. Fields that an older sender lacks take their
default. The type of a value is not checked, because Kilonova wrote both ends.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import types
import typing
from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeVar, cast

from common.domain.json_types import JsonObject, JsonValue

T = TypeVar("T")
_PLAIN: tuple[type, ...] = (str, int, float, bool, type(None))


def to_wire(record: object) -> JsonValue:
    """Return a record, or a list or dictionary of records, as plain data.

    Raises:
        TypeError: A value is neither plain nor a record.
    """
    if isinstance(record, _PLAIN):  # a StrEnum is a str
        return record
    if dataclasses.is_dataclass(record) and not isinstance(record, type):
        return {name: to_wire(getattr(record, name)) for name in _names(type(record))}
    if isinstance(record, dict):
        return {key: to_wire(value) for key, value in record.items()}
    if isinstance(record, (list, tuple)):
        return [to_wire(item) for item in record]
    raise TypeError(f"objects of type {type(record).__name__} cannot be sent to another process")


def from_wire(kind: type[T], data: JsonObject) -> T:
    """Return the record of type ``kind`` from the plain data that ``to_wire`` returned.

    Unknown keys are ignored. A missing field takes its default.

    Raises:
        TypeError, AttributeError: A field without a default is missing, or a record, a list of
            records or a dictionary of records has another type in the data.
        ValueError: A value is not in the enumeration of its field.
    """
    if not isinstance(data, Mapping):  # "key in data" is also defined for a text and a list
        raise TypeError(f"the data of {kind.__name__} is not a dictionary: {type(data).__name__}")
    readers = _readers(cast(Hashable, kind))
    return kind(**{name: read(data[name]) for name, read in readers.items() if name in data})


@functools.cache
def _names(kind: type) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind))


@functools.cache
def _readers(kind: type) -> dict[str, Callable[[Any], Any]]:
    """Return name -> function that reads the value, for each field of a record of this type."""
    hints = typing.get_type_hints(kind)
    return {name: _reader(hints[name]) for name in _names(kind)}


def _reader(hint: object) -> Callable[[Any], Any]:
    """Return the function that reads a value of a field of this type from plain data.

    The function builds records, lists of records, dictionaries of records and members of
    enumerations, also if the field may be None. A value of another type is returned unchanged.
    """
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        inner = [_reader(argument) for argument in arguments if argument is not type(None)]
        return lambda value: None if value is None else inner[0](value)
    if origin is list and dataclasses.is_dataclass(arguments[0]):
        return lambda value: [from_wire(arguments[0], part) for part in value]
    if origin is dict and dataclasses.is_dataclass(arguments[1]):
        return lambda value: {key: from_wire(arguments[1], part) for key, part in value.items()}
    if dataclasses.is_dataclass(hint):
        return lambda value: from_wire(cast(type, hint), value)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return hint
    return lambda value: value
