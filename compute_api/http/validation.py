# SPDX-License-Identifier: Apache-2.0
"""JSON schemas by microversion, and the validation of bodies and queries.

A schema is written as of 2.1, followed by its changes: ``VersionedSchema(base, ("2.19", put(…)),
…)``. A compiled validator checks values. Only for an invalid value ``explanations`` builds the
error text. Under the legacy root /v2 unknown keys are removed instead of refused. Error texts never
contain passwords.
"""

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


# --- Formats of strings ---
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


def _check_parses(
    parse: Callable[[str], object], *refusals: type[Exception]
) -> Callable[[str], bool]:
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
    "ipv4": _check_parses(ipaddress.IPv4Address, ValueError),
    "ipv6": _check_parses(ipaddress.IPv6Address, ValueError),
    "regex": lambda text: bool(text) and patterns.is_pattern(text),
    "date-time": _check_parses(clock.parse, ValueError, OverflowError),
}
_FORMAT_TEXTS = {
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


# --- Changes by microversion ---
def put(path: str, value: Document) -> Change:
    """Return the change that sets the schema of a key.

    Args:
        path: Names of keys from the root, separated by "/". ``*`` means the items of a list.
        value: The schema of the last key.
    """

    def change(document: Document) -> None:
        *parents, last = path.split("/")
        # Later changes modify the copy.
        _walk(document, parents)["properties"][last] = copy.deepcopy(value)

    return change


def drop(path: str) -> Change:
    """Return the change that removes a key from the properties. The path is as for ``put``."""

    def change(document: Document) -> None:
        *parents, last = path.split("/")
        del _walk(document, parents)["properties"][last]

    return change


def require(path: str) -> Change:
    """Return the change that makes a key required. The path is as for ``put``."""

    def change(document: Document) -> None:
        *parents, last = path.split("/")
        parent = _walk(document, parents)
        parent["required"] = [*parent.get("required", ()), last]

    return change


def strict(document: Document) -> None:
    """Change a schema so that unknown top-level keys, or query parameters, are invalid."""
    document["additionalProperties"] = False


def replace(value: Document) -> Change:
    """Return the change that replaces the whole schema."""

    def change(document: Document) -> None:
        document.clear()
        document.update(copy.deepcopy(value))

    return change


def _walk(document: Document, keys: list[str]) -> Document:
    for key in keys:
        document = document["items"] if key == "*" else document["properties"][key]
    return document


class VersionedSchema:
    """The schema of a body or a query in all microversions: a base, followed by changes."""

    def __init__(self, base: Document, *changes: tuple[str, *tuple[Change, ...]]) -> None:
        self._base = base
        self._changes = [(number(since), edits) for since, *edits in changes]
        self._at = functools.lru_cache(maxsize=None)(self._build)

    def at(self, version: int) -> Schema:
        """Return the schema of this microversion, which is built at the first use."""
        return self._at(max([0] + [since for since, _ in self._changes if since <= version]))

    def _build(self, version: int) -> Schema:
        document = copy.deepcopy(self._base)
        for since, edits in self._changes:
            if since <= version:
                for edit in edits:
                    edit(document)
        return Schema(document)


class Schema:
    """A JSON schema with its validators, which are compiled at the first use."""

    def __init__(self, document: Document) -> None:
        self.document = document

    @functools.cached_property
    def _validator(self) -> jsonschema_rs.Draft202012Validator:
        return jsonschema_rs.Draft202012Validator(
            self.document, formats=FORMATS, validate_formats=True
        )

    @functools.cached_property
    def _explainer(self) -> explanations.Explainer:
        return explanations.build_explainer("Draft202012Validator", FORMATS)(self.document)

    def is_valid(self, value: object) -> bool:
        """Return True if the value is valid."""
        return bool(self._validator.is_valid(value))

    def check(self, value: object) -> None:
        """Validate a value.

        Raises:
            BadRequest: The value is invalid. The text names the field, unless the error is at the
                top level.
        """
        if not self.is_valid(value):
            raise errors.BadRequest(self._describe_error(value))

    def prune(self, value: JsonValue) -> JsonValue:
        """Return the value without the unknown keys of objects that permit no additional ones.

        The argument is not changed. Of ``anyOf``, the first schema of type object applies.
        """
        return _prune(self.document, value)

    @property
    def names(self) -> Collection[str]:
        """The names of the schema's top-level keys, which in a query are the parameters."""
        properties: Document = self.document["properties"]
        return properties.keys()

    def _describe_error(self, value: object) -> str:
        problem = next(self._explainer.iter_errors(value), None)
        if problem is None:
            return "The request does not fit its schema."
        path = list(problem.absolute_path)
        # The name is the last key. Indexes of lists are left out.
        name = next((step for step in reversed(path) if isinstance(step, str)), "")
        name = explanations.cut(name)
        if explanations.SECRET.intersection(path):
            rule = problem.validator_value
            detail = {
                "maxLength": f" It has more than {rule} characters.",
                "format": f" It is not {rule}.",
                "type": f" Its type is not {rule}.",
            }.get(str(problem.validator), "")
            return (
                f"Invalid input for field/attribute {name}. The value is not repeated here.{detail}"
            )
        message = explanations.cut(problem.message, 2 * explanations.MAX_SHOWN_CHARACTERS)
        if problem.validator == "format":
            message = (
                f"{explanations.abbreviate(problem.instance)} "
                f"{_FORMAT_TEXTS.get(str(problem.validator_value), 'is not valid')}"
            )
        if not name:
            return message
        value = problem.instance
        text = explanations.cut(value) if isinstance(value, str) else explanations.abbreviate(value)
        return f"Invalid input for field/attribute {name}. Value: {text}. {message}"


def _prune(schema: Document, value: JsonValue) -> JsonValue:
    if isinstance(value, list) and "items" in schema:
        return [_prune(schema["items"], item) for item in value]
    if isinstance(value, dict) and "anyOf" in schema:
        schema = next(
            (choice for choice in schema["anyOf"] if choice.get("type") == "object"), schema
        )
    if not isinstance(value, dict) or (
        "properties" not in schema and "patternProperties" not in schema
    ):
        return value
    properties: Document = schema.get("properties", {})
    patterns = [re.compile(pattern) for pattern in schema.get("patternProperties", {})]
    closed = schema.get("additionalProperties") is False
    return {
        key: _prune(properties.get(key, {}), item)
        for key, item in value.items()
        if not closed or key in properties or any(pattern.search(key) for pattern in patterns)
    }


def is_true(value: object) -> bool:
    """Return True for True, 1, and the texts "true", "1", "on", "yes", "t", "y" in any case."""
    return str(value).strip().lower() in ("true", "1", "on", "yes", "t", "y")
