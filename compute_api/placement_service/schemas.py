# SPDX-License-Identifier: Apache-2.0
"""Bodies and queries of the placement service, through its microversions.

``Versioned`` holds one document and what replaces it since a version. Refusals are worded by jsonschema, because that
is how clients know them, on one line, because the last one is all that the command line shows.
"""
from __future__ import annotations

import functools
from typing import Any

import jsonschema

from common import errors, ids
from compute_api.placement_service.request import BadQuery

Document = dict[str, Any]
SHOWN = 1000                                    # characters of each part of a refusal
MOST, LARGEST_RATIO = 2**31 - 1, 3.40282e38
_NAME = "^[A-Z0-9_]+$"
_CUSTOM = "^CUSTOM_[A-Z0-9_]+$"                 # $ also stands before a last line feed, which the format line forbids

_FORMATS = jsonschema.FormatChecker(formats=())
_FORMATS.checks("uuid")(lambda value: not isinstance(value, str) or ids.spells_uuid(value))
_FORMATS.checks("line")(lambda value: not isinstance(value, str) or "\n" not in value)


class Versioned:
    """The document in force at a version: the last of ``steps`` (since, document) that has begun."""

    def __init__(self, *steps: tuple[int, Document]) -> None:
        self._steps = steps
        self._at = functools.lru_cache(maxsize=None)(self._made)

    def check_body(self, version: int, value: Any) -> None:
        """Raises BadRequest that says what does not fit."""
        problem = self._problem(version, value)
        if problem:
            raise errors.BadRequest(f"JSON does not validate: {problem}")

    def check_query(self, version: int, value: dict[str, str]) -> None:
        """Raises BadQuery that says what does not fit."""
        problem = self._problem(version, value)
        if problem:
            raise BadQuery(f"Invalid query string parameters: {problem}")

    def _problem(self, version: int, value: Any) -> str:
        found = next(self._at(max(since for since, _ in self._steps if since <= version)).iter_errors(value), None)
        return _worded(found) if found else ""

    def _made(self, since: int) -> Any:
        return jsonschema.Draft4Validator(dict(self._steps)[since], format_checker=_FORMATS)


def _worded(problem: Any) -> str:
    """What does not fit, which rule says so, and where it stands."""
    rule, place = list(problem.relative_schema_path)[:-1], list(problem.absolute_path)
    return (f"{problem.message[:SHOWN]}. Failed validating {problem.validator!r} in schema{_steps(rule)}, on "
            f"instance{_steps(place)[:SHOWN]}")


def _steps(path: list[Any]) -> str:
    return "".join(f"[{step!r}]" for step in path)


def _object(required: tuple[str, ...] = (), /, **properties: Document) -> Document:
    return {"type": "object", "properties": properties, "additionalProperties": False,
            **({"required": list(required)} if required else {})}


TEXT: Document = {"type": "string"}
UUID: Document = {"type": "string", "format": "uuid"}
_PARENT: Document = {"anyOf": [UUID, {"type": "null"}]}
_NUMBER: Document = {"type": "integer"}
_PROVIDER_NAME: Document = {"type": "string", "maxLength": 200}

NOTHING = Versioned((0, _object()))
ANYTHING = Versioned((0, {}))

CREATE_PROVIDER = Versioned(
    (0, _object(("name",), name=_PROVIDER_NAME, uuid=UUID)),
    (14, _object(("name",), name=_PROVIDER_NAME, uuid=UUID, parent_provider_uuid=_PARENT)))
UPDATE_PROVIDER = Versioned(
    (0, _object(("name",), name=_PROVIDER_NAME)),
    (14, _object(("name",), name=_PROVIDER_NAME, parent_provider_uuid=_PARENT)))
LIST_PROVIDERS = Versioned(
    (0, _object(name=TEXT, uuid=UUID)),
    (3, _object(name=TEXT, uuid=UUID, member_of=TEXT)),
    (4, _object(name=TEXT, uuid=UUID, member_of=TEXT, resources=TEXT)),
    (14, _object(name=TEXT, uuid=UUID, member_of=TEXT, resources=TEXT, in_tree=UUID)),
    (18, _object(name=TEXT, uuid=UUID, member_of=TEXT, resources=TEXT, in_tree=UUID, required=TEXT)))


