# SPDX-License-Identifier: Apache-2.0
"""POST /servers/{id}/action: the body's key chooses the row of ``states.ACTIONS``, and the row says the rest.

An action that a workflow carries out is begun and answered 202; one with ``answer_after`` waits for that step; a
question goes to the host at once.
"""
from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import falcon

from common import errors, states
from common.store import actions, services
from compute_api import microversions, waiting
from compute_api.microversions import Range
from compute_api.request import Answer, Request
from compute_api.schemas import server_actions as schemas

#: Removed actions that answer otherwise than "no such action": key, from when, the HTTP error.
REMOVED: tuple[tuple[str, Range, Callable[[], falcon.HTTPError]], ...] = (
    ("resetNetwork", Range(), falcon.HTTPGone),
    ("os-getRDPConsole", Range("2.6"), falcon.HTTPNotFound),
)


def act(request: Request, server: Any) -> Answer:
    """POST /servers/{id}/action"""
    if len(request.body) != 1:
        raise errors.BadRequest("Malformed request body")
    [key] = request.body
    row = _row(key, request)
    request.require(row.policy, {"project_id": server.project_id, "user_id": server.user_id})
    if row.query is not None:
        return Answer(QUERIES[row.query](request, server), row.success)
    given = request.body[key]
    action_id = request.write(actions.begin, row, server.id, context=request.context, project_id=request.scope,
                              args=given if isinstance(given, dict) else {})
    request.services.bell.ring()
    if row.answer_after is not None:
        waiting.for_step(request.services.store, action_id, row.answer_after)
    return Answer(None, row.success)


def _row(key: str, request: Request) -> states.Action:
    """The row for this body at this version; checks the body."""
    rows = [row for row in states.ACTIONS if row.key == key and key in schemas.BY_KEY]
    for removed, versions, error in REMOVED:
        if removed == key and request.version in versions:
            raise error()
    if not rows:
        raise errors.BadRequest(f"There is no such action: {key[:80]}")
    served = [row for row in rows if request.version in Range(row.since, row.until)]
    if not served:
        raise errors.NotFound(f"API version '{microversions.text(request.version)}' is not supported on this method.")
    schemas.BY_KEY[key].at(request.version).check(request.body)
    for row in served:
        if row.when is None or str(request.body[key][row.when[0]]).upper() == row.when[1]:
            return row
    raise errors.BadRequest(f"There is no such action: {key[:80]}")


MAX_CONSOLE = 102400         # bytes of a console that are ever shown
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f]")


def console_output(request: Request, server: Any) -> dict[str, Any]:
    """The end of what the guest has written to its serial console."""
    length = request.body["os-getConsoleOutput"].get("length")
    output = _ask(request, server, "console_output", {"server": server.id, "length_bytes": MAX_CONSOLE})["output"]
    lines = None if length in (None, -1, "-1") else int(length)
    if lines is not None:
        output = "\n".join(output.split("\n")[-lines:]) if lines else ""
    return {"output": _UNPRINTABLE.sub("", output)}


def _ask(request: Request, server: Any, verb: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Ask the server's host, without letting silent hosts take all threads.

    Raises:
        Conflict: the server is on no host, or its host is down or does not answer. Unavailable: too many wait.
    """
    if not server.host:
        raise errors.Conflict(f"Instance {server.id} is not ready")
    if not request.read(services.is_up, server.host):
        raise errors.HostDown(f"Instance {server.id} is on a host that is down; try again when it is up.")
    slots = request.services.query_slots
    if not slots.acquire(blocking=False):
        raise errors.Unavailable("Too many requests are waiting for hosts to answer; try again.")
    try:
        return request.services.agents.query(server.host, verb, arguments)
    except errors.NoAnswer as problem:
        raise errors.HostDown(f"The host of instance {server.id} does not answer; try again.") from problem
    finally:
        slots.release()


#: What is asked of a host at once, by the row's ``query``.
QUERIES: dict[str, Callable[[Request, Any], dict[str, Any]]] = {"console_output": console_output}
