# SPDX-License-Identifier: Apache-2.0
"""Comparison of Nova's and Kilonova's schemas of requests with generated samples.

``list_trials`` pairs the schemas of each operation, at each version at which a schema begins or
ends. ``compare`` validates the samples of both schemas with Nova's validator and with Kilonova's.
No request is sent.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

from common.domain import states
from compute_api.compute.routes import GONE, ROUTES, Route
from compute_api.compute.schemas import aggregates, common
from compute_api.compute.schemas.servers import actions as server_actions
from compute_api.http.microversions import Range
from compute_api.http.validation import VersionedSchema
from deploy.environment import NOVA_PYTHON
from tests.nova import samples
from tests.nova.schemas import Operation, read_operations

JUDGE = Path(__file__).with_name("judge.py")
#: Path -> schemas of bodies by their single key.
BY_KEY: dict[str, dict[str, VersionedSchema]] = {
    "/servers/{}/action": server_actions.BY_KEY,
    "/os-volumes_boot/{}/action": server_actions.BY_KEY,
    "/os-aggregates/{}/action": aggregates.BY_KEY,
}


def strip_names(path: str) -> str:
    """Return a path without the names of parameters, for example "/servers/{}"."""
    return re.sub(r"\{\w+\}", "{}", path)


@cache
def _routes_by_path() -> dict[tuple[str, str], list[Route]]:
    routes = defaultdict(list)
    for route in ROUTES:
        routes[route.method, strip_names(route.path)].append(route)
    return routes


@cache
def list_gone() -> frozenset[tuple[str, str]]:
    """Return method and path of the operations that Kilonova answers with 410."""
    return frozenset(
        (method, strip_names(path)) for path, methods in GONE.items() for method in methods.split()
    )


def find_route(operation: Operation, version: int) -> Route | None:
    """Return Kilonova's route for an operation of Nova at a version, or None."""
    path = strip_names(operation.path)
    route = next(
        (
            route
            for route in _routes_by_path().get((operation.method, path), ())
            if version in route.versions
        ),
        None,
    )
    if (
        route is not None
        and BY_KEY.get(path) is server_actions.BY_KEY
        and not any(
            action.key == operation.key and version in Range(action.since, action.until)
            for action in states.ACTIONS
        )
    ):
        return None
    return route


@dataclass(eq=False)
class Trial:
    """A pair of schemas for the body or the query of requests.

    Attributes:
        kind: "body" or "query".
        nova: Nova's schema.
        ours: Kilonova's schema.
        accepts: Validates a value by Kilonova's schema.
        key: The key of an action's body, or None.
        uses: Each (title of the operation, version) with this pair.
    """

    kind: str
    nova: dict[str, Any]
    ours: dict[str, Any]
    accepts: Any
    key: str | None
    uses: list[tuple[str, int]] = field(default_factory=list)

    def samples(self, is_tried: Callable[[str], bool]) -> Iterator[samples.Sample]:
        """Yield each sample once.

        A sample of a query has only values that a URL can have. A sample of an action names this
        action and no other.

        Args:
            is_tried: Returns False for a place to leave out, with all places below.
        """
        previous = set()
        for schema in (self.nova, self.ours):
            for place, piece, value in samples.generate_samples(schema, "", is_tried):
                text = json.dumps(value, sort_keys=True)
                if text not in previous and self._is_possible(value):
                    previous.add(text)
                    yield place, piece, value

    def _is_possible(self, value: Any) -> bool:
        """Return True if a request of this kind could have the value."""
        if self.kind == "query":
            return isinstance(value, dict) and all(
                isinstance(texts, list) and texts and all(isinstance(text, str) for text in texts)
                for texts in value.values()
            )
        return self.key is None or (isinstance(value, dict) and set(value) == {self.key})


