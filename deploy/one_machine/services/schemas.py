# SPDX-License-Identifier: Apache-2.0
"""JSON schemas of bodies: here they are brought to their canonical form and checked, and nowhere
else.

A schema may say two things more than JSON schema knows. A `format` of FORMATS brings a value to its
canonical form first ("TRUE" becomes true, an address its shortest spelling); `null_is` stands for
null. A wrong body raises a 400 that names the field, and never repeats the value, which may be a
secret. No handler meets a value of a wrong type.
"""

import copy
import ipaddress
import re
from collections.abc import Callable, Mapping

import falcon
import jsonschema_rs

from deploy.one_machine.services.json_types import Body, JsonValue

Document = Body
MAX_INTEGER = 2**31 - 1
TRUTHS = {"true": True, "1": True, "false": False, "0": False}
MAC = re.compile(r"([0-9a-f]{2}:){5}[0-9a-f]{2}")


def _spelled(parse: Callable[[str], JsonValue]) -> Callable[[JsonValue], str]:
    """As `parse` spells it."""

    def spell(value: JsonValue) -> str:
        if not isinstance(value, str):
            raise TypeError  # a number would be taken for an address
        return str(parse(value))

    return spell


def _boolean(value: JsonValue) -> JsonValue:
    return TRUTHS.get(str(value).lower(), value)


def _integer(value: JsonValue) -> JsonValue:
    return int(value) if isinstance(value, str) and re.fullmatch(r"-?\d{1,12}", value) else value


def _mac(value: str) -> str:
    found = value.lower().replace("-", ":")
    if not MAC.fullmatch(found) or int(found[:2], 16) & 1 or found == "00:00:00:00:00:00":
        raise ValueError
    return found


#: Each gives the canonical form of a value, or raises ValueError or TypeError.
FORMATS: Mapping[str, Callable[[JsonValue], JsonValue]] = {
    "boolean": _boolean,
    "integer": _integer,
    "lower-case": lambda value: value.lower() if isinstance(value, str) else value,
    "ip-address": _spelled(ipaddress.ip_address),
    # Bits of a host are dropped.
    "cidr": _spelled(lambda value: ipaddress.ip_network(value, strict=False)),
    # A network, or a host's address with the length of its network, which stays as it was given.
    "prefix": _spelled(ipaddress.ip_interface),
    "mac-address": _mac,
}


def text(max_length: int = 255, **more: JsonValue) -> Document:
    """A string."""
    return {"type": "string", "maxLength": max_length, **more}


def integer(minimum: int = 0, maximum: int = MAX_INTEGER, **more: JsonValue) -> Document:
    """A whole number."""
    return {"type": "integer", "minimum": minimum, "maximum": maximum, **more}


def one_of(*values: JsonValue) -> Document:
    """One of these values."""
    return {"enum": list(values)} | (
        {"type": "string"} if all(isinstance(one, str) for one in values) else {}
    )


def array(items: Document, max_items: int = 200) -> Document:
    """A list without repetitions."""
    return {"type": "array", "items": items, "maxItems": max_items, "uniqueItems": True}


def mapping(properties: Mapping[str, Document], *required: str, others: bool = False) -> Document:
    """An object with these properties, and others only where that is said."""
    return {
        "type": "object",
        "properties": dict(properties),
        "required": list(required),
        "additionalProperties": others,
    }


def nullable(document: Document) -> Document:
    """What the schema allows, or null."""
    enum = {"enum": [None, *document["enum"]]} if "enum" in document else {}
    return {**document, "type": ["null", document["type"]], **enum}


BOOLEAN, NOT_EMPTY = {"type": "boolean"}, r"\S"
#: A boolean, or a word for one.
TRUTH = {"type": "boolean", "format": "boolean"}


class BodySchema:
    """A compiled schema."""

    def __init__(self, document: Document) -> None:
        self._document = document
        self._validator = jsonschema_rs.validator_for(
            document,
            formats={name: _parses(form) for name, form in FORMATS.items()},
            validate_formats=True,
            mask="the value",
        )

    def checked(self, value: JsonValue, where: str) -> JsonValue:
        """The canonical form of a body, or of a part of it; `where` is its name in the error.
        Raises 400."""
        found = _canonical(self._document, value)
        error = next(self._validator.iter_errors(found), None)
        if error is None:
            return found
        path = [
            where,
            *(str(step)[:64] for step in error.instance_path),
            *filter(None, [getattr(error.kind, "property", None)]),
        ]
        raise falcon.HTTPBadRequest(
            description=f"Invalid input for '{'.'.join(path)}': {error.message[:300]}."
        )


def _canonical(document: Document, value: JsonValue) -> JsonValue:
    if value is None:
        return copy.copy(document.get("null_is"))
    if form := FORMATS.get(document.get("format", "")):
        try:
            return form(value)
        except (ValueError, TypeError):
            return value
    if isinstance(value, list) and "items" in document:
        return [_canonical(document["items"], item) for item in value]
    if isinstance(value, dict) and "properties" in document:
        return {
            name: _canonical(document["properties"].get(name, {}), item)
            for name, item in value.items()
        }
    return value


def _parses(form: Callable[[JsonValue], JsonValue]) -> Callable[[str], bool]:
    def check(value: str) -> bool:
        try:
            form(value)
        except (ValueError, TypeError):
            return False
        return True

    return check
