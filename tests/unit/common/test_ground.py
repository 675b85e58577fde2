# SPDX-License-Identifier: Apache-2.0
"""Ids, times and problem classes in ``common.domain``."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, strategies

from common.domain import clock, errors, ids

KINDS = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, errors.Problem)
]
EXAMPLES = {
    errors.OverQuota: errors.OverQuota({"cores": (4, 18, 20), "ram": (1, 2, 3)}),
    errors.WrongState: errors.WrongState("stop", "s1", "vm_state", "stopped"),
    errors.Locked: errors.Locked("s1"),
}


def test_new_ids_are_valid_and_differ() -> None:
    assert ids.is_uuid(ids.new())
    assert ids.is_request(ids.new_request())
    assert ids.new() != ids.new()
    assert not ids.is_request(ids.new())


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        None,
        7,
        "0" * 36,
        "{6f70656e-0000-4000-8000-737461636b21}",
        "6F70656E-0000-4000-8000-737461636B21",
        "6f70656e-0000-4000-8000-737461636b21\n",
        " 6f70656e-0000-4000-8000-737461636b21",
        "6f70656e000040008000737461636b21",
    ],
)
def test_is_uuid_refuses_all_but_lower_case_uuids_with_dashes(text: object) -> None:
    assert not ids.is_uuid(text)
    assert not ids.is_request(f"req-{text}")


@given(strategies.integers(0, 4_102_444_800 * clock.SECOND))
def test_clock_parse_of_iso_text_returns_the_same_time(micros: int) -> None:
    assert clock.parse(clock.iso(micros, fraction=True)) == micros  # type: ignore[arg-type]
    assert clock.parse(clock.iso(micros)) == micros - micros % clock.SECOND  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "text",
    [
        "2026-01-02T03:04:05Z",
        "2026-01-02T03:04:05",
        " 2026-01-02 03:04:05+00:00 ",
        "2026-01-02T05:04:05+02:00",
        "20260102T030405Z",
    ],
)
def test_clock_parse_reads_iso_formats_and_takes_missing_offset_as_utc(text: str) -> None:
    assert clock.iso(clock.parse(text)) == "2026-01-02T03:04:05Z"


@pytest.mark.parametrize("text", ["", "yesterday", "2026-13-01T00:00:00Z", "1767323045"])
def test_clock_parse_refuses_malformed_time(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        clock.parse(text)


def test_clock_iso_of_none_returns_none() -> None:
    assert clock.iso(None) is None


def test_clock_monotonic_advances_with_real_time() -> None:
    before = clock.Clock().monotonic()
    assert 0 <= clock.Clock().monotonic() - before < 5
    assert abs(time.monotonic() - before) < 5


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("0", 0),
        ("9" * 18, 10**18 - 1),
        ("9" * 19, None),
        ("-1", None),
        ("\u0663", None),
        ("1\n", None),
        ("", None),
    ],
)
def test_ids_number_accepts_up_to_18_ascii_digits(text: str, number: int | None) -> None:
    assert ids.number(text) == number


@pytest.mark.parametrize(
    ("text", "is_valid"),
    [
        ("5EBF03D0-58ED-4D7B-9B6F-FA56BE3A0D6C", True),
        ("5ebf03d058ed4d7b9b6ffa56be3a0d6c", True),
        ("{5ebf03d0-58ed-4d7b-9b6f-fa56be3a0d6c}", False),
        ("urn:uuid:5ebf03d058ed4d7b9b6ffa56be3a0d6c", False),
        ("", False),
    ],
)
def test_spells_uuid_accepts_with_or_without_dashes_but_no_braces_or_urn(
    text: str, is_valid: bool
) -> None:
    assert ids.spells_uuid(text) is is_valid


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_problem_class_has_status_kind_and_text(kind: type[errors.Problem]) -> None:
    problem = EXAMPLES.get(kind) or kind("why")
    assert 400 <= problem.status < 600
    assert problem.kind
    assert str(problem) == problem.text != ""
    assert problem.retryable == (problem.status == 503 or kind in (errors.HostDown, errors.Busy))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_errors_docstring_lists_problem_class_with_its_status(kind: type[errors.Problem]) -> None:
    line = next(
        line for line in (errors.__doc__ or "").splitlines() if f" {kind.__name__} " in line + " "
    )
    assert f" {kind.status}" in line


def test_over_quota_wrong_state_and_locked_texts_equal_those_of_nova() -> None:
    assert EXAMPLES[errors.OverQuota].text == (
        "Quota exceeded for cores, ram: Requested 4, 1, but already used 18, 2 of 20, 3 cores, ram"
    )
    assert (
        EXAMPLES[errors.WrongState].text
        == "Cannot 'stop' instance s1 while it is in vm_state stopped"
    )
    assert EXAMPLES[errors.Locked].text == "Instance s1 is locked"
    assert errors.Problem().text.startswith("Unexpected error.")
