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
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from common import states
from compute_api.compute.routes import GONE, ROUTES, Route
from compute_api.compute.schemas import aggregates, common, server_actions
from compute_api.edge.microversions import Range
from compute_api.edge.validation import VersionedSchema
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

    def samples(self) -> Iterator[samples.Sample]:
        """Each once; of a query only what can be typed, of an action only what is this action."""
        seen = set()
        for schema in (self.nova, self.ours):
            for place, piece, value in samples.around(schema):
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


def compared(
    tried: list[Trial], *, at_every_version: bool = True
) -> list[tuple[Trial, str, Any, Any, bool, bool]]:
    """(trial, place, what stands there, the whole, does Nova take it, do we) of every sample.

    Args:
        tried: The trials.
        at_every_version: False: of an operation, try a piece at a place again only where a schema
            of this place differs from those at the earlier versions.
    """
    cases = [
        (number, trial, *sample) for number, trial in enumerate(tried) for sample in trial.samples()
    ]
    if not at_every_version:
        cases = list({_case_key(*case[1:]): case for case in reversed(cases)}.values())
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
        (trial, place, piece, value, nova, trial.takes(value))
        for (_, trial, place, piece, value), nova in zip(
            cases, json.loads(done.stdout), strict=True
        )
    ]


@cache
def _place_text(trial: Trial, place: str) -> str:
    return json.dumps([samples.at(schema, place) for schema in (trial.nova, trial.ours)])


def _case_key(trial: Trial, place: str, piece: Any, value: Any) -> tuple[str, ...]:
    """Return the same key for the samples of an operation whose piece meets the same schemas."""
    title, _ = trial.at[0]
    return trial.kind, title, place, json.dumps(piece, sort_keys=True), _place_text(trial, place)
