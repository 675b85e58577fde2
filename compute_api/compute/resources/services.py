# SPDX-License-Identifier: Apache-2.0
"""Handlers of services: list, disable, force down, and delete."""

from __future__ import annotations

from common.domain import errors, ids
from common.domain.json_types import JsonObject
from common.domain.service_binaries import Binary
from common.domain.statuses import HostState
from common.store.engine import Connection
from common.store.hosts import aggregates, services
from common.store.rows import HeardServiceRow
from common.store.views import host_removal
from compute_api.compute.request.request import Request
from compute_api.compute.views.fields import Field, render, render_readable, visible_fields
from compute_api.compute.views.times import format_micros
from compute_api.http.microversions import Range
from compute_api.http.validation import is_true

#: The zone of services other than compute services.
INTERNAL = "internal"
#: The status of a service whose host takes no new servers.
DISABLED = "disabled"


def state(row: HeardServiceRow) -> HostState:
    """Return UP if the conductors count the service as up, and the service is not forced down.

    Otherwise return DOWN.
    """
    return HostState.UP if row.up and not row.forced_down else HostState.DOWN


def status(row: HeardServiceRow) -> str:
    """Return "disabled" if the service is disabled, otherwise "enabled"."""
    return DISABLED if row.disabled else "enabled"


#: ``view`` is a mapping of hosts to zones.
FIELDS: tuple[Field, ...] = (
    Field("id", "id", until="2.52"),
    Field("id", "uuid", since="2.53"),
    Field("binary", "binary"),
    Field("host", "host"),
    Field("zone", lambda row, view: view[row.host] if row.binary == Binary.COMPUTE else INTERNAL),
    Field("status", lambda row, view: status(row)),
    Field("state", lambda row, view: state(row)),
    Field("updated_at", lambda row, view: format_micros(row.seen_at or row.updated_at)),
    Field("disabled_reason", "disabled_reason"),
    Field("forced_down", "forced_down", since="2.11"),
)


def index(request: Request) -> JsonObject:
    """Return the services, filtered by host and binary, for GET /os-services."""

    def work(tx: Connection) -> list[JsonObject]:
        zones = aggregates.zones(tx, request.services.settings.default_zone)
        rows = services.list_all(
            tx, host=request.query_value("host"), binary=request.query_value("binary")
        )
        getters = visible_fields(FIELDS, request.version)
        return [render_readable(getters, row, zones) for row in rows]

    return {"services": request.read(work)}


_FORCED = Range("2.11", "2.52")


def update_by_host(request: Request, service_id: str) -> JsonObject:
    """Change a service by host and binary, before 2.53.

    Args:
        request: The request, whose body names host and binary.
        service_id: The change: enable, disable, disable-log-reason or (since 2.11) force-down.

    Raises:
        NotFound: The change or the service does not exist.
        BadRequest: The body lacks the value of the change.
    """
    body = request.body
    changes_by_name = {
        "enable": _enable,
        "disable": _disable,
        "disable-log-reason": _disable_with_reason,
        **({"force-down": _force_down} if request.version in _FORCED else {}),
    }
    if service_id not in changes_by_name:
        raise errors.NotFound("Unknown action")
    changes, shown = changes_by_name[service_id](body)

    def work(tx: Connection) -> None:
        rows = services.list_all(tx, host=body["host"], binary=body["binary"])
        if not rows:
            raise errors.NotFound(f"Could not find binary {body['binary']} on host {body['host']}.")
        services.set_state(tx, rows[0].uuid, **changes)

    request.write(work)
    request.services.wakeup.wake()
    return {"service": {"host": body["host"], "binary": body["binary"], **shown}}


Change = tuple[JsonObject, JsonObject]


def _enable(body: JsonObject) -> Change:
    return {"disabled": False, "disabled_reason": None}, {"status": "enabled"}


def _disable(body: JsonObject) -> Change:
    return {"disabled": True, "disabled_reason": None}, {"status": "disabled"}


def _disable_with_reason(body: JsonObject) -> Change:
    if "disabled_reason" not in body:
        raise errors.BadRequest("Missing disabled reason field")
    reason = body["disabled_reason"]
    return {"disabled": True, "disabled_reason": reason}, {
        "status": "disabled",
        "disabled_reason": reason,
    }


