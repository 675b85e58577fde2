# SPDX-License-Identifier: Apache-2.0
"""Handlers of drains and evacuations of a host, at /os-services/{service_id}/actions.

This is an extension that Nova does not have. It has a separate microversion namespace, to avoid
conflicts with Nova's microversions (docs/decisions/0048-host-operations.md). Conductors execute the
actions.
"""

from __future__ import annotations

from common.domain import errors, ids
from common.domain.json_types import JsonObject
from common.domain.service_binaries import Binary
from common.store.engine import Connection
from common.store.hosts import host_actions, services
from common.store.hosts.host_actions import Arguments, HostAction, Name
from compute_api.compute.request import microversions
from compute_api.compute.request.request import Request
from compute_api.compute.views import host_actions as view
from compute_api.http.response import ApiResponse


def index(request: Request, service_id: str) -> JsonObject:
    """Return the actions on a host, newest first, for GET /os-services/{service_id}/actions.

    The list ends after ``limit`` actions, and has no further pages.

    Raises:
        NotAcceptable: The header chooses an unsupported version of Kilonova's operations.
        BadRequest: The id of the service is not a UUID.
        NotFound: The compute service does not exist.
    """
    microversions.check_extension(request.headers)

    def work(tx: Connection) -> list[HostAction]:
        return host_actions.page(tx, _find_host(tx, service_id), request.limit)

    return {"host_actions": [view.action(row) for row in request.read(work)]}


def show(request: Request, service_id: str, action_id: str) -> JsonObject:
    """Return an action on a host with its events.

    Raises:
        NotAcceptable: The header chooses an unsupported version of Kilonova's operations.
        BadRequest: The id of the service is not a UUID.
        NotFound: The compute service does not exist, or its host has no such action.
    """
    microversions.check_extension(request.headers)

    def work(tx: Connection) -> JsonObject:
        row = _find_action(tx, service_id, action_id)
        return view.with_events(row, host_actions.events(tx, row.id))

    return {"host_action": request.read(work)}


def create(request: Request, service_id: str) -> ApiResponse:
    """Begin a drain or an evacuation for POST /os-services/{service_id}/actions.

    A drain also disables the host. A conductor executes the action, and the response does not wait
    for that.

    Raises:
        NotAcceptable: The header chooses an unsupported version of Kilonova's operations.
        BadRequest: The id of the service is not a UUID.
        NotFound: The compute service does not exist.
        Conflict: Another action on the host has not ended.
    """
    microversions.check_extension(request.headers)
    [(name, arguments)] = request.body.items()

    def work(tx: Connection) -> HostAction:
        return host_actions.begin(
            tx, _find_host(tx, service_id), Name(name), Arguments(**arguments), request.context
        )

    row = request.write(work)
    request.services.wakeup.wake()
    return ApiResponse(
        {"host_action": view.action(row)},
        headers={
            "Location": request.links.of(f"os-services/{service_id}/actions", row.id)[0]["href"]
        },
    )


def delete(request: Request, service_id: str, action_id: str) -> None:
    """Stop an action on a host, which then begins no further moves. Running moves continue.

    Raises:
        NotAcceptable: The header chooses an unsupported version of Kilonova's operations.
        BadRequest: The id of the service is not a UUID.
        NotFound: The compute service does not exist, or its host has no such action.
        Conflict: The action has ended.
    """
    microversions.check_extension(request.headers)
    request.write(lambda tx: host_actions.stop(tx, _find_action(tx, service_id, action_id).id))


def _find_host(tx: Connection, service_id: str) -> str:
    """Return the host of a compute service.

    Raises:
        BadRequest: The id is not a UUID.
        NotFound: No compute service has this id.
    """
    if not ids.is_uuid(service_id):
        raise errors.BadRequest(f"Invalid uuid {service_id[:80]}")
    row = services.show(tx, service_id)
    if row is None or row.binary != Binary.COMPUTE:
        raise errors.NotFound(f"Compute service {service_id} could not be found.")
    return str(row.host)


def _find_action(tx: Connection, service_id: str, action_id: str) -> HostAction:
    host = _find_host(tx, service_id)
    row = host_actions.show(tx, action_id[:36])
    if row.host != host:
        raise errors.NotFound(f"Host {host} has no action {action_id[:40]}.")
    return row
