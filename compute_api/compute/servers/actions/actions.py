# SPDX-License-Identifier: Apache-2.0
"""POST /servers/{id}/action: the key of the body chooses the rows of ``states.ACTIONS``.

An action with a workflow begins, and the response is 202. With ``answer_after`` the response waits
for that step. An immediate action is complete before the response. A query begins no action: a
function of ``action_table.QUERIES`` carries the query out.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import falcon

from common.domain import errors, states
from common.store.rows import ServerRecord
from common.store.servers import immediate_actions
from compute_api.compute.request import action_waits, microversions, passwords
from compute_api.compute.request.request import Request
from compute_api.compute.schemas.servers import actions as schemas
from compute_api.compute.servers.actions.action_table import PREPARERS, QUERIES
from compute_api.compute.servers.actions.preparers import prepare_without_arguments
from compute_api.compute.servers.prepared_action import PreparedAction
from compute_api.http.microversions import Range
from compute_api.http.response import ApiResponse

#: Actions that Nova removed: the key, the microversions of the removal, and the HTTP error.
REMOVED: tuple[tuple[str, Range, Callable[[], falcon.HTTPError]], ...] = (
    ("resetNetwork", Range(), falcon.HTTPGone),
    ("os-getRDPConsole", Range("2.6"), falcon.HTTPNotFound),
)


def act(request: Request, server: ServerRecord) -> ApiResponse:
    """Carry out or begin the action that the body names, for POST /servers/{id}/action.

    Returns the response of the action.

    Raises:
        BadRequest: The action does not exist, or the body is invalid.
        NotFound: The action does not exist at this microversion.
        HTTPError: Nova has removed the action (410 or 404).
        Forbidden: The policy does not allow the action.
        Conflict: The server's state, a lock or a running action does not allow the action.
        Problem: The query or the preparation of the action refuses the request, or the action fails
            at the step for which the response waits.
    """
    if len(request.body) != 1:
        raise errors.BadRequest("Malformed request body")
    [key] = request.body
    served = _find_served_rows(key, request)
    target = {"project_id": server.project_id, "user_id": server.user_id}
    if not any(request.allows(row.policy, target) for row in served):
        request.require(served[0].policy, target)
    rows = _select_rows(key, served, request)
    row = states.matching_row(rows, server.vm_state)
    request.require(row.policy, target)
    if row.query is not None:
        return ApiResponse(QUERIES[row.query](request, server), row.success)
    # Fail before any request to an external service. ``begin`` checks again under the lock.
    request.check(row, server, waits=True)
    prepared = PREPARERS.get(key, prepare_without_arguments)(request, server, request.body[key])
    if row.immediate is not None:
        request.write(
            immediate_actions.do,
            row,
            server.id,
            context=request.context,
            project_id=request.scope,
            args=prepared.args,
        )
        return ApiResponse(None, row.success)
    action_id = _begin(request, rows, server, prepared)
    request.services.wakeup.wake()
    step = prepared.answer_after or row.answer_after
    if step is not None:
        _wait(request, action_id, step, prepared.failure)
    return prepared.answer() if prepared.answer is not None else ApiResponse(None, row.success)


def _begin(
    request: Request, rows: list[states.Action], server: ServerRecord, prepared: PreparedAction
) -> str:
    """Begin the prepared action, and return the id of the action.

    If another action of the server is running, wait for its end for a limited time.

    Raises:
        Unavailable: The action may have begun, so its changes in external services stay.
        Problem: The action has not begun, and ``prepared.give_up``, if set, was called.
    """
    begin = partial(
        request.begin,
        prepared.begin,
        rows,
        server.id,
        args=prepared.args,
        changes=prepared.changes,
        secrets=passwords.seal(request.services.vault, prepared.password, prepared.files),
    )
    try:
        return action_waits.begin_in_turn(request.services, server.id, begin)
    except errors.Unavailable:
        # The action may have begun, so external changes must stay.
        raise
    except errors.Problem:
        if prepared.give_up is not None:
            prepared.give_up()
        raise


def _find_served_rows(key: str, request: Request) -> list[states.Action]:
    """Return the rows of ``states.ACTIONS`` for this key at the request's microversion.

    Raises:
        BadRequest: The action does not exist.
        NotFound: The action does not exist at this version.
        HTTPError: Nova has removed the action at this version.
    """
    rows = [row for row in states.ACTIONS if row.key == key and key in schemas.BY_KEY]
    for removed, versions, error in REMOVED:
        if removed == key and request.version in versions:
            raise error()
    if not rows:
        raise errors.BadRequest(f"There is no such action: {key[:80]}")
    served = [row for row in rows if request.version in Range(row.since, row.until)]
    if not served:
        raise errors.NotFound(
            f"API version '{microversions.text(request.version)}' is not supported on this method."
        )
    return served


def _select_rows(key: str, served: list[states.Action], request: Request) -> list[states.Action]:
    """Check the body against the action's schema, and return the rows that match the body's values.

    Under the legacy root /v2 unknown keys are first removed from ``request.body``.

    Raises:
        BadRequest: The body violates the schema, or no row matches the values.
    """
    schema = schemas.BY_KEY[key].at(request.version)
    if request.links.legacy:
        request.body = schema.prune(request.body)
    schema.check(request.body)
    selected = [
        row
        for row in served
        if row.when is None or str(request.body[key][row.when[0]]).upper() == row.when[1]
    ]
    if not selected:
        raise errors.BadRequest(f"There is no such action: {key[:80]}")
    return selected


def _wait(request: Request, action_id: str, step: str, failure: type[errors.Problem]) -> None:
    """Wait until the step succeeds, or until a timeout, which is no error.

    If too many other requests are waiting, return without a wait for the step.

    Raises:
        failure: The action failed at this step, or ended before the step succeeded.
        Forbidden: The action failed at this step, because the policy or the quota of an external
            service does not allow the step.
    """
    with action_waits.slot(request.services) as is_free:
        if is_free:
            action_waits.for_step(
                request.services.store,
                action_id,
                step,
                failure=failure,
                timeout_seconds=request.services.settings.answer_timeout_seconds,
            )