def _force_down(body: JsonObject) -> Change:
    if "forced_down" not in body:
        raise errors.BadRequest("Missing forced_down field")
    forced = is_true(body["forced_down"])
    return {"forced_down": forced}, {"forced_down": forced}


def update(request: Request, service_id: str) -> JsonObject:
    """Change a compute service for PUT /os-services/{uuid}.

    Raises:
        BadRequest: The id is not a UUID, the body is inconsistent, or this is no compute service.
        NotFound: The service does not exist.
    """
    if not ids.is_uuid(service_id):
        raise errors.BadRequest(f"Invalid uuid {service_id[:80]}")
    changes = _parse_changes(request.body)

    def work(tx: Connection) -> JsonObject:
        row = services.show(tx, service_id)
        if row is None:
            raise errors.NotFound(f"Service {service_id} could not be found.")
        if row.binary != Binary.COMPUTE:
            raise errors.BadRequest(
                f"Updating a {row.binary} service is not supported. Only nova-compute services "
                "can be updated."
            )
        services.set_state(tx, service_id, **changes)
        zones = aggregates.zones(tx, request.services.settings.default_zone)
        return render(visible_fields(FIELDS, request.version), services.show(tx, service_id), zones)

    shown = request.write(work)
    request.services.wakeup.wake()
    return {"service": shown}


def _parse_changes(body: JsonObject) -> JsonObject:
    """Return the columns of a service that a request changes, with their new values.

    Raises:
        BadRequest: The body has no change, or a disabled_reason without the status disabled.
    """
    if not {"status", "forced_down"} & set(body):
        raise errors.BadRequest(
            "No updates were requested. Fields 'status' or 'forced_down' should be specified."
        )
    changes: JsonObject = {}
    if "disabled_reason" in body and body.get("status") != DISABLED:
        raise errors.BadRequest(
            "Specifying disabled_reason requires that status is set to disabled."
        )
    if "status" in body:
        disabled = body["status"] == DISABLED
        changes |= {
            "disabled": disabled,
            "disabled_reason": body.get("disabled_reason") if disabled else None,
        }
    if "forced_down" in body:
        changes["forced_down"] = is_true(body["forced_down"])
    return changes


def delete_by_number(request: Request, service_id: str) -> None:
    """Delete a service for DELETE /os-services/{number} before 2.53.

    Raises:
        BadRequest: The id is not a number.
        NotFound: The service does not exist.
        Conflict: The host of the compute service is not empty (``_delete``).
    """
    number = ids.number(service_id)
    if number is None:
        raise errors.BadRequest(f"Invalid service id {service_id[:40]}: it must be a number.")
    _delete(request, service_id, number=number)


def delete(request: Request, service_id: str) -> None:
    """Delete a service for DELETE /os-services/{uuid} since 2.53.

    Raises:
        BadRequest: The id is not a UUID.
        NotFound: The service does not exist.
        Conflict: The host of the compute service is not empty (``_delete``).
    """
    if not ids.is_uuid(service_id):
        raise errors.BadRequest(f"Invalid uuid {service_id[:80]}")
    _delete(request, service_id, uuid=service_id)


def _delete(
    request: Request, shown: str, uuid: str | None = None, number: int | None = None
) -> None:
    """Delete a service, and for a compute service also the host and its resource provider.

    The keys and the join token of the host stay. An agent that still runs registers again as a new
    service.

    Args:
        request: The request.
        shown: Id of the service in error messages.
        uuid: UUID of the service, or None if ``number`` is given.
        number: Number of the service, or None if ``uuid`` is given.

    Raises:
        NotFound: The service does not exist.
        Conflict: The host has servers, open migrations, guest records or allocations, or its
            resource provider has children.
    """

    def work(tx: Connection) -> None:
        row = services.show(tx, uuid, number)
        if row is None:
            raise errors.NotFound(f"Service {shown} could not be found.")
        if row.binary == Binary.COMPUTE:
            host_removal.remove(tx, row, shown)
        else:
            services.remove(tx, row)

    request.write(work)
