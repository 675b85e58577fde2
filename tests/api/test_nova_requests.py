# SPDX-License-Identifier: Apache-2.0
"""Requests accepted by Nova's schemas and by Kilonova's, at each first and last microversion.

Both must accept or both must refuse each sample, which is generated from both schemas.
tests/nova/known.py has the permitted differences with reasons. A listed difference that no longer
exists fails a test.
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
    """Yield (trial, place, operation, version) of each place that a sample represents."""
    for trial, place in result.spots:
        for title, version in trial.uses:
            yield trial, place, title, version


def find_known_difference(
    title: str, place: str, piece: object, ours: bool
) -> known.KnownDifference | None:
    """Return the known difference that covers this sample, or None."""
    return next(
        (entry for entry in known.REQUESTS if entry.covers(title, place, piece, ours)), None
    )


@pytest.mark.parametrize(
    "at_every_place",
    [False, pytest.param(True, marks=pytest.mark.slice("operations"))],
    ids=["each pair of schemas", "at every place and version"],
)
def test_request_schemas_accept_same_samples_as_nova(
    at_every_place: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    all_trials = trials.list_trials()
    used: Counter[known.KnownDifference] = Counter()
    differing, unknown = set(), []
    results = trials.compare(all_trials, at_every_place=at_every_place)
    for result in results:
        for trial, place, title, version in places_of(result) if result.nova != result.ours else ():
            entry = find_known_difference(title, place, result.piece, result.ours)
            if entry is None:
                unknown.append(
                    f"{title} at 2.{version}: {trial.kind} at {place!r}: "
                    f"{'we take' if result.ours else 'Nova takes'} {json.dumps(result.value)[:300]}"
                )
            else:
                used[entry] += 1
                differing.add((trial.kind, title, version))
    total = sum(len(trial.uses) for trial in all_trials)
    with capsys.disabled():
        print(
            f"\nNova's schemas of requests: {total} operations × versions checked with {len(results)} samples, "
            f"{total - len(differing)} agree, {len(differing)} differ in {len(used)} known ways"
        )
    assert not unknown, "\n".join(unknown[:20])
    assert set(used) == set(known.REQUESTS), [
        entry for entry in known.REQUESTS if entry not in used
    ]
    assert total > 800 and {True, False} == {result.nova for result in results}


def test_nova_operations_are_served_in_same_microversions_except_known_absent() -> None:
    differing = set()
    for operation in schemas.read_operations():
        since, until = operation.versions
        for version in {max(since - 1, 1), max(since, 1), until, min(until + 1, 104)}:
            if operation.serves(version) != (trials.find_route(operation, version) is not None):
                differing.add(operation.title)
    assert differing == set(known.ABSENT)


def test_operations_removed_by_nova_are_in_list_of_gone_routes() -> None:
    removed = {
        (operation.method, trials.strip_names(operation.path))
        for operation in schemas.read_operations()
        if operation.removed
    }
    ours = {(route.method, trials.strip_names(route.path)) for route in trials.ROUTES}
    assert removed - ours == trials.list_gone()
    actions = {
        operation.key
        for operation in schemas.read_operations()
        if operation.removed and (operation.method, trials.strip_names(operation.path)) in ours
    }
    assert actions == {"resetNetwork", "os-getRDPConsole"}


def test_routes_are_operations_of_nova_or_listed_extensions() -> None:
    operations_of_nova = {
        (operation.method, trials.strip_names(operation.path))
        for operation in schemas.read_operations()
    }
    own = [route for route in trials.ROUTES if route.policy.startswith("kilonova:")]
    assert {route.path for route in own} == set(known.OWN)
    assert {
        (route.method, trials.strip_names(route.path))
        for route in trials.ROUTES
        if route not in own
    } <= operations_of_nova


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"),
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
def test_generated_samples_of_schema_include_valid_and_invalid_values(
    schema: samples.Schema, valid: object, invalid: object
) -> None:
    values = [value for _, _, value in samples.generate_samples(schema)]
    assert valid in values and invalid in values