def _amount(least: int) -> Document:
    return {"type": "integer", "minimum": least, "maximum": MOST}


_INVENTORY: Document = {
    "resource_provider_generation": _NUMBER, "total": _amount(1), "reserved": _amount(0), "min_unit": _amount(1),
    "max_unit": _amount(1), "step_size": _amount(1),
    # One of nothing would be no capacity, and could not be told from none by hand.
    "allocation_ratio": {"type": "number", "maximum": LARGEST_RATIO}}
ADD_INVENTORY = Versioned((0, _object(("total", "resource_class"), **_INVENTORY,
                                      resource_class={"type": "string", "pattern": _NAME, "maxLength": 255})))
PUT_INVENTORY = Versioned((0, _object(("total", "resource_provider_generation"), **_INVENTORY)))
PUT_INVENTORIES = Versioned((0, _object(
    ("resource_provider_generation", "inventories"), resource_provider_generation=_NUMBER,
    inventories={"type": "object", "patternProperties": {_NAME: _object(("total",), **_INVENTORY)},
                 "additionalProperties": False})))

_UUIDS: Document = {"type": "array", "items": UUID, "uniqueItems": True}
PUT_AGGREGATES = Versioned(
    (1, _UUIDS),
    (19, _object(("aggregates", "resource_provider_generation"), aggregates=_UUIDS,
                 resource_provider_generation=_NUMBER)))

TRAIT_NAME: Document = {"type": "string", "minLength": 1, "maxLength": 255, "pattern": _CUSTOM,
                        "format": "line"}
PUT_TRAITS = Versioned((6, _object(
    ("traits", "resource_provider_generation"), resource_provider_generation=_NUMBER,
    traits={"type": "array", "items": {"type": "string", "minLength": 1, "maxLength": 255}})))
LIST_TRAITS = Versioned((6, _object(name=TEXT, associated=TEXT)))

CLASS_NAME: Document = {"type": "string", "pattern": _CUSTOM, "maxLength": 255, "format": "line"}
CLASS = Versioned((2, _object(("name",), name=CLASS_NAME)))
CUSTOM_CLASS, CUSTOM_TRAIT = Versioned((0, CLASS_NAME)), Versioned((0, TRAIT_NAME))

_ID: Document = {"type": "string", "minLength": 1, "maxLength": 255}
USAGES = Versioned(
    (9, _object(("project_id",), project_id=_ID, user_id=_ID)),
    (38, _object(("project_id",), project_id=_ID, user_id=_ID,
                 consumer_type={**_ID, "pattern": f"{_NAME}|^all|^unknown$"})))

_LIMIT: Document = {"type": "string", "pattern": "^[1-9][0-9]*$", "minLength": 1}


def _groups(suffix: str, *names: str, **properties: Document) -> Document:
    return {**_object(**properties), "patternProperties": {f"^{name}({suffix})?$": TEXT for name in names}}


_POLICY: Document = {"type": "string", "enum": ["none", "isolate"]}
_SINCE_25, _SINCE_33 = "[1-9][0-9]*", "[a-zA-Z0-9_-]{1,64}"
_PARTS = ("resources", "required", "member_of")
CANDIDATES = Versioned(
    (10, _object(("resources",), resources=TEXT)),
    (16, _object(("resources",), resources=TEXT, limit=_LIMIT)),
    (17, _object(("resources",), resources=TEXT, limit=_LIMIT, required=TEXT)),
    (21, _object(("resources",), resources=TEXT, limit=_LIMIT, required=TEXT, member_of=TEXT)),
    (25, _groups(_SINCE_25, *_PARTS, limit=_LIMIT, group_policy=_POLICY)),
    (31, _groups(_SINCE_25, *_PARTS, "in_tree", limit=_LIMIT, group_policy=_POLICY)),
    (33, _groups(_SINCE_33, *_PARTS, "in_tree", limit=_LIMIT, group_policy=_POLICY)),
    (35, _groups(_SINCE_33, *_PARTS, "in_tree", limit=_LIMIT, group_policy=_POLICY, root_required=TEXT)),
    (36, _groups(_SINCE_33, *_PARTS, "in_tree", limit=_LIMIT, group_policy=_POLICY, root_required=TEXT,
                 same_subtree=TEXT)))
