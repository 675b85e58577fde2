# SPDX-License-Identifier: Apache-2.0
"""Status of every operation of every service, for each persona and owner of the record.

The expected statuses are in tests/surface/access.txt, and a route without a row fails. The default
set calls each operation with the least privileged permitted role, with the role below, and from
another project.
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
#: Operations that are not called for every owner, with the reason.
NOT_ASKED = {
    "POST /v3/users/{key}/password": "of a user who is not there it is a guess, and guesses are slowed down"
}


def call_and_restore(site: Site, operation: Operation, persona: str, owner: str) -> Any:
    """Call an operation, and restore the databases if the call changed a record."""
    answer = site.ask(
        persona,
        operation.method,
        operation.url(site, owner),
        operation.body(site, owner),
        operation.headers(site),
    )
    if answer.status_code < 400 and operation.method not in READS:
        site.reset()
    return answer


def cases(row: access.Row, whole: bool) -> Iterator[tuple[str, str]]:
    """Yield the (owner, persona) pairs of a row.

    A sample contains the least privileged permitted role, the role below, and another project.
    """
    if whole:
        yield from row.words
        return
    least = next(
        (at for at, persona in enumerate(RANKS) if row.words["own", persona] == "ok"), len(RANKS)
    )
    for persona in {*RANKS[max(0, least - 1) : least + 1], "other"}:
        yield "own", persona


def differences(world: World, whole: bool) -> list[str]:
    """Return a line for each answer that differs from the table."""
    lines, table = [], access.rows()
    for operation in world.operations:
        row = table[access.name_of(operation)]
        if not whole and operation.path.startswith("/os-volumes_boot"):
            # These are the endpoints of /servers again.
            continue
        for owner, persona in cases(row, whole):
            answer = call_and_restore(world.sites[operation.service], operation, persona, owner)
            if not row.fits(operation, owner, persona, answer.status_code):
                lines.append(
                    f"{operation.service} {operation.name}: {persona} on {owner}: {answer.status_code}, not "
                    f"{row.words[owner, persona]}: {answer.text[:200]}"
                )
    return lines


def test_access_table_has_one_row_for_every_operation(world: World) -> None:
    names = {access.name_of(operation) for operation in world.operations}
    assert names - set(access.rows()) == set(), "no row"
    assert set(access.rows()) - names == set(), "no such operation"
    for operation in world.operations:
        owners = {owner for owner, _ in access.rows()[access.name_of(operation)].words}
        assert (
            owners == set(access.OWNERS if operation.kinds else access.OWNERS[:1])
            or operation.name in NOT_ASKED
        )


def test_sampled_operations_return_statuses_of_access_table(world: World) -> None:
    assert not (lines := differences(world, whole=False)), "\n".join(lines)


# This takes half a minute.
@pytest.mark.slice("guests")
def test_operation_by_each_role_returns_status_of_access_table(world: World) -> None:
    assert not (lines := differences(world, whole=True)), "\n".join(lines)


def test_record_of_another_project_is_refused_like_missing_record(world: World) -> None:
    """Status, header names and body are equal, except for the id in the body."""
    lines, table, compared = [], access.rows(), 0
    for operation in world.operations:
        row, site = table[access.name_of(operation)], world.sites[operation.service]
        word = row.words.get(("foreign", "manager"), "ok")
        if word != row.words.get(("missing", "manager")) or not word.startswith("4"):
            continue
        refusals = [
            comparable(site, operation, call_and_restore(site, operation, "manager", owner), owner)
            for owner in access.OWNERS[1:]
        ]
        compared += 1
        if refusals[0] != refusals[1]:
            lines.append(f"{operation.service} {operation.name}: {refusals}")
    assert not lines, "\n".join(lines)
    assert compared > 300


def comparable(
    site: Site, operation: Operation, answer: Any, owner: str
) -> tuple[int, str, set[str]]:
    """Return status, text and header names of a refusal without the ids of the request."""
    text = answer.text
    for kind in operation.kinds:
        text = text.replace(site.id_of(owner, kind), MISSING)
    for name in ("X-Openstack-Request-Id", "X-Compute-Request-Id"):
        text = text.replace(answer.headers.get(name, MISSING), "")
    return answer.status_code, text, {name.lower() for name in answer.headers}
