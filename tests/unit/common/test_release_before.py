# SPDX-License-Identifier: Apache-2.0
"""Agents and conductors of this release and of the one before understand each other
(docs/decisions/0026).

release_before.json has the records that crossed between them in that release, and its verbs. At a
release it is written anew: python -m tests.unit.common.test_release_before >
tests/unit/common/release_before.json
"""

from __future__ import annotations

import dataclasses
import json
import re
import typing
from pathlib import Path
from typing import Any

import pytest

from common.models import Access, GuestSpec, Heartbeat, Sync, SyncAnswer
from compute_agent.verbs import VERBS

CROSSING = (Sync, SyncAnswer, Heartbeat, Access, GuestSpec)
RELEASE = Path(__file__).with_name("release_before.json")
#: Records that were renamed -> what the release before calls them. Fields say so themselves, see
#: common.wire.
RENAMED = {
    "NumaNode": "Cell",
    "AssignedNumaNode": "FittedCell",
    "HardwareAssignment": "Fitting",
    "JsonObject": "JSON",
}


def records(kind: Any) -> set[Any]:
    """The dataclasses that one consists of, itself among them."""
    if not dataclasses.is_dataclass(kind):
        return set().union(*map(records, typing.get_args(kind)))
    return {kind}.union(*map(records, typing.get_type_hints(kind).values()))


def shape(kind: Any) -> dict[str, dict[str, Any]]:
    """Field -> its type, and whether a reader insists on it."""
    return {
        one.metadata.get("wire", one.name): {
            "type": _old_names(str(one.type)),
            "required": one.default is dataclasses.MISSING
            and one.default_factory is dataclasses.MISSING,
        }
        for one in dataclasses.fields(kind)
    }


def _old_names(text: str) -> str:
    return re.sub(r"\w+", lambda word: RENAMED.get(word[0], word[0]), text)


def today() -> dict[str, Any]:
    found = set().union(*map(records, CROSSING))
    return {
        "records": {
            _old_names(kind.__name__): shape(kind)
            for kind in sorted(found, key=lambda kind: str(kind.__name__))
        },
        "verbs": sorted(VERBS),
    }


BEFORE, NOW = json.loads(RELEASE.read_text()) if RELEASE.exists() else {"records": {}}, today()


def test_the_records_that_cross_are_known() -> None:
    assert {"Sync", "SyncAnswer", "Command", "Result", "DomainState", "HostInventory"} <= set(
        BEFORE["records"]
    )


@pytest.mark.parametrize("name", sorted(BEFORE["records"]))
def test_what_the_release_before_insists_on_is_told(name: str) -> None:
    insists = {field for field, of in BEFORE["records"][name].items() if of["required"]}
    assert insists <= set(NOW["records"].get(name, {}))


@pytest.mark.parametrize("name", sorted(BEFORE["records"]))
def test_what_the_release_before_does_not_tell_has_a_default(name: str) -> None:
    insists = {field for field, of in NOW["records"].get(name, {}).items() if of["required"]}
    assert insists <= set(BEFORE["records"][name])


@pytest.mark.parametrize("name", sorted(BEFORE["records"]))
def test_what_both_tell_means_the_same(name: str) -> None:
    before, now = BEFORE["records"][name], NOW["records"].get(name, {})
    assert {field: of["type"] for field, of in before.items() if field in now} == {
        field: now[field]["type"] for field in before if field in now
    }


def test_an_agent_still_knows_the_verbs_of_the_release_before() -> None:
    assert set(BEFORE["verbs"]) <= set(VERBS)


if __name__ == "__main__":
    print(json.dumps(today(), indent=1, sort_keys=True))
