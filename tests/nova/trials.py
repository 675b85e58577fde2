# SPDX-License-Identifier: Apache-2.0
"""Requests made up from Nova's schemas and from ours, and who takes which: Nova's own validator,
and ours.

``trials`` lists for each operation, and each version at which a schema begins or ends, what Nova
and what we ask there; ``compared`` tries every sample of both on both. Nothing is carried out: only
the schemas are asked.
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
from tests.nova.schemas import Operation, operations

JUDGE = Path(__file__).with_name("judge.py")
#: Bodies whose schema is chosen by their one key.
BY_KEY: dict[str, dict[str, VersionedSchema]] = {
    "/servers/{}/action": server_actions.BY_KEY,
    "/os-volumes_boot/{}/action": server_actions.BY_KEY,
    "/os-aggregates/{}/action": aggregates.BY_KEY,
}


def plain(path: str) -> str:
    """A path without the names of its parameters."""
    return re.sub(r"\{\w+\}", "{}", path)


@cache
def _rows() -> dict[tuple[str, str], list[Route]]:
    found = defaultdict(list)
    for route in ROUTES:
        found[route.method, plain(route.path)].append(route)
    return found


@cache
def gone() -> frozenset[tuple[str, str]]:
    """What we answer 410."""
    return frozenset(
        (method, plain(path)) for path, methods in GONE.items() for method in methods.split()
    )


def row_of(operation: Operation, version: int) -> Route | None:
    """Our row for it at this version."""
    path = plain(operation.path)
    row = next(
        (one for one in _rows().get((operation.method, path), ()) if version in one.versions), None
    )
    if (
        row is not None
        and BY_KEY.get(path) is server_actions.BY_KEY
        and not any(
            action.key == operation.key and version in Range(action.since, action.until)
            for action in states.ACTIONS
        )
    ):
        return None
    return row


@dataclass(eq=False)
class Trial:
    """What both ask of a request's body or query, and at which (operation, version) they do."""

    kind: str
    nova: dict[str, Any]
    ours: dict[str, Any]
    takes: Any
    key: str | None
    at: list[tuple[str, int]] = field(default_factory=list)

    def samples(self, is_tried: Callable[[str], bool]) -> Iterator[samples.Sample]:
        """Yield each sample once.

        A sample of a query has only values that a URL can have. A sample of an action names this
        action and no other.

        Args:
            is_tried: Returns False for a place that is left out, with all places below it.
        """
        seen = set()
        for schema in (self.nova, self.ours):
            for place, piece, value in samples.around(schema, "", is_tried):
                text = json.dumps(value, sort_keys=True)
                if text not in seen and self._is_one(value):
                    seen.add(text)
                    yield place, piece, value

    def _is_one(self, value: Any) -> bool:
        if self.kind == "query":
            return isinstance(value, dict) and all(
                isinstance(texts, list) and texts and all(isinstance(text, str) for text in texts)
                for texts in value.values()
            )
        return self.key is None or (isinstance(value, dict) and set(value) == {self.key})


def trials() -> list[Trial]:
    """All that is to be tried; what is alike in several operations and versions once."""
    found: dict[str, Trial] = {}
    for operation in operations():
        for kind in ("body", "query"):
            for version in edges(operation, kind):
                row = row_of(operation, version)
                if row is None or operation.removed:
                    continue
                nova = getattr(operation, kind).at(version)
                ours = _asked(operation, row, kind, version)
                if nova is None and kind == "body":
                    continue
                document = {} if ours is None else ours.document
                name = json.dumps((kind, operation.key, nova, document), sort_keys=True)
                trial = found.setdefault(
                    name,
                    Trial(
                        kind,
                        nova or {"type": "object"},
                        document,
                        (lambda value: True) if ours is None else ours.is_valid,
                        operation.key,
                    ),
                )
                trial.at.append((operation.title, version))
    return list(found.values())


def edges(operation: Operation, kind: str) -> list[int]:
    """The first and the last version of each range of its schemas, within its own versions."""
    since, until = operation.versions
    listed = {end for first, last, _ in getattr(operation, kind).listed for end in (first, last)}
    return sorted({max(since, 1, min(end, until)) for end in listed | {since, until}})


def _asked(operation: Operation, row: Route, kind: str, version: int) -> Any:
    """Our schema; None when nothing is asked."""
    if kind == "query":
        return (row.query or common.NOTHING).at(version)
    by_key = BY_KEY.get(plain(operation.path))
    if by_key is not None and operation.key is not None:
        return by_key[operation.key].at(version)
    return None if row.body is None else row.body.at(version)


#: A place in the bodies or queries of a trial.
Spot = tuple[Trial, str]


@dataclass
class Result:
    """Whether Nova and Kilonova take a sample.

    Attributes:
        spots: The places that the sample stands for. The first is where it was tried.
        piece: The value at that place, a part of the body or query.
        value: The whole body or query.
        nova: Nova takes it.
        ours: Kilonova takes it.
    """

    spots: list[Spot]
    piece: Any
    value: Any
    nova: bool
    ours: bool


class Places:
    """The places to try: each pair of Nova's schema and ours once, wherever it is used."""

    def __init__(self) -> None:
        self._first: dict[tuple[str, str], Spot] = {}
        self._same: dict[Spot, dict[Spot, None]] = defaultdict(dict)

    def is_tried(self, trial: Trial, place: str) -> bool:
        """Return True for the first place with these schemas, and note the others."""
        schemas: list[Any] = [samples.at(schema, place) for schema in (trial.nova, trial.ours)]
        # Only the samples of a whole body differ with the key of an action.
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


def compared(tried: list[Trial], *, at_every_place: bool = True) -> list[Result]:
    """Return who takes which sample.

    Args:
        tried: The trials.
        at_every_place: False: try a place only if no earlier place of any trial has the same pair
            of Nova's schema and ours. A schema decides alike wherever it is used.
    """
    places = Places()

    def is_tried(trial: Trial, place: str) -> bool:
        return at_every_place or places.is_tried(trial, place)

    cases = [
        (number, trial, *sample)
        for number, trial in enumerate(tried)
        for sample in trial.samples(partial(is_tried, trial))
    ]
    asked = {
        "schemas": [trial.nova for trial in tried],
        "cases": [(number, value) for number, _, _, _, value in cases],
    }
    done = subprocess.run(
        [str(NOVA_PYTHON), "-W", "ignore", str(JUDGE)],
        input=json.dumps(asked),
        text=True,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [
        Result(list(places.spots(trial, place)), piece, value, nova, trial.takes(value))
        for (_, trial, place, piece, value), nova in zip(
            cases, json.loads(done.stdout), strict=True
        )
    ]
