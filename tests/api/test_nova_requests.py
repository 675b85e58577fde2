# SPDX-License-Identifier: Apache-2.0
"""What may be asked: Nova's schemas and ours, for every operation at the first and last version of
each range.

Samples are made from both schemas; each must be taken or refused by both. What differs and may, and
why, is in tests/nova/known.py; what is no longer so there fails here.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.nova import known, samples, schemas, trials


@pytest.fixture(autouse=True)
def nova() -> None:
    schemas.require()


def places_of(result: trials.Result) -> Iterator[tuple[trials.Trial, str, str, int]]:
    """Yield (trial, place, operation, version) of each place that a sample stands for."""
    for trial, place in result.spots:
        for title, version in trial.at:
            yield trial, place, title, version


def reason(title: str, place: str, piece: object, ours: bool) -> known.Known | None:
    """Why it may be taken by one only."""
    return next(
        (entry for entry in known.REQUESTS if entry.covers(title, place, piece, ours)), None
    )


@pytest.mark.parametrize(
    "at_every_place",
    [False, pytest.param(True, marks=pytest.mark.slice("operations"))],
    ids=["each pair of schemas", "at every place and version"],
)
def test_request_schemas_accept_the_samples_that_nova_accepts(
    at_every_place: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    tried = trials.trials()
    used: Counter[known.Known] = Counter()
    differ, news = set(), []
    results = trials.compared(tried, at_every_place=at_every_place)
    for result in results:
        for trial, place, title, version in places_of(result) if result.nova != result.ours else ():
            entry = reason(title, place, result.piece, result.ours)
            if entry is None:
                news.append(
                    f"{title} at 2.{version}: {trial.kind} at {place!r}: "
                    f"{'we take' if result.ours else 'Nova takes'} {json.dumps(result.value)[:300]}"
                )
            else:
                used[entry] += 1
                differ.add((trial.kind, title, version))
    total = sum(len(trial.at) for trial in tried)
    with capsys.disabled():
        print(
            f"\nNova's schemas of requests: {total} operations × versions checked with {len(results)} samples, "
            f"{total - len(differ)} agree, {len(differ)} differ in {len(used)} known ways"
        )
    assert not news, "\n".join(news[:20])
    assert set(used) == set(known.REQUESTS), [
        entry for entry in known.REQUESTS if entry not in used
    ]
    assert total > 800 and {True, False} == {result.nova for result in results}


def test_every_operation_is_served_in_the_same_versions() -> None:
    differ = set()
    for operation in schemas.operations():
        since, until = operation.versions
        for version in {max(since - 1, 1), max(since, 1), until, min(until + 1, 104)}:
            if operation.serves(version) != (trials.row_of(operation, version) is not None):
                differ.add(operation.title)
    assert differ == set(known.ABSENT)


def test_what_nova_removed_is_gone() -> None:
    removed = {(one.method, trials.plain(one.path)) for one in schemas.operations() if one.removed}
    ours = {(route.method, trials.plain(route.path)) for route in trials.ROUTES}
    assert removed - ours == trials.gone()
    actions = {
        one.key
        for one in schemas.operations()
        if one.removed and (one.method, trials.plain(one.path)) in ours
    }
    assert actions == {"resetNetwork", "os-getRDPConsole"}


def test_we_serve_nothing_that_nova_does_not() -> None:
    theirs = {(one.method, trials.plain(one.path)) for one in schemas.operations()}
    own = [route for route in trials.ROUTES if route.policy.startswith("kilonova:")]
    assert {route.path for route in own} == set(known.OWN)
    assert {
        (route.method, trials.plain(route.path)) for route in trials.ROUTES if route not in own
    } <= theirs


@pytest.mark.parametrize(
    ("schema", "taken", "refused"),
    [
        ({"type": "string", "minLength": 2, "maxLength": 3}, "xxx", "xxxx"),
        ({"enum": ["a"]}, "a", "x"),
        ({"type": "integer", "minimum": 7}, 7, 6),
        ({"type": "array", "items": {"type": "null"}, "maxItems": 4}, [None] * 4, [None] * 5),
        (
            {"type": "object", "properties": {"a": {"type": "null"}}, "required": ["a"]},
            {"a": None},
            {},
        ),
        (
            {"oneOf": [{"type": "null"}, {"type": "string", "format": "uuid"}]},
            samples.UUID,
            samples.UUID[:-1],
        ),
    ],
)
def test_samples_stand_on_both_sides(
    schema: samples.Schema, taken: object, refused: object
) -> None:
    made = [value for _, _, value in samples.around(schema)]
    assert taken in made and refused in made
