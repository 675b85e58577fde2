# SPDX-License-Identifier: Apache-2.0
"""Parts that many schemas share, and the query parameters of lists."""

from __future__ import annotations

from compute_api.http.validation import Document, VersionedSchema, strict

MAX_INT = 2**31 - 1
BOOLEAN: Document = {
    "enum": [
        True,
        "True",
        "TRUE",
        "true",
        "1",
        "ON",
        "On",
        "on",
        "YES",
        "Yes",
        "yes",
        False,
        "False",
        "FALSE",
        "false",
        "0",
        "OFF",
        "Off",
        "off",
        "NO",
        "No",
        "no",
    ]
}
NAME: Document = {"type": "string", "minLength": 1, "maxLength": 255, "format": "name"}
UUID: Document = {"type": "string", "format": "uuid"}
DESCRIPTION: Document = {
    "type": ["string", "null"],
    "minLength": 0,
    "maxLength": 255,
    "format": "printable",
}
HOST: Document = {
    "type": "string",
    "minLength": 1,
    "maxLength": 255,
    "pattern": "^[a-zA-Z0-9._-]*$",
}
IPV4: Document = {"type": "string", "format": "ipv4"}
IPV6: Document = {"type": "string", "format": "ipv6"}
METADATA: Document = {
    "type": "object",
    "additionalProperties": False,
    "patternProperties": {"^[a-zA-Z0-9_:. -]{1,255}$": {"type": "string", "maxLength": 255}},
}
TAG: Document = {
    "type": "string",
    "minLength": 1,
    "maxLength": 60,
    "pattern": "^[^,/]*$",
    "format": "printable",
}
DISK_CONFIG: Document = {"enum": ["AUTO", "MANUAL"]}
ANY: Document = {}


def integer(minimum: int) -> Document:
    """Return the schema of an integer up to ``MAX_INT``, as a number or as text.

    Args:
        minimum: The least allowed number: -1, 0 or 1.
    """
    digits = {-1: "-1|[0-9]+", 0: "[0-9]+", 1: "0*[1-9][0-9]*"}[minimum]
    return {
        "anyOf": [
            {"type": "integer", "minimum": minimum, "maximum": MAX_INT},
            {"type": "string", "pattern": f"^({digits})$", "format": "int32"},
        ]
    }


def record(properties: Document, required: tuple[str, ...] = (), **more: object) -> Document:
    """Return the schema of an object that may have only the keys in ``properties``.

    Args:
        properties: Schemas by key.
        required: Keys that the object must have.
        more: Further keywords of the schema.
    """
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
        **more,
    }


def wrapped(name: str, content: Document) -> Document:
    """Return the schema of an object with the single key ``name``, which is required."""
    return record({name: content}, (name,))


def repeated(content: Document | None = None, most: int | None = None) -> Document:
    """Return the schema of a query parameter, which a request may repeat.

    Args:
        content: Schema of each value. None means any text.
        most: Maximum number of values. None means no limit.
    """
    limit: Document = {} if most is None else {"maxItems": most}
    return {"type": "array", "items": {"type": "string"} if content is None else content, **limit}


COUNT: Document = {"type": "string", "pattern": "^[0-9]{1,19}$"}


def query(properties: Document | None = None, **more: object) -> Document:
    """Return the schema of a query, which also permits unknown parameters.

    ``additionalProperties=False``, or from a version on the change ``strict``, refuses these.

    Args:
        properties: Schemas by parameter. None means no parameters.
        more: Further keywords of the schema.
    """
    return {"type": "object", "properties": properties or {}, "additionalProperties": True, **more}


#: Accepts every value.
ANYTHING = VersionedSchema(ANY)
#: No parameters. From 2.102 on unknown parameters are an error.
NOTHING = VersionedSchema(query(), ("2.102", strict))
#: No parameters. All versions ignore unknown parameters.
IGNORED = VersionedSchema(query())
