# SPDX-License-Identifier: Apache-2.0
"""JSON schemas that change with the microversion, and checks of bodies and queries against them.

A schema is written once, as it was at 2.1, followed by its differences: ``VersionedSchema(base,
("2.19", put(…)), …)``. A compiled validator decides; only when it refuses, ``explanations``
finds the words. Under the legacy root /v2 unknown keys are dropped instead of refused. A refused
password is never repeated in the text."""

from __future__ import annotations

import base64
import binascii
import copy
import functools
import ipaddress
import re
from collections.abc import Callable, Collection

import jsonschema_rs

from common.domain import clock, errors, ids, patterns
from common.domain.json_types import JsonObject, JsonValue
from common.domain.text import is_printable
from compute_api.http import explanations
from compute_api.http.microversions import number

Document = JsonObject
Change = Callable[[Document], None]


# --- formats: what a string may look like beyond its length ---
def _is_name(text: str) -> bool:
    return bool(text) and text == text.strip() and is_printable(text)


def _is_int32(text: str) -> bool:
    return re.fullmatch("-?[0-9]{1,10}", text) is not None and abs(int(text)) < 2**31


def _is_base64(text: str) -> bool:
    try:
        base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError):
        return False
    return True


def _parses(parse: Callable[[str], object], *refusals: type[Exception]) -> Callable[[str], bool]:
    def check(text: str) -> bool:
        try:
            parse(text)
        except refusals:
            return False
        return True

    return check


FORMATS: dict[str, Callable[[str], bool]] = {
    "name": _is_name,
    "printable": is_printable,
    "uuid": ids.spells_uuid,
    "base64": _is_base64,
    "int32": _is_int32,
    "line": lambda text: "\n" not in text,
    "ipv4": _parses(ipaddress.IPv4Address, ValueError),
    "ipv6": _parses(ipaddress.IPv6Address, ValueError),
    "regex": lambda text: bool(text) and patterns.is_pattern(text),
    "date-time": _parses(clock.parse, ValueError, OverflowError),
}
_SAYS = {
    "name": "must not be empty, hold only printable characters, and neither begin nor end with white space",
    "printable": "must hold only printable characters",
    "uuid": "is not a UUID",
    "line": "is more than one line",
    "base64": "is not base64",
    "int32": "is not a whole number, or too large",
    "ipv4": "is not an IPv4 address",
    "ipv6": "is not an IPv6 address",
    "regex": "is not a regular expression, or has look-around, back references or too many repeats",
    "date-time": "is not an ISO 8601 time",
}


# --- differences ---
def put(path: str, value: Document) -> Change:
    """At ``path`` (keys, or * for the items of a list) stands ``value`` from now on."""

    def change(document: Document) -> None:
        *way, last = path.split("/")
        # a later change is made in it
        _walk(document, way)["properties"][last] = copy.deepcopy(value)

    return change


def drop(path: str) -> Change:
    """The key at ``path`` is unknown from now on."""

    def change(document: Document) -> None:
        *way, last = path.split("/")
        del _walk(document, way)["properties"][last]

    return change


def require(path: str) -> Change:
    """The key at ``path`` must be there from now on."""

    def change(document: Document) -> None:
        *way, last = path.split("/")
        parent = _walk(document, way)
        parent["required"] = [*parent.get("required", ()), last]

    return change


def strict(document: Document) -> None:
    """Unknown keys at the top (a query's parameters) are refused from now on."""
    document["additionalProperties"] = False


def replace(value: Document) -> Change:
    """The whole is ``value`` from now on."""

    def change(document: Document) -> None:
        document.clear()
        document.update(copy.deepcopy(value))

    return change


def _walk(document: Document, way: list[str]) -> Document:
    for step in way:
        document = document["items"] if step == "*" else document["properties"][step]
    return document


