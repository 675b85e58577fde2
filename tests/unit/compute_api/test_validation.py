# SPDX-License-Identifier: Apache-2.0
"""Schemas with changes by version, formats, and error messages of the validation."""

from __future__ import annotations

from typing import Any

import pytest

from common.domain import errors
from compute_api.compute.schemas.common import NAME, integer, record, wrapped
from compute_api.http.validation import FORMATS, VersionedSchema, drop, is_true, put, require

BODY = VersionedSchema(
    wrapped(
        "thing",
        record({"name": NAME, "size": integer(1), "parts": {"type": "array", "items": record({})}}),
    ),
    ("2.5", put("thing/colour", {"enum": ["red"]}), put("thing/parts/*/tag", {"type": "string"})),
    ("2.7", drop("thing/colour"), require("thing/name")),
)


@pytest.mark.parametrize(
    ("version", "thing", "fits"),
    [
        (1, {}, True),
        (1, {"size": "7"}, True),
        (1, {"size": 0}, False),
        (1, {"colour": "red"}, False),
        (4, {"parts": [{"tag": "x"}]}, False),
        (5, {"parts": [{"tag": "x"}]}, True),
        (5, {"colour": "red"}, True),
        (6, {"colour": "blue"}, False),
        (7, {"name": "n"}, True),
        (7, {}, False),
        (7, {"name": "n", "colour": "red"}, False),
    ],
)
def test_schema_check_applies_changes_of_the_version(
    version: int, thing: dict[str, Any], fits: bool
) -> None:
    if fits:
        BODY.at(version).check({"thing": thing})
    else:
        with pytest.raises(errors.BadRequest):
            BODY.at(version).check({"thing": thing})


def test_schema_is_built_once_between_two_changes() -> None:
    assert BODY.at(5) is BODY.at(6)
    assert BODY.at(4) is not BODY.at(5)


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("name", ["vm", "ü 1"], ["", " vm", "vm ", "a\nb", "a\u2028b"]),
        ("printable", ["", " x "], ["a\x00b", "\n"]),
        (
            "uuid",
            ["70a599e0-31e7-49b7-b260-868f441e862b", "70A599E031E749B7B260868F441E862B"],
            ["x", "70a599e0"],
        ),
        ("base64", ["", "aGk=", "aG k=\n"], ["a", "!!!!", "ü"]),
        ("ipv4", ["192.0.2.1"], ["192.0.2", "::1", ""]),
        ("ipv6", ["::1", "80fe::"], ["192.0.2.1", "x"]),
        ("regex", ["a.*"], ["(", "*", ""]),
        ("date-time", ["2026-01-02T03:04:05Z", "2026-01-02"], ["yesterday", ""]),
    ],
)
def test_schema_formats_accept_valid_and_refuse_invalid_values(
    name: str, good: list[str], bad: list[str]
) -> None:
    assert [FORMATS[name](text) for text in good] == [True] * len(good)
    assert [FORMATS[name](text) for text in bad] == [False] * len(bad)


@pytest.mark.parametrize(
    ("key", "schema"),
    [("adminPass", {"type": "string", "maxLength": 3}), ("changePassword", {"type": "object"})],
)
def test_validation_error_hides_password(key: str, schema: dict[str, object]) -> None:
    body = VersionedSchema(record({key: schema}))
    with pytest.raises(errors.BadRequest) as failure:
        body.at(1).check({key: "hunter2"})
    assert "hunter2" not in failure.value.text


def test_validation_error_of_list_item_names_its_key() -> None:
    query = VersionedSchema(
        record({"limit": {"type": "array", "items": {"type": "string", "pattern": "^[0-9]+$"}}})
    )
    with pytest.raises(errors.BadRequest) as failure:
        query.at(1).check({"limit": ["many"]})
    assert failure.value.text.startswith("Invalid input for field/attribute limit. Value: many. ")


def test_validation_error_shortens_long_value() -> None:
    with pytest.raises(errors.BadRequest) as failure:
        BODY.at(1).check({"thing": {"name": "x" * 100_000}})
    assert len(failure.value.text) < 1000


def test_prune_drops_unknown_keys_at_every_depth() -> None:
    body = {"thing": {"name": "n", "what": 1, "parts": [{"tag": "t", "more": 2}]}, "else": 3}
    assert BODY.at(5).prune(body) == {"thing": {"name": "n", "parts": [{"tag": "t"}]}}


def test_is_true_accepts_true_on_1_and_yes_only() -> None:
    assert [
        is_true(value) for value in (True, "True", "ON", "1", "yes", False, "no", "0", "Off", None)
    ] == [True] * 5 + [False] * 5


@pytest.mark.parametrize(
    ("least", "fit", "do_not"),
    [
        (
            1,
            (1, "1", "007", 2**31 - 1, "2147483647"),
            (0, "0", "00", "-1", "2147483648", "9999999999", "1" * 5000, "\u0663", "1\n"),
        ),
        (0, (0, "0", "12"), (-1, "-1", "-0", "2147483648")),
        (-1, (-1, "-1", "0"), (-2, "-2", "--1", "2147483648")),
    ],
)
def test_integer_schema_applies_range_to_numbers_as_text(
    least: int, fit: tuple[Any, ...], do_not: tuple[Any, ...]
) -> None:
    body = VersionedSchema(record({"size": integer(least)}))
    for value in fit:
        body.at(1).check({"size": value})
    for value in do_not:
        with pytest.raises(errors.BadRequest, match="size"):
            body.at(1).check({"size": value})