def list_trials() -> list[Trial]:
    """Return all trials, with operations and versions of the same pair of schemas in one trial."""
    trials: dict[str, Trial] = {}
    for operation in read_operations():
        for kind in ("body", "query"):
            for version in list_edge_versions(operation, kind):
                route = find_route(operation, version)
                if route is None or operation.removed:
                    continue
                nova = getattr(operation, kind).at(version)
                ours = _find_own_schema(operation, route, kind, version)
                if nova is None and kind == "body":
                    continue
                document = {} if ours is None else ours.document
                name = json.dumps((kind, operation.key, nova, document), sort_keys=True)
                trial = trials.setdefault(
                    name,
                    Trial(
                        kind,
                        nova or {"type": "object"},
                        document,
                        (lambda value: True) if ours is None else ours.is_valid,
                        operation.key,
                    ),
                )
                trial.uses.append((operation.title, version))
    return list(trials.values())


def list_edge_versions(operation: Operation, kind: str) -> list[int]:
    """Return the versions of an operation at which a range of schemas begins or ends."""
    since, until = operation.versions
    ends = {end for first, last, _ in getattr(operation, kind).listed for end in (first, last)}
    return sorted({max(since, 1, min(end, until)) for end in ends | {since, until}})


def _find_own_schema(operation: Operation, route: Route, kind: str, version: int) -> Any:
    """Return Kilonova's schema, or None for a body without a schema."""
    if kind == "query":
        return (route.query or common.NOTHING).at(version)
    by_key = BY_KEY.get(strip_names(operation.path))
    if by_key is not None and operation.key is not None:
        return by_key[operation.key].at(version)
    return None if route.body is None else route.body.at(version)


#: A place in the bodies or queries of a trial.
Spot = tuple[Trial, str]


@dataclass
class Result:
    """The results of both validators for a sample.

    Attributes:
        spots: The places that the sample represents, first the place of the sample itself.
        piece: The value at that place, a part of the body or query.
        value: The whole body or query.
        nova: True if Nova accepts the sample.
        ours: True if Kilonova accepts the sample.
    """

    spots: list[Spot]
    piece: Any
    value: Any
    nova: bool
    ours: bool


class Places:
    """The places to try, once for each pair of Nova's schema and Kilonova's schema."""

    def __init__(self) -> None:
        self._first: dict[tuple[str, str], Spot] = {}
        self._same: dict[Spot, dict[Spot, None]] = defaultdict(dict)

    def is_tried(self, trial: Trial, place: str) -> bool:
        """Return True for the first place with these schemas, and record the other places."""
        schemas: list[Any] = [
            samples.find_schemas(schema, place) for schema in (trial.nova, trial.ours)
        ]
        # The key of an action matters only for samples of the whole body.
        schemas.append(None if place else trial.key)
        first = self._first.setdefault((trial.kind, json.dumps(schemas)), (trial, place))
        if first != (trial, place):
            self._same[first][trial, place] = None
        return first == (trial, place)

    def spots(self, trial: Trial, place: str) -> Iterator[Spot]:
        """Yield the place, and all places with the same schemas."""
        yield trial, place
        steps = place.split("/")
        for count in range(1, len(steps) + 1):
            above = "/".join(steps[:count])
            for other, root in self._same.get((trial, above), ()):
                yield from self.spots(other, root + place.removeprefix(above))


def compare(trials: list[Trial], *, at_every_place: bool = True) -> list[Result]:
    """Validate the samples of all trials with both validators.

    Args:
        trials: The trials.
        at_every_place: False tries a place only if no earlier place of any trial has the same pair
            of schemas. A schema decides the same at every place.
    """
    places = Places()

    def is_tried(trial: Trial, place: str) -> bool:
        return at_every_place or places.is_tried(trial, place)

    cases = [
        (number, trial, *sample)
        for number, trial in enumerate(trials)
        for sample in trial.samples(partial(is_tried, trial))
    ]
    request = {
        "schemas": [trial.nova for trial in trials],
        "cases": [(number, value) for number, _, _, _, value in cases],
    }
    process = subprocess.run(
        [str(NOVA_PYTHON), "-W", "ignore", str(JUDGE)],
        input=json.dumps(request),
        text=True,
        capture_output=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr[-3000:]
    return [
        Result(list(places.spots(trial, place)), piece, value, nova, trial.accepts(value))
        for (_, trial, place, piece, value), nova in zip(
            cases, json.loads(process.stdout), strict=True
        )
    ]
