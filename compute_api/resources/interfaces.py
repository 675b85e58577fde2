# SPDX-License-Identifier: Apache-2.0
"""/servers/{id}/os-interface: a server's interfaces, and one more or less of them.

What is shown is read from the network service with the caller's token. Attaching and detaching are actions; a second
one waits until the first has let go of the server, and attaching is answered when the guest has the interface.
"""
from __future__ import annotations

from typing import Any

from common import errors, states
from common.models import Interface
from common.store import actions
from common.store.servers import loads
from common.wire import from_wire
from compute_api import waiting
from compute_api.dependencies import Networks
from compute_api.request import Answer, Request
from compute_api.resources import server_networks
from compute_api.validation import FORMATS
from compute_api.views import interfaces as view

ATTACH, DETACH = states.row("attach_interface"), states.row("detach_interface")


def index(request: Request, server: Any) -> dict[str, Any]:
    """GET …/os-interface"""
    networks = server_networks.service(request)
    if networks is None:
        return {"interfaceAttachments": []}
    tags, ports = _tags(server), networks.ports(request.context.token, device_id=server.id)
    return {"interfaceAttachments": [view.of_port(port, tags.get(port["id"], ""), request.version) for port in ports]}


def show(request: Request, server: Any, port_id: str) -> dict[str, Any]:
    """GET …/os-interface/{port_id}"""
    networks = server_networks.service(request)
    missing = errors.NotFound(f"Server {server.id} has no interface with port {port_id[:80]}.")
    if networks is None or not FORMATS["uuid"](port_id):
        raise missing
    try:
        port = networks.port(request.context.token, port_id)
    except (errors.NotFound, errors.BadRequest) as problem:
        raise missing from problem
    if port["device_id"] != server.id:
        raise missing
    return {"interfaceAttachment": view.of_port(port, _tags(server).get(port_id, ""), request.version)}


def attach(request: Request, server: Any) -> Answer:
    """POST …/os-interface"""
    given = request.body.get("interfaceAttachment") or {}
    networks = server_networks.service(request)
    if networks is None:
        raise errors.NotImplementedHere("This cloud has no network service, so servers cannot have interfaces.")
    _check_state(request, server, ATTACH)
    args = {"networks": [_wish(request, networks, server, given)], "security_groups": []}
    slots = request.services.wait_slots
    if not slots.acquire(blocking=False):
        raise errors.Unavailable("Too many requests are waiting for interfaces to be attached; try again.")
    try:
        return _attached(request, server, args)
    finally:
        slots.release()


def _attached(request: Request, server: Any, args: dict[str, Any]) -> Answer:
    """Begin, and answer with the interface that the guest has got."""
    patience, store = request.services.settings.answer_patience, request.services.store
    action_id = waiting.for_turn(lambda: _begin(request, server, ATTACH, args), patience=patience)
    request.services.bell.ring()
    assert ATTACH.answer_after is not None
    if waiting.for_step(store, action_id, ATTACH.answer_after, patience=patience) is None:
        return Answer(None, 202)
    done = request.read(actions.show_by_id, action_id)
    assert done is not None
    interface = from_wire(Interface, done.data["interface"])
    return Answer({"interfaceAttachment": view.of_interface(interface, request.version)})


def _wish(request: Request, networks: Networks, server: Any, given: dict[str, Any]) -> dict[str, Any]:
    """The one interface that is asked for."""
    network_id, port_id, fixed = given.get("net_id"), given.get("port_id"), given.get("fixed_ips")
    if network_id and port_id:
        raise errors.BadRequest("Must not input both net_id and port_id")
    if fixed and not network_id:
        raise errors.BadRequest("Must input net_id when request IP address")
    item = {"uuid": network_id, "port": port_id, "tag": given.get("tag"),
            "fixed_ip": fixed[0]["ip_address"] if fixed else None}
    wishes, _ = server_networks.wished(request, server.project_id, [item] if network_id or port_id else [],
                                       server_networks.ATTACHING)
    if not wishes:
        raise errors.BadRequest("No specific network was requested and none are available for project "
                                f"'{server.project_id}'.")
    server_networks.affordable(networks, request.context.token, server.project_id, wishes, 1, 1)
    return {**wishes[0], "tag": given["tag"]} if given.get("tag") else wishes[0]


def detach(request: Request, server: Any, port_id: str) -> None:
    """DELETE …/os-interface/{port_id}"""
    if port_id not in _tags(server):
        raise errors.NotFound(f"Server {server.id} has no interface with port {port_id[:80]}.")
    _check_state(request, server, DETACH)
    slots = request.services.wait_slots
    waits = slots.acquire(blocking=False)
    try:
        waiting.for_turn(lambda: _begin(request, server, DETACH, {"port": port_id}),
                         patience=request.services.settings.answer_patience if waits else 0)
    finally:
        if waits:
            slots.release()
    request.services.bell.ring()


def _tags(server: Any) -> dict[str, str]:
    """Port -> tag of each interface that the server has."""
    return {one["port"]: one["tag"] for one in loads(server.interfaces or "[]")}


def _check_state(request: Request, server: Any, row: states.Action) -> None:
    """So that no neighbour is asked in vain; whether another action is at work is asked again, and waited for."""
    try:
        actions.check(row, server.id, server, request.context)
    except errors.Busy:
        return


def _begin(request: Request, server: Any, row: states.Action, args: dict[str, Any]) -> str:
    return request.begin(actions.begin, row, server.id, args=args)
