# SPDX-License-Identifier: Apache-2.0
"""Handlers of /servers/{id}/ips, and the actions that change addresses (until 2.43).

The list comes from the server's record. The actions send the change to the network service with the
caller's token before the response. An event of that service then updates the record. The actions
ignore locks and running actions, because the caller could change the network service directly.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Sequence

from common.domain import errors
from common.domain.json_types import JsonObject
from common.store.rows import ServerRecord
from compute_api.compute.request.dependencies import TenantNetworks
from compute_api.compute.request.request import Request
from compute_api.compute.servers.networks import network_records
from compute_api.compute.servers.networks.network_records import (
    FLOATING_IPS,
    PORTS,
    conflicts_as,
    list_floating_ips,
)
from compute_api.compute.views.servers import addresses as view


def index(request: Request, server: ServerRecord) -> JsonObject:
    """Return the addresses of a server by network, for GET /servers/{id}/ips."""
    return {"addresses": view.grouped(server.interfaces)}


def show(request: Request, server: ServerRecord, network: str) -> JsonObject:
    """Return the addresses in the network with this name, for GET /servers/{id}/ips/{network}.

    Raises:
        NotFound: The server has no address in a network with this name.
    """
    addresses = view.grouped(server.interfaces)
    if network not in addresses:
        raise errors.NotFound(f"Server {server.id} has no interface in network {network[:80]}.")
    return {network: addresses[network]}


# --- floating addresses of servers ---
def add_floating(request: Request, server: ServerRecord) -> None:
    """Associate a floating IP with a server (action addFloatingIp).

    The fixed address is the one in the request, or else the server's first IPv4 address.

    Raises:
        NotFound: The floating IP does not exist, or the cloud has no network service.
        Conflict: Several floating IPs have the address.
        BadRequest: The server has no such fixed address, or the network service refuses.
        Forbidden: The caller may not change the floating IP.
    """
    body, networks, token = (
        request.body["addFloatingIp"],
        network_records.required(request),
        request.context.token,
    )
    floating = _find_floating_ip(networks, token, body["address"])
    port_id, fixed = _choose_fixed_address(
        networks.ports(token, device_id=server.id), server.id, body.get("fixed_address")
    )
    # For example, no router connects the networks, or the floating IP is already associated.
    with conflicts_as(errors.BadRequest, errors.NotFound):
        networks.update(
            token, FLOATING_IPS, floating["id"], {"port_id": port_id, "fixed_ip_address": fixed}
        )


def remove_floating(request: Request, server: ServerRecord) -> None:
    """Disassociate a floating IP from a server (action removeFloatingIp).

    Raises:
        NotFound: The floating IP does not exist, or the cloud has no network service.
        Conflict: Several floating IPs have the address, or the floating IP is not associated with
            this server.
    """
    address = request.body["removeFloatingIp"]["address"]
    networks, token = network_records.required(request), request.context.token
    floating = _find_floating_ip(networks, token, address)
    if floating["port_id"] not in {
        port["id"] for port in networks.ports(token, device_id=server.id)
    }:
        raise errors.Conflict(f"Floating IP {address} is not associated with server {server.id}.")
    networks.update(token, FLOATING_IPS, floating["id"], {"port_id": None})


def _find_floating_ip(networks: TenantNetworks, token: str, address: str) -> JsonObject:
    """Return the floating IP with this address.

    Raises:
        NotFound: The floating IP does not exist for the caller.
        Conflict: Several floating IPs have the address.
    """
    rows = list_floating_ips(networks, token, floating_ip_address=address)
    if not rows:
        raise errors.NotFound(f"Floating IP {address} not found.")
    if len(rows) > 1:
        raise errors.Conflict(
            f"Several floating IPs have the address {address}; associate or disassociate one by its "
            "id in the network service."
        )
    return rows[0]


def _choose_fixed_address(
    ports: Iterable[JsonObject], server_id: str, fixed_address: str | None
) -> tuple[str, str]:
    """Return the id of the port and the fixed address for a floating IP.

    Args:
        ports: The ports of the server.
        server_id: Id of the server, for errors.
        fixed_address: The requested fixed address. None chooses the first IPv4 address.

    Raises:
        BadRequest: The ports have no such address.
    """
    addresses = [(port["id"], fixed["ip_address"]) for port in ports for fixed in port["fixed_ips"]]
    if not addresses:
        raise errors.BadRequest(
            f"Server {server_id} has no fixed address to associate a floating IP with."
        )
    if fixed_address is not None:
        matches = [
            address
            for address in addresses
            if ipaddress.ip_address(address[1]) == ipaddress.ip_address(fixed_address)
        ]
        error = f"{fixed_address} is not a fixed address of server {server_id}."
    else:
        matches = [
            address for address in addresses if ipaddress.ip_address(address[1]).version == 4
        ]
        error = f"Server {server_id} has no fixed IPv4 address to associate a floating IP with."
    if not matches:
        raise errors.BadRequest(error)
    return matches[0]


# --- fixed addresses of servers ---
def add_fixed(request: Request, server: ServerRecord) -> None:
    """Add a fixed address to the server's first port in a network (action addFixedIp).

    The address comes from the first subnet for which the network service accepts the change. IPv4
    subnets are tried before IPv6 subnets.

    Raises:
        NotFound: The server has no port in the network, or the cloud has no network service.
        BadRequest: The network has no subnet, or the service refuses each subnet, for example
            because no address is free.
    """
    network_id = str(request.body["addFixedIp"]["networkId"])
    networks, token = network_records.required(request), request.context.token
    ports = (
        networks.ports(token, device_id=server.id, network_id=network_id)
        if network_records.is_id(network_id)
        else []
    )
    if not ports:
        raise errors.NotFound(
            f"Server {server.id} has no port in network {network_id}; attach an interface instead."
        )
    subnets = sorted(
        networks.subnets(token, [network_id]), key=lambda subnet: ":" in subnet["cidr"]
    )
    refused: errors.Problem = errors.BadRequest(f"Network {network_id} has no subnet.")
    for subnet in subnets:
        try:
            _set_fixed_ips(
                networks, token, ports[0], [*ports[0]["fixed_ips"], {"subnet_id": subnet["id"]}]
            )
        except (errors.Conflict, errors.BadRequest) as problem:
            refused = problem
        else:
            return
    raise errors.BadRequest(refused.text) from refused


def remove_fixed(request: Request, server: ServerRecord) -> None:
    """Remove a fixed address from a port of the server (action removeFixedIp).

    Raises:
        NotFound: The cloud has no network service.
        BadRequest: The server does not have the address, or the network service refuses.
    """
    address = request.body["removeFixedIp"]["address"]
    networks, token = network_records.required(request), request.context.token
    for port in networks.ports(token, device_id=server.id):
        left = [
            fixed
            for fixed in port["fixed_ips"]
            if ipaddress.ip_address(fixed["ip_address"]) != ipaddress.ip_address(address)
        ]
        if len(left) < len(port["fixed_ips"]):
            with conflicts_as(errors.BadRequest):
                _set_fixed_ips(networks, token, port, left)
            return
    raise errors.BadRequest(f"{address} is not a fixed address of server {server.id}.")


def _set_fixed_ips(
    networks: TenantNetworks, token: str, port: JsonObject, fixed: Sequence[JsonObject]
) -> None:
    networks.update(token, PORTS, port["id"], {"fixed_ips": list(fixed)})
