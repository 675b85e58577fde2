# SPDX-License-Identifier: Apache-2.0
"""POST /os-server-external-events: what other services report of servers.

An event is a hint: a wired port wakes the action that waits for it, and the action asks the network
service itself; a change makes us read the interfaces again. So events may be lost, late or
repeated. When the network service does not answer meanwhile, the request is a 503 and its sender
may repeat it."""

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
REREAD_TIMEOUT_SECONDS = 20.0  # seconds in which the servers of one request are read again
REIMAGE = "await_reimage"  # the step that waits for the block storage service
PLUG = "plug"  # the step that waits for the network service
#: Events that mean nothing without a tag, and the tags that they may have; (): any.
_TAGS: dict[str, Sequence[str]] = {
    "accelerator-request-bound": (),
    "network-vif-deleted": (),
    "power-update": ("POWER_ON", "POWER_OFF"),
    "volume-extended": (),
    "volume-reimaged": (),
}

#: Does what the events of one name ask for; the code of each.
Handler = Callable[[Request, Sequence[JsonMapping], JsonMapping], list[int]]


def create(request: Request) -> ApiResponse:
    """POST /os-server-external-events"""
    events = request.body["events"]
    rows = request.read(servers.some, {event["server_uuid"] for event in events})
    codes = [_refusal(event, rows.get(event["server_uuid"])) for event in events]
    for name, handle in HANDLERS.items():
        meant = [
            number
            for number, event in enumerate(events)
            if codes[number] == DONE and event["name"] == name
        ]
        if meant:
            found = handle(request, [events[number] for number in meant], rows)
            for number, code in zip(meant, found, strict=True):
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


def _refusal(event: JsonMapping, row: ServerPlace | None) -> int:
    """Why nothing can be done about an event; DONE: something can."""
    if row is None:
        return MISSING
    allowed = _TAGS.get(event["name"])
    if allowed is not None and (not event.get("tag") or (allowed and event["tag"] not in allowed)):
        return BAD
    return DONE if row.host and event["name"] in HANDLERS else UNPROCESSABLE


def _wake(request: Request, events: Sequence[JsonMapping], rows: JsonMapping) -> list[int]:
    request.write(actions.wake, {event["server_uuid"] for event in events}, PLUG)
    request.services.wakeup.wake(neighbours=True)
    return [DONE] * len(events)


def _look_at_volume(
    request: Request, events: Sequence[JsonMapping], rows: JsonMapping
) -> list[int]:
    """What waits for a volume asks the block storage service itself, whatever the event says."""
    codes = []
    for event in events:
        try:
            request.read(volumes.show, event["server_uuid"], event["tag"])
            codes.append(DONE)
        except errors.NotFound:
            codes.append(MISSING)
    meant = {
        event["server_uuid"] for event, code in zip(events, codes, strict=True) if code == DONE
    }
    request.write(actions.wake, meant, REIMAGE)
    request.services.wakeup.wake(neighbours=True)
    return codes


def _reread(request: Request, events: Sequence[JsonMapping], rows: JsonMapping) -> list[int]:
    """Write what the network service says of the servers' interfaces now."""
    networks, clock = request.networks, Clock()
    if networks is None:
        return [UNPROCESSABLE] * len(events)
    end = clock.monotonic() + REREAD_TIMEOUT_SECONDS
    for server_id in dict.fromkeys(event["server_uuid"] for event in events):
        if clock.monotonic() > end:
            raise errors.Unavailable(
                "The network service is too slow for so many events; send them again in parts."
            )
        if rows[server_id].interfaces:
            server_networks.refresh_interfaces(request, networks, server_id)
    return [DONE] * len(events)


def _detach(request: Request, events: Sequence[JsonMapping], rows: JsonMapping) -> list[int]:
    """Take deleted ports out of their guests, also of locked servers: there is nothing left to
    protect. A port whose server cannot let go of it now is left to a pending cleanup."""
    codes = []
    for event in events:
        server_id, port = event["server_uuid"], event["tag"]
        is_known = port in [one["port"] for one in rows[server_id].interfaces or ()]
        try:
            if not (is_known and _begin_detach(request, server_id, port)) and FORMATS["uuid"](port):
                request.write(_record_deletion, server_id, port, is_known)
            codes.append(DONE)
        except errors.NotFound:
            codes.append(MISSING)
    request.services.wakeup.wake()
    return codes


def _begin_detach(request: Request, server_id: str, port: str) -> bool:
    """Begin the action that takes a port out of its server. Returns False if the server's state or
    another action forbids it."""
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
    """Leave a deleted port to a pending cleanup, unless the running action removes the port itself.

    A running action may be about to give the server a port that the server's row does not have yet.
    """
    server = servers.show(tx, server_id)
    if not server.action and not is_known:
        return
    action = actions.show_by_id(tx, server.action) if server.action else None
    if action is None or (action.workflow != "delete" and action.args.get("port") != port):
        cleanups.add_gone_port(tx, server_id, server.project_id, port)


def _extend(request: Request, events: Sequence[JsonMapping], rows: JsonMapping) -> list[int]:
    """Servers see that volumes have grown, also those that are locked."""
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


#: By name, in the order in which they are done. For the others nothing waits in this cloud.
HANDLERS: dict[str, Handler] = {
    "network-vif-plugged": _wake,
    "network-vif-unplugged": _wake,
    "network-vif-deleted": _detach,
    "network-changed": _reread,
    "volume-extended": _extend,
    "volume-reimaged": _look_at_volume,
}