class VersionedSchema:
    """One body or query through the microversions: as it was first, followed by its differences."""

    def __init__(self, base: Document, *changes: tuple[str, *tuple[Change, ...]]) -> None:
        self._base = base
        self._changes = [(number(since), edits) for since, *edits in changes]
        self._at = functools.lru_cache(maxsize=None)(self._made)

    def at(self, version: int) -> Schema:
        """The schema in force; made when first asked for."""
        return self._at(max([0] + [since for since, _ in self._changes if since <= version]))

    def _made(self, version: int) -> Schema:
        document = copy.deepcopy(self._base)
        for since, edits in self._changes:
            if since <= version:
                for edit in edits:
                    edit(document)
        return Schema(document)


class Schema:
    """One JSON Schema, ready to check with."""

    def __init__(self, document: Document) -> None:
        self.document = document

    @functools.cached_property
    def _compiled(self) -> jsonschema_rs.Draft202012Validator:
        return jsonschema_rs.Draft202012Validator(
            self.document, formats=FORMATS, validate_formats=True
        )

    @functools.cached_property
    def _explaining(self) -> explanations.Explainer:
        return explanations.bounded("Draft202012Validator", FORMATS)(self.document)

    def is_valid(self, value: object) -> bool:
        """Does the value fit?"""
        return bool(self._compiled.is_valid(value))

    def check(self, value: object) -> None:
        """Raises BadRequest that names the field, when the value does not fit."""
        if not self.is_valid(value):
            raise errors.BadRequest(self._reason(value))

    def pruned(self, value: JsonValue) -> JsonValue:
        """The value without keys that are unknown to the schema."""
        return _pruned(self.document, value)

    @property
    def names(self) -> Collection[str]:
        """The keys that it knows: of a query, its parameters."""
        known: Document = self.document["properties"]
        return known.keys()

    def _reason(self, value: object) -> str:
        problem = next(self._explaining.iter_errors(value), None)
        if problem is None:
            return "The request does not fit its schema."
        path = list(problem.absolute_path)
        # not its place in a list
        name = next((step for step in reversed(path) if isinstance(step, str)), "")
        name = explanations.cut(name)
        if explanations.SECRET.intersection(path):
            rule = problem.validator_value
            why = {
                "maxLength": f" It has more than {rule} characters.",
                "format": f" It is not {rule}.",
                "type": f" Its type is not {rule}.",
            }.get(str(problem.validator), "")
            return f"Invalid input for field/attribute {name}. The value is not repeated here.{why}"
        message = explanations.cut(problem.message, 2 * explanations.MAX_SHOWN_CHARACTERS)
        if problem.validator == "format":
            message = (
                f"{explanations.shown(problem.instance)} "
                f"{_SAYS.get(str(problem.validator_value), 'is not valid')}"
            )
        if not name:
            return message
        value = problem.instance
        text = explanations.cut(value) if isinstance(value, str) else explanations.shown(value)
        return f"Invalid input for field/attribute {name}. Value: {text}. {message}"


def _pruned(schema: Document, value: JsonValue) -> JsonValue:
    if isinstance(value, list) and "items" in schema:
        return [_pruned(schema["items"], item) for item in value]
    if isinstance(value, dict) and "anyOf" in schema:
        schema = next(
            (choice for choice in schema["anyOf"] if choice.get("type") == "object"), schema
        )
    if not isinstance(value, dict) or (
        "properties" not in schema and "patternProperties" not in schema
    ):
        return value
    known: Document = schema.get("properties", {})
    patterns = [re.compile(pattern) for pattern in schema.get("patternProperties", {})]
    closed = schema.get("additionalProperties") is False
    return {
        key: _pruned(known.get(key, {}), item)
        for key, item in value.items()
        if not closed or key in known or any(pattern.search(key) for pattern in patterns)
    }


def is_true(value: object) -> bool:
    """What a BOOLEAN of the schemas means."""
    return str(value).strip().lower() in ("true", "1", "on", "yes", "t", "y")
