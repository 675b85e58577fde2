# SPDX-License-Identifier: Apache-2.0
"""Handlers of /servers/{id}/os-interface: list, show, attach and detach interfaces.

Interfaces are read from the network service with the caller's token. Attaching and detaching are
actions. A second action waits until the first has ended. The response to an attach waits until the
guest has the interface.
"""

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
    """Return the interfaces of a server for GET /servers/{id}/os-interface.

    Without a network service the list is empty.
    """
    networks = request.networks
    if networks is None:
        return {"interfaceAttachments": []}
    tags, ports = _read_tags(server), networks.ports(request.context.token, device_id=server.id)
    return {
        "interfaceAttachments": [
            view.of_port(port, tags.get(port["id"], ""), request.version) for port in ports
        ]
    }


def show(request: Request, server: ServerRecord, port_id: str) -> JsonObject:
    """Return an interface of a server for GET /servers/{id}/os-interface/{port_id}.

    Raises:
        NotFound: The server has no interface with this port.
    """
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
        "interfaceAttachment": view.of_port(
            port, _read_tags(server).get(port_id, ""), request.version
        )
    }


def attach(request: Request, server: ServerRecord) -> ApiResponse:
    """Begin to attach an interface for POST /servers/{id}/os-interface, and wait for the guest.

    The response is the interface, or 202 without a body if the guest does not have the interface in
    time.

    Raises:
        BadRequest, NotFound, Conflict: The network, port or address cannot be used, the server's
            state does not allow the action, earlier actions did not end in time, or the action
            failed.
        Forbidden: The quota of ports is exhausted, or a policy does not allow the interface.
        NotImplementedHere: The cloud has no network service.
        Unavailable: Too many requests are waiting, or the network service does not answer.
    """
    body = request.body.get("interfaceAttachment") or {}
    networks = request.networks
    if networks is None:
        raise errors.NotImplementedHere(
            "This cloud has no network service, so servers cannot have interfaces."
        )
    request.check(ATTACH, server, waits=True)
    args = {
        "networks": [_look_up_interface(request, networks, server, body)],
        "security_groups": [],
    }
    with action_waits.slot(request.services) as is_free:
        if not is_free:
            raise errors.Unavailable(
                "Too many requests are waiting for interfaces to be attached; try again."
            )
        return _attach_and_wait(request, server, args)


def _attach_and_wait(request: Request, server: ServerRecord, args: JsonObject) -> ApiResponse:
    """Begin the attachment with these arguments, wait for the guest, and return the response.

    The response is the interface, or after the timeout 202 without a body.

    Raises:
        Conflict: The action failed, the server's state does not allow the action, or earlier
            actions did not end in time.
        Forbidden: The action failed, because the policy or quota of the network service forbids it.
    """
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
    row = request.read(actions.show_by_id, action_id)
    assert row is not None
    interface = from_wire(Interface, row.data["interface"])
    return ApiResponse({"interfaceAttachment": view.of_interface(interface, request.version)})


def _look_up_interface(
    request: Request, networks: TenantNetworks, server: ServerRecord, body: JsonObject
) -> JsonObject:
    """Look up the requested interface, and return the entry for the action's arguments.

    Without a network or a port in the request this is the only network that the project can use.

    Raises:
        BadRequest: The fields do not fit together, or the network, port or address cannot be used.
            Or the request names no network, and the project can use no network or several.
        NotFound, Conflict: The network or port does not exist, or the port or address is in use.
        Forbidden: The project's quota of ports is exhausted, or the network is external and not
            shared, and the policy does not allow that.
    """
    network_id, port_id, fixed = body.get("net_id"), body.get("port_id"), body.get("fixed_ips")
    if network_id and port_id:
        raise errors.BadRequest("Must not input both net_id and port_id")
    if fixed and not network_id:
        raise errors.BadRequest("Must input net_id when request IP address")
    item = {
        "uuid": network_id,
        "port": port_id,
        "tag": body.get("tag"),
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
    return {**requested[0], "tag": body["tag"]} if body.get("tag") else requested[0]


def detach(request: Request, server: ServerRecord, port_id: str) -> None:
    """Begin to detach an interface for DELETE /servers/{id}/os-interface/{port_id}.

    If another action is running, wait until that action has ended.

    Raises:
        NotFound: The server's row has no interface with this port.
        Conflict: The server's state does not allow the action, or the running action did not end in
            time.
    """
    if port_id not in _read_tags(server):
        raise errors.NotFound(f"Server {server.id} has no interface with port {port_id[:80]}.")
    request.check(DETACH, server, waits=True)
    action_waits.begin_in_turn(
        request.services,
        server.id,
        lambda: _begin(request, server, DETACH, {"port": port_id}),
    )
    request.services.wakeup.wake()


def _read_tags(server: ServerRecord) -> dict[str, str]:
    """Return the tags of the server's interfaces by port id, "" for an interface without a tag."""
    return {interface["port"]: interface["tag"] for interface in loads(server.interfaces or "[]")}


def _begin(request: Request, server: ServerRecord, row: states.Action, args: JsonObject) -> str:
    return request.begin(actions.begin, row, server.id, args=args)


def network_info(request: Request, server: ServerRecord) -> None:
    """Refresh the interfaces in the server's row (action injectNetworkInfo).

    The data comes from the network service. Ports that are not in the row are ignored, and
    interfaces whose port is gone stay unchanged. Hosts receive changes of ports directly from the
    network service. Without a network service the action does nothing.

    Raises:
        Unavailable: The network service does not answer.
    """
    networks = request.networks
    if networks is not None:
        server_networks.refresh_interfaces(request, networks, server.id)
