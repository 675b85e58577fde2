# SPDX-License-Identifier: Apache-2.0
"""/servers/{id}/os-interface: show, attach and detach interfaces.

Interfaces are read from the network service with the caller's token. Attaching and detaching are
actions; the second of two waits until the first has ended. Attaching is answered when the guest has
the interface."""

from __future__ import annotations

from common.domain import errors, states
from common.domain.json_types import JsonObject
from common.domain.models import Interface
from common.domain.wire import from_wire
from common.store.rows import ServerRecord
from common.store.servers import actions
from common.store.servers.servers import loads
from compute_api.compute.request import action_waits
from compute_api.compute.request.dependencies import TenantNetworks
from compute_api.compute.request.request import Request
from compute_api.compute.servers.networks import networks as server_networks
from compute_api.compute.views.servers import interfaces as view
from compute_api.http.response import ApiResponse
from compute_api.http.validation import FORMATS

ATTACH, DETACH = states.row("attach_interface"), states.row("detach_interface")


def index(request: Request, server: ServerRecord) -> JsonObject:
    """GET …/os-interface"""
    networks = request.networks
    if networks is None:
        return {"interfaceAttachments": []}
    tags, ports = _tags(server), networks.ports(request.context.token, device_id=server.id)
    return {
        "interfaceAttachments": [
            view.of_port(port, tags.get(port["id"], ""), request.version) for port in ports
        ]
    }


def show(request: Request, server: ServerRecord, port_id: str) -> JsonObject:
    """GET …/os-interface/{port_id}"""
    networks = request.networks
    missing = errors.NotFound(f"Server {server.id} has no interface with port {port_id[:80]}.")
    if networks is None or not FORMATS["uuid"](port_id):
        raise missing
    try:
        port = networks.port(request.context.token, port_id)
    except (errors.NotFound, errors.BadRequest) as problem:
        raise missing from problem
    if port["device_id"] != server.id:
        raise missing
    return {
        "interfaceAttachment": view.of_port(port, _tags(server).get(port_id, ""), request.version)
    }


def attach(request: Request, server: ServerRecord) -> ApiResponse:
    """POST …/os-interface"""
    given = request.body.get("interfaceAttachment") or {}
    networks = request.networks
    if networks is None:
        raise errors.NotImplementedHere(
            "This cloud has no network service, so servers cannot have interfaces."
        )
    request.check(ATTACH, server, waits=True)
    args = {
        "networks": [_requested_interface(request, networks, server, given)],
        "security_groups": [],
    }
    with action_waits.slot(request.services) as is_free:
        if not is_free:
            raise errors.Unavailable(
                "Too many requests are waiting for interfaces to be attached; try again."
            )
        return _attached(request, server, args)


def _attached(request: Request, server: ServerRecord, args: JsonObject) -> ApiResponse:
    """Begin, and answer with the interface that the guest has got."""
    timeout, store = request.services.settings.answer_timeout_seconds, request.services.store
    action_id = action_waits.in_turn(
        request.services, server.id, lambda: _begin(request, server, ATTACH, args)
    )
    request.services.wakeup.wake()
    assert ATTACH.answer_after is not None
    if (
        action_waits.for_step(store, action_id, ATTACH.answer_after, timeout_seconds=timeout)
        is None
    ):
        return ApiResponse(None, 202)
    done = request.read(actions.show_by_id, action_id)
    assert done is not None
    interface = from_wire(Interface, done.data["interface"])
    return ApiResponse({"interfaceAttachment": view.of_interface(interface, request.version)})


def _requested_interface(
    request: Request, networks: TenantNetworks, server: ServerRecord, given: JsonObject
) -> JsonObject:
    """The one interface that is asked for."""
    network_id, port_id, fixed = given.get("net_id"), given.get("port_id"), given.get("fixed_ips")
    if network_id and port_id:
        raise errors.BadRequest("Must not input both net_id and port_id")
    if fixed and not network_id:
        raise errors.BadRequest("Must input net_id when request IP address")
    item = {
        "uuid": network_id,
        "port": port_id,
        "tag": given.get("tag"),
        "fixed_ip": fixed[0]["ip_address"] if fixed else None,
    }
    requested, _ = server_networks.look_up_interfaces(
        request,
        server.project_id,
        [item] if network_id or port_id else [],
        server_networks.ATTACHING,
    )
    if not requested:
        raise errors.BadRequest(
            "No specific network was requested and none are available for project "
            f"'{server.project_id}'."
        )
    server_networks.count_within_port_quota(
        networks, request.context.token, server.project_id, requested, 1, 1
    )
    return {**requested[0], "tag": given["tag"]} if given.get("tag") else requested[0]


def detach(request: Request, server: ServerRecord, port_id: str) -> None:
    """DELETE …/os-interface/{port_id}"""
    if port_id not in _tags(server):
        raise errors.NotFound(f"Server {server.id} has no interface with port {port_id[:80]}.")
    request.check(DETACH, server, waits=True)
    action_waits.begin_in_turn(
        request.services,
        server.id,
        lambda: _begin(request, server, DETACH, {"port": port_id}),
    )
    request.services.wakeup.wake()


def _tags(server: ServerRecord) -> dict[str, str]:
    """Port -> tag of each interface that the server has."""
    return {one["port"]: one["tag"] for one in loads(server.interfaces or "[]")}


def _begin(request: Request, server: ServerRecord, row: states.Action, args: JsonObject) -> str:
    return request.begin(actions.begin, row, server.id, args=args)


def network_info(request: Request, server: ServerRecord) -> None:
    """What the network service says of the server's interfaces is read again; the hosts hear of it
    from that service themselves."""
    networks = request.networks
    if networks is not None:
        server_networks.refresh_interfaces(request, networks, server.id)
