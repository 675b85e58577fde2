# SPDX-License-Identifier: Apache-2.0
"""A second action is requested while another is in progress: a refusal, or both end."""

from __future__ import annotations

import sqlalchemy as sa

from common.domain import errors, states
from common.store import schema
from conductor.workflows import WORKFLOWS
from tests.fault_matrix.aim import CONDUCTOR, inject_once
from tests.fault_matrix.bench import Bench, Point
from tests.fault_matrix.cells import REQUESTS, Cell
from tests.fault_matrix.outcome import Verdict
from tests.workflows.scenarios import ask

#: Requests that name a volume, which the server need not have.
WITHOUT_VOLUMES = (
    "detach_volume",
    "extend_volume",
    "swap_volume",
    "volume_snapshot_create",
    "volume_snapshot_delete",
)


def inject_pair(bench: Bench, cell: Cell, turn: int) -> Verdict:
    """Request the second action while the first waits for its host or for a service."""
    inject_once(
        bench,
        lambda point: _is_in_progress(cell.workflow, point),
        lambda point: request_meanwhile(bench, bench.trial.server, REQUESTS[cell.fault]),
    )
    return Verdict.BOTH


def _is_in_progress(workflow: str, point: Point) -> bool:
    """Return True at the point at which the first action of a pair is interrupted."""
    steps = WORKFLOWS[workflow].steps
    if any(step.command for step in steps):
        return point[0] == "agent" and point[4] == "before"
    if any(step.call for step in steps):
        return point[0] == "part" and point[1] == workflow and point[3:] == ("call", "begins")
    return point[0] == CONDUCTOR and point[3] == "taken"


def request_meanwhile(bench: Bench, server_id: str, request: str) -> None:
    """Request an action of a busy server, and check the answer against the table of states.

    ``bench.accepted`` is set to the result.
    """
    cloud = bench.cloud
    server = cloud.show(server_id)
    allowed = is_allowed(request, server)
    with cloud.store.engine.connect() as tx:
        before = tx.scalar(sa.select(sa.func.count()).select_from(schema.actions))
    try:
        ask(cloud, server.id, request)
    except errors.Problem as problem:
        assert 400 <= problem.status < 500, f"{request} is answered with {problem.status}"
        refusals = (404, 409) if request in WITHOUT_VOLUMES else (409,)
        assert allowed or problem.status in refusals, f"{request} is answered with {problem.status}"
        with cloud.store.engine.connect() as tx:
            after = tx.scalar(sa.select(sa.func.count()).select_from(schema.actions))
        assert before == after, "it was refused and left an action"
        bench.accepted = False
        return
    assert allowed, f"{request} is accepted, which the table of states forbids"
    bench.accepted = True


def is_allowed(request: str, server: object) -> bool:
    """Return True if the table lets the request supersede the action that the server has now."""
    vm_state, task_state = getattr(server, "vm_state"), getattr(server, "task_state")  # noqa: B009
    for row in find_table_rows(request):
        fits = (row.vm == states.ANY or vm_state in row.vm) and (
            row.task == states.ANY or task_state in row.task
        )
        if fits and row.supersedes and (row.task == states.ANY or task_state is not None):
            return True
    return False


def find_table_rows(request: str) -> list[states.Action]:
    """Return the rows of the table for a request, "key" or "key:VALUE"."""
    key, _, value = request.partition(":")
    return [
        row
        for row in states.ACTIONS
        if row.key == key and row.workflow and (row.when is None or row.when[1] == value)
    ]
