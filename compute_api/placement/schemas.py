# SPDX-License-Identifier: Apache-2.0
"""Schemas for bodies and queries of the placement service, by microversion.

Error texts come from jsonschema, because clients know them. Each text is one line, because the
command line only shows the last line.
"""

from __future__ import annotations

import functools

from common.domain import errors
from compute_api.http import explanations
from compute_api.http.validation import FORMATS, Document, VersionedSchema, replace
from compute_api.placement.request import BadQuery

#: Longest part of an error text.
MAX_SHOWN_CHARACTERS = 1000
MOST, LARGEST_RATIO = 2**31 - 1, 3.40282e38
_NAME = "^[A-Z0-9_]+$"
# "$" also matches before a final line feed, which the format "line" forbids.
_CUSTOM = "^CUSTOM_[A-Z0-9_]+$"


class PlacementSchema(VersionedSchema):
    """The schema of a body or a query, with one document per range of microversions.

    Each step is a microversion and the document that applies from this version on.
    """

    def __init__(self, *steps: tuple[str, Document]) -> None:
        (_, first), *later = steps
        super().__init__(first, *((since, replace(document)) for since, document in later))
        self._validator = functools.lru_cache(maxsize=None)(self._make_validator)

    def check_body(self, version: int, value: object) -> None:
        """Validate a body.

        Raises:
            BadRequest: The body is invalid. The text names the first error.
        """
        problem = self._find_error(version, value)
        if problem:
            raise errors.BadRequest(f"JSON does not validate: {problem}")

    def check_query(self, version: int, value: dict[str, str]) -> None:
        """Validate a query.

        Raises:
            BadQuery: The query is invalid. The text names the first error.
        """
        problem = self._find_error(version, value)
        if problem:
            raise BadQuery(f"Invalid query string parameters: {problem}")

    def _find_error(self, version: int, value: object) -> str:
        """Return the text of the first error with rule and location, or "" for a valid value."""
        error = next(self._validator(version).iter_errors(value), None)
        if error is None:
            return ""
        rule, place = list(error.relative_schema_path)[:-1], list(error.absolute_path)
        return (
            f"{error.message[:MAX_SHOWN_CHARACTERS]}. Failed validating {error.validator!r} in "
            f"schema{_format_path(rule)}, on instance{_format_path(place)[:MAX_SHOWN_CHARACTERS]}"
        )

    def _make_validator(self, version: int) -> explanations.Explainer:
        return explanations.build_explainer("Draft4Validator", FORMATS)(self.at(version).document)


def _format_path(path: list[object]) -> str:
    return "".join(f"[{step!r}]" for step in path)


def _object_schema(required: tuple[str, ...] = (), /, **properties: Document) -> Document:
    return {
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
        **({"required": list(required)} if required else {}),
    }


TEXT: Document = {"type": "string"}
UUID: Document = {"type": "string", "format": "uuid"}
_PARENT: Document = {"anyOf": [UUID, {"type": "null"}]}
_NUMBER: Document = {"type": "integer"}
_PROVIDER_NAME: Document = {"type": "string", "maxLength": 200}

NOTHING = PlacementSchema(("1.0", _object_schema()))
ANYTHING = PlacementSchema(("1.0", {}))

CREATE_PROVIDER = PlacementSchema(
    ("1.0", _object_schema(("name",), name=_PROVIDER_NAME, uuid=UUID)),
    (
        "1.14",
        _object_schema(("name",), name=_PROVIDER_NAME, uuid=UUID, parent_provider_uuid=_PARENT),
    ),
)
UPDATE_PROVIDER = PlacementSchema(
    ("1.0", _object_schema(("name",), name=_PROVIDER_NAME)),
    ("1.14", _object_schema(("name",), name=_PROVIDER_NAME, parent_provider_uuid=_PARENT)),
)
LIST_PROVIDERS = PlacementSchema(
    ("1.0", _object_schema(name=TEXT, uuid=UUID)),
    ("1.3", _object_schema(name=TEXT, uuid=UUID, member_of=TEXT)),
    ("1.4", _object_schema(name=TEXT, uuid=UUID, member_of=TEXT, resources=TEXT)),
    ("1.14", _object_schema(name=TEXT, uuid=UUID, member_of=TEXT, resources=TEXT, in_tree=UUID)),
    (
        "1.18",
        _object_schema(
            name=TEXT, uuid=UUID, member_of=TEXT, resources=TEXT, in_tree=UUID, required=TEXT
        ),
    ),
)


def _amount_schema(least: int) -> Document:
    return {"type": "integer", "minimum": least, "maximum": MOST}


