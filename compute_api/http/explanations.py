# SPDX-License-Identifier: Apache-2.0
"""Error texts for values that violate a JSON schema, at bounded cost.

The texts are those of jsonschema, as in Nova. jsonschema alone includes the whole value in a text
and visits each part of a value of any size. Here a text contains only the beginning of the value,
without secrets. A compiled validator skips valid items and keys, and each keyword stops at its
first error.

Invariant: the length of a text is at most a few times MAX_SHOWN_CHARACTERS.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import jsonschema_rs
import orjson

from common.domain.json_types import JsonObject, JsonValue

if TYPE_CHECKING:
    from jsonschema import ValidationError

#: Characters of an invalid value in an error text.
MAX_SHOWN_CHARACTERS = 300
#: Unknown keys in an error text.
MAX_SHOWN_KEYS = 20
SECRET = frozenset(
    {"adminPass", "changePassword", "user_data", "personality", "contents", "private_key"}
)
Formats = Mapping[str, Callable[[str], bool]]


def cut(text: str, most: int = MAX_SHOWN_CHARACTERS) -> str:
    """Return the text, or its first ``most`` characters and an ellipsis if the text is longer."""
    return text if len(text) <= most else text[:most] + "…"


def abbreviate(value: object) -> str:
    """Return the value's repr with '***' as the value of keys in ``SECRET``.

    A longer text is cut to ``MAX_SHOWN_CHARACTERS`` characters and an ellipsis.
    """
    text = ""
    for piece in _split_repr(value):
        text += piece
        # Quotes of a string are not counted.
        if len(text) > MAX_SHOWN_CHARACTERS + 2:
            return text[:MAX_SHOWN_CHARACTERS] + "…"
    return text


def _split_repr(value: object) -> Iterator[str]:
    """Yield the repr of the value in parts, so that the caller can stop early.

    Strings are cut to ``MAX_SHOWN_CHARACTERS + 1`` characters. '***' replaces the value of keys in
    ``SECRET``.
    """
    if isinstance(value, dict):
        yield "{"
        for number, (key, item) in enumerate(value.items()):
            yield (", " if number else "") + f"{str(key)[: MAX_SHOWN_CHARACTERS + 1]!r}: "
            yield from ("'***'",) if key in SECRET else _split_repr(item)
        yield "}"
    elif isinstance(value, list):
        yield "["
        for number, item in enumerate(value):
            yield ", " if number else ""
            yield from _split_repr(item)
        yield "]"
    elif isinstance(value, str):
        yield repr(str(value[: MAX_SHOWN_CHARACTERS + 1]))
    else:
        yield repr(value)


class _Text(str):
    __slots__ = ()
    __repr__ = abbreviate


class _List(list[Any]):
    __slots__ = ()
    __repr__ = abbreviate


class _Object(dict[str, Any]):
    __slots__ = ()
    __repr__ = abbreviate


_BRIEF: dict[type, type] = {str: _Text, list: _List, dict: _Object}


class Explainer(Protocol):
    """The methods of a jsonschema validator that this module uses."""

    def iter_errors(self, instance: object) -> Iterator[ValidationError]:
        """Yield the errors of the value."""

    def descend(
        self, instance: object, schema: JsonValue, *, path: object, schema_path: str | None = None
    ) -> Iterator[ValidationError]:
        """Yield the errors of a part of the value.

        Args:
            instance: The part.
            schema: The schema of the part.
            path: The key or index of the part.
            schema_path: The key of ``schema`` in the whole schema, or None.
        """


#: A check of one keyword: from the validator, the keyword's value, the instance and the schema.
Keyword = Callable[
    [Explainer, JsonValue, JsonValue, JsonObject], "Iterator[ValidationError] | None"
]


def build_explainer(draft: str, formats: Formats) -> Callable[[JsonObject], Explainer]:
    """Return a function that makes the validator of a schema, with error texts at bounded cost.

    Args:
        draft: Name of a validator class of jsonschema, for example Draft202012Validator.
        formats: The checks of formats, by name.
    """
    import jsonschema

    base_class = getattr(jsonschema, draft)

    checker = jsonschema.FormatChecker(formats=())
    for name, check in formats.items():
        checker.checks(name)(lambda value, check=check: not isinstance(value, str) or check(value))
    keywords = {**base_class.VALIDATORS, **_Keywords(base_class, formats).by_name}
    extended = jsonschema.validators.extend(
        base_class, {name: _limit_errors(keyword) for name, keyword in keywords.items()}
    )
    return functools.partial(extended, format_checker=checker)


def _limit_errors(keyword: Keyword) -> Keyword:
    """Return the check of a keyword, limited to one error with an abbreviated value in the text."""

    def check(
        validator: Explainer, rule: JsonValue, value: JsonValue, schema: JsonObject
    ) -> Iterator[ValidationError]:
        brief = _BRIEF.get(type(value), lambda same: same)(value)
        yield from itertools.islice(keyword(validator, rule, brief, schema) or (), 1)

    return check


@functools.cache
def _compile_pattern(pattern: str) -> Callable[[object], bool]:
    """Return a function that checks whether any part of a text matches a pattern of a schema.

    The function returns True for a value that is no text.
    """
    return jsonschema_rs.Draft202012Validator({"pattern": pattern}).is_valid


class _Keywords:
    """Checks for the keywords that visit each item or key of a value, in place of jsonschema's."""

    def __init__(self, kind: Any, formats: Formats) -> None:  # noqa: ANN401 - jsonschema has no types
        self._unknown_keys: Keyword = kind.VALIDATORS["additionalProperties"]
        self._formats = formats
        #: Compiled check of each rule, by the rule's id. A stored rule keeps the id valid.
        self._compiled: dict[int, tuple[JsonObject, Callable[[object], bool]]] = {}
        self.by_name: dict[str, Keyword] = {
            "items": self._check_items,
            "patternProperties": self._check_pattern_properties,
            "additionalProperties": self._check_additional_properties,
            "uniqueItems": self._check_unique_items,
        }

    def _compile_rule(self, rule: JsonObject) -> Callable[[object], bool]:
        """Return a function that checks whether a value is valid for a part of the schema."""
        if id(rule) not in self._compiled:
            compiled = jsonschema_rs.Draft202012Validator(
                rule, formats=dict(self._formats), validate_formats=True
            )
            self._compiled[id(rule)] = (rule, compiled.is_valid)
        return self._compiled[id(rule)][1]

    def _check_items(
        self, validator: Explainer, rule: JsonValue, value: JsonValue, schema: JsonObject
    ) -> Iterator[ValidationError]:
        if isinstance(value, list):
            fits = self._compile_rule(rule)
            for index, item in enumerate(value):
                if not fits(item):
                    yield from validator.descend(item, rule, path=index)

    def _check_pattern_properties(
        self, validator: Explainer, rule: JsonValue, value: JsonValue, schema: JsonObject
    ) -> Iterator[ValidationError]:
        if isinstance(value, dict):
            for pattern, content in rule.items():
                fits = self._compile_rule(content)
                has_pattern = _compile_pattern(pattern)
                for key, item in value.items():
                    if has_pattern(key) and not fits(item):
                        yield from validator.descend(item, content, path=key, schema_path=pattern)

    def _check_additional_properties(
        self, validator: Explainer, rule: JsonValue, value: JsonValue, schema: JsonObject
    ) -> Iterator[ValidationError]:
        if not isinstance(value, dict) or rule is True:
            return
        properties = schema.get("properties", {})
        patterns = [_compile_pattern(pattern) for pattern in schema.get("patternProperties", {})]
        unknown = (
            key
            for key in value
            if key not in properties and not any(has_pattern(key) for has_pattern in patterns)
        )
        if rule is not False:
            fits = self._compile_rule(rule)
            for key in unknown:
                if not fits(value[key]):
                    yield from validator.descend(value[key], rule, path=key)
            return
        named = {_Text(key): None for key in itertools.islice(unknown, MAX_SHOWN_KEYS)}
        yield from self._unknown_keys(validator, rule, named, schema) or ()

    def _check_unique_items(
        self, validator: Explainer, rule: JsonValue, value: JsonValue, schema: JsonObject
    ) -> Iterator[ValidationError]:
        from jsonschema import ValidationError

        if rule and isinstance(value, list):
            forms = (orjson.dumps(item, option=orjson.OPT_SORT_KEYS) for item in value)
            if len(set(forms)) < len(value):
                yield ValidationError(f"{value!r} has non-unique elements")
