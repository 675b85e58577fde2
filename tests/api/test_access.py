# SPDX-License-Identifier: Apache-2.0
"""Who is answered what: every operation of every service, for each persona, on own, foreign and
missing records.

What is expected is data, tests/surface/access.txt. A route that has no row there fails. The default
set asks each operation as the least role that may, as the next below it, and as another project.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.surface import access
from tests.surface.operations import Operation
from tests.surface.site import MISSING, Site
from tests.surface.world import World

RANKS = ("reader", "member", "manager", "admin")
READS = ("GET", "HEAD")
#: What is not asked for records of some owner, and why.
NOT_ASKED = {
    "POST /v3/users/{key}/password": "of a user who is not there it is a guess, and guesses are slowed down"
}


def ask(site: Site, operation: Operation, persona: str, owner: str) -> Any:
    """Ask, and let nothing remain of it."""
    answer = site.ask(
        persona,
        operation.method,
        operation.url(site, owner),
        operation.body(site, owner),
        operation.headers(site),
    )
    if answer.status_code < 400 and operation.method not in READS:
        site.set_back()
    return answer


def numa_nodes(row: access.Row, whole: bool) -> Iterator[tuple[str, str]]:
    """(owner, persona) of a row; of a sample the least role that may, the next below it, and
    another project."""
    if whole:
        yield from row.words
        return
    least = next(
        (at for at, persona in enumerate(RANKS) if row.words["own", persona] == "ok"), len(RANKS)
    )
    for persona in {*RANKS[max(0, least - 1) : least + 1], "other"}:
        yield "own", persona


def wrong(world: World, whole: bool) -> list[str]:
    found, table = [], access.rows()
    for operation in world.operations:
        row = table[access.name_of(operation)]
        if not whole and operation.path.startswith("/os-volumes_boot"):
            continue  # the same endpoints again
        for owner, persona in numa_nodes(row, whole):
            answer = ask(world.sites[operation.service], operation, persona, owner)
            if not row.fits(operation, owner, persona, answer.status_code):
                found.append(
                    f"{operation.service} {operation.name}: {persona} on {owner}: {answer.status_code}, not "
                    f"{row.words[owner, persona]}: {answer.text[:200]}"
                )
    return found


def test_every_operation_stands_in_the_table(world: World) -> None:
    asked = {access.name_of(operation) for operation in world.operations}
    assert asked - set(access.rows()) == set(), "no row"
    assert set(access.rows()) - asked == set(), "no such operation"
    for operation in world.operations:
        owners = {owner for owner, _ in access.rows()[access.name_of(operation)].words}
        assert (
            owners == set(access.OWNERS if operation.kinds else access.OWNERS[:1])
            or operation.name in NOT_ASKED
        )


def test_a_sample_is_answered_as_the_table_says(world: World) -> None:
    assert not (found := wrong(world, whole=False)), "\n".join(found)


@pytest.mark.slice("guests")  # half a minute
def test_all_is_answered_as_the_table_says(world: World) -> None:
    assert not (found := wrong(world, whole=True)), "\n".join(found)


def test_foreign_record_is_refused_as_a_missing_one(world: World) -> None:
    """By its status, its body but for the id that was asked for, and its headers."""
    told, table, compared = [], access.rows(), 0
    for operation in world.operations:
        row, site = table[access.name_of(operation)], world.sites[operation.service]
        word = row.words.get(("foreign", "manager"), "ok")
        if word != row.words.get(("missing", "manager")) or not word.startswith("4"):
            continue
        said = [
            shown(site, operation, ask(site, operation, "manager", owner), owner)
            for owner in access.OWNERS[1:]
        ]
        compared += 1
        if said[0] != said[1]:
            told.append(f"{operation.service} {operation.name}: {said}")
    assert not told, "\n".join(told)
    assert compared > 300


def shown(site: Site, operation: Operation, answer: Any, owner: str) -> tuple[int, str, set[str]]:
    """What a refusal tells, without the id that was asked for and the request's own."""
    text = answer.text
    for kind in operation.kinds:
        text = text.replace(site.id_of(owner, kind), MISSING)
    for name in ("X-Openstack-Request-Id", "X-Compute-Request-Id"):
        text = text.replace(answer.headers.get(name, MISSING), "")
    return answer.status_code, text, {name.lower() for name in answer.headers}