_INVENTORY: Document = {
    "resource_provider_generation": _NUMBER,
    "total": _amount_schema(1),
    "reserved": _amount_schema(0),
    "min_unit": _amount_schema(1),
    "max_unit": _amount_schema(1),
    "step_size": _amount_schema(1),
    # The handler rejects 0 and below, which would leave no capacity.
    "allocation_ratio": {"type": "number", "maximum": LARGEST_RATIO},
}
ADD_INVENTORY = PlacementSchema(
    (
        "1.0",
        _object_schema(
            ("total", "resource_class"),
            **_INVENTORY,
            resource_class={"type": "string", "pattern": _NAME, "maxLength": 255},
        ),
    )
)
PUT_INVENTORY = PlacementSchema(
    ("1.0", _object_schema(("total", "resource_provider_generation"), **_INVENTORY))
)
PUT_INVENTORIES = PlacementSchema(
    (
        "1.0",
        _object_schema(
            ("resource_provider_generation", "inventories"),
            resource_provider_generation=_NUMBER,
            inventories={
                "type": "object",
                "patternProperties": {_NAME: _object_schema(("total",), **_INVENTORY)},
                "additionalProperties": False,
            },
        ),
    )
)

_UUIDS: Document = {"type": "array", "items": UUID, "uniqueItems": True}
PUT_AGGREGATES = PlacementSchema(
    ("1.1", _UUIDS),
    (
        "1.19",
        _object_schema(
            ("aggregates", "resource_provider_generation"),
            aggregates=_UUIDS,
            resource_provider_generation=_NUMBER,
        ),
    ),
)

TRAIT_NAME: Document = {
    "type": "string",
    "minLength": 1,
    "maxLength": 255,
    "pattern": _CUSTOM,
    "format": "line",
}
PUT_TRAITS = PlacementSchema(
    (
        "1.6",
        _object_schema(
            ("traits", "resource_provider_generation"),
            resource_provider_generation=_NUMBER,
            traits={"type": "array", "items": {"type": "string", "minLength": 1, "maxLength": 255}},
        ),
    )
)
LIST_TRAITS = PlacementSchema(("1.6", _object_schema(name=TEXT, associated=TEXT)))

CLASS_NAME: Document = {"type": "string", "pattern": _CUSTOM, "maxLength": 255, "format": "line"}
CLASS = PlacementSchema(("1.2", _object_schema(("name",), name=CLASS_NAME)))
CUSTOM_CLASS, CUSTOM_TRAIT = (
    PlacementSchema(("1.0", CLASS_NAME)),
    PlacementSchema(("1.0", TRAIT_NAME)),
)

_ID: Document = {"type": "string", "minLength": 1, "maxLength": 255}
USAGES = PlacementSchema(
    ("1.9", _object_schema(("project_id",), project_id=_ID, user_id=_ID)),
    (
        "1.38",
        _object_schema(
            ("project_id",),
            project_id=_ID,
            user_id=_ID,
            consumer_type={**_ID, "pattern": f"{_NAME}|^all|^unknown$"},
        ),
    ),
)

_LIMIT: Document = {"type": "string", "pattern": "^[1-9][0-9]*$", "minLength": 1}


def _groups_schema(suffix: str, *names: str, **properties: Document) -> Document:
    return {
        **_object_schema(**properties),
        "patternProperties": {f"^{name}({suffix})?$": TEXT for name in names},
    }


_POLICY: Document = {"type": "string", "enum": ["none", "isolate"]}
_SINCE_25, _SINCE_33 = "[1-9][0-9]*", "[a-zA-Z0-9_-]{1,64}"
_PARTS = ("resources", "required", "member_of")
CANDIDATES = PlacementSchema(
    ("1.10", _object_schema(("resources",), resources=TEXT)),
    ("1.16", _object_schema(("resources",), resources=TEXT, limit=_LIMIT)),
    ("1.17", _object_schema(("resources",), resources=TEXT, limit=_LIMIT, required=TEXT)),
    (
        "1.21",
        _object_schema(("resources",), resources=TEXT, limit=_LIMIT, required=TEXT, member_of=TEXT),
    ),
    ("1.25", _groups_schema(_SINCE_25, *_PARTS, limit=_LIMIT, group_policy=_POLICY)),
    ("1.31", _groups_schema(_SINCE_25, *_PARTS, "in_tree", limit=_LIMIT, group_policy=_POLICY)),
    ("1.33", _groups_schema(_SINCE_33, *_PARTS, "in_tree", limit=_LIMIT, group_policy=_POLICY)),
    (
        "1.35",
        _groups_schema(
            _SINCE_33, *_PARTS, "in_tree", limit=_LIMIT, group_policy=_POLICY, root_required=TEXT
        ),
    ),
    (
        "1.36",
        _groups_schema(
            _SINCE_33,
            *_PARTS,
            "in_tree",
            limit=_LIMIT,
            group_policy=_POLICY,
            root_required=TEXT,
            same_subtree=TEXT,
        ),
    ),
)
