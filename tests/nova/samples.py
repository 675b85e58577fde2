# SPDX-License-Identifier: Apache-2.0
"""Values made from a JSON schema: one that fits, and around it what just fits and what just does
not, place by place.

Each has the place (keys with / between, * for any item or name) that makes it differ from the
others. All else in it is as simple as the schema lets it be, so that nothing else decides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

Schema = dict[str, Any]
#: The place, what stands there, and the whole.
Sample = tuple[str, Any, Any]

UUID = "70a599e0-31e7-49b7-b260-868f441e862b"
#: Texts that a format lets pass, the simplest first, and such that look alike.
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
#: What may stand anywhere.
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


def whole_numbers(schema: Schema) -> Iterator[Any]:
    """Around the ends of the range, as numbers and as text."""
    ends = {
        value + step
        for key in ("minimum", "maximum", "exclusiveMinimum")
        if abs(value := schema.get(key, 0)) < 2**63
        for step in (-1, 0, 1)
    }
    for value in sorted(ends | {MAX_INT, MAX_INT + 1}):
        yield from (int(value), str(int(value)))


def texts(schema: Schema) -> Iterator[str]:
    yield from TEXTS.get(schema.get("format", ""), ())
    yield from WORDS
    for key in ("minLength", "maxLength"):
        if 1 < schema.get(key, 0) < 100_000:
            yield from ("x" * length for length in (schema[key] - 1, schema[key], schema[key] + 1))


def types(schema: Schema) -> tuple[str, ...]:
    found = schema.get("type", ())
    return (found,) if isinstance(found, str) else tuple(found)


def choices(schema: Schema) -> list[Schema]:
    """The alternatives, each with what holds for all of them; all that must hold at once as one."""
    own = {key: value for key, value in schema.items() if key not in ("oneOf", "anyOf", "allOf")}
    for key in ("oneOf", "anyOf"):
        if key in schema:
            return [{**own, **one} for one in schema[key]]
    if "allOf" in schema:
        return [{key: value for one in (own, *schema["allOf"]) for key, value in one.items()}]
    return [own]


def simplest(schema: Schema) -> Any:
    """A value that fits."""
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
    known = schema.get("properties", {})
    made = {name: simplest(known.get(name, {})) for name in schema.get("required", ())}
    more = iter([name for name in known if name not in made])
    while len(made) < schema.get("minProperties", 0):
        name = next(more, None)
        if name is None:
            return {
                **made,
                "x": simplest(next(iter(schema.get("patternProperties", {"": {}}).values()))),
            }
        made[name] = simplest(known[name])
    return made


def at(schema: Schema, place: str) -> list[Schema]:
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


def around(
    schema: Schema, place: str = "", is_tried: Callable[[str], bool] = lambda place: True
) -> Iterator[Sample]:
    """What may and may not stand where this schema is.

    Args:
        schema: The schema.
        place: Where it is.
        is_tried: Returns False for a place that is left out, with all places below it.
    """
    if not is_tried(place):
        return
    yield from ((place, value, value) for value in (simplest(schema), *ANYTHING))
    for one in choices(schema):
        plain: list[Any] = [*one.get("enum", ())]
        if "string" in types(one) or "enum" in one:
            plain += texts(one)
        if {"integer", "number", "string"} & set(types(one)):
            plain += whole_numbers(one)
        yield from ((place, value, value) for value in plain)
        if "items" in one or "array" in types(one):
            yield from _lists(one, place, is_tried)
        if "properties" in one or "patternProperties" in one:
            yield from _records(one, place, is_tried)


def _lists(schema: Schema, place: str, is_tried: Callable[[str], bool]) -> Iterator[Sample]:
    items = schema.get("items", {})
    yield from (
        (where, piece, [value]) for where, piece, value in around(items, f"{place}/*", is_tried)
    )
    one = simplest(items)
    for number in {
        2,
        *(
            schema[end] + more
            for end in ("minItems", "maxItems")
            if end in schema
            for more in (0, 1)
        ),
    }:
        yield place, [one] * number, [one] * number


def _records(schema: Schema, place: str, is_tried: Callable[[str], bool]) -> Iterator[Sample]:
    known, base = schema.get("properties", {}), simplest({**schema, "type": "object"})
    for whole in (
        {**base, **{name: simplest(part) for name, part in known.items()}},
        {**base, "x-unknown": ["x"]},
        *({key: value for key, value in base.items() if key != name} for name in base),
    ):
        yield place, whole, whole
    for name, part in known.items():
        yield from (
            (where, piece, {**base, name: value})
            for where, piece, value in around(part, f"{place}/{name}", is_tried)
        )
    for part in schema.get("patternProperties", {}).values():
        yield from (
            (where, piece, {**base, "x": value})
            for where, piece, value in around(part, f"{place}/*")
        )
        yield from ((f"{place}/*", name, {**base, name: simplest(part)}) for name in WORDS)
