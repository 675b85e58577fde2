# SPDX-License-Identifier: Apache-2.0
"""POST /servers/{id}/action: the body's key chooses the rows of ``states.ACTIONS``, and they say the rest.

An action that a workflow carries out is begun and answered 202; one with ``answer_after`` waits for that step; an
immediate one is done when it is answered; a question goes to the host at once, and a change of addresses to the network
service.
"""
from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import falcon

from common import errors, states
from common.store import actions, at_once
from compute_api import microversions, passwords, waiting
from compute_api.asking import ask
from compute_api.microversions import Range
from compute_api.request import Answer, Request
from compute_api.resources import (
    consoles,
    floating_ips,
    security_groups,
    server_moves,
    server_networks,
    server_preparing,
    server_rebuild,
)
from compute_api.schemas import server_actions as schemas

#: What an action makes of its body, by the body's key; others need nothing.
PREPARERS: dict[str, server_preparing.Prepare] = {
    **server_preparing.PREPARERS, **security_groups.PREPARERS, **server_moves.PREPARERS,
    "rebuild": server_rebuild.prepare}
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
    rows = _rows(key, request)
    row = states.fitting(rows, server.vm_state)
    request.require(row.policy, {"project_id": server.project_id, "user_id": server.user_id})
    if row.query is not None:
        return Answer(QUERIES[row.query](request, server), row.success)
    actions.check(row, server.id, server, request.context)      # so that no neighbour is asked in vain; begin decides
    prepared = PREPARERS.get(key, server_preparing.nothing)(request, server, request.body[key])
    if row.immediate is not None:
        request.write(at_once.do, row, server.id, context=request.context, project_id=request.scope,
                      args=prepared.args)
        return Answer(None, row.success)
    action_id = request.begin(prepared.begin, rows, server.id, args=prepared.args, changes=prepared.changes,
                              secrets=passwords.sealed(request.services.vault, prepared.password, prepared.files))
    request.services.bell.ring()
    step = prepared.answer_after or row.answer_after
    if step is not None:
        _wait(request, action_id, step, prepared.failure)
    return prepared.answer() if prepared.answer is not None else Answer(None, row.success)


def _rows(key: str, request: Request) -> list[states.Action]:
    """The rows for this body at this version; checks the body."""
    rows = [row for row in states.ACTIONS if row.key == key and key in schemas.BY_KEY]
    for removed, versions, error in REMOVED:
        if removed == key and request.version in versions:
            raise error()
    if not rows:
        raise errors.BadRequest(f"There is no such action: {key[:80]}")
    served = [row for row in rows if request.version in Range(row.since, row.until)]
    if not served:
        raise errors.NotFound(f"API version '{microversions.text(request.version)}' is not supported on this method.")
    schema = schemas.BY_KEY[key].at(request.version)
    if request.links.legacy:
        request.body = schema.pruned(request.body)
    schema.check(request.body)
    meant = [row for row in served if row.when is None or str(request.body[key][row.when[0]]).upper() == row.when[1]]
    if not meant:
        raise errors.BadRequest(f"There is no such action: {key[:80]}")
    return meant


def _wait(request: Request, action_id: str, step: str, failure: type[errors.Problem]) -> None:
    """Wait for the step, unless too many do: then the answer is 202, as for any other action."""
    slots = request.services.wait_slots
    if not slots.acquire(blocking=False):
        return
    try:
        waiting.for_step(request.services.store, action_id, step, failure=failure,
                         patience=request.services.settings.answer_patience)
    finally:
        slots.release()


MAX_CONSOLE = 102400         # bytes of a console that are ever shown
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f]")


def console_output(request: Request, server: Any) -> dict[str, Any]:
    """The end of what the guest has written to its serial console."""
    length = request.body["os-getConsoleOutput"].get("length")
    output = ask(request, server, "console_output", {"server": server.id, "length_bytes": MAX_CONSOLE})["output"]
    lines = None if length in (None, -1, "-1") else int(length)
    if lines is not None:
        output = "\n".join(output.split("\n")[-lines:]) if lines else ""
    return {"output": _UNPRINTABLE.sub("", output)}


def network_info(request: Request, server: Any) -> None:
    """What the network service says of the server's interfaces is read again; the hosts hear of it from that service
    themselves."""
    networks = server_networks.service(request)
    if networks is not None:
        server_networks.read_again(request, networks, server.id)


#: What an action answers at once, by the row's ``query``; None: nothing but its status.
QUERIES: dict[str, Callable[[Request, Any], dict[str, Any] | None]] = {
    **floating_ips.ACTIONS,
    "console_output": console_output,
    "network_info": network_info,
    "vnc_console": consoles.by_action("os-getVNCConsole", "vnc"),
    "spice_console": consoles.by_action("os-getSPICEConsole", "spice"),
    "serial_console": consoles.by_action("os-getSerialConsole", "serial")}
