# SPDX-License-Identifier: Apache-2.0
"""JSON schemas of bodies.

Only this module brings bodies to their canonical form and validates them.

A schema may contain two keys beside the keys of JSON Schema. A `format` of FORMATS converts a value
to its canonical form before the validation. For example, "TRUE" becomes true, and an address gets
its shortest spelling. `null_is` replaces null. An invalid body raises a 400 that contains the
field's name and never the value, which may be a secret. Handlers only get values of the right type.
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


def _canonical_text(parse: Callable[[str], JsonValue]) -> Callable[[JsonValue], str]:
    """Return a function that returns the canonical text of a value, for example an address.

    The function raises TypeError if the value is no text, and the error of `parse` if the text is
    malformed.
    """

    def spell(value: JsonValue) -> str:
        # A number would be parsed as an address.
        if not isinstance(value, str):
            raise TypeError
        return str(parse(value))

    return spell


def _boolean(value: JsonValue) -> JsonValue:
    return TRUTHS.get(str(value).lower(), value)


def _integer(value: JsonValue) -> JsonValue:
    return int(value) if isinstance(value, str) and re.fullmatch(r"-?\d{1,12}", value) else value


def _mac(value: str) -> str:
    address = value.lower().replace("-", ":")
    if not MAC.fullmatch(address) or int(address[:2], 16) & 1 or address == "00:00:00:00:00:00":
        raise ValueError
    return address


#: Name -> a function that returns the canonical value, or raises ValueError or TypeError.
FORMATS: Mapping[str, Callable[[JsonValue], JsonValue]] = {
    "boolean": _boolean,
    "integer": _integer,
    "lower-case": lambda value: value.lower() if isinstance(value, str) else value,
    "ip-address": _canonical_text(ipaddress.ip_address),
    # Host bits are dropped.
    "cidr": _canonical_text(lambda value: ipaddress.ip_network(value, strict=False)),
    # A network, or a host's address with the length of the network. Host bits stay.
    "prefix": _canonical_text(ipaddress.ip_interface),
    "mac-address": _mac,
}


def text(max_length: int = 255, **more: JsonValue) -> Document:
    """Return the schema of a string. ``more`` has other keys of JSON Schema."""
    return {"type": "string", "maxLength": max_length, **more}


def integer(minimum: int = 0, maximum: int = MAX_INTEGER, **more: JsonValue) -> Document:
    """Return the schema of an integer. ``more`` has other keys of JSON Schema."""
    return {"type": "integer", "minimum": minimum, "maximum": maximum, **more}


def one_of(*values: JsonValue) -> Document:
    """Return the schema that accepts exactly these values."""
    return {"enum": list(values)} | (
        {"type": "string"} if all(isinstance(value, str) for value in values) else {}
    )


def array(items: Document, max_items: int = 200) -> Document:
    """Return the schema of a list of up to ``max_items`` different items."""
    return {"type": "array", "items": items, "maxItems": max_items, "uniqueItems": True}


def mapping(properties: Mapping[str, Document], *required: str, others: bool = False) -> Document:
    """Return the schema of an object with these properties, and more only if ``others`` is True."""
    return {
        "type": "object",
        "properties": dict(properties),
        "required": list(required),
        "additionalProperties": others,
    }


def nullable(document: Document) -> Document:
    """Return a schema that accepts null and the values of ``document``, which has one type."""
    enum = {"enum": [None, *document["enum"]]} if "enum" in document else {}
    return {**document, "type": ["null", document["type"]], **enum}


BOOLEAN, NOT_EMPTY = {"type": "boolean"}, r"\S"
#: A boolean, or a word for one, for example "TRUE" or "0".
TRUTH = {"type": "boolean", "format": "boolean"}


class BodySchema:
    """A compiled JSON schema, which also converts values to their canonical form."""

    def __init__(self, document: Document) -> None:
        self._document = document
        self._validator = jsonschema_rs.validator_for(
            document,
            formats={name: _make_check(form) for name, form in FORMATS.items()},
            validate_formats=True,
            mask="the value",
        )

    def validate(self, value: JsonValue, where: str) -> JsonValue:
        """Return the canonical form of a body, or of a part of it.

        Args:
            value: The body, or the part.
            where: The name in the error, for example "server".

        Raises:
            HTTPBadRequest: The body does not match the schema.
        """
        canonical = _canonical(self._document, value)
        error = next(self._validator.iter_errors(canonical), None)
        if error is None:
            return canonical
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


def _make_check(form: Callable[[JsonValue], JsonValue]) -> Callable[[str], bool]:
    def check(value: str) -> bool:
        try:
            form(value)
        except (ValueError, TypeError):
            return False
        return True

    return check
