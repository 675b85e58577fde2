# SPDX-License-Identifier: Apache-2.0
"""The parts that many schemas share, as the Compute API has them, and the queries that every list
takes."""

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
    """A number, or its decimal digits as text, in the same range. minimum: -1, 0 or 1."""
    digits = {-1: "-1|[0-9]+", 0: "[0-9]+", 1: "0*[1-9][0-9]*"}[minimum]
    return {
        "anyOf": [
            {"type": "integer", "minimum": minimum, "maximum": MAX_INT},
            {"type": "string", "pattern": f"^({digits})$", "format": "int32"},
        ]
    }


def record(properties: Document, required: tuple[str, ...] = (), **more: object) -> Document:
    """An object with these keys and no others."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
        **more,
    }


def wrapped(name: str, content: Document) -> Document:
    """A body: an object with this one key."""
    return record({name: content}, (name,))


def repeated(content: Document | None = None, most: int | None = None) -> Document:
    """A query parameter, which may be given several times."""
    limit: Document = {} if most is None else {"maxItems": most}
    return {"type": "array", "items": {"type": "string"} if content is None else content, **limit}


COUNT: Document = {"type": "string", "pattern": "^[0-9]{1,19}$"}


def query(properties: Document | None = None, **more: object) -> Document:
    """A query with these parameters; others are ignored until a version is strict."""
    return {"type": "object", "properties": properties or {}, "additionalProperties": True, **more}


#: Whatever it is.
ANYTHING = VersionedSchema(ANY)
#: No parameters at all; refused from 2.102 on.
NOTHING = VersionedSchema(query(), ("2.102", strict))
#: No parameters; what is given is ignored at every version.
IGNORED = VersionedSchema(query())
