# SPDX-License-Identifier: Apache-2.0
"""POST /os-server-external-events: events about servers from other services.

An event is only a hint, so events may be lost, late or repeated. For example, the event for a
plugged port wakes the waiting action, which then reads the port from the network service. After
other changes of the network the API reads the interfaces again. If the network service does not
answer, the response is 503, and the sender may repeat the request.

Each handler gets the request, the events with one name, and the rows of the servers by id.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial

from common.domain import errors, states
from common.domain.clock import Clock
from common.domain.json_types import JsonMapping
from common.store import cleanups
from common.store.engine import Connection
from common.store.rows import ServerPlace
from common.store.servers import actions, servers, volumes
from compute_api.compute.request.request import Request
from compute_api.compute.schemas.external_events import COMPLETED
from compute_api.compute.servers.networks import networks as server_networks
from compute_api.http.response import ApiResponse
from compute_api.http.validation import FORMATS

DONE, BAD, MISSING, UNPROCESSABLE = 200, 400, 404, 422
#: Limit for the time in which the interfaces of one request are read.
REREAD_TIMEOUT_SECONDS = 20.0
#: The steps that wait for the block storage service and for the network service.
REIMAGE = "await_reimage"
PLUG = "plug"
#: Events that need a tag -> allowed tags. An empty sequence allows all tags.
_TAGS: dict[str, Sequence[str]] = {
    "accelerator-request-bound": (),
    "network-vif-deleted": (),
    "power-update": ("POWER_ON", "POWER_OFF"),
    "volume-extended": (),
    "volume-reimaged": (),
}

#: Handles events with one name. The arguments are the request, the events, and the rows of servers
#: by id. Returns a code for each event.
Handler = Callable[[Request, Sequence[JsonMapping], JsonMapping], list[int]]


def create(request: Request) -> ApiResponse:
    """Handle events for POST /os-server-external-events, and return a code for each.

    The status is 200 if all events succeed, otherwise 207.

    Raises:
        Unavailable: The network service does not answer, or is too slow for the number of events.
    """
    events = request.body["events"]
    rows = request.read(servers.some, {event["server_uuid"] for event in events})
    codes = [_check_event(event, rows.get(event["server_uuid"])) for event in events]
    for name, handle in HANDLERS.items():
        numbers = [
            number
            for number, event in enumerate(events)
            if codes[number] == DONE and event["name"] == name
        ]
        if numbers:
            new_codes = handle(request, [events[number] for number in numbers], rows)
            for number, code in zip(numbers, new_codes, strict=True):
                codes[number] = code
    body = [
        {
            **event,
            "code": code,
            "status": event.get("status", COMPLETED) if code == DONE else "failed",
        }
        for event, code in zip(events, codes, strict=True)
    ]
    return ApiResponse({"events": body}, 200 if set(codes) == {DONE} else 207)


def _check_event(event: JsonMapping, row: ServerPlace | None) -> int:
    """Return the error code of an event, or DONE if the event can be handled.

    The code is MISSING if the server does not exist (``row`` is None), BAD if the tag is missing or
    not allowed, and UNPROCESSABLE if the server is on no host or no handler has the event's name.
    """
    if row is None:
        return MISSING
    allowed = _TAGS.get(event["name"])
    if allowed is not None and (not event.get("tag") or (allowed and event["tag"] not in allowed)):
        return BAD
    return DONE if row.host and event["name"] in HANDLERS else UNPROCESSABLE


def _wake_plug(request: Request, events: Sequence[JsonMapping], rows: JsonMapping) -> list[int]:
    """Wake the servers' actions at the step ``PLUG``. Return DONE for each event."""
    request.write(actions.wake, {event["server_uuid"] for event in events}, PLUG)
    request.services.wakeup.wake(service_calls=True)
    return [DONE] * len(events)


def _wake_reimage(request: Request, events: Sequence[JsonMapping], rows: JsonMapping) -> list[int]:
    """Wake the servers' actions at the step ``REIMAGE``, and return the code of each event.

    The actions read the result from the block storage service. The code is MISSING if the server
    does not have the volume, otherwise DONE.
    """
    codes = []
    for event in events:
        try:
            request.read(volumes.show, event["server_uuid"], event["tag"])
            codes.append(DONE)
        except errors.NotFound:
            codes.append(MISSING)
    server_ids = {
        event["server_uuid"] for event, code in zip(events, codes, strict=True) if code == DONE
    }
    request.write(actions.wake, server_ids, REIMAGE)
    request.services.wakeup.wake(service_calls=True)
    return codes


