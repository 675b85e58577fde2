# SPDX-License-Identifier: Apache-2.0
"""/os-floating-ips and /os-floating-ip-pools (until 2.35): proxies to the network service."""

from __future__ import annotations

from collections.abc import Sequence

from common.domain import errors
from common.domain.json_types import JsonObject
from compute_api.compute.request.dependencies import TenantNetworks
from compute_api.compute.request.request import Request
from compute_api.compute.servers.networks import network_records
from compute_api.compute.servers.networks.network_records import (
    FLOATING_IPS,
    NETWORKS,
    conflicts_as,
    list_floating_ips,
)
from compute_api.compute.views.proxies import floating_ips as view

DEFAULT_POOL = "nova"  # the pool that is meant when none is named, if there is one of this name


def index(request: Request) -> JsonObject:
    """GET /os-floating-ips"""
    networks, token = request.networks, request.context.token
    if networks is None:
        return {"floating_ips": []}
    found = list_floating_ips(networks, token, project_id=request.context.project_id)
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
    networks = request.networks
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
