# SPDX-License-Identifier: Apache-2.0
"""Addresses of a server: GET /servers/{id}/ips, and the actions that change them (until 2.43).

The list comes from the server's record. The actions change the network service with the caller's
token before the answer, and its event updates the record. They ignore locks and other actions of
the server, because the caller may do the same in the network service."""

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
    """GET …/ips"""
    return {"addresses": view.grouped(server.interfaces)}


def show(request: Request, server: ServerRecord, network: str) -> JsonObject:
    """GET …/ips/{network}"""
    found = view.grouped(server.interfaces)
    if network not in found:
        raise errors.NotFound(f"Network {network[:80]} is not one of the server's.")
    return {network: found[network]}


# --- floating addresses of servers ---
def add_floating(request: Request, server: ServerRecord) -> None:
    """addFloatingIp"""
    given, networks, token = (
        request.body["addFloatingIp"],
        network_records.required(request),
        request.context.token,
    )
    floating = _by_address(networks, token, given["address"])
    port_id, fixed = _destination(
        networks.ports(token, device_id=server.id), server.id, given.get("fixed_address")
    )
    # no router leads there, or the address has another
    with conflicts_as(errors.BadRequest, errors.NotFound):
        networks.update(
            token, FLOATING_IPS, floating["id"], {"port_id": port_id, "fixed_ip_address": fixed}
        )


def remove_floating(request: Request, server: ServerRecord) -> None:
    """removeFloatingIp"""
    address = request.body["removeFloatingIp"]["address"]
    networks, token = network_records.required(request), request.context.token
    floating = _by_address(networks, token, address)
    if floating["port_id"] not in {
        port["id"] for port in networks.ports(token, device_id=server.id)
    }:
        raise errors.Conflict(f"Floating IP {address} is not associated with server {server.id}.")
    networks.update(token, FLOATING_IPS, floating["id"], {"port_id": None})


def _by_address(networks: TenantNetworks, token: str, address: str) -> JsonObject:
    found = list_floating_ips(networks, token, floating_ip_address=address)
    if not found:
        raise errors.NotFound(f"Floating IP {address} not found.")
    if len(found) > 1:
        raise errors.Conflict(
            f"There are several floating IPs {address}; use the network service to say which."
        )
    return found[0]


def _destination(
    ports: Iterable[JsonObject], server_id: str, wanted: str | None
) -> tuple[str, str]:
    """The port and the fixed address that are meant: the one wanted, else the first of IPv4."""
    held = [(port["id"], fixed["ip_address"]) for port in ports for fixed in port["fixed_ips"]]
    if not held:
        raise errors.BadRequest(
            f"Server {server_id} has no fixed address to associate a floating IP with."
        )
    if wanted is not None:
        found = [
            one for one in held if ipaddress.ip_address(one[1]) == ipaddress.ip_address(wanted)
        ]
        why = f"{wanted} is not a fixed address of server {server_id}."
    else:
        found = [one for one in held if ipaddress.ip_address(one[1]).version == 4]
        why = f"Server {server_id} has no fixed IPv4 address to associate a floating IP with."
    if not found:
        raise errors.BadRequest(why)
    return found[0]


# --- fixed addresses of servers ---
def add_fixed(request: Request, server: ServerRecord) -> None:
    """addFixedIp: one more address for the server's port in a network, of the first subnet that has
    one left."""
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
            _readdress(
                networks, token, ports[0], [*ports[0]["fixed_ips"], {"subnet_id": subnet["id"]}]
            )
        except (errors.Conflict, errors.BadRequest) as problem:
            refused = problem
        else:
            return
    raise errors.BadRequest(refused.text) from refused


def remove_fixed(request: Request, server: ServerRecord) -> None:
    """removeFixedIp"""
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
                _readdress(networks, token, port, left)
            return
    raise errors.BadRequest(f"{address} is not a fixed address of server {server.id}.")


def _readdress(
    networks: TenantNetworks, token: str, port: JsonObject, fixed: Sequence[JsonObject]
) -> None:
    networks.update(token, PORTS, port["id"], {"fixed_ips": list(fixed)})
