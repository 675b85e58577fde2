# SPDX-License-Identifier: Apache-2.0
"""Valid and invalid values generated from a JSON schema.

For each place of the schema there are values that just fit and values that just do not. All other
parts of a sample are the simplest valid values, so that only this place decides. A place has the
keys from the root, each after a slash, with * for any item or name. For example, "/server/tags/*".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

Schema = dict[str, Any]
#: The place, the value at this place, and the whole value.
Sample = tuple[str, Any, Any]

UUID = "70a599e0-31e7-49b7-b260-868f441e862b"
#: Format -> texts that the format accepts, the simplest first, and similar texts.
TEXTS: dict[str, tuple[str, ...]] = {
    "uuid": (UUID, UUID.replace("-", ""), UUID.upper(), UUID[:-1], "{" + UUID + "}"),
    "ipv4": ("192.0.2.1", "192.0.2.256", "192.0.2", "192.0.2.1/24", "2001:db8::1"),
    "ipv6": ("2001:db8::1", "2001:db8::g", "::ffff:192.0.2.1", "192.0.2.1"),
    "date-time": (
        "2026-01-02T03:04:05Z",
        "2026-01-02T03:04:05.5+01:00",
        "2026-01-02",
        "2026-13-02",
        "yesterday",
    ),
    "base64": ("aGVsbG8=", "aGVsbG8", "héllo", "aGVs\nbG8="),
    "regex": ("^web", "(", "*", "[a-", "(x+)+", "(?=x)"),
    "name": ("x",),
    "az_name": ("x",),
    "name_with_leading_trailing_spaces": ("x",),
    "printable": ("x",),
    "int32": ("1", "2147483647", "2147483648"),
    "cidr": ("10.0.0.0/8", "10.0.0.0"),
    "uri": ("http://a/b", "/b"),
    "mac-address": ("fa:16:3e:00:00:01",),
}
#: Values to try at any place.
ANYTHING: tuple[Any, ...] = (None, True, 0, 1, -1, 1.5, [], {}, ["x"], {"x": "x"})
WORDS = (
    "x",
    "",
    " ",
    " x",
    "x ",
    "x y",
    "é",
    "x\ty",
    "x\u2028y",
    "x/y",
    "x,y",
    "x:y",
    "x@y",
    "x.y",
    "x_y",
    "x-y",
    "-x",
    "x" * 64,
    "x" * 256,
    "0",
    "1",
    "-1",
    "01",
    "1.5",
    "1e3",
    "true",
    "TRUE",
    "tRue",
    "null",
)
MAX_INT = 2**31 - 1


def generate_integers(schema: Schema) -> Iterator[Any]:
    """Yield integers at and beside the limits of the range, as numbers and as texts."""
    ends = {
        value + step
        for key in ("minimum", "maximum", "exclusiveMinimum")
        if abs(value := schema.get(key, 0)) < 2**63
        for step in (-1, 0, 1)
    }
    for value in sorted(ends | {MAX_INT, MAX_INT + 1}):
        yield from (int(value), str(int(value)))


def generate_texts(schema: Schema) -> Iterator[str]:
    """Yield texts of the format, general texts, and texts at and beside the limits of length."""
    yield from TEXTS.get(schema.get("format", ""), ())
    yield from WORDS
    for key in ("minLength", "maxLength"):
        if 1 < schema.get(key, 0) < 100_000:
            yield from ("x" * length for length in (schema[key] - 1, schema[key], schema[key] + 1))


def types(schema: Schema) -> tuple[str, ...]:
    """Return the types that a schema permits."""
    names = schema.get("type", ())
    return (names,) if isinstance(names, str) else tuple(names)


def choices(schema: Schema) -> list[Schema]:
    """Return the alternatives of ``oneOf`` or ``anyOf``, each merged with the rest of the schema.

    The parts of ``allOf`` are merged into a single alternative.
    """
    own = {key: value for key, value in schema.items() if key not in ("oneOf", "anyOf", "allOf")}
    for key in ("oneOf", "anyOf"):
        if key in schema:
            return [{**own, **part} for part in schema[key]]
    if "allOf" in schema:
        return [{key: value for part in (own, *schema["allOf"]) for key, value in part.items()}]
    return [own]


def simplest(schema: Schema) -> Any:
    """Return a simple valid value of the first alternative."""
    schema = choices(schema)[0]
    if "enum" in schema:
        return schema["enum"][0]
    kinds = types(schema)
    if "object" in kinds or "properties" in schema:
        return _object(schema)
    if "array" in kinds:
        return [simplest(schema.get("items", {})) for _ in range(schema.get("minItems", 0))]
    if "string" in kinds:
        word = (
            TEXTS[schema["format"]][0]
            if "format" in schema
            else "1"
            if "9" in schema.get("pattern", "")
            else "x"
        )
        return (
            "/" + word
            if schema.get("pattern", "").startswith("^/")
            else word[: schema.get("maxLength")]
        )
    if {"integer", "number"} & set(kinds):
        return max(1, int(schema.get("minimum", 1)))
    return True if "boolean" in kinds else None


def _object(schema: Schema) -> dict[str, Any]:
    properties = schema.get("properties", {})
    values = {name: simplest(properties.get(name, {})) for name in schema.get("required", ())}
    more = iter([name for name in properties if name not in values])
    while len(values) < schema.get("minProperties", 0):
        name = next(more, None)
        if name is None:
            return {
                **values,
                "x": simplest(next(iter(schema.get("patternProperties", {"": {}}).values()))),
            }
        values[name] = simplest(properties[name])
    return values


def find_schemas(schema: Schema, place: str) -> list[Schema]:
    """Return the schemas of a place, one for each alternative."""
    alternatives = [schema]
    for step in place.split("/")[1:]:
        alternatives = [
            part
            for alternative in alternatives
            for choice in choices(alternative)
            for part in _children(choice, step)
        ]
    return alternatives


def _children(schema: Schema, step: str) -> list[Schema]:
    if step in schema.get("properties", {}):
        return [schema["properties"][step]]
    items = [schema["items"]] if step == "*" and "items" in schema else []
    parts = [*items, *schema.get("patternProperties", {}).values()]
    return parts or [{"unknown names": schema.get("additionalProperties", True)}]


def generate_samples(
    schema: Schema, place: str = "", is_tried: Callable[[str], bool] = lambda place: True
) -> Iterator[Sample]:
    """Yield valid and invalid samples for each place of a schema.

    Args:
        schema: The schema.
        place: Place of the schema in a larger schema, or "".
        is_tried: Returns False for a place to leave out, with all places below.
    """
    if not is_tried(place):
        return
    yield from ((place, value, value) for value in (simplest(schema), *ANYTHING))
    for choice in choices(schema):
        plain: list[Any] = [*choice.get("enum", ())]
        if "string" in types(choice) or "enum" in choice:
            plain += generate_texts(choice)
        if {"integer", "number", "string"} & set(types(choice)):
            plain += generate_integers(choice)
        yield from ((place, value, value) for value in plain)
        if "items" in choice or "array" in types(choice):
            yield from _generate_lists(choice, place, is_tried)
        if "properties" in choice or "patternProperties" in choice:
            yield from _generate_objects(choice, place, is_tried)


def _generate_lists(
    schema: Schema, place: str, is_tried: Callable[[str], bool]
) -> Iterator[Sample]:
    items = schema.get("items", {})
    yield from (
        (below, piece, [value])
        for below, piece, value in generate_samples(items, f"{place}/*", is_tried)
    )
    item = simplest(items)
    for number in {
        2,
        *(
            schema[end] + more
            for end in ("minItems", "maxItems")
            if end in schema
            for more in (0, 1)
        ),
    }:
        yield place, [item] * number, [item] * number


def _generate_objects(
    schema: Schema, place: str, is_tried: Callable[[str], bool]
) -> Iterator[Sample]:
    properties, base = schema.get("properties", {}), simplest({**schema, "type": "object"})
    for whole in (
        {**base, **{name: simplest(part) for name, part in properties.items()}},
        {**base, "x-unknown": ["x"]},
        *({key: value for key, value in base.items() if key != name} for name in base),
    ):
        yield place, whole, whole
    for name, part in properties.items():
        yield from (
            (below, piece, {**base, name: value})
            for below, piece, value in generate_samples(part, f"{place}/{name}", is_tried)
        )
    for part in schema.get("patternProperties", {}).values():
        yield from (
            (below, piece, {**base, "x": value})
            for below, piece, value in generate_samples(part, f"{place}/*")
        )
        yield from ((f"{place}/*", name, {**base, name: simplest(part)}) for name in WORDS)