def _refresh_interfaces(
    request: Request, events: Sequence[JsonMapping], rows: JsonMapping
) -> list[int]:
    """Refresh the interfaces in the rows of servers with data from the network service.

    Return the code of each event: DONE, also for servers without interfaces. Without a network
    service all codes are UNPROCESSABLE.

    Raises:
        Unavailable: The network service does not answer, or the reads take longer than
            ``REREAD_TIMEOUT_SECONDS``.
    """
    networks, clock = request.networks, Clock()
    if networks is None:
        return [UNPROCESSABLE] * len(events)
    end = clock.monotonic() + REREAD_TIMEOUT_SECONDS
    for server_id in dict.fromkeys(event["server_uuid"] for event in events):
        if clock.monotonic() > end:
            raise errors.Unavailable(
                "The network service is too slow for so many events; send the events again in "
                "several requests."
            )
        if rows[server_id].interfaces:
            server_networks.refresh_interfaces(request, networks, server_id)
    return [DONE] * len(events)


def _detach(request: Request, events: Sequence[JsonMapping], rows: JsonMapping) -> list[int]:
    """Begin to detach deleted ports from their guests, and return the code of each event.

    This includes locked servers, because the port no longer exists. If the state or a running
    action of a server does not allow the detachment now, or the server's row lacks the port, this
    calls ``_record_deletion``, except for a tag that is not a UUID. The code is MISSING if the
    detachment or ``_record_deletion`` does not find the server any more, otherwise DONE.
    """
    codes = []
    for event in events:
        server_id, port = event["server_uuid"], event["tag"]
        is_known = port in [interface["port"] for interface in rows[server_id].interfaces or ()]
        try:
            if not (is_known and _begin_detach(request, server_id, port)) and FORMATS["uuid"](port):
                request.write(_record_deletion, server_id, port, is_known)
            codes.append(DONE)
        except errors.NotFound:
            codes.append(MISSING)
    request.services.wakeup.wake()
    return codes


def _begin_detach(request: Request, server_id: str, port: str) -> bool:
    """Begin the detachment of a port, and return True.

    Returns False if the server does not allow the detachment now, for example during an action.

    Raises:
        NotFound: The server does not exist any more.
    """
    try:
        request.make(
            partial(actions.is_begun, server_id=server_id),
            actions.begin,
            states.row("detach_interface"),
            server_id,
            context=dataclasses.replace(request.context, admin=True),
            args={"port": port},
        )
    except errors.Conflict:
        return False
    return True


def _record_deletion(tx: Connection, server_id: str, port: str, is_known: bool) -> None:
    """Record a pending cleanup for a deleted port, unless the running action removes the port.

    A port that is missing in the server's row is recorded only if an action is running, because the
    action may be adding that port.

    Args:
        tx: The transaction.
        server_id: Id of the server.
        port: Id of the deleted port.
        is_known: Whether the server's row contains the port.

    Raises:
        NotFound: The server does not exist any more.
    """
    server = servers.show(tx, server_id)
    if not server.action and not is_known:
        return
    action = actions.show_by_id(tx, server.action) if server.action else None
    if action is None or (action.workflow != "delete" and action.args.get("port") != port):
        cleanups.add_gone_port(tx, server_id, server.project_id, port)


def _extend(request: Request, events: Sequence[JsonMapping], rows: JsonMapping) -> list[int]:
    """Begin actions that show guests the new size of extended volumes, also for locked servers.

    Return the code of each event: MISSING if the server does not have the volume, UNPROCESSABLE if
    the server's state or a running action does not allow the action, otherwise DONE.
    """
    row, system = states.row("extend_volume"), dataclasses.replace(request.context, admin=True)
    codes = []
    for event in events:
        server_id, volume_id = event["server_uuid"], event["tag"]
        try:
            device = request.read(volumes.show, server_id, volume_id)
            request.make(
                partial(actions.is_begun, server_id=server_id),
                actions.begin,
                row,
                server_id,
                context=system,
                args={"block_device": device.uuid, "volume_id": volume_id},
            )
            codes.append(DONE)
        except errors.NotFound:
            codes.append(MISSING)
        except errors.Conflict:
            codes.append(UNPROCESSABLE)
    request.services.wakeup.wake()
    return codes


#: Name of events -> handler, in the order of execution. Other events have no effect in this cloud.
HANDLERS: dict[str, Handler] = {
    "network-vif-plugged": _wake_plug,
    "network-vif-unplugged": _wake_plug,
    "network-vif-deleted": _detach,
    "network-changed": _refresh_interfaces,
    "volume-extended": _extend,
    "volume-reimaged": _wake_reimage,
}
