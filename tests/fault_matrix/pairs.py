# SPDX-License-Identifier: Apache-2.0
"""Another action comes while one is in hand: it is refused, or both end."""

from __future__ import annotations

import sqlalchemy as sa

from common.domain import errors, states
from common.store import schema
from conductor.workflows import WORKFLOWS
from tests.fault_matrix.aim import CONDUCTOR, once
from tests.fault_matrix.bench import Bench, Point
from tests.fault_matrix.cells import ASKED, Cell
from tests.fault_matrix.outcome import Verdict
from tests.workflows.scenarios import ask

#: What these speak of the server need not have.
WITHOUT_VOLUMES = (
    "detach_volume",
    "extend_volume",
    "swap_volume",
    "volume_snapshot_create",
    "volume_snapshot_delete",
)


def pair(bench: Bench, cell: Cell, turn: int) -> Verdict:
    """The second is asked for while the first is at its host, or at a service."""
    once(
        bench,
        lambda point: _is_in_hand(cell.workflow, point),
        lambda point: ask_meanwhile(bench, bench.trial.server, ASKED[cell.fault]),
    )
    return Verdict.BOTH


def _is_in_hand(workflow: str, point: Point) -> bool:
    steps = WORKFLOWS[workflow].steps
    if any(step.command for step in steps):
        return point[0] == "agent" and point[4] == "before"
    if any(step.call for step in steps):
        return point[0] == "part" and point[1] == workflow and point[3:] == ("call", "begins")
    return point[0] == CONDUCTOR and point[3] == "taken"


def ask_meanwhile(bench: Bench, server_id: str, wanted: str) -> None:
    """It is accepted or refused as the table of states says, of a server that an action has."""
    cloud = bench.cloud
    server = cloud.show(server_id)
    may = is_allowed(wanted, server)
    with cloud.store.engine.connect() as tx:
        before = tx.scalar(sa.select(sa.func.count()).select_from(schema.actions))
    try:
        ask(cloud, server.id, wanted)
    except errors.Problem as problem:
        assert 400 <= problem.status < 500, f"{wanted} is answered with {problem.status}"
        refusals = (404, 409) if wanted in WITHOUT_VOLUMES else (409,)
        assert may or problem.status in refusals, f"{wanted} is answered with {problem.status}"
        with cloud.store.engine.connect() as tx:
            after = tx.scalar(sa.select(sa.func.count()).select_from(schema.actions))
        assert before == after, "it was refused and left an action"
        bench.accepted = False
        return
    assert may, f"{wanted} is accepted, which the table of states forbids"
    bench.accepted = True


def is_allowed(wanted: str, server: object) -> bool:
    """Does the table let it begin, now that another action has the server?"""
    vm_state, task_state = getattr(server, "vm_state"), getattr(server, "task_state")  # noqa: B009
    for row in rows_of(wanted):
        fits = (row.vm == states.ANY or vm_state in row.vm) and (
            row.task == states.ANY or task_state in row.task
        )
        if fits and row.supersedes and (row.task == states.ANY or task_state is not None):
            return True
    return False


def rows_of(wanted: str) -> list[states.Action]:
    """The rows of the table that a request, "key" or "key:VALUE", can mean."""
    key, _, value = wanted.partition(":")
    return [
        row
        for row in states.ACTIONS
        if row.key == key and row.workflow and (row.when is None or row.when[1] == value)
    ]
