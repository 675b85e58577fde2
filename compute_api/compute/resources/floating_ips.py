# SPDX-License-Identifier: Apache-2.0
"""/os-floating-ips and /os-floating-ip-pools (until 2.35), and the actions for addresses of a
server (until 2.43).

All of it is done in the network service with the caller's token before the answer. The server's
record shows its new addresses when the network service's event has come. A locked server and an
action in progress are no obstacle: in the network service, where the caller could do the same,
there is neither."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Sequence

from common import errors
from common.json_types import JsonObject
from common.store.rows import ServerRecord
from compute_api.compute.dependencies import TenantNetworks
from compute_api.compute.request import Request
from compute_api.compute.resources import network_records, server_networks
from compute_api.compute.resources.network_records import (
    FLOATING_IPS,
    NETWORKS,
    PORTS,
    conflicts_as,
)
from compute_api.compute.views import networks as view

DEFAULT_POOL = "nova"  # the pool that is meant when none is named, if there is one of this name


# --- the addresses themselves ---
def index(request: Request) -> JsonObject:
    """GET /os-floating-ips"""
    networks, token = server_networks.service(request), request.context.token
    if networks is None:
        return {"floating_ips": []}
    found = _known(networks, token, project_id=request.context.project_id)
    return {"floating_ips": _shown(networks, token, found)}


def show(request: Request, floating_ip_id: str) -> JsonObject:
    """GET /os-floating-ips/{id}"""
    found = network_records.one(request, FLOATING_IPS, floating_ip_id)
    return {
        "floating_ip": _shown(network_records.required(request), request.context.token, [found])[0]
    }


def create(request: Request) -> JsonObject:
    """POST /os-floating-ips"""
    networks, token = network_records.required_to_make(request), request.context.token
    pool = _pool(_pools(networks, token), (request.body or {}).get("pool"))
    with conflicts_as(errors.NotFound):  # no address is left
        made = networks.create(token, FLOATING_IPS, {"floating_network_id": pool["id"]})
    return {"floating_ip": _shown(networks, token, [made])[0]}


def delete(request: Request, floating_ip_id: str) -> None:
    """DELETE /os-floating-ips/{id}"""
    found = network_records.one(request, FLOATING_IPS, floating_ip_id)
    network_records.required(request).delete(request.context.token, FLOATING_IPS, found["id"])


def pools(request: Request) -> JsonObject:
    """GET /os-floating-ip-pools"""
    networks = server_networks.service(request)
    found = [] if networks is None else _pools(networks, request.context.token)
    return {"floating_ip_pools": [{"name": view.pool(network)} for network in found]}


def _pools(networks: TenantNetworks, token: str) -> list[JsonObject]:
    return networks.records(token, NETWORKS, **{"router:external": True})


def _pool(known: Sequence[JsonObject], wanted: str | None) -> JsonObject:
    """The external network of this name or id; without one the default, or the only one."""
    found = [one for one in known if wanted == one["id"]] or [
        one for one in known if one["name"] == (wanted or DEFAULT_POOL)
    ]
    if wanted is None and not found:
        found = [one for one in known if one.get("is_default")] or list(known)
    if not found:
        raise errors.NotFound(
            "Floating IP pool not found."
            if wanted is None
            else f"Floating IP pool {wanted[:80]} not found; GET /os-floating-ip-pools lists them."
        )
    if len(found) > 1:
        raise errors.BadRequest(
            f"There are several floating IP pools: {', '.join(one['id'] for one in found)[:400]}; "
            "name one by its id."
        )
    return found[0]


def _known(networks: TenantNetworks, token: str, **filters: object) -> list[JsonObject]:
    """Floating addresses; none where the service has no routers."""
    try:
        return networks.records(token, FLOATING_IPS, **filters)
    except errors.NotFound:
        return []


def _shown(networks: TenantNetworks, token: str, found: Sequence[JsonObject]) -> list[JsonObject]:
    """With the names of their pools and the servers that they lead to."""
    pool_ids = sorted({one["floating_network_id"] for one in found})
    port_ids = sorted({one["port_id"] for one in found if one["port_id"]})
    names = (
        {one["id"]: view.pool(one) for one in networks.networks(token, "", pool_ids)}
        if pool_ids
        else {}
    )
    servers = (
        {port["id"]: port["device_id"] for port in networks.ports(token, id=port_ids)}
        if port_ids
        else {}
    )
    return [view.floating_ip(one, names, servers) for one in found]


# --- floating addresses of servers ---
def add(request: Request, server: ServerRecord) -> None:
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


def remove(request: Request, server: ServerRecord) -> None:
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
    found = _known(networks, token, floating_ip_address=address)
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
